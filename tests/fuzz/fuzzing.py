"""A small fuzzer: it changes inputs of a target by a seed, and keeps each input that the target does not stand.

A target is a function of bytes. It may raise `KillickError`; any other exception, work or memory beyond its bounds, and
a difference from its reference fail it. `corpus/TARGET` has the inputs that failed once, and is replayed in the gate.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from killick.errors import KillickError
from seeds import draw_seed

CORPUS: Final = Path(__file__).parent / "corpus"
INPUT_BYTES_MAX: Final = 1 << 16
CALLS_MAX: Final = 3_000_000
"""The most calls of functions on one input."""
MEMORY_BYTES_MAX: Final = 64 << 20
SHRINKS_MAX: Final = 300

Run = Callable[[bytes], None]


class Unbounded(BaseException):
    """A target did more than its bounds allow. No `except Exception` of a target catches it."""


class Target(NamedTuple):
    """What is fuzzed: a function of bytes, and inputs that it accepts."""

    name: str
    run: Run
    seeds: Callable[[], Sequence[bytes]]


@contextmanager
def bounded() -> Iterator[None]:
    """Counts calls and memory, so that neither depends on how fast the machine is."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > CALLS_MAX:
            raise Unbounded(f"over {CALLS_MAX:,} calls")

    tracemalloc.start()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        sys.setprofile(before)
        tracemalloc.stop()
    if peak > MEMORY_BYTES_MAX:
        raise Unbounded(f"{peak:,} bytes of memory")


def tried(target: Target, data: bytes) -> BaseException | None:
    """Returns what is wrong with a target on one input."""
    try:
        with bounded(), suppress(KillickError):
            target.run(data)
    except (Exception, Unbounded) as error:
        return error
    return None


def known(name: str) -> list[Path]:
    """Returns the files of a target's corpus."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())


def hunt(target: Target, count: int) -> None:
    """Tries changed inputs. Shrinks the first one that fails, adds it to the corpus, and raises AssertionError."""
    seed = draw_seed()
    chance = random.Random(f"{seed} {target.name}")
    pool = [*target.seeds(), *(path.read_bytes() for path in known(target.name))]
    for _ in range(count):
        data = changed(chance, pool)
        if (error := tried(target, data)) is not None:
            path = keep(target.name, _shrunk(target, data, type(error)))
            raise AssertionError(f"{target.name}, seed {seed}: {error!r}; see {path}") from error


def keep(name: str, data: bytes) -> Path:
    """Adds an input to a target's corpus."""
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _shrunk(target: Target, data: bytes, kind: type[BaseException]) -> bytes:
    size, left = len(data) // 2, SHRINKS_MAX
    while size and left:
        for start in range(0, len(data), size):
            less = data[:start] + data[start + size :]
            left -= 1
            if not left or type(tried(target, less)) is kind:
                data = less if left else data
                break
        else:
            size //= 2
    return data


# Changes ------------------------------------------------------------------------------------------

_ODD: Final[list[Any]] = [
    None, True, 0, -1, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 10**30, 0.5, -0.0, 1e308, "", "\x00", "é", "\ud83d",
    "a" * 999, "../x", [], {}, [[]], [None], {"": 0}, "AAAA", "=", "0" * 64,
]  # fmt: skip
_BYTES: Final = [
    b"\x00",
    b"\xff",
    b"\n",
    b"\r\n",
    b'"',
    b"{",
    b"[",
    b"0",
    b"-1",
    b"\xed\xa0\xbd",
    b"\\ud83d",
    b"e999",
    b"(?i)",
    b"$",
]


def changed(chance: random.Random, pool: Sequence[bytes]) -> bytes:
    """Returns an input with one to four changes: in its bytes, or in its values where it is lines of JSON."""
    data = chance.choice(pool)
    is_packed = data[:2] == b"\x1f\x8b" and chance.random() < 0.9
    if is_packed:
        data = gzip.decompress(data)
    for _ in range(chance.randint(1, 4)):
        change = chance.choice([_flip, _cut, _repeat, _insert, _splice, _value, _value, _value])
        data = change(chance, data, pool)[:INPUT_BYTES_MAX]
    return gzip.compress(data, mtime=0) if is_packed else data


def _span(chance: random.Random, data: bytes) -> tuple[int, int]:
    start = chance.randint(0, len(data))
    return start, min(len(data), start + chance.choice([1, 1, 2, 4, 16, 256, 4096]))


def _flip(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    start, _ = _span(chance, data)
    return data[:start] + chance.randbytes(1) + data[start + 1 :]


def _cut(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    start, end = _span(chance, data)
    return data[:start] + data[end:]


def _repeat(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    start, end = _span(chance, data)
    return data[:end] + data[start:end] * chance.choice([1, 2, 50, 2000]) + data[end:]


def _insert(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    start, _ = _span(chance, data)
    return data[:start] + chance.choice(_BYTES) * chance.choice([1, 1, 3, 1000]) + data[start:]


def _splice(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    other = chance.choice(pool)
    start, end = _span(chance, other)
    at, _ = _span(chance, data)
    return data[:at] + other[start:end] + data[at:]


def _value(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Replaces, removes or doubles one value of a line of JSON."""
    lines = data.split(b"\n")
    number = chance.randrange(len(lines))
    try:
        text = json.dumps(
            _in(chance, json.loads(lines[number])), ensure_ascii=chance.random() < 0.5, separators=(",", ":")
        )
    except (ValueError, RecursionError):
        return _flip(chance, data, pool)
    lines[number] = text.encode("utf-8", "surrogatepass")
    return b"\n".join(lines)


def _in(chance: random.Random, tree: Any) -> Any:
    if isinstance(tree, dict | list) and tree and chance.random() < 0.85:
        key = chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
        match chance.randrange(6):
            case 0:
                del tree[key]
            case 1 if isinstance(tree, list):
                tree += [tree[key]] * chance.choice([1, 100])
            case 1:
                tree[str(chance.choice(_ODD))] = tree[key]
            case _:
                tree[key] = _in(chance, tree[key])
        return tree
    if isinstance(tree, int) and chance.random() < 0.5:
        return tree + chance.choice([-1, 1, 1 << 32])
    if chance.random() < 0.05:
        for _ in range(chance.choice([30, 300])):
            tree = [tree]
        return tree
    return chance.choice(_ODD)
