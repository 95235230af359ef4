"""Queries across runs and time: decisions, calls, failures, effects, answers. The index finds candidates; the log
decides.

Indexing happens on query, so that appends pay nothing for it. Each candidate is read from its log, and false positives
are skipped. Rewound events are found too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import merge
from itertools import islice
from typing import Any, Final, TypedDict, TypeVar, Unpack, overload

import msgspec

from killick.blocking import Blocks, C, Group, InThread
from killick.errors import KillickError, RunBroken, RunUnknown, StoreError, StoreFull, StoreReadOnly, ValueErased
from killick.history.search.index import Marked, Progress, Scan, catch_up
from killick.history.search.results import (
    Findings,
    FoundAnswer,
    FoundCall,
    FoundDecision,
    FoundEffect,
    FoundFailure,
    SearchHit,
    Standing,
)
from killick.history.search.terms import (
    TermQuery,
    failure_names,
    folded,
    leaves,
    mapping,
    term,
    value_wanted,
    verb_of,
)
from killick.log.log import Log
from killick.model import events as e
from killick.model.codec import Erased, plain
from killick.model.facts import LIVE, Step
from killick.model.ledger import Effect
from killick.model.state import State
from killick.store.records import ASKS, NO_DEADLINE, IndexQuery, RunQuery, TermPosition

_RESULTS_MAX: Final = 1 << 40
"""No store has as many, and a C function counts to them."""
_PAGE_MIN: Final = 64
_PAGE_MAX: Final = 4_096
_STATES_MAX: Final = 64
_ASKING_MAX: Final = 10_000
_VALUES: Final = ("arguments", "question", "options", "choice", "because", "answer", "comment")

T = TypeVar("T", bound=SearchHit)


class Within(TypedDict, total=False):
    """Filters of every query. A fork's run includes the events shared with its parent.

    agent, run          only events of this agent, or of this run
    since_us, until_us  only events in this time, in microseconds since the epoch
    limit               the maximum number of results, 100 by default; None for all
    """

    agent: str | None
    run: str | None
    since_us: int | None
    until_us: int | None
    limit: int | None


# asking -------------------------------------------------------------------------------------------


class Finder(Group[C]):
    """Queries across runs and time. Every query takes the filters of `Within`: agent, run, time and limit."""

    @overload
    def __init__(self: Finder[Blocks], log: Log) -> None: ...
    @overload
    def __init__(self, log: Log, client: C) -> None: ...
    def __init__(self, log: Log, client: Any = None) -> None:
        super().__init__(client or Blocks())
        self._log = log

    @InThread
    def catch_up(self, progress: Progress | None = None) -> int:
        """Indexes new events, as every query does first. Returns their number."""
        return catch_up(self._log, progress).events

    @InThread
    def decisions(
        self,
        *,
        question: str | None = None,
        choice: Any = None,
        by: str | None = None,
        because: str | None = None,
        **within: Unpack[Within],
    ) -> Findings[FoundDecision]:
        """Finds decisions, ignoring case.

        question, choice  the question, and the chosen option
        by                the name of the decider
        because           a part of the reason
        """
        groups: list[set[int]] = [{term("decision")}]
        if question is not None:
            groups.append({term("question", "is", folded(question)), term("question", "open")})
        if by is not None:
            groups.append({term("by", folded(by))})
        chosen = None if choice is None else TermQuery(folded(choice) if isinstance(choice, str) else choice)
        if chosen is not None:
            groups.append(value_wanted("choice", "", chosen) or set())

        def read(reader: _Reader, place: TermPosition, event: e.Event) -> Iterator[FoundDecision]:
            data = reader.data(place)
            if not isinstance(event, e.DecisionMade):
                return
            fields: dict[str, Any] = {name: data.get(name) for name in ("question", "options", "choice", "because")}
            said = fields["because"] if isinstance(fields["because"], str) else ""
            choices = [leaf._replace(text=leaf.text and folded(leaf.text)) for leaf in leaves(plain(fields["choice"]))]
            fits = (
                (question is None or folded(fields["question"]) == folded(question))
                and (by is None or folded(event.by) == folded(by))
                and (because is None or folded(because) in folded(said))
                and (chosen is None or any(map(chosen.fits, choices)))
            )
            if fits:
                yield FoundDecision(**reader.place(place, event.step), **fields, by=event.by)

        return self._ask(groups, read, within)

    @InThread
    def calls(
        self, tool: str | None = None, *, where: Mapping[str, Any] | None = None, **within: Unpack[Within]
    ) -> Findings[FoundCall]:
        """Finds tool calls.

        tool   the name of the tool
        where  arguments by dotted path; a list matches if one of its items does
        """
        wanted = {path: TermQuery(value) for path, value in (where or {}).items()}

        def read(reader: _Reader, place: TermPosition, event: e.Event) -> Iterator[FoundCall]:
            if not isinstance(event, e.StepIntended | e.StepEdited) or reader.owner(place) != place.run:
                return
            step = reader.step(place, event.step)
            intended = event if isinstance(event, e.StepIntended) else None
            if intended is not None and (intended.sort != "tool" or (step is not None and step.edited)):
                return  # the edited arguments are those of the call
            name = intended.name if intended is not None else step.name if step is not None else ""
            arguments = reader.data(place).get("arguments")
            if tool in (None, name) and _have(arguments, wanted):
                yield FoundCall(
                    **reader.place(place, event.step),
                    tool=name,
                    arguments=arguments,
                    status=step.status if step is not None else "cancelled",
                    attempts=len(step.attempts) if step is not None else 0,
                    output=reader.output(place, step),
                )

        return self._ask([{term("call")}, *_narrowed(tool, wanted)], read, within)

    @InThread
    def failures(
        self, kind: str | None = None, *, tool: str | None = None, **within: Unpack[Within]
    ) -> Findings[FoundFailure]:
        """Finds failures of attempts, steps and runs.

        kind  a type name as in `StepFailed.is_a`, ignoring case; or timeout, cancelled, died, expired
        tool  the name of the tool
        """
        groups: list[set[int]] = [{term("failure")}]
        if kind is not None:
            groups.append({term("is", folded(kind))})
        if tool is not None:
            groups.append({term("tool", tool)})

        def read(reader: _Reader, place: TermPosition, event: e.Event) -> Iterator[FoundFailure]:
            failure = mapping(reader.data(place).get("failure"))
            if not failure or not isinstance(event, e.AttemptEnded | e.StepEnded | e.StepIntended | e.RunFailed):
                return
            if kind is not None and folded(kind) not in failure_names(failure):
                return
            is_run = isinstance(event, e.RunFailed)
            step = None if event.step is None or is_run else reader.step(place, event.step)
            named = None if step is None else step.name
            if tool in (None, named):
                yield FoundFailure(
                    **reader.place(place, event.step),
                    of="run" if is_run else "attempt" if isinstance(event, e.AttemptEnded) else "step",
                    tool=named,
                    type=str(failure.get("type", "")),
                    message=str(failure.get("message", "")),
                    attempt=event.attempt if isinstance(event, e.AttemptEnded) else None,
                    failure=failure,
                )

        return self._ask(groups, read, within)

    @InThread
    def effects(
        self,
        tool: str | None = None,
        *,
        status: Standing | None = None,
        where: Mapping[str, Any] | None = None,
        **within: Unpack[Within],
    ) -> Findings[FoundEffect]:
        """Finds effects from the ledgers: a rewound effect counts until it is compensated.

        tool    the name of the tool
        status  only effects in this status
        where   arguments by dotted path; a list matches if one of its items does
        """
        wanted = {path: TermQuery(value) for path, value in (where or {}).items()}
        narrowed = {"undone": [{term("undone")}], "in_doubt": [{term("in doubt")}]}.get(status or "", [])
        seen = set[tuple[str, int, str]]()

        def read(reader: _Reader, place: TermPosition, event: e.Event) -> Iterator[FoundEffect]:
            owner = reader.owner(place)
            arguments = reader.data(place).get("arguments")
            for effect in reader.effects(owner, place.seq):
                stands = reader.standing(owner, effect)
                known = (owner, place.seq, effect.key)
                if stands is None or status not in (None, stands) or tool not in (None, effect.tool) or known in seen:
                    continue
                if _have(arguments, wanted):
                    seen.add(known)
                    here = msgspec.structs.replace(place, run=owner)
                    yield FoundEffect(
                        **reader.place(here, effect.step), tool=effect.tool, key=effect.key, arguments=arguments,
                        status=stands,
                    )  # fmt: skip

        return self._ask([{term("effect")}, *narrowed, *_narrowed(tool, wanted)], read, within)

    @InThread
    def answers(
        self, *, by: str | None = None, verb: str | None = None, to: str | None = None, **within: Unpack[Within]
    ) -> Findings[FoundAnswer]:
        """Finds people's answers.

        by    the name of the person
        verb  such as "approve"
        to    a person or role that was asked
        """
        groups: list[set[int]] = [{term("answer")}]
        for word, given in (("by", by), ("verb", verb), ("to", to)):
            if given is not None:
                groups.append({term(word, folded(given))})

        def fits(hit: FoundAnswer) -> bool:
            return (
                (by is None or (hit.by is not None and folded(hit.by) == folded(by)))
                and (verb is None or hit.verb == folded(verb))
                and (to is None or folded(to) in map(folded, hit.to))
            )

        def read(reader: _Reader, place: TermPosition, event: e.Event) -> Iterator[FoundAnswer]:
            if isinstance(event, e.WaitClosed | e.WaitVoted):
                data = reader.data(place)
                opened, prompt = reader.asked(place, event.step)
                hit = FoundAnswer(
                    **reader.place(place, event.step), prompt=prompt, to=opened, verb=verb_of(data.get("answer")),
                    value=mapping(data.get("answer")).get("value"), by=event.by, comment=data.get("comment"),
                    answered_at_us=reader.answered_at(place, event),
                )  # fmt: skip
                yield from [hit] if fits(hit) else []

        untaken = sorted(filter(fits, _untaken(self._log, within)), key=lambda hit: -hit.at_us)
        return self._ask(groups, read, within, untaken)

    def _ask(self, groups: list[set[int]], read: _Read[T], within: Within, also: Iterable[T] = ()) -> Findings[T]:
        log, agent, run, limit = self._log, within.get("agent"), within.get("run"), within.get("limit", 100)
        if limit is not None:
            limit = min(max(limit, 0), _RESULTS_MAX)
        if agent is not None:
            groups = [*groups, {term("in", agent)}]
        if run is not None and log.store.head(run) is None:
            raise RunUnknown(run)
        scanned: str | None = None
        marked: Marked = log.store.search
        try:
            unread = catch_up(log).unread
        except (StoreReadOnly, StoreFull) as error:
            scanned, scan = str(error), Scan(log, groups)
            marked, unread = scan.marked, scan.unread
        reader = _Reader(log, marked, unread)
        if run is not None:
            # The index is in time order; for a single run its own log is shorter.
            marked = Scan(log, groups, run).marked
        places = _places(marked, IndexQuery(groups, within.get("since_us"), within.get("until_us"), limit=_PAGE_MIN))
        recorded = (hit for place in places for hit in reader.hits(read, place))
        found = merge(also, recorded, key=lambda hit: -hit.at_us)
        items = list(found if limit is None else islice(found, limit + 1))
        more = limit is not None and len(items) > limit
        return Findings(items[:limit], more=more, scanned=scanned, unread=tuple(dict.fromkeys(unread)))


_Read = Callable[["_Reader", TermPosition, e.Event], Iterator[T]]
"""Returns an event's result, if it matches."""


