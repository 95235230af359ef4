"""The book of acknowledgements: what callers were told was accepted, and what the store's record says of it.

A caller writes a line before each call and one after it, each flushed, to a file of its own. The judge reads the record
from exports and archives, whose format `docs/file-formats.md` gives, and finds each accepted call obeyed, refused with
a reason, pending, or lost. A message may also be unread by a run that ended later; an answer and a command may not.
Knows no module of Killick.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

OBEYED: Final = {
    "pause": "run.paused", "resume": "run.resumed", "cancel": "cancel.requested", "note": "note.made",
    "set": "context.changed", "prioritize": "run.prioritized",
}  # fmt: skip
"""The event that carries out a command."""

_OVER: Final = re.compile(r"the run is over \((\w+)\)")

ENDS: Final = ("run.completed", "run.failed", "run.cancelled", "run.renewed")
ENCRYPTED: Final = "$encrypted"
HEARD_ON: Final = ("run.completed", "run.failed", "run.cancelled")
"""The events that the hook of a story listens to."""


# the book -----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call that a caller made. `outcome`: accepted, refused, or maybe, if no answer to it is on file."""

    ticket: str
    kind: str
    run: str
    verb: str
    more: Mapping[str, Any]
    asked_ns: int
    outcome: str = "maybe"
    said: str = ""
    done_ns: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.verb} {self.ticket} to {self.run} {dict(self.more) or ''}".rstrip()


class Book:
    """The file of one story. Several processes may write to it at once: a line is one write."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._count = 0

    def close(self) -> None:
        os.close(self._fd)

    def enter(
        self, kind: str, run: str, verb: str, call: Callable[[str], Any], *, refusals: tuple[type[Exception], ...],
        unsure: tuple[type[Exception], ...], **more: Any,
    ) -> Any:  # fmt: skip
        """Make a call under a ticket of its own, which names it on record; returns its result.

        `refusals` say that it was not accepted. After one of `unsure` nobody knows; both are entered and return None.
        """
        ticket = self.ask(kind, run, verb, **more)
        try:
            result = call(ticket)
        except refusals as refused:
            self.answer(ticket, "refused", f"{type(refused).__name__}: {refused}")
        except unsure as error:
            self.answer(ticket, "maybe", f"{type(error).__name__}: {error}")
        else:
            self.answer(ticket, "accepted", repr(result))
            return result
        return None

    def ask(self, kind: str, run: str, verb: str, **more: Any) -> str:
        self._count += 1
        ticket = f"{kind[0]}{os.getpid()}-{self._count}-{os.urandom(3).hex()}"
        self._write(ticket=ticket, kind=kind, run=run, verb=verb, more=more)
        return ticket

    def answer(self, ticket: str, outcome: str, said: str = "") -> None:
        self._write(ticket=ticket, outcome=outcome, said=said[:300])

    def heard(self, run: str, seq: int, kind: str) -> None:
        """A hook was called."""
        self._write(heard=[run, seq, kind])

    def _write(self, **fields: Any) -> None:
        os.write(self._fd, json.dumps({**fields, "at_ns": time.monotonic_ns()}).encode() + b"\n")
        os.fsync(self._fd)


class Entries(NamedTuple):
    """What a book says."""

    calls: list[Call]
    heard: Counter[tuple[str, int]]


def read_book(path: Path) -> Entries:
    calls: dict[str, Call] = {}
    heard: Counter[tuple[str, int]] = Counter()
    for text in path.read_bytes().splitlines() if path.exists() else []:
        line = json.loads(text)
        if "heard" in line:
            heard[line["heard"][0], line["heard"][1]] += 1
        elif "outcome" in line:
            known = calls[line["ticket"]]
            calls[known.ticket] = known._replace(
                outcome=line["outcome"], said=line["said"], done_ns=line["at_ns"]
            )  # fmt: skip
        else:
            more = line["more"]
            calls[line["ticket"]] = Call(
                line["ticket"], line["kind"], line["run"], line["verb"], more, line["at_ns"]
            )  # fmt: skip
    return Entries([*calls.values()], heard)


# the record ---------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An event of a log: its fields, and its values."""

    seq: int
    kind: str
    fields: Mapping[str, Any]
    data: Mapping[str, Any]


