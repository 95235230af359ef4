"""The short form of the soak: workers that are killed and frozen, a server that restarts, a far side that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seeds import draw_seed
from soak.acknowledgements import Book, Entries, Record, judge, read_book

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]

RUNS = 100
BLOWS = 8


def soak(store: str, *, seed: int | None = None, every_seconds: float = 0.4) -> dict[str, Any]:
    """In a process that holds no thread, because it forks."""
    seed = draw_seed() if seed is None else seed
    asked = [store, "--runs", RUNS, "--workers", 3, "--blows", BLOWS, "--every-seconds", every_seconds]
    asked += ["--restarts", 1, "--limit-seconds", 1_200]
    done = subprocess.run(
        [sys.executable, "-m", "soak", *map(str, asked), "--seed", str(seed), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=False,
    )
    assert done.stdout, f"seed {seed}: {done.stderr[-6_000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == [], f"seed {seed}: {'; '.join(found['wrong'][:10])}"
    assert found["steps"] >= 8 * RUNS, seed
    return found


def test_on_sqlite_every_run_ends_and_every_effect_happens_once_whoever_is_killed_or_frozen() -> None:
    found = soak("sqlite")
    assert min(found["kills"], found["freezes"]) >= 1, found


def test_on_postgresql_the_same_holds_while_its_server_is_restarted() -> None:
    found = soak("postgres")
    assert min(found["kills"], found["freezes"]) >= 1, found
    assert found["restarts"] == 1, found


def test_on_postgresql_the_same_holds_when_a_synchronous_replica_takes_over_from_a_primary_that_died() -> None:
    """Every other worker is behind PgBouncer, which pools transactions."""
    found = soak("failover")
    assert min(found["kills"], found["freezes"]) >= 1, found
    assert found["restarts"] == 1, found


def test_a_rolling_upgrade_repeats_nothing_and_strands_no_run() -> None:
    """Workers with the old code are killed and frozen, and replaced one by one by workers with the new code."""
    found = soak("upgrade", seed=7, every_seconds=1.5)
    assert min(found["kills"], found["freezes"]) >= 1, found
    assert found["on the new code"] >= 1, found
    if found["on the new code"] < RUNS:  # else the machine was busy, and no run had ended before the upgrade
        assert found["diverged"] >= 1, "an old worker took a run that a new one had in hand"


def test_random_stories_over_the_whole_surface_agree_with_the_books_of_the_far_side() -> None:
    """Seeds that once found a child whose end woke nobody, a hang after a compensation, and a hot loop."""
    seeds = [draw_seed() + number for number in range(3)]
    for seed in [1001, 1003, 1009, 1012, 1015, *seeds]:
        told = subprocess.run(
            [sys.executable, "-m", "soak.stories", "--seed", str(seed), "--stories", "1", "--story-seconds", "4"],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)}, check=False,
        )  # fmt: skip
        assert told.returncode == 0, f"seed {seed}: {told.stdout[-6_000:]}{told.stderr[-2_000:]}"


def audited(store: str, *words: str, seed: int) -> dict[str, Any]:
    """One story of callers, and its book held against the record."""
    done = subprocess.run(
        [sys.executable, "-m", "soak.audit", store, "--stories", "1", "--seed", str(seed), "--json", *words],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)}, check=False,
    )  # fmt: skip
    assert done.stdout, f"seed {seed}: {done.stderr[-6_000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    assert found["wrong"] == [], f"seed {seed}: {'; '.join(found['wrong'][:10])}"
    return found["counts"]


@pytest.mark.parametrize("store", ["sqlite", "encrypted", "postgres"])
def test_every_call_that_a_store_accepted_is_on_record_whoever_is_killed(store: str) -> None:
    for seconds in (5, 20, 80):  # until a busy machine came to something
        counts = audited(store, "--story-seconds", str(seconds), seed=draw_seed())
        if counts.get("message obeyed") and counts["kills"]:
            return
    raise AssertionError(f"nothing was obeyed: {counts}")


def test_who_looks_at_health_doctor_and_ps_all_the_time_loses_nothing() -> None:
    """Each worker looks, in the process that holds the store, and one is killed each second."""
    counts = audited(
        "sqlite", "--runs", "60", "--story-seconds", "6", "--every-seconds", "1", "--looks", "0.1", seed=draw_seed()
    )  # fmt: skip
    assert counts["start obeyed"] >= 60, counts


@pytest.mark.far
@pytest.mark.parametrize("store", ["sqlite", "encrypted", "postgres", "redis"])
def test_after_a_thousand_kills_every_call_that_a_store_accepted_is_on_record(store: str) -> None:
    counts = audited(store, "--story-seconds", "450", "--every-seconds", "0.3", seed=draw_seed())
    assert counts["kills"] >= 1_000, counts


@pytest.mark.far
def test_beside_three_hundred_runs_whoever_looks_at_the_store_all_the_time_loses_nothing() -> None:
    looks = ("--runs", "300", "--story-seconds", "120", "--every-seconds", "1", "--looks", "0.1")
    counts = audited("sqlite", *looks, seed=draw_seed())
    assert counts["start obeyed"] >= 300, counts


# the judge ------------------------------------------------------------------------------------------


def record(*logs: list[dict[str, Any]]) -> Record:
    return Record([b"\n".join(json.dumps(line).encode() for line in log) for log in logs])


def log(run: str, *kinds: str | dict[str, Any], messages: tuple[dict[str, Any], ...] = ()) -> list[dict[str, Any]]:
    """The export of a run with these events and messages."""
    events = [{"kind": kind} if isinstance(kind, str) else kind for kind in kinds]
    return [
        {"is": "killick.run", "run": run},
        *({"is": "event", "run": run, "seq": seq, "body": body} for seq, body in enumerate(events, 1)),
        *({"is": "message", "run": run, "number": at, **each} for at, each in enumerate(messages, 1)),
    ]


def entries(tmp_path: Path, *calls: tuple[str, str, str, dict[str, Any]]) -> Entries:
    """A book in which each of these calls was accepted, in this order."""
    book = Book(tmp_path / "book")
    for kind, run, verb, more in calls:
        book.answer(book.ask(kind, run, verb, **more), "accepted")
    book.close()
    return read_book(tmp_path / "book")


SEND = ("message", "box", "send", {"id": "m"})
MESSAGE = {"id": "m", "name": "order", "at": 1, "body": "it"}
TAKEN = {"kind": "wait.closed", "step": "1", "how": "answered", "message": 1}


@pytest.mark.parametrize(
    ("found", "logs"),
    [
        ("obeyed", [log("box", TAKEN, messages=(MESSAGE,))]),
        ("pending", [log("box", "run.taken", messages=(MESSAGE,))]),
        ("unread", [log("box", "run.completed", messages=(MESSAGE,))]),
        ("lost", [log("box", "run.taken")]),
        ("lost", [log("box", "run.renewed", messages=(MESSAGE,)), log("box+2", "run.started")]),
        ("obeyed", [log("box", "run.renewed", messages=(MESSAGE,)), log("box+2", TAKEN, messages=(MESSAGE,))]),
        ("doubled", [log("box", TAKEN, messages=(MESSAGE,)), log("box+2", TAKEN, messages=(MESSAGE,))]),
    ],
)
def test_a_message_is_obeyed_once_pending_unread_or_lost(
    tmp_path: Path, found: str, logs: list[list[dict[str, Any]]]
) -> None:
    [verdict] = judge(entries(tmp_path, SEND), record(*logs)).verdicts
    assert verdict.found == found


@pytest.mark.parametrize("verb", ["approve", "reject"])
@pytest.mark.parametrize("need", [1, 2])
def test_an_answer_that_a_run_left_in_its_inbox_at_its_end_is_lost_and_one_that_it_took_then_is_refused(
    tmp_path: Path, need: int, verb: str
) -> None:
    made = entries(tmp_path, ("answer", "pay", verb, {"step": "1", "digest": "d", "need": need}))
    name = "killick.vote" if need > 1 and verb == "approve" else "killick.answer"
    message = {"id": "m", "name": name, "at": 1, "by": made.calls[0].ticket, "body": {}}
    closed = {"kind": "wait.closed", "step": "1", "how": "cancelled"}
    took = {"kind": "message.taken", "message": 1, "name": name, "id": "m", "by": made.calls[0].ticket}
    for events, found in (((closed, "run.cancelled"), "lost"), ((closed, took, "run.cancelled"), "refused")):
        assert judge(made, record(log("pay", *events, messages=(message,)))).counts[f"answer {found}"] == 1


def test_what_was_accepted_after_its_caller_saw_the_end_is_lost(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.answer(book.ask("look", "box", "look"), "accepted", "'ended'")
    book.answer(book.ask("message", "box", "send", id="m"), "accepted")
    found = judge(read_book(tmp_path / "book"), record(log("box", "run.completed", messages=(MESSAGE,))))
    assert found.counts["message lost"] == 1


def test_a_command_without_an_event_or_a_message_is_lost_and_one_that_was_refused_on_record_is_not(
    tmp_path: Path,
) -> None:
    made = entries(tmp_path, ("command", "box", "pause", {}))
    by = made.calls[0].ticket
    refused = {"kind": "note.made", "by": "killick"}
    noted = log("box", refused)
    noted[1]["data"] = {"note": f"{by} wanted to pause: it is over"}
    for logs, found in (
        (log("box", {"kind": "run.paused", "by": by}), "obeyed"), (noted, "refused"),
        (log("box", "run.paused"), "lost"),
    ):  # fmt: skip
        assert judge(made, record(logs)).counts[f"command {found}"] == 1, found


def test_a_cancel_that_a_renewed_log_recorded_is_lost(tmp_path: Path) -> None:
    made = entries(tmp_path, ("command", "box", "cancel", {}))
    event = {"kind": "cancel.requested", "by": made.calls[0].ticket}
    assert judge(made, record(log("box", event, "run.renewed"), log("box+2", "run.started"))).wrong


def test_of_the_answers_to_one_question_no_more_are_accepted_than_it_takes(tmp_path: Path) -> None:
    question = {"step": "1", "digest": "d", "need": 2}
    made = entries(tmp_path, *(("answer", "pay", verb, question) for verb in ("approve", "approve", "reject")))
    ann, bob, cyd = (call.ticket for call in made.calls)
    messages = tuple({"id": by, "name": "killick.vote", "at": 1, "by": by, "body": {}} for by in (ann, bob, cyd))
    closed = {"kind": "wait.closed", "step": "1", "how": "answered", "by": bob, "message": 2}
    paid = record(log("pay", {"kind": "wait.voted", "step": "1", "by": ann, "message": 1}, closed, messages=messages))
    wrong = judge(made, paid).wrong
    assert [cyd in each for each in wrong] == [True], wrong
