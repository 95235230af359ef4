"""The ways to send a session: everything, keep-last-N masking, and Killick's window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from bench.session.meter import encoded
from bench.session.play import Outcome, Player
from bench.session.script import Session
from killick.window import Policy, Window, estimate

KEEPS: Final = (2, 3, 5, 8, 12, 16, 24, 32, 48)
MASK: Final = "[the result was left out to save space]"


class Everything:
    """Sends all of it, always."""

    name = "everything"

    def fit(self, history: list[Any], tools: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return list(history), tools

    def answer(self, tool: str, arguments: dict[str, Any]) -> str | None:
        return None


class Masking(Everything):
    """The last N results whole, a line in place of each older one."""

    def __init__(self, keep: int) -> None:
        self.name = f"masking, last {keep}"
        self._keep = keep
        self._masked: dict[int, Any] = {}

    def fit(self, history: list[Any], tools: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        results = [at for at, message in enumerate(history) if message["role"] == "tool"]
        return self._without(history, results[: len(results) - self._keep]), tools

    def _without(self, history: list[Any], places: list[int]) -> list[Any]:
        sent = list(history)
        for at in places:
            if len(history[at]["content"]) > len(MASK):
                sent[at] = self._masked.setdefault(at, {**history[at], "content": MASK})
        return sent


class MaskingInBatches(Masking):
    """The same, but nothing is masked until the budget is reached; then all but the last N are at once."""

    def __init__(self, keep: int, budget: int) -> None:
        super().__init__(keep)
        self.name = f"masking in batches, last {keep}"
        self._budget = budget
        self._gone: list[int] = []
        self._sizes: dict[int, tuple[Any, int]] = {}

    def fit(self, history: list[Any], tools: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        sent = self._without(history, self._gone)
        if sum(map(self._size, (*tools, *sent))) > self._budget:
            results = [at for at, message in enumerate(history) if message["role"] == "tool"]
            self._gone = results[: len(results) - self._keep]
            sent = self._without(history, self._gone)
        return sent, tools

    def _size(self, part: Any) -> int:
        known = self._sizes.get(id(part))
        if known is None:
            known = self._sizes[id(part)] = part, estimate(encoded(part))
        return known[1]


class Killick:
    """The window as it comes; or with another policy."""

    def __init__(self, budget: int, *, policy: Policy | None = None, name: str = "killick") -> None:
        self.name = name
        self._budget = budget
        self._policy = policy
        self.window: Window | None = None
        self.decisions: list[Any] = []

    def fit(self, history: list[Any], tools: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        if self.window is None:
            self.window = Window(self._budget, policy=self._policy, record=self.decisions.append)
        sent = self.window.fit(history, tools)
        return sent.messages, sent.tools

    def answer(self, tool: str, arguments: dict[str, Any]) -> str | None:
        assert self.window is not None
        answer = self.window.answer(tool, arguments)
        return None if answer is None else answer.text


def masked(session: Session, budget: int, make: Callable[[int], Masking] = Masking) -> Outcome:
    """With the largest N for which no request of the session exceeds the budget.

    Masking takes nothing but results out. Where the words alone exceed the budget there is no such N; then it is the
    one that costs least, however far it exceeds the budget.
    """
    best: Outcome | None = None
    low, high = 1, len(session.moves)
    while low <= high:
        keep = (low + high) // 2
        outcome = Player(session, make(keep), budget).play()
        if outcome.bill.over:
            high = keep - 1
        else:
            best, low = outcome, keep + 1
    return best or min(
        (Player(session, make(keep), budget).play() for keep in KEEPS), key=lambda each: each.bill.cost()
    )