class Log:
    """One log, and every message that it received."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.root, plus, number = run.rpartition("+")
        self.number = int(number) if plus and number.isdigit() else 1
        self.root = self.root if self.number > 1 else run
        self.events: list[Event] = []
        self.messages: list[Mapping[str, Any]] = []
        self.takers: dict[int, Event] = {}
        self.forwarded: set[int] = set()
        """The messages that it handed to its renewal, unread."""

    @property
    def end(self) -> Event | None:
        last = next((each for each in reversed(self.events) if each.kind in ENDS), None)
        later = last is not None and any(
            each.seq > last.seq and each.kind in ("run.rewound", "run.resumed") for each in self.events
        )
        return None if later else last

    @property
    def is_renewed(self) -> bool:
        return self.end is not None and self.end.kind == "run.renewed"

    def close(self) -> Log:
        for event in self.events:
            if event.kind in ("message.taken", "wait.closed", "wait.voted", "context.refused", "child.ended"):
                number = event.fields.get("message")
                if isinstance(number, int):
                    self.takers.setdefault(number, event)
        if self.is_renewed:
            for event in reversed(self.events[:-1]):
                if event.kind != "message.taken" or event.fields.get("step") is not None:
                    break
                self.forwarded.add(event.fields["message"])
        return self

    def by(self, actor: str, *kinds: str) -> list[Event]:
        """The events that name an actor."""
        return [each for each in self.events if each.fields.get("by") == actor and each.kind in kinds]


class Record:
    """Every log of a store, from exports of its runs and from its archives.

    `decrypt` reads the values of an event of an encrypted store, where its key is there.
    """

    def __init__(
        self, exports: Iterable[bytes], archives: Iterable[Path] = (),
        decrypt: Callable[[str, int], Mapping[str, Any]] = lambda *_: {},
    ) -> None:  # fmt: skip
        self.logs: dict[str, Log] = {}
        self._decrypt = decrypt
        for path in archives:
            for one in _unzipped(path):
                self._add(one)
        for text in exports:
            self._add(text.splitlines())
        self.chains: dict[str, list[Log]] = defaultdict(list)
        for log in sorted(self.logs.values(), key=lambda each: each.number):
            self.chains[log.root].append(log)

    def _add(self, lines: Iterable[bytes]) -> None:
        log: Log | None = None
        for text in lines:
            line = json.loads(text)
            if line["is"] == "killick.run":
                if log is not None:
                    log.close()
                log = self.logs[line["run"]] = Log(line["run"])
            elif log is not None and line["is"] == "event" and line["run"] == log.run:
                body = line["body"] if isinstance(line["body"], dict) else json.loads(line["body"])
                data = line.get("data") or {}
                if ENCRYPTED in data:
                    data = self._decrypt(log.run, line["seq"]) or data
                log.events.append(Event(line["seq"], body["kind"], body, data))
            elif log is not None and line["is"] == "message":
                log.messages.append(line)
        if log is not None:
            log.close()

    def chain(self, run: str) -> list[Log]:
        """The logs of a run and its renewals, in their order."""
        return self.chains.get(run) or self.chains.get(Log(run).root, [])


def _unzipped(path: Path) -> Iterator[list[bytes]]:
    """The lines of an archive, as far as it was written."""
    lines: list[bytes] = []
    with suppress(EOFError, OSError), gzip.open(path) as file:
        lines.extend(file)
    yield lines if lines and lines[-1].endswith(b"\n") else lines[:-1]


# the judge ----------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What became of a call. `found`: obeyed, refused, pending, unread, archived, or lost."""

    call: Call
    found: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.found.upper()} {self.call}: {self.why}"


class Judged(NamedTuple):
    """Every call's verdict, and how many there are of each kind and class."""

    verdicts: list[Verdict]
    counts: Counter[str]
    wrong: list[str]


def judge(entries: Entries, record: Record, *, hook: str | None = None, is_calm: bool = False) -> Judged:
    """What became of every call that was accepted, and of every event that the hook should have heard. Where all is
    calm, nothing but a run is pending: what lies in an inbox there is stuck."""
    verdicts = [*map(_Judge(entries, record).verdict, entries.calls), *_answers(entries, record)]
    verdicts = [
        each._replace(found="stuck") if is_calm and each.found == "pending" and each.call.kind != "start" else each
        for each in verdicts
        if each.found
    ]
    counts = Counter(f"{each.call.kind} {each.found}" for each in verdicts)
    counts.update(f"{each.kind} call {each.outcome}" for each in entries.calls)
    wrong = [str(each) for each in verdicts if each.found in ("lost", "doubled", "contradicted", "stuck")]
    if hook is not None:
        wrong += _unheard(entries, record, hook, counts)
    wrong += _sent_by_runs(record, counts)
    return Judged(verdicts, counts, wrong)


