"""Random but plausible logs, told by a seed: what tests fold, store, break and rewind."""

from __future__ import annotations

import random
from collections.abc import Iterator

from killick.log import Entry
from killick.model import events as e

START_US = 1_750_000_000_000_000


def started(run: str = "run_1", at: int = START_US, **fields: object) -> Entry:
    """The first entry of a run."""
    return Entry(e.RunStarted(at=at, run=run, agent="review", **fields), {"input": {"claim": 17}})  # type: ignore[arg-type]


class Story:
    """Tells a run event by event; knows enough of what it told to stay plausible."""

    def __init__(self, seed: int, *, rewinds: bool = True) -> None:
        self.random = random.Random(seed)
        self.rewinds = rewinds
        self.at = START_US
        self.step = 0
        self.seq = 1
        self.generation = 0
        self.version = 0
        self.boundaries: list[tuple[int, int]] = []

    def entries(self, count: int) -> Iterator[list[Entry]]:
        """Batches of entries, as a runtime would append them, until `count` events were told."""
        while self.seq < count:
            batch = self._next()
            self.seq += len(batch)
            yield batch

    def _tick(self) -> int:
        self.at += self.random.randint(1, 5_000_000)
        return self.at

    def _next(self) -> list[Entry]:
        if self.rewinds and self.boundaries and self.random.random() < 0.03:
            return self._rewind()
        self.boundaries.append((self.seq, self.step))
        told = self.random.choices(
            [
                self._tool,
                self._model,
                self._decision,
                self._wait,
                self._context,
                self._note,
                self._child,
                self._pause,
            ],
            [40, 20, 10, 8, 8, 4, 4, 2],
        )[0]
        return told()

    def _rewind(self) -> list[Entry]:
        place = self.random.randrange(len(self.boundaries))
        cut, self.step = self.boundaries[place]
        del self.boundaries[place:]
        self.generation += 1
        return [Entry(e.RunRewound(at=self._tick(), cut=cut, generation=self.generation), {"because": "try again"})]

    def _number(self) -> str:
        self.step += 1
        return str(self.step)

    def _tool(self) -> list[Entry]:
        step = self._number()
        effect = self.random.choice(["reads", "idempotent", "at_most_once"])
        name = self.random.choice(["fetch", "send_email", "pay"])
        key = f"run_1:step_{step}~{self.generation}:{name}:f3a9b12c"
        arguments = {"to": "a@b.c", "amount": self.random.randint(1, 9)}
        told = [
            Entry(
                e.StepIntended(at=self._tick(), step=step, sort="tool", name=name, digest=f"d{step}", effect=effect),
                {"arguments": arguments, "because": "the plan says so"},
            )
        ]
        attempts = self.random.choice([1, 1, 1, 2, 3])
        for attempt in range(1, attempts + 1):
            told.append(Entry(e.AttemptStarted(at=self._tick(), step=step, attempt=attempt, key=key, epoch=0)))
            if attempt < attempts:
                ended = e.AttemptEnded(
                    at=self._tick(),
                    step=step,
                    attempt=attempt,
                    outcome="refused",
                    retry_at=self.at + 1_000_000,
                )
                told.append(Entry(ended, {"failure": {"type": "ConnectionRefusedError", "attempt": attempt}}))
        outcome = self.random.choices(["returned", "refused", "unknown"], [8, 1, 1])[0]
        last = e.AttemptEnded(at=self._tick(), step=step, attempt=attempts, outcome=outcome)
        values = (
            {"output": {"ok": True, "step": step}} if outcome == "returned" else {"failure": {"type": "TimeoutError"}}
        )
        told.append(Entry(last, values))
        if outcome == "unknown" and effect == "at_most_once":
            settled = e.AttemptSettled(
                at=self._tick(), step=step, attempt=attempts, key=key, settlement="happened", by="ann"
            )
            told.append(Entry(settled, {"output": {"ok": "as ann saw"}}))
        return told

    def _model(self) -> list[Entry]:
        step = self._number()
        size = self.random.choice([40, 400, 4_000])
        text = "".join(self.random.choices("abcdefghij klmnop", k=size))
        usage = e.Usage(model="m", tokens_in=size, tokens_out=12, cost_micros=size)
        return [
            Entry(
                e.StepIntended(at=self._tick(), step=step, sort="model", name="chat", digest=f"m{step}"),
                {"arguments": {"messages": [{"role": "user", "content": text}]}},
            ),
            Entry(e.AttemptStarted(at=self._tick(), step=step, attempt=1, key=f"model:{step}", epoch=0)),
            Entry(
                e.AttemptEnded(at=self._tick(), step=step, attempt=1, outcome="returned", usage=usage),
                {"output": {"role": "assistant", "content": text[::-1]}},
            ),
        ]

    def _decision(self) -> list[Entry]:
        values = {
            "question": "Who?",
            "options": ["auto", "manager"],
            "choice": "auto",
            "because": "it is small",
        }
        return [Entry(e.DecisionMade(at=self._tick(), step=self._number()), values)]

    def _wait(self) -> list[Entry]:
        step = self._number()
        return [
            Entry(e.StepIntended(at=self._tick(), step=step, sort="wait", name="ask", digest=f"w{step}")),
            Entry(
                e.WaitOpened(at=self._tick(), step=step, waits_for="answer", to=("managers",), deadline=self.at + 10),
                {"prompt": f"Pay step {step}?", "schema": {"type": "boolean"}},
            ),
            Entry(e.WaitClosed(at=self._tick(), step=step, how="answered", by="ann"), {"answer": "approve"}),
        ]

    def _context(self) -> list[Entry]:
        self.version += 1
        whole = self.version % 7 == 1
        values = {"document": {"v": self.version}} if whole else {"set": {f"k{self.version % 5}": self.version}}
        return [Entry(e.ContextChanged(at=self._tick(), version=self.version, whole=whole), values)]

    def _note(self) -> list[Entry]:
        return [Entry(e.NoteMade(at=self._tick()), {"note": "so far so good"})]

    def _child(self) -> list[Entry]:
        step = self._number()
        child = f"child_{self.seq}"
        return [
            Entry(e.StepIntended(at=self._tick(), step=step, sort="child", name="research")),
            Entry(e.ChildSpawned(at=self._tick(), step=step, run=child, agent="research"), {"input": step}),
            Entry(e.ChildEnded(at=self._tick(), step=step, run=child, status="completed"), {"result": 1}),
        ]

    def _pause(self) -> list[Entry]:
        return [
            Entry(e.RunPaused(at=self._tick(), by="ann"), {"because": "lunch"}),
            Entry(e.RunResumed(at=self._tick(), by="ann")),
        ]
