"""Runs with forks, children and rewinds, told event by event: what tests draw and compare without running any code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from killick.log import Entry, Log, RunLog
from killick.model import events as e
from killick.store import MemoryStore

START_US = 1_790_000_000_000_000


def fork_of(log: Log, forked: e.RunForked, values: Mapping[str, Any] | None = None) -> RunLog:
    """A fork of a run, which its first event creates."""
    fold, ledger = log.folds(forked.parent, forked.base)
    if forked.keep:
        fold = log.state(forked.parent, forked.cut, keep=forked.keep).fold
    made = log.fork(forked, fold, ledger)
    made.append(Entry(forked, values))
    return made


class Family:
    """Writes logs. Every event is a second after the one before, whichever run it is of."""

    def __init__(self, log: Log | None = None) -> None:
        self.log = log or Log(MemoryStore())
        self._at = START_US

    def now(self) -> int:
        self._at += 1_000_000
        return self._at

    def append(self, run: str, *entries: Entry) -> int:
        """Append to a run; gives the seq of the last event."""
        self.log.open(run).append(*entries)
        return self.log.head(run).seq

    def start(self, run: str = "r", agent: str = "review", **fields: Any) -> None:
        self.log.create(e.RunStarted(at=self.now(), run=run, agent=agent, **fields), {"input": 17})

    def step(self, run: str, step: str, name: str = "fetch", output: Any = "ok", **fields: Any) -> int:
        """A tool that returned; gives where it ended. `arguments` and `effect` may be given."""
        seq = self.begin(run, step, name, **fields)
        del seq
        ended = e.AttemptEnded(at=self.now(), step=step, attempt=1, outcome="returned")
        return self.append(run, Entry(ended, {"output": output}))

    def begin(
        self,
        run: str,
        step: str,
        name: str = "fetch",
        *,
        arguments: Any = None,
        effect: e.EffectClass = "reads",
        sort: e.Sort = "tool",
        **fields: Any,
    ) -> int:
        """A step that began and has not ended; gives where its attempt started."""
        key = fields.pop("key", f"{run}:step_{step}:{name}:f3a9b12c")
        intended = e.StepIntended(at=self.now(), step=step, sort=sort, name=name, effect=effect, **fields)
        started = e.AttemptStarted(at=self.now(), step=step, attempt=1, key=key, epoch=0)
        return self.append(run, Entry(intended, {"arguments": arguments or {}}), Entry(started))

    def steps(self, run: str, first: int, last: int, name: str = "fetch") -> None:
        """Many steps at once."""
        entries: list[Entry] = []
        for number in map(str, range(first, last + 1)):
            key = f"{run}:step_{number}:{name}:f3a9b12c"
            entries += [
                Entry(e.StepIntended(at=self.now(), step=number, sort="tool", name=name, effect="reads")),
                Entry(e.AttemptStarted(at=self._at, step=number, attempt=1, key=key, epoch=0)),
                Entry(e.AttemptEnded(at=self._at, step=number, attempt=1, outcome="returned"), {"output": "ok"}),
            ]
        self.append(run, *entries)

    def scope(self, run: str, step: str, branches: int) -> int:
        intended = e.StepIntended(at=self.now(), step=step, sort="scope", name="gather")
        return self.append(run, Entry(intended, {"arguments": {"branches": branches}}))

    def end_scope(self, run: str, step: str) -> int:
        return self.append(run, Entry(e.StepEnded(at=self.now(), step=step), {"output": None}))

    def decide(self, run: str, step: str, choice: str, question: str = "Who?") -> int:
        values = {"question": question, "options": ["auto", "manager"], "choice": choice, "because": "it is so"}
        return self.append(run, Entry(e.DecisionMade(at=self.now(), step=step), values))

    def ask(self, run: str, step: str, prompt: str) -> int:
        intended = e.StepIntended(at=self.now(), step=step, sort="wait", name="ask")
        opened = e.WaitOpened(at=self.now(), step=step, waits_for="answer", name="ask", to=("managers",))
        return self.append(run, Entry(intended), Entry(opened, {"prompt": prompt}))

    def adopt(self, run: str, step: str, name: str, of: tuple[str, str, int], output: Any = "ok") -> int:
        """A step that took what (run, key, seq) had done."""
        owner, key, seq = of
        intended = e.StepIntended(at=self.now(), step=step, sort="tool", name=name, effect="at_most_once")
        adopted = e.StepAdopted(at=self.now(), step=step, run=owner, key=key, seq=seq)
        return self.append(run, Entry(intended, {"arguments": {}}), Entry(adopted, {"output": output}))

    def undo(self, run: str, step: str, undoes: str, seq: int, name: str = "pay") -> int:
        """Somebody had the effect undone that started at a seq."""
        begun = {"sort": "undo", "effect": "at_most_once", "undoes": undoes, "undoes_seq": seq}
        self.begin(run, step, name, key=f"{run}:step_{undoes}:{name}:f3a9b12c:undo", **begun)
        return self.append(run, Entry(e.AttemptEnded(at=self.now(), step=step, attempt=1, outcome="returned")))

    def spawn(self, run: str, step: str, child: str, agent: str = "child") -> int:
        intended = e.StepIntended(at=self.now(), step=step, sort="child", name=agent)
        spawned = e.ChildSpawned(at=self.now(), step=step, run=child, agent=agent)
        return self.append(run, Entry(intended, {"arguments": {"input": 1}}), Entry(spawned))

    def rewind(self, run: str, cut: int, keep: tuple[int, ...] = (), **fields: Any) -> int:
        generation = self.log.ledger(run).facts.generation + 1
        because = fields.pop("because", None)
        event = e.RunRewound(at=self.now(), cut=cut, keep=keep, generation=generation, **fields)
        return self.append(run, Entry(event, {"because": because} if because else None))

    def fork(self, run: str, parent: str, cut: int, *more: Entry, told: bool = True, **fields: Any) -> None:
        """A fork with what it was given; `told`: its parent knows of it."""
        generation = self.log.ledger(parent, cut).facts.generation + 1
        values = {name: fields.pop(name) for name in ("input", "because") if name in fields}
        forked = e.RunForked(at=self.now(), run=run, parent=parent, cut=cut, generation=generation, **fields)
        fork_of(self.log, forked, values)
        if more:
            self.append(run, *more)
        if told:
            self.append(parent, Entry(e.ForkMade(at=self.now(), run=run, cut=cut)))

    def complete(self, run: str, result: Any = "done") -> int:
        return self.append(run, Entry(e.RunCompleted(at=self.now()), {"result": result}))


def claim() -> Family:
    """Six timelines: `r` was rewound from 4 to before 3 and adopted its payment, which was undone; `r-fork` left it
    after step 2 with another output, and `r-fork-fork` left that; `r/2` is a child; `r-fork-2` may do nothing."""
    told = Family()
    told.start()
    told.step("r", "1", "check", {"status": "up"}, arguments={"bank": "DE02"})
    after_2 = told.spawn("r", "2", "r/2")
    told.start("r/2", "child", parent="r", parent_step="2")
    told.step("r/2", "1", "look", "17 pages")
    told.complete("r/2")
    started = told.begin("r", "3", "pay", effect="at_most_once", arguments={"to": "Ann", "amount": 1250})
    ended = e.AttemptEnded(at=told.now(), step="3", attempt=1, outcome="returned")
    told.append("r", Entry(ended, {"output": "paid"}))
    told.begin("r", "4", "mail", effect="at_most_once")
    told.rewind("r", after_2, by="ann", because="the wrong Ann")
    after_3 = told.adopt("r", "3", "pay", ("r", "r:step_3:pay:f3a9b12c", started), "paid")
    told.decide("r", "4", "auto")
    told.complete("r")
    told.undo("r", "0.1", "3", started)
    given = Entry(e.ContextChanged(at=told.now(), version=1, by="ann"), {"set": {"route": "manager"}})
    told.fork("r-fork", "r", after_3, given, effects="none", by="ann")
    told.decide("r-fork", "4", "manager")
    told.ask("r-fork", "5", "The bank is down. Pay by hand?")
    told.fork("r-fork-fork", "r-fork", told.log.head("r-fork").seq - 2, model="big-one", input=18, renews_input=True)
    told.fork("r-fork-2", "r", 4, effects="live")
    told.step("r-fork-2", "2", "check", {"status": "down"}, arguments={"bank": "DE03"})
    return told