class _Judge:
    """The verdicts of calls that one event or message settles."""

    def __init__(self, entries: Entries, record: Record) -> None:
        self._record = record
        self._ended = _seen_ended(entries)

    def verdict(self, call: Call) -> Verdict:
        settle = {
            "message": self._message, "command": self._command, "start": self._start, "publish": self._publish,
            "fire": self._publish,
        }.get(call.kind)  # fmt: skip
        if settle is None:
            return Verdict(call, "")
        found = settle(call)
        if call.outcome == "accepted":
            return found
        if call.outcome == "refused" and found.found == "obeyed":
            return Verdict(call, "contradicted", f"refused with {call.said}, and {found.why}")
        if call.outcome == "refused" and (said := _OVER.search(call.said)) is not None:
            chain = self._record.chain(call.run)
            end = chain[-1].end if chain else None
            if chain and (end is None or end.kind != f"run.{said[1]}"):
                return Verdict(call, "contradicted", f"refused with {call.said}, and the run is {_last(chain)}")
        return Verdict(call, "doubled", found.why) if found.found == "doubled" else Verdict(call, "")

    def _message(self, call: Call) -> Verdict:
        id_ = call.more.get("id", call.ticket)
        return received(call, self._record.chain(call.run), id_, since=self._ended.get(call.run))

    def _command(self, call: Call) -> Verdict:
        chain = self._record.chain(call.run)
        for log in chain:
            for event in log.by(call.ticket, OBEYED[call.verb]):
                if call.verb == "cancel" and log.is_renewed:
                    return Verdict(call, "lost", f"{log.run} recorded it as event {event.seq}, and was renewed")
                return Verdict(call, "obeyed", f"event {event.seq} of {log.run}")
        for log in chain:
            if why := _refusal(log, call.ticket):
                return Verdict(call, "refused", why)
            if log.by(call.ticket, "message.taken"):
                return Verdict(call, "refused", f"taken by {log.run}, which {log.end and log.end.kind}")
        if call.said.startswith("'already"):
            return Verdict(call, "refused", call.said)  # it told its caller that there is nothing to do
        for log in reversed(chain):
            for message in log.messages:
                if message.get("by") == call.ticket:
                    return unread(call, chain, log, message, since=self._ended.get(call.run))
        return Verdict(call, "lost", f"on record nowhere; the last log is {_last(chain)}")

    def _start(self, call: Call) -> Verdict:
        chain = self._record.chain(call.run)
        if not chain:
            return Verdict(call, "lost", "there is no such run")
        if chain[-1].end is None:
            return Verdict(call, "pending", f"{chain[-1].run} has not ended")
        return Verdict(call, "obeyed", f"{chain[-1].run} ended")

    def _publish(self, call: Call) -> Verdict:
        """A trigger records what it made of an event: a firing, a place in its queue, or the reason for neither."""
        found = [log for run, log in self._record.logs.items() if run.startswith(call.run)]
        for log in found:
            fired = [
                each
                for each in log.events
                if call.ticket in (each.data.get("body"), each.fields.get("by"), each.fields.get("id"))
            ]
            starts = [each for each in fired if each.kind == "trigger.fired"]
            if len({each.fields.get("run") for each in starts}) > 1:
                return Verdict(call, "doubled", f"{log.run} fired {len(starts)} times for it")
            if fired:
                kind = "refused" if fired[-1].kind == "trigger.passed" else "obeyed"
                return Verdict(call, kind, f"event {fired[-1].seq} of {log.run}")
            for message in log.messages:
                if call.ticket in (message["id"], message.get("by")) and message["number"] not in log.takers:
                    return Verdict(call, "pending", f"message {message['number']} of {log.run}")
        return Verdict(call, "lost", f"on record in none of {[log.run for log in found]}")


