"""What a store keeps of limits: buckets of tokens, and the permits to be in flight at once. Does no I/O."""

from __future__ import annotations

import msgspec

from killick.model.facts import PERMIT
from killick.store.records import UniqueRight


class TokenBucket(msgspec.Struct, frozen=True):
    """One bucket of a rate limit: its id, the time that a token takes to come back, and the time that all take.

    A store keeps one number a bucket, the time when it will be full again.
    """

    id: bytes
    token_us: int
    capacity_us: int

    def taken(self, full_at_us: int | None, now_us: int) -> tuple[int, int]:
        """Returns when the bucket is full after taking one token, and how long to wait before that is allowed."""
        # A clock that was set back must not close the limit for longer than it takes to fill the bucket.
        since = min(max(full_at_us or now_us, now_us), now_us + self.capacity_us)
        return since + self.token_us, since + self.token_us - now_us - self.capacity_us


class PermitPool(msgspec.Struct, frozen=True):
    """The calls that may be in flight at once under a limit, for one value of its argument: so many rights, each the
    prefix and a number. The prefix is the names of the limit and of the argument, and a keyed digest of the value."""

    prefix: bytes
    count: int

    @property
    def tag(self) -> str:
        """The tag of the runs that wait for one."""
        return f"killick:permit:{self.prefix.hex()}"

    def rights(self) -> list[UniqueRight]:
        return [UniqueRight(PERMIT, self.prefix + number.to_bytes(2, "big")) for number in range(self.count)]


def pool_names(key: bytes) -> tuple[str, str, bytes]:
    """Returns the limit, its argument ("" without one), and the value's digest, from a right's key or its prefix."""
    limit, by, value = key.split(b"\0", 2)
    return limit.decode(), by.decode(), value[:32]


def limit_of(tag: str) -> str:
    """Returns the limit whose permit runs with this tag wait for."""
    return pool_names(bytes.fromhex(tag.rpartition(":")[2]))[0]
