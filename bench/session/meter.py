"""What a row of requests costs: one measure for all strategies, so that none can hide anything from it.

A request is what a provider caches from the start: tools, then messages (the system's are the first). What is the
same, byte for byte, as in the request before, message by message from the front, was read from the cache; the rest was
written to it. Replies cost as output. Everything counts: what is fetched again, tombstones, calls made in vain.
That a cache is kept for as long as it is needed, and at every length, is granted to all of them alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from killick.window import Rates, estimate

ANTHROPIC: Final = Rates(input=1.0, cached=0.1, written=1.25, output=5.0)
OPENAI: Final = Rates(input=1.0, cached=0.1, written=1.0, output=5.0)


def encoded(part: Any) -> str:
    """A part of a request as it goes over the wire."""
    return json.dumps(part, ensure_ascii=False, separators=(",", ":"))


class Bill(msgspec.Struct):
    """What was sent so far, in tokens."""

    calls: int = 0
    cached: int = 0
    written: int = 0
    output: int = 0
    largest: int = 0
    over: int = 0
    """Requests that exceeded the budget."""
    breaks: int = 0
    """Requests in which something was changed that had been sent before."""

    @property
    def sent(self) -> int:
        """Tokens of all requests."""
        return self.cached + self.written

    def cost(self, rates: Rates = ANTHROPIC) -> float:
        """In tokens of plain input."""
        return self.cached * rates.cached + self.written * rates.written + self.output * rates.output


class Meter:
    """Compares each request with the one before."""

    def __init__(self, budget: int | None = None) -> None:
        self.bill = Bill()
        self._budget = budget
        self._before: list[tuple[str, int]] = []
        self._known: dict[int, tuple[Any, tuple[str, int]]] = {}

    def request(self, tools: Sequence[Any], messages: Sequence[Any]) -> int:
        """One more request; its tokens."""
        parts = [self._part(part) for part in (*tools, *messages)]
        same = 0
        for part, before in zip(parts, self._before, strict=False):
            if part is not before and part[0] != before[0]:
                break
            same += 1
        bill, total = self.bill, sum(size for _, size in parts)
        cached = sum(size for _, size in parts[:same])
        bill.calls += 1
        bill.cached += cached
        bill.written += total - cached
        bill.largest = max(bill.largest, total)
        bill.over += self._budget is not None and total > self._budget
        bill.breaks += same < len(self._before)
        self._before = parts
        return total

    def reply(self, message: Mapping[str, Any]) -> None:
        """What the model said to it."""
        self.bill.output += estimate(encoded(message))

    def _part(self, part: Any) -> tuple[str, int]:
        known = self._known.get(id(part))
        if known is None:
            text = encoded(part)
            known = self._known[id(part)] = part, (text, estimate(text))
        return known[1]