def received(call: Call, chain: list[Log], id_: str, *, since: int | None = None) -> Verdict:
    """What became of a message, by its id in the logs of a run and its renewals."""
    there = [(log, each) for log in chain for each in log.messages if each["id"] == id_]
    taken = [
        (log, log.takers[each["number"]])
        for log, each in there
        if each["number"] in log.takers and each["number"] not in log.forwarded
    ]
    if len(taken) > 1:
        return Verdict(call, "doubled", f"taken by {', '.join(log.run for log, _ in taken)}")
    if taken:
        log, event = taken[0]
        return Verdict(call, "obeyed", f"event {event.seq} of {log.run}")
    if not there:
        return Verdict(call, "lost", f"in no inbox; the last log is {_last(chain)}")
    return unread(call, chain, *there[-1], since=since)


def unread(call: Call, chain: list[Log], log: Log, message: Mapping[str, Any], *, since: int | None) -> Verdict:
    """What became of a message that was not taken: `since` is when a caller was first told that the run is over."""
    place = f"message {message['number']} of {log.run}"
    if log is not chain[-1] or log.is_renewed:
        return Verdict(call, "lost", f"{place} is untaken, and the run went on as {_last(chain)}")
    if log.end is None:
        return Verdict(call, "pending", place)
    if call.kind in ("answer", "command"):
        return Verdict(call, "lost", f"{place}, which ended ({log.end.kind}), was neither obeyed nor refused")
    if since is not None and call.asked_ns > since:
        return Verdict(call, "lost", f"{place} was accepted after the run had ended ({log.end.kind})")
    return Verdict(call, "unread", f"{place}, which ended ({log.end.kind})")


def _seen_ended(entries: Entries) -> dict[str, int]:
    """When a caller first saw that a run is over for good: by a look that it entered before it made its call."""
    seen: dict[str, int] = {}
    for call in entries.calls:
        if call.kind == "look" and call.outcome == "accepted" and "ended" in call.said:
            seen[call.run] = min(seen.get(call.run, call.done_ns), call.done_ns)
    return seen


def _refusal(log: Log, ticket: str) -> str:
    """The reason on record for which a command was refused."""
    for event in log.events:
        if event.kind == "note.made" and event.fields.get("by") == "killick" and ticket in str(event.data.get("note")):
            return str(event.data["note"])
        if event.kind == "context.refused" and event.fields.get("by") == ticket:
            return f"context.refused at {event.seq} of {log.run}"
    return ""


def _last(chain: list[Log]) -> str:
    return f"{chain[-1].run} ({chain[-1].end.kind if chain[-1].end else 'live'})" if chain else "none"


# answers ------------------------------------------------------------------------------------------


def _answers(entries: Entries, record: Record) -> Iterator[Verdict]:
    """What became of the answers to each question, judged together: at most one of them decides."""
    questions: dict[tuple[str, str, Any], list[Call]] = defaultdict(list)
    for call in entries.calls:
        if call.kind == "answer":
            questions[call.run, call.more["step"], call.more.get("digest")].append(call)
    for (run, step, _), calls in questions.items():
        log = record.logs.get(run)
        if log is None:
            yield from (Verdict(each, "lost", "its run is gone") for each in calls if each.outcome == "accepted")
        else:
            yield from _Question(log, step, calls).verdicts()