def _places(marked: Marked, query: IndexQuery) -> Iterator[TermPosition]:
    """Yields positions, newest first, page by page."""
    while page := marked(query):
        yield from page
        if len(page) < query.limit:
            return
        query = msgspec.structs.replace(query, before=page[-1], limit=min(query.limit * 4, _PAGE_MAX))


def _untaken(log: Log, within: Within) -> Iterator[FoundAnswer]:
    """Yields the answers and votes that runs have in their inboxes and have not taken."""
    from killick.history.run_info import untaken_answers  # the other queries need none of it

    since, until = within.get("since_us") or 0, within.get("until_us") or NO_DEADLINE
    for row in log.store.runs(RunQuery(status=LIVE, agent=within.get("agent"), tag=ASKS), limit=_ASKING_MAX):
        is_meant = row.delivered and within.get("run") in (None, row.run)
        with suppress(RunBroken):
            for wait, message, body in untaken_answers(log, row.run) if is_meant else ():
                if since <= message.at_us < until:
                    yield FoundAnswer(
                        run=row.run, agent=row.agent, step=wait.step, seq=wait.opened, at_us=message.at_us,
                        prompt=wait.prompt, to=wait.to, verb=verb_of(body), value=body.get("value"), by=message.by,
                        comment=body.get("comment"), answered_at_us=message.at_us, taken=False,
                    )  # fmt: skip


