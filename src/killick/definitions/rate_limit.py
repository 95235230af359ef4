"""Rate limits that tools share: so many calls in so much time, for each value of one argument.

The store counts the calls of all its processes. Nothing here waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from killick.errors import DeclarationRefused
from killick.model.codec import DigestKey, digest
from killick.model.retry import rate
from killick.store.records import TokenBucket


@dataclass(frozen=True)
class Limit:
    """A rate limit, which all tools with the same limit share, in all processes of a store.

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

    def bucket(self, arguments: Mapping[str, Any], key: bytes) -> TokenBucket:
        """The bucket of a call with these arguments. Its id is a keyed digest, which reveals none of them."""
        if self.by is not None and self.by not in arguments:
            raise DeclarationRefused(
                f"Limit {self.name!r}",
                f"by={self.by!r} is not an argument of this tool (it has {', '.join(arguments) or 'none'})",
            )
        value = None if self.by is None else arguments[self.by]
        declared = [self.name, self.by, self.count, self.per_seconds, self.burst, value]
        token_us = math.ceil(self.per_seconds / self.count * 1_000_000)
        id_ = digest(declared, at=self.by or self.name, secret_key=DigestKey.of(key))
        return TokenBucket(id_, token_us, token_us * (self.burst or self.count))
