"""A run as a file is complete, the same each time, proved when it is loaded, and refused when it was touched."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stories import Story, started

import killick
from families import fork_of
from killick.archive.export import export, read
from killick.engine.control.inbox import delivery
from killick.errors import ExportBroken, RunBroken, RunUnknown
from killick.log import Entry, Log, repair, verify
from killick.model import events as e
from killick.store import MemoryStore, SqliteStore, Store
from seeds import draw_seed


@killick.tool(effect="reads")
async def export_fetch(n: int) -> dict[str, Any]:
    return {
        "text": "lorem ipsum é " * 500,
        "raw": bytes(range(256)) * 20,
        "rows": [{"n": k, "of": n} for k in range(300)],
    }


@killick.tool(effect="at_most_once", consumes=("token",))
async def export_pay(token: str) -> str:
    return f"paid by {token}"


@killick.agent
async def export_agent(run: killick.Run, n: int) -> str:
    await run.call(export_fetch, n)
    await run.call(export_pay, f"token {n}")
    answer = await run.ask("Right?")
    body = await run.wait("go")
    return f"{answer.kind} {body}"


@pytest.fixture
def kd(store: Store) -> Iterator[killick.Client]:
    """A run with large values, a claim, an answer, a message that it took and one that it did not."""
    with killick.Client(store, clock=killick.clock.LeapingClock()) as client:
        with pytest.raises(killick.RunWaiting):
            client.run(export_agent, 1, id="r")
        client.answer("r", "approve", by="ann")
        client.send("r", "go", {"word": "now" * 400})
        client.send("r", "unasked", 7)
        client.run(export_agent, 1, id="r")
        yield client


def test_a_loaded_run_holds_and_has_the_same_state_at_every_event(kd: killick.Client) -> None:
    loaded = read(kd.store.export("r")).loaded()
    log = Log(loaded)
    report = verify(log)
    assert (report.problems, report.events) == ([], kd.runtime.log.head("r").seq)
    for seq in range(kd.runtime.log.head("r").seq + 1):
        assert log.state("r", seq).to_json() == kd.state("r", seq).to_json()
        assert log.hash_at("r", seq) == kd.runtime.log.hash_at("r", seq)


def test_the_same_run_gives_the_same_bytes_from_any_store(kd: killick.Client) -> None:
    first = kd.store.export("r")
    assert kd.store.export("r") == first
    assert export(Log(read(first).loaded()), "r") == first


def test_the_awaitable_form_gives_the_same(kd: killick.Client) -> None:
    import asyncio

    assert asyncio.run(kd.as_async().store.export("r")) == kd.store.export("r")


def test_messages_and_claims_are_as_they_were(kd: killick.Client) -> None:
    store = read(kd.store.export("r")).loaded()
    taken = [(m.name, m.body, m.by, m.taken is None) for m in store.messages("r")]
    assert taken == [(m.name, m.body, m.by, m.taken is None) for m in kd.runtime.store.messages("r")]
    assert [m.name for m in store.inbox("r")] == ["unasked"]
    assert store.claimed("r").keys() == kd.runtime.store.claimed("r").keys() != set()


def test_every_line_is_json_and_the_first_says_what_it_is(kd: killick.Client) -> None:
    lines = [json.loads(line) for line in kd.store.export("r").splitlines()]
    header = lines[0]
    assert (header["is"], header["version"], header["run"], header["store"]) == (
        "killick.run",
        1,
        "r",
        kd.runtime.store.id,
    )
    for kind, count in (("event", "events"), ("message", "messages"), ("value", "values")):
        assert sum(line["is"] == kind for line in lines) == header[count]
    assert {line["codec"] for line in lines if line["is"] == "value"} == {"text", "json", "bytes"}
    assert lines[1]["body"]["kind"] == "run.started"
    assert lines[1]["data"] == {"input": 1}


def test_the_key_of_the_store_stays_where_it_is(kd: killick.Client) -> None:
    data = kd.store.export("r")
    assert kd.runtime.store.secret_key not in data
    assert kd.runtime.store.secret_key.hex().encode() not in data
    assert read(data).loaded().secret_key != kd.runtime.store.secret_key


def test_a_run_can_go_on_in_the_store_that_it_was_loaded_into(store: Store) -> None:
    with killick.Client(store) as kd:
        with pytest.raises(killick.RunWaiting):
            kd.run(export_agent, 1, id="r")
        data = kd.store.export("r")
    with killick.Client(read(data).loaded()) as kd:
        kd.answer("r", "reject")
        kd.send("r", "go", "here")
        assert kd.run(export_agent, 1, id="r") == "reject here"


def test_a_fork_carries_what_it_stands_on_and_nothing_that_came_after_the_cut(kd: killick.Client) -> None:
    cut = next(r.seq for r in kd.events("r") if isinstance(r.event, e.WaitOpened))
    fork = fork_of(kd.runtime.log, e.RunForked(at=1, run="f", parent="r", cut=cut, generation=1))
    fork.append(Entry(e.NoteMade(at=2), {"note": "in the fork"}))
    twice = fork_of(kd.runtime.log, e.RunForked(at=3, run="g", parent="f", cut=cut + 1, generation=2))
    twice.append(Entry(e.NoteMade(at=4), {"note": "x" * 3_000}))
    data = kd.store.export("g")
    assert b"nownow" not in data
    assert b"in the fork" not in data
    loaded = read(data).loaded()
    log = Log(loaded)
    assert verify(log).problems == []
    assert [(head.run, head.base, head.seq) for _, head in loaded.heads()] == [
        ("r", 0, cut),
        ("f", cut, cut + 1),
        ("g", cut + 1, cut + 3),
    ]
    assert log.state("g").to_json() == kd.state("g").to_json()
    kd.runtime.store.deliver([delivery(kd.runtime.log, "r", "later", 1, id="m9", by=None, at_us=5)])
    assert kd.store.export("g") == data, "what happens to an elder afterwards is none of its business"


def test_erased_values_stay_erased_and_their_hashes_hold(kd: killick.Client) -> None:
    seq = next(r.seq for r in kd.events("r") if isinstance(r.event, e.AttemptEnded))
    pieces = kd.runtime.log.pieces_of("r", seq)
    kd.runtime.log.erase(kd.runtime.log.open("r"), at=1, reason="asked for", seqs=[seq], pieces=list(pieces))
    data = kd.store.export("r")
    assert b"lorem" not in data
    log = Log(read(data).loaded())
    report = verify(log)
    assert (report.problems, report.erased) == ([], 1)
    assert log.state("r").to_json() == kd.state("r").to_json()


def test_a_value_that_another_run_erased_is_no_break(kd: killick.Client) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(export_agent, 2, id="other")
    seq = next(r.seq for r in kd.events("other") if isinstance(r.event, e.AttemptEnded))
    kd.runtime.log.erase(
        kd.runtime.log.open("other"), at=1, reason="x", pieces=list(kd.runtime.log.pieces_of("other", seq))
    )
    assert read(kd.store.export("r")).header.run == "r"


def test_a_repaired_run_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    log = Log(SqliteStore(path))
    first = started("m")
    handle = log.create(first.event, first.values or {})
    for number in range(6):
        handle.append(Entry(e.NoteMade(at=1), {"note": number}))
    log.close()
    log.store.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM events WHERE id = (SELECT (number << 32) + 4 FROM heads WHERE run = 'm')")
    db.close()
    log = Log(SqliteStore(path))
    repair(log, "m", at=1, reason="a row was lost", by="ops")
    loaded = Log(read(export(log, "m")).loaded())
    assert loaded.state("m").to_json() == log.state("m").to_json()
    assert loaded.head("m").hash == log.head("m").hash
    log.close()
    log.store.close()


@pytest.mark.gate(4)
@pytest.mark.parametrize("seed", range(8))
def test_any_story_with_rewinds_survives_the_journey(log: Log, seed: int) -> None:
    first = started()
    run = log.create(first.event, first.values or {})
    for batch in Story(seed).entries(150):
        run.append(*batch)
    data = export(log, "run_1")
    there = Log(read(data).loaded())
    assert there.state("run_1").to_json() == log.state("run_1").to_json()
    assert export(there, "run_1") == data


# what is refused ----------------------------------------------------------------------------------


def refusal(data: bytes) -> str:
    with pytest.raises(ExportBroken) as refused:
        read(data).loaded()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_whatever_is_changed_in_events_and_values_is_found(kd: killick.Client) -> None:
    data = kd.store.export("r")
    seed = draw_seed()
    chance = random.Random(seed)
    lines = data.splitlines(keepends=True)
    touchable = [n for n, line in enumerate(lines) if b'{"is":"message"' not in line and n]
    for _ in range(150):
        at = chance.choice(touchable)
        spot = chance.randrange(len(lines[at]) - 1)
        byte = bytes([chance.choice(b"abcXYZ0189")])
        if lines[at][spot : spot + 1] == byte:
            continue
        changed = lines[at][:spot] + byte + lines[at][spot + 1 :]
        try:
            there = read(b"".join([*lines[:at], changed, *lines[at + 1 :]])).loaded()
        except ExportBroken:
            continue
        # Of the last character of a hash two bits count for nothing.
        assert Log(there).state("r").to_json() == kd.state("r").to_json(), (seed, at, spot)


def test_a_last_event_that_is_said_to_be_of_another_run_is_found(kd: killick.Client) -> None:
    lines = kd.store.export("r").splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if line.startswith(b'{"is":"event"'))
    lines[last] = lines[last].replace(b'"run":"r"', b'"run":"a"', 1)
    assert "truncated or changed" in refusal(b"".join(lines))


def test_a_line_more_or_less_or_in_another_order_is_found(kd: killick.Client) -> None:
    lines = kd.store.export("r").splitlines(keepends=True)
    assert "truncated or changed" in refusal(b"".join(lines[:-1]))
    assert "truncated or changed" in refusal(b"".join([*lines, lines[3]]))
    assert "line 2 is damaged" in refusal(b"".join([lines[0], lines[2], lines[1], *lines[3:]]))
    assert "line 3 begins another run" in refusal(b"".join([*lines[:2], lines[0], *lines[3:]]))
    assert "line 4 is damaged" in refusal(b"".join([*lines[:3], b'{"is":"poem"}\n', *lines[4:]]))


def test_another_event_with_a_chain_of_its_own_is_not_this_run(kd: killick.Client) -> None:
    told = kd.store.export("r").replace(kd.runtime.store.id.encode(), b"store_0000000000000000")
    assert "does not verify" in refusal(told)


@pytest.mark.parametrize("data", [b"", b"{}", b"\x00\xff\n", b"not json\n{}", b"[1]", b'{"is":"event"}'])
def test_a_foreign_file_is_told_to_be_one(data: bytes) -> None:
    assert refusal(data) == "export: is not an export of a run; take another copy of it, or export the run again"


def test_a_newer_file_is_told_to_be_newer(kd: killick.Client) -> None:
    newer = kd.store.export("r").replace(b'"version":1', b'"version":3', 1)
    assert refusal(newer) == (
        "export: version 3, this build of Killick reads 1; "
        "read it with the version that wrote it, or export the run again"
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportBroken, match=r"gone\.killick: cannot be read"):
        read(tmp_path / "gone.killick").loaded()


def test_a_file_is_loaded_by_its_path(kd: killick.Client, tmp_path: Path) -> None:
    file = tmp_path / "r.killick"
    file.write_bytes(kd.store.export("r"))
    assert read(file).header.run == read(str(file)).header.run == "r"


def test_a_run_that_does_not_hold_is_not_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    with killick.open(str(path)) as kd, pytest.raises(killick.RunWaiting):
        kd.run(export_agent, 1, id="r")
    db = sqlite3.connect(path)
    with db:
        db.execute("UPDATE events SET body = CAST(replace(CAST(body AS TEXT), 'export_pay', 'export_hay') AS BLOB)")
    db.close()
    with killick.open(str(path)) as kd:
        with pytest.raises(RunBroken, match="body and hash do not fit the chain"):
            kd.store.export("r")
        assert not kd.store.verify("r").holds
        with pytest.raises(RunBroken, match="run `killick store repair"):
            kd.store.export("r")


def test_a_run_that_is_not_there_is_unknown() -> None:
    with pytest.raises(RunUnknown):
        export(Log(MemoryStore()), "r")


def test_what_its_parent_erased_after_the_cut_keeps_no_fork_from_being_handed_on(kd: killick.Client) -> None:
    fork = kd.fork("r", "1:after")
    [first] = [step for step in kd.state("r").fold.steps if step.id == "1"]
    kd.runtime.log.erase(kd.runtime.log.open("r"), at=4, reason="asked for it", seqs=[first.output])
    assert kd.store.verify().holds
    loaded = read(export(kd.runtime.log, fork.id)).loaded()
    assert loaded.head(fork.id) is not None
