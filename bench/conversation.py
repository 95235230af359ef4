"""An agent loop with every input and output on record: bytes on disk to bytes that are new."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from bench.measure import Measure, seconds
from bench.workload import Agent, file_bytes
from killick.log import Entry, Log
from killick.model.events import AttemptEnded, AttemptStarted, Event, StepIntended, Usage, to_text
from killick.store import SqliteStore

SEED: Final = 20_250_616
FIRST_MESSAGES: Final = 40
FIRST_CHARS: Final = 5_000
CHARS: Final = 2_500
"""Each call adds a question and a reply of this length."""

RUN: Final = "loop"
VALUES: Final[dict[type[Event], str]] = {StepIntended: "arguments", AttemptEnded: "output"}

Message = dict[str, str]

canonical: Final = msgspec.json.Encoder(order="sorted").encode


class Played(NamedTuple):
    """What a loop came to: its new bytes, what a call added early and late, how long the last one took."""

    new_bytes: int
    early_bytes: float
    late_bytes: float
    last_seconds: float


def measure(folder: Path) -> Iterator[Measure]:
    """Conversations that only grow, and ones that lose their oldest message at each call."""
    for drops in (False, True):
        for calls in (100, 1_000):
            path = folder / f"conversation-{calls}-{'drops' if drops else 'grows'}.db"
            played = play(path, calls, drops=drops)
            size = path.stat().st_size
            _check_elsewhere(path)
            how = f"{calls:,} calls" + (", each drops the oldest message" if drops else "")
            if calls > 100:
                yield Measure(
                    name="conversation",
                    what=f"bytes that a call adds late to early: is it linear? {how}",
                    figure=played.late_bytes / played.early_bytes,
                    at_most=1.1,
                )
            yield Measure(
                name="conversation",
                what=f"closed file to unique message bytes, {how}",
                figure=size / played.new_bytes,
                at_most=1.5 if calls == 100 and not drops else None,
                beside=f"{size:,} to {played.new_bytes:,} bytes; a call adds "
                f"{played.early_bytes:,.0f} early, {played.late_bytes:,.0f} late; "
                f"the last took {played.last_seconds * 1e3:.0f} ms; "
                "every input and output read back verbatim by another process",
            )


def play(path: Path, calls: int, *, drops: bool) -> Played:
    """Run the loop, close the store, and leave the digests of every input and output beside it."""
    chance, new_bytes = random.Random(SEED), 0

    def say(role: str, chars: int = CHARS) -> Message:
        nonlocal new_bytes
        new_bytes += chars
        return {"role": role, "content": b64encode(chance.randbytes(chars * 3 // 4)).decode()}

    store = SqliteStore(path)
    log = Log(store)
    run = Agent.started(log, RUN).log
    messages = [say("user", FIRST_CHARS) for _ in range(FIRST_MESSAGES)]
    digests: list[str] = []
    tenth, bytes_after, took = calls // 10, dict[int, int](), 0.0
    for call in range(1, calls + 1):
        del messages[:drops]
        messages.append(say("user"))
        arguments, reply = {"model": "a-model", "messages": messages}, say("assistant")
        digests += [_digest(arguments), _digest(reply)]
        intended, started, ended = _call(call, arguments, reply, digest=digests[-2])
        took = seconds(partial(run.append, intended, started)) + seconds(partial(run.append, ended))
        messages.append(reply)
        if call in (1, 1 + tenth, calls - tenth, calls):
            bytes_after[call] = file_bytes(path)
    log.close()
    store.close()
    _record(path).write_bytes(msgspec.json.encode(digests))
    early = (bytes_after[1 + tenth] - bytes_after[1]) / tenth
    late = (bytes_after[calls] - bytes_after[calls - tenth]) / tenth
    return Played(new_bytes, early, late, took)


def _call(call: int, arguments: dict[str, Any], reply: Message, *, digest: str) -> tuple[Entry, Entry, Entry]:
    at, step = time.time_ns() // 1_000, str(call)
    usage = Usage(model="a-model", tokens_in=60_000, tokens_out=800)
    return (
        Entry(
            StepIntended(at=at, step=step, sort="model", name="messages.create", digest=to_text(bytes.fromhex(digest))),
            {"arguments": arguments},
        ),
        Entry(
            AttemptStarted(at=at, step=step, attempt=1, key=f"{RUN}:step_{step}:messages.create:{digest[:8]}", epoch=1)
        ),
        Entry(AttemptEnded(at=at, step=step, attempt=1, outcome="returned", usage=usage), {"output": reply}),
    )


def _digest(value: object) -> str:
    return sha256(canonical(value)).hexdigest()


# the other process --------------------------------------------------------------------------------


def _record(path: Path) -> Path:
    return path.with_suffix(".json")


def _check_elsewhere(path: Path) -> None:
    subprocess.run([sys.executable, "-m", __spec__.name, str(path)], cwd=Path(__file__).parents[1], check=True)


def check(path: Path) -> None:
    """Read every input and output and compare digests with the writer; exit with a line if one differs."""
    expected = iter(msgspec.json.decode(_record(path).read_bytes(), type=list[str]))
    with closing(SqliteStore(path, create=False)) as store:
        log = Log(store)
        for seq, event, _ in log.read(RUN):
            name = VALUES.get(type(event))
            if name is not None and _digest(log.data(RUN, seq)[name]) != next(expected):
                sys.exit(f"{path.name}: the {name} at event {seq} is not what was written")
    if next(expected, None) is not None:
        sys.exit(f"{path.name}: the log ends before what was written")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
