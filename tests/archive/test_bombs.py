"""Files that another person sent cost little memory, whatever is in them."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.archive import bundle
from killick.audit.checkpoint import new_key
from killick.audit.proof import verify_proof
from killick.errors import ExportBroken, ProofBroken
from killick.model import events as e
from killick.model import hashing

pytestmark = pytest.mark.slow

MEMORY_MAX_MB = 384
"""For the interpreter, Killick and a file of at most 2 MB, whatever it unpacks to."""

VERIFIES = """
import pathlib, re, resource, sys
from killick.cli.main import main
code = main(["store", "verify", sys.argv[1]])
status = pathlib.Path("/proc/self/status")
if status.exists():  # on Linux ru_maxrss is at least that of the process that started this one
    print(code, int(re.search("VmHWM:[^0-9]*([0-9]+)", status.read_text())[1]) >> 10)
else:
    print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20)
"""

Lines = Iterator[bytes]


@killick.agent
async def said(run: killick.Run, text: str) -> str:
    return text


@pytest.fixture
def whole(tmp_path: Path) -> list[bytes]:
    """The lines of an archive of one run."""
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.run(said, "yes", id="r")
        kd.store.prune(older=0, to=tmp_path / "whole.gz")
    return gzip.decompress((tmp_path / "whole.gz").read_bytes()).splitlines(keepends=True)


def with_header(whole: list[bytes], **counts: int) -> list[bytes]:
    head = json.loads(whole[1]) | counts
    return [whole[0], json.dumps(head, separators=(",", ":")).encode() + b"\n", *whole[2 : 2 + head["events"]]]


def value(number: int, size: int) -> bytes:
    """A line that matches its hash, as long as it may be."""
    text = f"{number}" + "A" * size
    named = e.to_text(hashing.value_hash("text", text.encode()))
    return json.dumps({"is": "value", "hash": named, "codec": "text", "text": text}).encode() + b"\n"


def huge_line(whole: list[bytes]) -> Lines:
    yield whole[0]
    for _ in range(300):
        yield b"a" * (1 << 20)


def long_lines(whole: list[bytes]) -> Lines:
    yield from with_header(whole, values=40)
    for number in range(40):
        yield value(number, 7 << 20)


def wrong_lines(whole: list[bytes]) -> Lines:
    yield from with_header(whole, values=40)
    for _ in range(40):
        yield value(1, 7 << 20).replace(b"A", b"B")


def short_lines(whole: list[bytes]) -> Lines:
    """Messages have no hash of their own."""
    yield from with_header(whole, messages=3_000_000)
    lines = b"".join(
        b'{"is":"message","run":"r","number":%d,"id":"a","name":"b","at":1,"body":{}}\n' % number
        for number in range(10)
    )
    for _ in range(30):
        yield lines * 10_000


def deep_line(whole: list[bytes]) -> Lines:
    yield from with_header(whole, values=1)
    yield b'{"is":"value","hash":"","codec":"json","json":' + b"[" * (3 << 20) + b"]" * (3 << 20) + b"}\n"


def wide_line(whole: list[bytes]) -> Lines:
    yield from with_header(whole, values=1)
    yield b'{"is":"value","hash":"","codec":"json","json":[' + b"[]," * (2 << 20) + b"[]]}\n"


def deep_header(whole: list[bytes]) -> Lines:
    yield b'{"is":' + b"[" * (7 << 20) + b"\n"


def declared(whole: list[bytes]) -> Lines:
    yield from with_header(whole, values=2 << 30, messages=1 << 200)
    for number in range(40):
        yield value(number, 7 << 20)


SHAPES = [huge_line, long_lines, wrong_lines, short_lines, deep_line, wide_line, deep_header, declared]


@pytest.mark.parametrize(("shape", "members"), [(shape, False) for shape in SHAPES] + [(long_lines, True)])
def test_a_small_archive_is_refused_in_little_memory(
    tmp_path: Path, whole: list[bytes], shape: Callable[[list[bytes]], Lines], members: bool
) -> None:
    bomb = tmp_path / "bomb.gz"
    with bomb.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw) as packed:
        for line in shape(whole):
            # As one member, or each line as its own.
            if members and len(line) > 10_000:
                raw.write(gzip.compress(line, 6))
            else:
                packed.write(line)
            if raw.tell() > 2_000_000:
                break
    verifies_in_little_memory(bomb)


@pytest.mark.parametrize("shape", [deep_line, wide_line, declared, deep_header])
def test_an_export_is_refused_in_little_memory(
    tmp_path: Path, whole: list[bytes], shape: Callable[[list[bytes]], Lines]
) -> None:
    with (tmp_path / "bomb.killick").open("wb") as file:
        for number, line in enumerate(shape(whole)):
            if number and file.tell() < 100_000_000:
                file.write(line)
    verifies_in_little_memory(tmp_path / "bomb.killick")


def verifies_in_little_memory(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VERIFIES, str(file)], cwd=file.parent, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    code, peak_mb = map(int, done.stdout.splitlines()[-1].split())
    assert code == 1, done
    assert peak_mb < MEMORY_MAX_MB


def test_each_line_is_compared_with_its_hash_before_the_next_is_read(tmp_path: Path, whole: list[bytes]) -> None:
    lines = [*with_header(whole, values=2), value(1, 10).replace(b"A", b"B"), b"this line is not read"]
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"".join(lines)))
    with pytest.raises(ExportBroken, match=f"line {len(lines) - 2} is damaged"):
        bundle.verify(tmp_path / "a.gz")


@pytest.mark.parametrize("text", ["x" * 20_000_000, "".join(random.Random(7).choices("ab", k=100_000))])
def test_what_was_archived_is_read_however_well_it_compresses(tmp_path: Path, text: str) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.run(said, text, id="r")
        kd.store.prune(older=0, to=tmp_path / "a.gz")
    assert bundle.verify(tmp_path / "a.gz").runs == 1


@pytest.mark.parametrize("proof", [b"[" * 1_000_000, b'{"is":"killick.proof","version":' + b"9" * 1_000_000 + b"}"])
def test_a_proof_that_is_none_is_refused(proof: Any) -> None:
    with pytest.raises(ProofBroken):
        verify_proof(proof, new_key()[1])