class _Question:
    """A question and every answer to it that a caller made."""

    def __init__(self, log: Log, step: str, calls: list[Call]) -> None:
        self._log = log
        self._step = step
        self._calls = calls
        self._need = int(calls[0].more.get("need", 1))
        self._closed = next(
            (each for each in log.events if each.kind == "wait.closed" and each.fields["step"] == step), None
        )

    def verdicts(self) -> Iterator[Verdict]:
        accepted = [each for each in self._calls if each.outcome == "accepted"]
        maybe = [each for each in self._calls if each.outcome == "maybe"]
        for call in self._calls:
            if call.outcome == "refused" and self._decided_by() == call.ticket:
                yield Verdict(call, "contradicted", f"refused with {call.said}, and it decided")
        for call in accepted:
            yield self._of_votes(call, accepted, maybe) if call.verb == "approve" else self._of_reject(call, accepted)

    def _decided_by(self) -> str | None:
        if self._closed is None or self._closed.fields.get("how") != "answered":
            return None
        return str(self._closed.fields.get("by"))

    def _of_reject(self, call: Call, accepted: list[Call]) -> Verdict:
        if self._decided_by() == call.ticket:
            return Verdict(call, "obeyed", f"event {self._closed.seq if self._closed else 0} of {self._log.run}")
        if self._closed is not None and self._decided_by() is not None:
            return Verdict(call, "lost", f"accepted, and {self._decided_by()} decided otherwise: {self._closed.data}")
        return self._open(call)

    def _of_votes(self, call: Call, accepted: list[Call], maybe: list[Call]) -> Verdict:
        approvals = sorted((each for each in accepted if each.verb == "approve"), key=lambda each: each.done_ns)
        if len(approvals) > self._need and call is approvals[-1]:
            return Verdict(call, "lost", f"accepted, and {len(approvals) - 1} of {self._need} were there")
        rejects = [each for each in accepted if each.verb != "approve"]
        if any(each.done_ns < call.asked_ns for each in rejects):
            return Verdict(call, "lost", "accepted after a reject that was accepted")
        voted = [each for each in self._log.by(call.ticket, "wait.voted") if each.fields["step"] == self._step]
        if self._decided_by() == call.ticket:
            return Verdict(call, "obeyed", f"event {self._closed.seq if self._closed else 0} of {self._log.run}")
        if voted and (self._closed is not None or len(approvals) < self._need):
            others = [each for each in (*rejects, *maybe) if each.verb != "approve"]
            dropped = self._closed is not None and self._closed.fields.get("how") in ("cancelled", "voided", "skipped")
            if len(approvals) >= self._need and not (others or dropped) and self._outcome() != "approve":
                return Verdict(call, "lost", f"one of {len(approvals)} votes for a question that {self._how()}")
            return Verdict(call, "obeyed", f"event {voted[0].seq} of {self._log.run}")
        if self._closed is not None and self._log.by(call.ticket, "message.taken"):
            return Verdict(call, "refused", f"taken by {self._log.run} after the question was closed ({self._how()})")
        return self._open(call)

    def _outcome(self) -> str:
        """What was decided: nothing, as long as the question is open, and unknown where its key is destroyed."""
        data = self._closed.data if self._closed is not None else {}
        if ENCRYPTED in data:
            return "approve"
        answer = data.get("answer")
        return str(answer.get("kind")) if isinstance(answer, Mapping) else ""

    def _how(self) -> str:
        return "is open" if self._closed is None else f"{self._closed.fields.get('how')} {self._closed.data}"

    def _open(self, call: Call) -> Verdict:
        """An answer that decided nothing so far."""
        for message in self._log.messages:
            if message.get("by") == call.ticket:
                event = self._log.takers.get(message["number"])
                if event is None:
                    return unread(call, [self._log], self._log, message, since=None)
                if self._log.end is not None or self._closed is not None:
                    return Verdict(call, "refused", f"{event.kind} at {event.seq}; the question {self._how()}")
        return Verdict(call, "lost", f"in no inbox and no event of {self._log.run}; the question {self._how()}")


# hooks, and runs that send ------------------------------------------------------------------------


def _unheard(entries: Entries, record: Record, hook: str, counts: Counter[str]) -> Iterator[str]:
    """Every ended run was announced to the hook, or is on the hook's record as dropped."""
    log = record.logs.get(f"hook:{hook}")
    if log is None:
        yield f"hook:{hook} has no record"
        return
    dropped = {
        (each.data.get("run", each.fields.get("run")), each.data.get("seq", each.fields.get("seq")))
        for each in log.events
        if each.kind == "hook.dropped"
    }
    for run, other in record.logs.items():
        if ":" in run:
            continue  # a system log has no hooks
        for event in other.events:
            if event.kind in HEARD_ON:
                where = (run, event.seq)
                found = "heard" if entries.heard[where] else "dropped" if where in dropped else "LOST"
                counts[f"hook event {found}"] += 1
                if found == "LOST":
                    yield f"LOST hook event: {event.kind} at {event.seq} of {run} never reached {hook}"


def _sent_by_runs(record: Record, counts: Counter[str]) -> Iterator[str]:
    """A run that has sent a message was told so, too."""
    for log in record.logs.values():
        for event in log.events:
            if event.kind != "message.sent":
                continue
            call = Call(event.fields["id"], "sent", event.fields["run"], "send", {}, 0, "accepted")
            found = received(call, record.chain(call.run), call.ticket)
            counts[f"sent by a run {found.found}"] += 1
            if found.found in ("lost", "doubled"):
                yield str(found)
