"""Takes random agents through time: processes that die, people who answer, and what the record must say after each.

Owns the fold that is written down plainly: from the raw rows of a store, by the rule alone, with no snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

import killick
from folded import fold_ledger, fold_timeline
from killick.engine.signals import Signal
from killick.errors import (
    AlreadyAnswered,
    AnswerRefused,
    KillickError,
    RunBusy,
    StoreUnavailable,
    TimeRefused,
)
from killick.ids import SeededIds
from killick.model import event_codec
from killick.model import events as e
from killick.model.fold import Fold
from killick.model.ledger import Ledger
from killick.store import Store
from killick.store.records import ENDED, RunQuery
from killick.testing import replay
from simulation.random_agents import ACTING, AGENTS, ONCE, FarSide, Program, action_of, input_of

RUN: Final = "run"
SNAPSHOT_EVERY: Final = 5
TURNS_MAX: Final = 400
HANG_SECONDS: Final = 300

Told = list[tuple[int, e.Event]]


# the fold, plainly --------------------------------------------------------------------------------


class Plain(NamedTuple):
    """A run as its raw rows tell it: every event, and the timeline as it was at each of them."""

    log: Told
    lines: dict[int, Told]


def plainly(store: Store, run: str) -> Plain:
    """A timeline at an event is the one before it and that event; where it went back, what stood at the cut, what was
    kept, and the event that says so."""
    head = store.head(run)
    assert head is not None
    log: Told = []
    lines: dict[int, Told] = {0: []}
    if head.parent is not None:
        above = plainly(store, head.parent)
        log = [(seq, event) for seq, event in above.log if seq <= head.base]
        lines = {seq: line for seq, line in above.lines.items() if seq <= head.base}
    for row in store.read(run, after=head.base, limit=100_000):
        event = event_codec.decode(row.body)
        line = lines[row.seq - 1]
        if isinstance(event, e.RunRewound | e.RunForked):
            events = dict(log)
            line = [*lines[event.cut], *((seq, events[seq]) for seq in event.keep)]
        log.append((row.seq, event))
        lines[row.seq] = [*line, (row.seq, event)]
    return Plain(log, lines)


_VECTORS: Final = ("steps", "tops", "decisions", "retried", "failures", "trace", "effects", "notes")


def differences(fast: Fold | Ledger, slow: Fold | Ledger) -> Iterator[str]:
    """In what two folds are not the same."""
    names = _VECTORS if isinstance(slow, Fold) else ("effects", "consumed", "children")
    for name in slow.facts.__struct_fields__:
        if getattr(fast.facts, name) != getattr(slow.facts, name):
            yield f"{name} is {getattr(fast.facts, name)!r}, not {getattr(slow.facts, name)!r}"
    for name in names:
        if list(getattr(fast, name)) != list(getattr(slow, name)):
            yield f"{name} are {list(getattr(fast, name))!r}, not {list(getattr(slow, name))!r}"


# processes ----------------------------------------------------------------------------------------


class Dead(Exception):
    """The process is dead: nothing that it does any more reaches the store or the world."""


class Life:
    """One process: dies at one of the points at which it touches what outlives it."""

    def __init__(self, kill_at: int = 0) -> None:
        self.points = 0
        self.dead = False
        self._kill_at = kill_at

    def point(self, place: str) -> None:
        if self.dead:
            raise Dead(place)
        self.points += 1
        if self.points == self._kill_at:
            self.dead = True
            raise Dead(place)

    def look(self, place: str) -> None:
        """Reading is no point to die at, but a dead process reads nothing."""
        if self.dead:
            raise Dead(place)


_WRITES: Final = frozenset({"append", "deliver", "lease", "release", "renew", "reindex", "set_references"})


class _Line:
    """The way from one process to its store; a dead one is told that there is none."""

    def __init__(self, store: Store, life: Life) -> None:
        self._store, self._life = store, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._passing(name, found) if callable(found) else found

    def _passing(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def passed(*args: Any, **kwargs: Any) -> Any:
            try:
                if name in _WRITES:
                    self._life.point(f"before {name}")
                else:
                    self._life.look(name)
                done = operation(*args, **kwargs)
                if name in _WRITES:
                    self._life.point(f"after {name}")
                return done
            except Dead as dead:
                raise StoreUnavailable(self._store.place, "this process is dead") from dead

        return passed

    def close(self) -> None:
        """The store outlives the process."""


async def _advanced(client: killick.Client, run: str) -> None:
    try:
        async with asyncio.timeout(HANG_SECONDS):
            await client.as_async().advance(run)
    except TimeoutError:
        raise AssertionError(f"{run} hangs") from None


class Leap(NamedTuple):
    """What somebody does to a run's time. Which run, and which place, is counted among those that there are then."""

    do: Literal["rewind", "fork", "undo"]
    run: int
    place: int
    changes: Literal["", "output", "set", "input"] = ""
    effects: e.ForkEffects = "recorded"


