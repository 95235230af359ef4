"""The hash chain of a log, the hashes of its values (sha256, domain-separated), and idempotency keys. Pure functions.

hash[n]  = sha256(0x04 ‖ hash[n-1] ‖ body[n])
leaf[n]  = sha256(0x00 ‖ body[n])                    of an event in a seal's tree, whose nodes begin with 0x01
value    = sha256(0x02 ‖ codec ‖ 0x00 ‖ bytes)
genesis  = sha256(0x03 ‖ "killick" ‖ 0x00 ‖ format ‖ 0x00 ‖ store id ‖ 0x00 ‖ run id)

A fork's genesis is its parent's hash at the cut.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from killick.errors import ValueRefused
from killick.text import LONE_SURROGATE, printable

FORMAT: Final = 1
"""The version of the byte format, bound into every genesis."""

HASH_BYTES: Final = 32
LINK: Final = b"\x04"
DATA: Final = b"\x02json\x00"
"""The prefixes of a chain hash, and of the hash of an event's data."""
LINKED: Final = sha256(LINK)
DATED: Final = sha256(DATA)
"""The hashes that have begun with these. A copy of one is made in half the time of a new one."""


def genesis(store_id: str, run_id: str) -> bytes:
    """Returns the hash before a run's first event. Refuses a run id that UTF-8 cannot encode."""
    if printable(run_id) != run_id:
        raise ValueRefused(f"run {printable(run_id)}", LONE_SURROGATE)
    parts = (b"killick", str(FORMAT).encode(), store_id.encode(), run_id.encode())
    return sha256(b"\x03" + b"\x00".join(parts)).digest()


def leaf(body: bytes) -> bytes:
    """Hashes one event's body, or one entry of a seal, for a Merkle tree."""
    return sha256(b"\x00" + body).digest()


def link(before: bytes, body: bytes) -> bytes:
    """Returns the chain hash at an event, from the previous hash and its body."""
    linked = LINKED.copy()
    linked.update(before + body)
    return linked.digest()


def value_hash(codec: str, body: bytes) -> bytes:
    """Returns the hash of a value stored outside the event's body."""
    return sha256(b"\x02%b\x00%b" % (codec.encode(), body)).digest()


def unsalted(data: bytes) -> bytes:
    """Returns an event's data without its salt, to compare it with another event's.

    The salt keeps a short value from being guessed from its hash once it is erased.
    """
    return data[:-1].rstrip(b" \t") + b"}"


def data_hash(data: bytes) -> bytes:
    """Returns the hash of an event's data, which is a value of codec `json`."""
    hashed = DATED.copy()
    hashed.update(data)
    return hashed.digest()


# idempotency keys: `{run}:step_{step}:{tool}:{eight hex digits of the arguments' digest}`, computed once, when a step's
# first attempt starts. The hex digits are a label for people; exact comparisons use the full digest.


def action_key(run: str, step: str, tool: str, arguments: bytes, *, generation: int = 0) -> str:
    """Returns the key of one action, shared by all its attempts. After a rewind the step id carries the generation."""
    at = f"{step}~{generation}" if generation else step
    return f"{run}:step_{at}:{tool}:{arguments.hex()[:8]}"


def is_key_of(key: str, run: str) -> bool:
    """Returns whether an action is the run's own, rather than one reused from another run."""
    return key.startswith(f"{run}:step_")


def undo_key(key: str) -> str:
    """Returns the key for compensating an action, from which the remote service knows the action."""
    return f"{key}:undo"
