"""Limits that tools share: calls per time, or calls in flight, for each value of one argument.

The store counts the calls of all its processes. Nothing here waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from killick.errors import DeclarationRefused
from killick.model.codec import DigestKey, digest
from killick.model.retry import rate
from killick.store.limits import PermitPool, TokenBucket

AT_ONCE_MAX: Final = 1_000
"""Bounded, because a step reads the holders of all permits of its limit."""


@dataclass(frozen=True)
class Limit:
    """A limit, which all tools with the same limit share, in all processes of a store.

    name     the name of the limit
    rate     calls per time: "10/min", "5/s", "100/h", "3/2m"
    by       a parameter of the tools: each of its values has its own limit
    burst    how many calls of the rate may come at once; by default all
    at_once  how many calls may be in flight at the same time

        crm = killick.Limit("crm", "10/min", by="tenant")
        gpu = killick.Limit("gpu", at_once=5)
    """

    name: str
    rate: str | None = field(default=None, compare=False)
    by: str | None = None
    burst: int | None = None
    at_once: int | None = None
    count: int = field(init=False)
    per_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        names: list[object] = [self.name] if self.by is None else [self.name, self.by]
        if not all(isinstance(name, str) and name for name in names):
            raise DeclarationRefused("Limit", f"names {names!r}; write it as in Limit('crm', '10/min', by='tenant')")
        if self.rate is None and self.at_once is None:
            raise DeclarationRefused(
                f"Limit {self.name!r}", "limits nothing; give a rate such as '10/min', or at_once=5"
            )
        count, per_seconds = (0, 0.0) if self.rate is None else rate(self.rate)
        burst = (count or None) if self.burst is None else self.burst
        for option, number, most in (("burst", burst, math.inf), ("at_once", self.at_once, AT_ONCE_MAX)):
            if number is not None and (type(number) is not int or not 1 <= number <= most):
                upto = "" if most == math.inf else f" to {most:,}"
                raise DeclarationRefused(
                    f"Limit {self.name!r}", f"{option}={number!r}; give a whole number from 1{upto}"
                )
        for name, value in {"burst": burst, "count": count, "per_seconds": per_seconds}.items():
            object.__setattr__(self, name, value)

    def bucket(self, arguments: Mapping[str, Any], key: bytes) -> TokenBucket | None:
        """The bucket of a call with these arguments; None without a rate. Its id is a keyed digest, which reveals none
        of them."""
        if self.rate is None:
            return None
        declared = [self.name, self.by, self.count, self.per_seconds, self.burst, self._value(arguments)]
        token_us = math.ceil(self.per_seconds / self.count * 1_000_000)
        id_ = digest(declared, at=self.by or self.name, secret_key=DigestKey.of(key))
        return TokenBucket(id_, token_us, token_us * (self.burst or self.count))

    def pool(self, arguments: Mapping[str, Any], key: bytes) -> PermitPool | None:
        """The permits of a call with these arguments; None if any number may be in flight."""
        if self.at_once is None:
            return None
        value = digest(
            [self.name, self.by, self._value(arguments)], at=self.by or self.name, secret_key=DigestKey.of(key)
        )
        return PermitPool(b"%b\0%b\0%b" % (self.name.encode(), (self.by or "").encode(), value), self.at_once)

    def _value(self, arguments: Mapping[str, Any]) -> Any:
        if self.by is not None and self.by not in arguments:
            raise DeclarationRefused(
                f"Limit {self.name!r}",
                f"by={self.by!r} is not an argument of this tool (it has {', '.join(arguments) or 'none'})",
            )
        return None if self.by is None else arguments[self.by]