class Journey:
    """One agent and its forks, over one store and one far side."""

    def __init__(
        self,
        store: Store,
        clock: killick.clock.LeapingClock,
        far: FarSide,
        agent: str,
        program: Program,
        *,
        behind: bool,
    ) -> None:
        self.store, self.clock, self.far = store, clock, far
        self.agent, self.program = agent, program
        self._behind = behind
        self._number = 0
        self._clients: list[killick.Client] = []
        self.kd = self.process(Life())
        self.kd.start(AGENTS[agent], input_of(agent, program), id=RUN)

    def process(self, life: Life) -> killick.Client:
        """Another process: it knows nothing but the store."""
        self._number += 1
        number = self._number
        self.life = life
        self.far.point = life.point
        client = killick.Client(
            cast("Store", _Line(self.store, life)),
            clock=self.clock,
            ids=SeededIds(number),
            build=lambda agent: e.Build(version=f"process {number}"),
            lease_seconds=float("inf"),
            behind=self._behind,
        )
        client.runtime.log._snapshot_every = SNAPSHOT_EVERY
        self._clients.append(client)
        self.kd = client
        return client

    def go_on(self, kills: Sequence[int] = ()) -> None:
        """Until every run has ended or waits for nobody who is there; so many processes die on the way."""
        for kill_at in (*kills, 0):
            life = Life(kill_at)
            client = self.process(life)
            try:
                self._to_rest(client)
                return
            except (KillickError, Dead, Signal):
                if not life.dead:
                    raise
            finally:
                life.dead = life.dead or kill_at != 0
                with contextlib.suppress(KillickError, Dead):
                    client.close()
                self._take_over()
                self.process(Life())

    def _take_over(self) -> None:
        for _, head in self.store.heads():
            if head.holder is not None:
                self.store.release(head.run, epoch=head.epoch, left=True)

    def close(self) -> None:
        self.far.point = lambda place: None
        for client in self._clients:
            with contextlib.suppress(KillickError, Dead):
                client.close()

    # what happens to runs ---------------------------------------------------------------------

    def runs(self) -> list[str]:
        return [row.run for row in reversed(self.store.runs(RunQuery(), limit=1_000))]

    def _to_rest(self, client: killick.Client) -> None:
        for _ in range(TURNS_MAX):
            due = self.store.due(self.clock.now_us(), limit=100)
            for row in due:
                with contextlib.suppress(RunBusy):
                    client.runtime.blocking(_advanced(client, row.run))
            if due or self._hosted(client) or self._answered(client):
                continue
            soonest = self.store.soonest_us()
            if soonest is None:
                return
            self.clock.advance(max(soonest - self.clock.now_us(), 1) / 1_000_000)
        raise AssertionError(f"comes to no rest: {[client.info(run) for run in self.runs()]}")

    def _hosted(self, client: killick.Client) -> bool:
        """Whether the process is still at a child beside its parent; a little later it has come further."""
        held = any(head.holder is not None for _, head in self.store.heads())
        if held:
            client.runtime.blocking(asyncio.sleep(0.001))
        return held

    def _answered(self, client: killick.Client) -> bool:
        """People look into the far side's books, and others send what is waited for."""
        acted = False
        for row in self.store.runs(RunQuery(status=("waiting",)), limit=1_000):
            for wait in client.info(row.run).waits:
                # A child that is hosted beside its parent may have gone on meanwhile.
                with contextlib.suppress(AnswerRefused, AlreadyAnswered):
                    acted = self._answer(client, wait) or acted
        return acted

    def _answer(self, client: killick.Client, wait: killick.Wait) -> bool:
        if wait.waits_for == "settlement":
            self._settle(client, wait)
        elif wait.waits_for == "answer":
            verb = "respond" if "respond" in wait.verbs else "approve" if zlib.crc32(wait.id.encode()) % 4 else "reject"
            value = f"yes, {wait.step}" if verb == "respond" else None
            client.answer(wait.id, cast("Any", verb), value=value, by="person")
        elif wait.waits_for == "event" and not self.store.inbox(wait.run, name=wait.name):
            client.send(wait.run, wait.name, f"heard {self.clock.now_us()}", by="program")
        else:
            return False
        return True

    def _settle(self, client: killick.Client, wait: killick.Wait) -> None:
        """Somebody who sees the books, and which request is meant."""
        found = self.far.requests.get(self._doubted(client, wait))
        if found is None:
            client.answer(wait.id, "not", by="person")
        else:
            client.answer(wait.id, "happened", value=found, by="person")

    def _doubted(self, client: killick.Client, wait: killick.Wait) -> str:
        """The key of what is in doubt: the step's own, or else the oldest of its lineage with these arguments."""
        assert wait.intention is not None
        told = wait.intention
        own = client.runtime.log.ledger(wait.run)
        if (key := own.facts.keys.get(wait.step)) is not None and own.effects[own.facts.open[key]].step == wait.step:
            return key
        for run in self.lineage(wait.run):
            for effect in client.runtime.log.ledger(run).in_doubt():
                arguments = client.runtime.log.data(run, effect.intended).get("arguments")
                if effect.tool == told["tool"] and arguments == told["arguments"]:
                    return effect.key
        raise AssertionError(f"nothing is in doubt at {wait}")

    def lineage(self, run: str) -> list[str]:
        """A run with its forks, and theirs, and what it was forked from."""
        root = self.root(run)
        return [each for each in self.runs() if self.root(each) == root]

    def root(self, run: str) -> str:
        head = self.store.head(run)
        assert head is not None
        return run if head.parent is None else self.root(head.parent)

    # going through time -----------------------------------------------------------------------

    def travel(self, leap: Leap, kd: killick.Client | None = None) -> str:
        """Take some run to some place, fork it there or undo something there; says what was done, or why not."""
        kd = kd or self.kd
        runs = self.runs()
        run = runs[leap.run % len(runs)]
        try:
            if leap.do == "undo":
                steps = [step.id for step in kd.state(run).fold.steps if step.name in ACTING] or ["1"]
                return f"{run}: {kd.undo(run, steps[leap.place % len(steps)])}"
            places = self.places(run)
            place = places[leap.place % len(places)]
            if leap.do == "rewind":
                return f"{run}: {kd.rewind(run, place)}"
            given = self._conditions(run, place, leap)
            return f"{run}: forked at {place} with {given} as {kd.fork(run, place, **given).id}"
        except (TimeRefused, AnswerRefused) as refused:
            return str(refused)

    def places(self, run: str) -> list[str]:
        """Every boundary of a run: of each step, of the generations that were left, of each event."""
        found = ["start", "now"]
        plain = plainly(self.store, run)
        ends = [seq - 1 for seq, event in plain.log if isinstance(event, e.RunRewound | e.RunForked)]
        for generation, end in enumerate((*ends, plain.log[-1][0])):
            tilde = "" if end == plain.log[-1][0] else f"~{generation}"
            for step in fold_timeline(plain.lines[end]).steps:
                found += [f"{step.id}{tilde}:before"] + ([f"{step.id}{tilde}:after"] if step.ended else [])
        return found + [f"@{seq}" for seq, _ in plain.log]

    def _conditions(self, run: str, place: str, leap: Leap) -> dict[str, Any]:
        given: dict[str, Any] = {"effects": leap.effects}
        step, _, side = place.partition(":")
        found = self.kd.state(run).fold.step(step)
        if leap.changes == "output" and side == "after" and found is not None and found.sort in ("tool", "decision"):
            given["output"] = {step: "otherwise"}
        elif leap.changes == "set":
            given["set"] = {"ale": "otherwise"}
        elif leap.changes == "input" and self.kd.state(run).agent != "walks_in_stages":
            given["input"] = [*self.kd.state(run).input, {"do": "pay", "what": "more"}]
        return given

    # what must hold ---------------------------------------------------------------------------

    def wrong(self) -> Iterator[str]:
        """Everything that does not hold, of every run."""
        plain = {run: plainly(self.store, run) for run in self.runs()}
        for run, told in plain.items():
            yield from self._wrong_states(run, told)
        yield from (f"verify: {problem}" for problem in self.kd.store.verify().problems)
        yield from self._wrong_books(plain)
        yield from self._wrong_replays()

    def _wrong_states(self, run: str, told: Plain) -> Iterator[str]:
        log = self.kd.runtime.log
        for seq, line in told.lines.items():
            for wrong in differences(log.state(run, seq).fold, fold_timeline(line)):
                yield f"{run}@{seq}: the state's {wrong}"
            upto = [(at, event) for at, event in told.log if at <= seq]
            for wrong in differences(log.ledger(run, seq), fold_ledger(upto)):
                yield f"{run}@{seq}: the ledger's {wrong}"
        opened = log.open(run)
        for wrong in differences(opened.fold, fold_timeline(told.lines[opened.seq])):
            yield f"{run}, opened: the state's {wrong}"

    def _wrong_books(self, plain: dict[str, Plain]) -> Iterator[str]:
        for key, times in Counter(key for key, _ in self.far.done).items():
            if times > 1:
                yield f"{key} was done {times} times"
        asked: dict[str, Counter[str]] = defaultdict(Counter)
        for run, told in plain.items():
            for line in told.lines.values():
                asked[self.root(run)] |= Counter(self._asked(run, line))
            yield from self._lost(run, told.lines[max(told.lines)])
            yield from self._unheard(run, told.lines[max(told.lines)])
        done: dict[str, Counter[str]] = defaultdict(Counter)
        for key, action in self.far.done:
            done[self.root(key.partition(":step_")[0])][action] += 1
        for root, actions in done.items():
            allowed = asked[root] + self.far.undone
            yield from (f"{root}: {action} once too often" for action in (actions - allowed).elements())

    def _asked(self, run: str, line: Told) -> Iterator[str]:
        for seq, event in line:
            if isinstance(event, e.StepIntended) and event.sort == "tool" and event.name in ACTING:
                yield action_of(event.name, self.kd.runtime.log.data(run, seq)["arguments"]["what"])

    def _lost(self, run: str, line: Told) -> Iterator[str]:
        """What the record stands on and the far side knows nothing of, or has once where a timeline owes it twice."""
        state = self.kd.state(run)
        keys = {event.step: event.key for _, event in line if isinstance(event, e.Started | e.StepAdopted)}
        stood: dict[str, str] = {}
        for step in state.fold.steps:
            if step.name in ACTING and step.sort == "tool" and step.status == "done":
                answer = self.far.requests.get(keys.get(step.id, ""))
                given = isinstance(state.event(step.output), e.StepOverridden)
                if state.output_of(step) != answer and not given:
                    yield f"{run}: step {step.id} has {state.output_of(step)!r}; the far side says {answer!r}"
                elif not given and step.name not in ONCE and (other := stood.get(keys[step.id])) is not None:
                    yield f"{run}: steps {other} and {step.id} have one payment between them: {answer}"
                stood[keys.get(step.id, "")] = step.id

    def _unheard(self, run: str, line: Told) -> Iterator[str]:
        """Messages that are in no inbox although what took them does not stand any more."""
        standing = {seq for seq, _ in line}
        for message in self.store.messages(run):
            if message.taken is not None and message.taken not in standing and not message.name.startswith("killick."):
                yield f"{run}: {message.name} ({message.id}) was taken at @{message.taken}, which does not stand"

    def _wrong_replays(self) -> Iterator[str]:
        self.far.is_shut = True
        try:
            for run in self.runs():
                state = self.kd.state(run)
                played = replay(self.kd.store.export(run), AGENTS[state.agent], check=False, seconds=3)
                if state.status == "cancelled":
                    # Where somebody called it off, code may have gone on; it must only agree as far as it went.
                    yield from [f"{run}: replay parts: {played.divergence}"] if played.divergence else []
                elif played.outcome != "agrees" or played.state is None:
                    yield f"{run}: replay {played.outcome}: {played.divergence or played.beyond}"
                elif (found := timeless(played.state)) != (
                    recorded := timeless(self.kd.state(run, state.fold.facts.ended or None))
                ):
                    parts = [part for part in recorded if recorded[part] != found[part]]
                    yield f"{run}: replay comes to another state: {[(found[part], recorded[part]) for part in parts]}"
        finally:
            self.far.is_shut = False


_TIMING: Final = frozenset({"seq", "at", "ended_at", "since", "deadline", "frames"})


def timeless(state: killick.State) -> Any:
    """A state less its times, and less where in files its errors were raised."""

    def less(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: less(part) for name, part in node.items() if name not in _TIMING}
        return [less(part) for part in node] if isinstance(node, list) else node

    return less(msgspec.json.decode(state.to_json()))


def ended(journey: Journey) -> bool:
    """Whether nothing is left to be done."""
    return all(row.status in ENDED for row in journey.store.runs(RunQuery(), limit=1_000))