def _narrowed(tool: str | None, wanted: Mapping[str, TermQuery]) -> list[set[int]]:
    """Returns the groups for a tool and its arguments, the rarest first."""
    arguments = [value_wanted("argument", path, value) for path, value in wanted.items()]
    return [each for each in arguments if each is not None] + ([] if tool is None else [{term("tool", tool)}])


def _have(arguments: Any, wanted: Mapping[str, TermQuery]) -> bool:
    found = leaves(plain(arguments)) if wanted else []
    return all(value.fits_at(path, found) for path, value in wanted.items())


# reading the log ----------------------------------------------------------------------------------


class _Reader:
    """Reads candidates for one query, and caches their runs."""

    def __init__(self, log: Log, marked: Marked, unread: list[str]) -> None:
        self._log, self._marked, self._unread = log, marked, unread
        self._states: dict[tuple[str, int], State] = {}
        self._effects: dict[str, dict[int, list[Effect]]] = {}
        self._rewinds: dict[str, list[tuple[int, e.RunRewound]]] = {}
        self._agents: dict[str, str] = {}

    def hits(self, read: _Read[T], place: TermPosition) -> Iterator[T]:
        """Returns a position's results: none for a missing event; an unreadable one is recorded."""
        try:
            yield from read(self, place, self._log.event(place.run, place.seq))
        except StoreError:
            raise
        except KillickError:
            self._unread.append(place.run)

    def place(self, place: TermPosition, step: str | None) -> dict[str, Any]:
        """Returns the fields that a result of any kind has."""
        rewound = self._rewound_at(place) is not None
        found = {"run": place.run, "agent": self._agent(place.run), "seq": place.seq, "at_us": place.at_us}
        return {**found, "step": step, "rewound": rewound}

    def data(self, place: TermPosition) -> Mapping[str, Any]:
        """Returns an event's values, with `Erased` for erased ones."""
        try:
            return self._log.data(place.run, place.seq)
        except ValueErased as error:
            return dict.fromkeys(_VALUES, Erased(error.digest))

    def owner(self, place: TermPosition) -> str:
        """Returns the run whose own log holds the event: a fork's index may name its parent's."""
        return self._log.owner(place.run, place.seq)

    def step(self, place: TermPosition, step: str) -> Step | None:
        """Returns a step's final state, or its state when it was rewound."""
        return self._state(place).fold.step(step)

    def output(self, place: TermPosition, step: Step | None) -> Any:
        return self._state(place).output_of(step) if step is not None and step.status == "done" else None

    def asked(self, place: TermPosition, step: str) -> tuple[tuple[str, ...], Any]:
        """Returns the approvers and the question before an answer."""
        state = self._state_at(place.run, place.seq - 1)
        wait = state.fold.facts.waits.get(step)
        return ((), None) if wait is None else (wait.to, state.data(wait.opened).get("prompt"))

    def answered_at(self, place: TermPosition, event: e.WaitClosed | e.WaitVoted) -> int:
        number = event.message
        messages = self._log.store.messages(place.run) if number is not None else []
        return next((message.at_us for message in messages if message.number == number), place.at_us)

    def effects(self, run: str, seq: int) -> Sequence[Effect]:
        """Returns the ledger's effects of an intention."""
        if run not in self._effects:
            by_intention: dict[int, list[Effect]] = {}
            for effect in self._log.ledger(run).effects:
                if not effect.undoes:
                    by_intention.setdefault(effect.intended, []).append(effect)
            self._effects[run] = by_intention
        return self._effects[run].get(seq, ())

    def standing(self, run: str, effect: Effect) -> Standing | None:
        """Returns whether an effect is in force, by its own run and by compensating forks; None: it did not happen."""
        if effect.status == "did_not_happen":
            return None
        if effect.status == "undone" or self._undone_by_fork(run, effect):
            return "undone"
        return "stands" if effect.status == "happened" else "in_doubt"

    def _undone_by_fork(self, run: str, effect: Effect) -> bool:
        forks = self._marked(IndexQuery([[term("undone", run, str(effect.intended))]]))
        found = (each for fork in forks for each in self.effects(fork.run, effect.intended))
        return any(each.key == effect.key and each.status == "undone" for each in found)

    def _agent(self, run: str) -> str:
        if run not in self._agents:
            row = self._log.store.index(run)
            self._agents[run] = self._log.state(run).agent if row is None else row.agent
        return self._agents[run]

    def _rewound_at(self, place: TermPosition) -> int | None:
        """Returns the rewind that dropped an event, if any."""
        run = place.run
        if run not in self._rewinds:
            found = [
                (each.seq, self._log.event(run, each.seq))
                for each in reversed(self._marked(IndexQuery([[term("rewound", run)]])))
            ]
            self._rewinds[run] = [(seq, event) for seq, event in found if isinstance(event, e.RunRewound)]
        for seq, event in self._rewinds[run]:
            if event.cut < place.seq < seq and place.seq not in event.keep:
                return seq
        return None

    def _state(self, place: TermPosition) -> State:
        rewound = self._rewound_at(place)
        return self._state_at(place.run, None if rewound is None else rewound - 1)

    def _state_at(self, run: str, at: int | None) -> State:
        key = (run, -1 if at is None else at)
        if key not in self._states:
            if len(self._states) == _STATES_MAX:
                self._states.clear()
            self._states[key] = self._log.state(run, at)
        return self._states[key]
