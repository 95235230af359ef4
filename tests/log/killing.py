"""Kills processes that append, for real, and looks at what they leave. Run as a program; prints JSON.

It forks from a process that holds no store and no thread, so that hundreds of deaths take seconds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stories import START_US, started

from killick.log import Entry, Log, RunLog, verify
from killick.model import events as e
from killick.store import SqliteStore
from killick.store.records import Delivery, UniqueRight
from leasing import leased_by

RUNS = 6
THREADS = 3


def note(batch: int, place: int, size: int) -> Entry:
    return Entry(
        e.NoteMade(at=START_US),
        {"note": {"batch": batch, "place": place, "of": size, "text": "x" * (batch % 900)}},
    )


def open_or_create(log: Log, run: str, holder: str) -> RunLog:
    if log.store.head(run) is None:
        first = started(run)
        return log.create(first.event, first.values or {}, holder=holder)
    return leased_by(holder, log, run)


def append_for_ever(path: Path, acknowledged: int, seed: int) -> None:
    """Several threads, each with runs of its own; every acknowledged head is told before the next append."""
    store = SqliteStore(path)
    log = Log(store, snapshot_every=64)

    def work(number: int) -> None:
        chance = random.Random(seed * 31 + number)
        handles = [open_or_create(log, f"run_{run}", f"w{os.getpid()}") for run in range(number, RUNS, THREADS)]
        while True:
            handle = chance.choice(handles)
            size = chance.choice([1, 1, 2, 5])
            batch = chance.randrange(10**9)
            entries = [note(batch, place, size) for place in range(size)]
            if chance.random() < 0.3:
                handle.append_behind(*entries)
                continue
            head = handle.append(*entries)
            os.write(acknowledged, f"{handle.run} {head.seq}\n".encode())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fork(task: Callable[[int], object]) -> tuple[int, int]:
    """Run a task in a child; returns its pid and the end of a pipe it writes to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            task(writing)
            code = 0
        except BaseException as error:
            os.write(writing, f"error {error!r}\n".encode())
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def finish(child: int, reading: int, began: bytes = b"") -> tuple[int, list[str]]:
    chunks = [began]
    while chunk := os.read(reading, 1 << 16):
        chunks.append(chunk)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return status, b"".join(chunks).decode().splitlines()


def look(path: Path, acknowledged: dict[str, int], *, whole: bool) -> Callable[[int], None]:
    """In a child: nothing acknowledged is lost, no batch is half there, the next one goes on at once."""

    def task(out: int) -> None:
        store = SqliteStore(path)
        log = Log(store)
        for run, seq in acknowledged.items():
            head = log.head(run)
            assert head.seq >= seq, f"{run}: acknowledged {seq}, found {head.seq}"
            tail = log.read(run, after=max(1, head.seq - 12))
            last = log.data(run, tail[-1].seq)["note"]
            assert last["place"] == last["of"] - 1, f"{run}: half a batch {last}"
            leased_by("looker", log, run).append(note(0, 0, 1))
            log.store.release(run, epoch=log.head(run).epoch)
        if whole:
            report = verify(log)
            assert report.problems == [], report.problems
            os.write(out, f"events {report.events}\n".encode())
        log.close()
        store.close()

    return task


def at_random_moments(folder: Path, kills: int, seed: int) -> dict[str, object]:
    chance = random.Random(seed)
    path = folder / "killick.db"
    acknowledged: dict[str, int] = {}
    told = 0
    events = "0"
    for kill in range(kills):
        child, reading = fork(lambda out, kill=kill: append_for_ever(path, out, seed + kill))
        began = b""
        for _ in range(chance.randrange(20)):
            began += os.read(reading, 1 << 16)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        status, lines = finish(child, reading, began)
        assert os.WIFSIGNALED(status), f"seed {seed}, kill {kill}: the child ended by itself: {lines[-1:]}"
        for line in lines:
            run, seq = line.split()
            acknowledged[run] = max(acknowledged.get(run, 0), int(seq))
        told += len(lines)
        whole = kill % 40 == 39 or kill == kills - 1
        status, lines = finish(*fork(look(path, acknowledged, whole=whole)))
        assert status == 0, f"seed {seed}, kill {kill}: {lines}"
        if whole:
            events = lines[0].split()[1]
    return {"kills": kills, "acknowledged": told, "events": int(events)}


