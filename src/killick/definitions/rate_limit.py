"""Rate limits that tools share: so many calls in so much time, for each value of one argument.

A process keeps its own count; it stores nothing and never waits itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from killick.clock import Clock
from killick.errors import DeclarationRefused
from killick.model.codec import canonical
from killick.model.retry import rate

BUCKETS_SWEPT: Final = 1024
"""The number of buckets from which full ones are dropped."""

_ROUNDING_SECONDS: Final = 1e-6
"""A tolerance: a caller that waited as long as required must not be refused again by rounding."""


@dataclass(frozen=True)
class Limit:
    """A rate limit, which all tools with the same limit share.

    name   the name of the limit
    rate   so many calls in so much time: "10/min", "5/s", "100/h", "3/2m"
    by     a parameter of the tools: each of its values has its own limit
    burst  how many calls may come at once; by default all

        crm = killick.Limit("crm", "10/min", by="tenant")
    """

    name: str
    rate: str = field(compare=False)
    by: str | None = None
    burst: int | None = None
    count: int = field(init=False)
    per_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        names: list[object] = [self.name] if self.by is None else [self.name, self.by]
        if not all(isinstance(name, str) and name for name in names):
            raise DeclarationRefused("Limit", f"names {names!r}; write it as in Limit('crm', '10/min', by='tenant')")
        count, per_seconds = rate(self.rate)
        burst = count if self.burst is None else self.burst
        if not isinstance(burst, int) or isinstance(burst, bool) or burst < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationRefused(f"Limit {self.name!r}", f"burst={burst!r}; give a whole number from 1")
        for name, value in {"burst": burst, "count": count, "per_seconds": per_seconds}.items():
            object.__setattr__(self, name, value)

    def key_of(self, arguments: Mapping[str, Any]) -> str:
        """The key of this call's bucket. It can contain a secret's digest: keep it in memory."""
        if self.by is None:
            return ""
        if self.by not in arguments:
            raise DeclarationRefused(
                f"Limit {self.name!r}",
                f"by={self.by!r} is not an argument of this tool (it has {', '.join(arguments) or 'none'})",
            )
        return canonical(arguments[self.by], at=self.by, secret_key=self.name.encode()).decode()


class Buckets:
    """A bucket of tokens for each limit and key, filled by the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # A bucket is one number: when it will be full again. One that is full needs none.
        self._full_at: dict[tuple[Limit, str], float] = {}
        self._sweep_above = BUCKETS_SWEPT

    def __len__(self) -> int:
        return len(self._full_at)

    def reserve(self, limits: Sequence[Limit], arguments: Mapping[str, Any]) -> float:
        """Takes a token of each limit and gives 0.0, or takes none and gives the seconds until all could be had."""
        buckets = [(limit, limit.key_of(arguments)) for limit in limits]
        with self._lock:
            now = self._clock.monotonic()
            taken: dict[tuple[Limit, str], float] = {}
            wait = 0.0
            for bucket in buckets:
                limit = bucket[0]
                token_seconds = limit.per_seconds / limit.count
                taken[bucket] = max(self._full_at.get(bucket, now), now) + token_seconds
                wait = max(wait, taken[bucket] - now - token_seconds * (limit.burst or limit.count))
            if wait > _ROUNDING_SECONDS:
                return wait
            self._full_at |= taken
            if len(self._full_at) > self._sweep_above:
                self._sweep(now)
            return 0.0

    def _sweep(self, now: float) -> None:
        """Forgets the full ones. The next sweep comes when there are twice as many, so that it costs little."""
        self._full_at = {bucket: full_at for bucket, full_at in self._full_at.items() if full_at > now}
        self._sweep_above = max(BUCKETS_SWEPT, 2 * len(self._full_at))