def everything(path: Path, before: Callable[[SqliteStore], object]) -> None:
    """Touches every kind of write once: birth, rows, pieces, claims, messages, leases, snapshots, erasing."""
    store = SqliteStore(path)
    before(store)
    log = Log(store, snapshot_every=4)
    handle = open_or_create(log, "run_0", f"w{os.getpid()}")
    store.deliver([Delivery(run="run_0", id="m1", name="go", body=b'"x"', by="ann", at_us=START_US)])
    handle.append(*[note(1, place, 4) for place in range(4)])
    big = Entry(e.NoteMade(at=START_US), {"note": {"batch": 0, "place": 0, "of": 1, "text": ["y" * 900] * 5}})
    handle.append(big)
    claim = UniqueRight("token", b"\x07" * 32)
    attempt = e.AttemptStarted(
        at=1, step="1", attempt=1, key="k", epoch=handle.epoch, claims=(f"token:{e.to_text(claim.key)}",)
    )
    if store.owned(claim.space, claim.key) == {}:
        handle.append(Entry(attempt), claims=(claim,))
    if store.inbox("run_0"):
        taken = e.MessageTaken(at=1, message=1, name="go", id="m1")
        handle.append(Entry(taken), takes=(1,))
    log.erase(handle, at=1, reason="test", seqs=[2])
    store.release("run_0", epoch=handle.epoch)
    store.sweep()
    log.close()
    store.close()


def at_every_statement(folder: Path) -> dict[str, object]:
    """Die before the nth statement, for every n, until one life is long enough to finish."""
    for count in range(1, 1_000):
        path = folder / f"killick_{count}.db"

        def live(out: int, path: Path = path, count: int = count) -> None:
            left = [count]

            def die(_: str) -> None:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            everything(path, lambda store: store._file._writer.set_trace_callback(die))

        status, lines = finish(*fork(live))
        assert status == 0 or os.WIFSIGNALED(status), (count, lines)

        def again(out: int, path: Path = path) -> None:
            store = SqliteStore(path)
            log = Log(store)
            report = verify(log)
            assert report.problems == [], report.problems
            log.close()
            store.close()
            everything(path, lambda store: None)
            store = SqliteStore(path)
            assert verify(Log(store)).problems == []
            store.close()

        broken, found = finish(*fork(again))
        assert broken == 0, f"died before statement {count}: {found}"
        if status == 0:
            return {"statements": count - 1}
    raise AssertionError("it never finished")


def with_torn_wal(folder: Path) -> dict[str, object]:
    """A power cut: the write-ahead log ends anywhere. What is left is a prefix of the commits, and it verifies."""
    path = folder / "killick.db"

    def write(out: int) -> None:
        store = SqliteStore(path)
        handle = open_or_create(Log(store, snapshot_every=8), "run_0", "w")
        for number in range(1, 30):
            handle.append(note(number, 0, 2), note(number, 1, 2))
        os.kill(os.getpid(), signal.SIGKILL)

    finish(*fork(write))
    wal = Path(f"{path}-wal").read_bytes()
    seqs: list[int] = []
    cuts = sorted({*range(0, len(wal), 2_048), *range(0, len(wal), 4_120), len(wal)})
    for cut in cuts:
        torn = folder / "torn.db"
        shutil.copy(path, torn)
        Path(f"{torn}-wal").write_bytes(wal[:cut])
        Path(f"{torn}-shm").unlink(missing_ok=True)

        def look_at(out: int, torn: Path = torn) -> None:
            store = SqliteStore(torn)
            log = Log(store)
            assert verify(log).problems == []
            head = store.head("run_0")
            os.write(out, f"{head.seq if head else 0}\n".encode())
            store.close()

        status, lines = finish(*fork(look_at))
        assert status == 0, f"wal cut at {cut}: {lines}"
        seqs.append(int(lines[0]))
    assert seqs == sorted(seqs)
    assert all(seq in (0, 1) or seq % 2 == 1 for seq in seqs), "half a batch"
    assert seqs[-1] == 59
    return {"cuts": len(cuts), "prefixes": len(set(seqs))}


if __name__ == "__main__":
    mode, folder, *rest = sys.argv[1:]
    known = {"moments": at_random_moments, "statements": at_every_statement, "torn": with_torn_wal}
    sys.stdout.write(json.dumps(known[mode](Path(folder), *map(int, rest))))
