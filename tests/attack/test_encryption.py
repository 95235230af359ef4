"""With keys, no value is in any byte of any file; after an erasure the master key reads nothing of that person."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.archive import bundle, export
from killick.cli.main import main
from killick.clock import Clock, LeapingClock, SystemClock
from killick.encryption.master_key import KeyFolder, master_keys
from killick.encryption.store import decrypting
from killick.errors import KeyRefused, RunWaiting
from killick.history import vaults
from killick.log import Log, verify
from killick.store import MemoryStore, SqliteStore
from killick.store.protocol import raw_store
from world import World

KEY = bytes(range(32))
SECRET = "ssn-078-05-1120"
LONG = f"letter to {SECRET}: " + "all is well, and nothing is owed. " * 400
SUBJECT = "user-17"

calls: list[str] = []


@killick.tool(effect="idempotent")
async def look_up(ssn: str, letter: str) -> dict[str, str]:
    calls.append(ssn)
    return {"found": ssn, "answered": letter}


@killick.tool(effect="idempotent", retry=killick.Retry(attempts=1))
async def fails(ssn: str) -> str:
    raise ValueError(f"no such number: {ssn}")


@killick.agent
async def child(run: killick.Run, ssn: str) -> str:
    return f"child of {ssn}"


@killick.agent
async def clerk(run: killick.Run, ssn: str) -> str:
    said = await run.wait("order")
    await run.update(person=ssn, letter=LONG)
    await run.note(f"about {ssn}")
    await run.call(look_up, said["ssn"], said["letter"])
    await run.decided("write?", ssn, options=[ssn, "no"], because=f"it is {ssn}")
    with suppress(killick.StepFailed):
        await run.call(fails, ssn)
    below = await run.spawn(child, ssn, id="below")
    answer = await run.ask(f"Write to {ssn}?", to="ann")
    return f"{await below.result()} {answer.kind} {ssn}"


def files_with(folder: Path, *texts: str) -> list[str]:
    """The files with one of these texts in any byte, packed or not."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".key":
            data = path.read_bytes()
            data += gzip.decompress(data) if data[:2] == b"\x1f\x8b" else b""
            found += [path.name for text in texts if text.encode() in data]
    return found


def live(kd: killick.Client) -> None:
    """A person's secret as input, message, argument, result, error, note, decision, context, question and comment."""
    kd.start(clerk, SECRET, id="r", subject=SUBJECT)
    kd.advance("r")
    kd.send("r", "order", {"ssn": SECRET, "letter": LONG}, by="ann")
    told = kd.advance("r")
    assert told.status == "waiting", told
    kd.advance("below")
    kd.advance("r")
    kd.answer("r", "approve", comment=f"she is {SECRET}", by="ann")
    outcome = kd.advance("r")
    assert outcome.status == "completed", outcome
    kd.rewind("r", "3:after", because=f"again for {SECRET}")
    kd.advance("r")
    kd.answer("r", "approve", comment=f"she is {SECRET}", by="ann")
    assert kd.advance("r").status == "completed"
    kd.fork("r", at="3:after", id="forked")
    kd.cancel("forked")
    kd.advance("forked")


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as client:
        live(client)
        yield client


def test_no_byte_of_a_value_is_in_any_file(kd: killick.Client, tmp_path: Path) -> None:
    assert [found.arguments["ssn"] for found in kd.find.calls("look_up", where={"ssn": SECRET})]
    (tmp_path / "r.export").write_bytes(kd.store.export("r"))
    kd.triggers.publish("nothing.listens", {"ssn": SECRET})
    assert kd.store.verify().problems == []
    plants = (SECRET, SECRET[4:], "all is well", "she is", "about ssn", SUBJECT)
    assert files_with(tmp_path, *plants) == []
    kd.store.prune(older=0, to=tmp_path / "old.jsonl.gz")
    assert files_with(tmp_path, *plants) == []
    assert bundle.verify(tmp_path / "old.jsonl.gz").runs >= 3
    kd.close()
    assert files_with(tmp_path, *plants) == []


def test_search_finds_values_that_its_index_does_not_hold(kd: killick.Client, tmp_path: Path) -> None:
    from killick.history.search.terms import term

    assert len(list(kd.find.calls("look_up", where={"ssn": SECRET}))) >= 1
    assert not list(kd.find.calls("look_up", where={"ssn": "another"}))
    assert list(kd.find.decisions(question="write?"))
    with closing(sqlite3.connect(tmp_path / "killick.db")) as db:
        kept = {each for (each,) in db.execute("SELECT term FROM marks")}
    guessed = ("argument", "is", "ssn", SECRET), ("question", "is", "write?"), ("choice", "is", "", SECRET)
    assert kept
    assert not kept & {term(*words) for words in guessed}


def test_after_an_erasure_the_master_key_reads_nothing_in_the_store_its_archive_or_an_export(
    kd: killick.Client, tmp_path: Path
) -> None:
    place = tmp_path / "killick.db"
    exported = kd.store.export("r")
    assert main(["store", "erase", "--subject", SUBJECT, "--yes", "--store", str(place)]) == 2, "it has no key here"
    kd.store.erase(SUBJECT)
    with killick.open(str(place), keys=KEY) as reader:
        log = reader.runtime.log
        for run in ("r", "below", "forked"):
            for row in log.rows(run):
                assert row.data is None
            for message in log.store.messages(run):
                assert message.body == b'{"$erased":""}'
            assert SECRET not in json.dumps(reader.state(run).to_json(), default=str)
        with closing(sqlite3.connect(place)) as db:
            hashes = [each for (each,) in db.execute("SELECT hash FROM pieces WHERE codec LIKE '%.aes'")]
        pieces = log.store.pieces(hashes)
        assert pieces
        assert {piece.body for piece in pieces.values()} == {None}
        assert reader.store.verify().problems == []
        with pytest.raises(KeyRefused, match="was destroyed"):
            export.read(exported).decrypt(log.store)
        reader.store.prune(older=0, to=tmp_path / "old.jsonl.gz")
        assert bundle.verify(tmp_path / "old.jsonl.gz").runs >= 3
    assert files_with(tmp_path, SECRET, "all is well", SUBJECT) == []


def test_an_old_backup_of_the_store_has_the_key(kd: killick.Client, tmp_path: Path) -> None:
    backup = backed_up(tmp_path / "killick.db", tmp_path / "backup.db")
    assert not kd.store.erase(SUBJECT).in_backups
    with killick.open(str(backup), keys=KEY) as old:
        assert SECRET in old.state("r").result


def backed_up(store: Path, backup: Path) -> Path:
    with closing(sqlite3.connect(store)) as db, closing(sqlite3.connect(backup)) as other:
        db.backup(other)
    return backup


def test_with_data_keys_in_a_folder_an_erasure_reaches_every_backup(tmp_path: Path) -> None:
    place, keys = tmp_path / "killick.db", tmp_path / "keys"
    keys.mkdir(0o700)
    with killick.open(str(place), keys=keys) as kd:
        live(kd)
        kd.run(child, "of nobody", id="another", subject="user-18")
        backup, exported = backed_up(place, tmp_path / "backup.db"), kd.store.export("r")
        assert kd.store.erase(SUBJECT).in_backups
        assert kd.state("another").result == "child of of nobody"
    assert files_with(tmp_path, SECRET, "all is well", SUBJECT) == []
    with killick.open(str(backup), keys=keys) as old:
        assert old.store.verify().problems == []
        assert old.state("another").result == "child of of nobody"
        for run in ("r", "below", "forked"):
            assert all(row.data is None for row in old.runtime.log.rows(run))
            assert {message.body for message in old.runtime.store.messages(run)} <= {b'{"$erased":""}'}
        with pytest.raises(KeyRefused, match="was destroyed"):
            export.read(exported).decrypt(old.runtime.store)
        assert old.run(child, SECRET, id="back", subject=SUBJECT) == f"child of {SECRET}"
        assert old.store.rotate_keys() == 4, "the store's, two of the person who came back, and another's"
        assert old.state("back").result == f"child of {SECRET}"


def test_a_store_names_no_file_outside_the_folder_of_its_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(0o700)
    (tmp_path / "precious").write_text("00" * 32)
    [folder] = master_keys(tmp_path / "keys")
    assert isinstance(folder, KeyFolder)
    for name in (b"../precious", b"", b"..", b"precious", b"00" * 32):
        for operation in (folder.unwrap, folder.destroy):
            with pytest.raises(ValueError, match=r"wrapped by|Non-hexadecimal|Odd-length"):
                operation(b"killick-folder:" + name)
    assert (tmp_path / "precious").read_text() == "00" * 32
    assert not folder.destroy(b"of a service")


def test_an_erasure_that_the_key_service_refuses_changes_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    class Service(KeyFolder):
        is_up = False

        def destroy(self, wrapped: bytes) -> bool:
            if not self.is_up:
                raise ConnectionError("no answer")
            return super().destroy(wrapped)

    service = Service(str(tmp_path))
    with killick.open(str(tmp_path / "killick.db"), keys=service) as kd:
        kd.run(child, SECRET, id="r", subject=SUBJECT)
        with pytest.raises(KeyRefused, match="failed to destroy a data key"):
            kd.store.erase(SUBJECT)
        assert kd.state("r").result == f"child of {SECRET}"
        service.is_up = True
        assert kd.store.erase(SUBJECT).in_backups
        assert all(row.data is None for row in kd.runtime.log.rows("r"))


def test_a_replay_reads_an_encrypted_run_and_its_file(kd: killick.Client, tmp_path: Path) -> None:
    (tmp_path / "r.export").write_bytes(kd.store.export("r"))
    for source in ("r", tmp_path / "r.export"):
        assert kd.replay(source, clerk, check=True).status == "completed"
    assert SECRET.encode() not in kd.store.export("r")


def test_a_flipped_byte_of_an_encrypted_value_is_found(kd: killick.Client, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "killick.db", isolation_level=None)) as db:
        other = "CASE substr(body, 61, 1) WHEN x'00' THEN x'01' ELSE x'00' END"
        flipped = f"CAST(substr(body, 1, 60) || {other} || substr(body, 62) AS BLOB)"
        db.execute(f"UPDATE pieces SET body = {flipped} WHERE codec LIKE '%.aes'")
    assert {problem.where for problem in kd.store.verify().problems} == {"pieces"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["memory", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_killed_at_any_append_with_keys_everything_is_done_once(tmp_path: Path, kind: str, when: str) -> None:
    @killick.agent
    async def steps(run: killick.Run, ssn: str) -> str:
        for number in range(3):
            await run.call(look_up, f"{ssn}-{number}", LONG)
        await run.note(ssn)
        return ssn

    number, made = 0, 1
    while number < made:
        number += 1
        clock: Clock = SystemClock() if kind == "sqlite" else LeapingClock()
        raw = SqliteStore(tmp_path / f"{number}.db") if kind == "sqlite" else MemoryStore(clock=clock)
        world = World(decrypting(raw, KEY, clock=clock), clock)
        calls.clear()
        world.line.cut_at = (number, when)
        assert world.outlived(steps, SECRET, run="r") == SECRET
        made = max(made, len(world.line.appends)) if number == 1 else made
        assert sorted(set(calls)) == [f"{SECRET}-{each}" for each in range(3)]
        assert all(SECRET.encode() not in row.body + (row.data or b"") for row in raw.read("r"))
        log = Log(world.store)
        assert verify(log).problems == []
        log.close()
        world.close()
    assert files_with(tmp_path, SECRET) == []
    assert number > 3


@killick.tool(effect="workspace")
async def write(folder: str, text: str) -> None:
    Path(folder, "plan.txt").write_text(text)


def writer_in(folder: str) -> Any:
    @killick.agent(workspace=folder)
    async def writer(run: killick.Run, text: str) -> str:
        await run.call(write, str(run.workspace), "nothing yet")
        await run.call(write, str(run.workspace), text)
        return "done"

    return writer


def test_a_workspace_is_encrypted(tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    writer = writer_in(str(folder))
    with killick.open(str(home / "killick.db"), keys=KEY) as kd:
        kd.run(writer, LONG * 20, id="r")
        (folder / "plan.txt").write_text("changed")
        kd.restore("r", "now")
        assert (folder / "plan.txt").read_text() == LONG * 20
        with pytest.raises(killick.errors.WorkspaceRefused, match=r"give each run a folder: .*/work/\{run\}$"):
            kd.run(writer, "x", id="s", subject=SUBJECT)
    assert (home / "killick.files").is_dir()
    assert files_with(home, SECRET, "all is well", "plan.txt") == []


def test_the_files_of_a_data_subject_are_under_their_key_and_go_with_it(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    writer = writer_in(str(tmp_path / "work" / "{run}"))
    plan = {run: tmp_path / "work" / run / "plan.txt" for run in ("r", "other")}
    with killick.open(str(home / "killick.db"), keys=KEY) as kd:
        kd.run(writer, LONG * 20, id="r", subject=SUBJECT)
        kd.run(writer, "of somebody else", id="other", subject="user-18")
        plan["r"].write_text("changed")
        kd.restore("r", "now")
        assert plan["r"].read_text() == LONG * 20
        fork = kd.fork("r", "1:after", by="ann").id
        assert vaults.verify(kd.runtime.log, ["r", "other", fork]).snapshots >= 4
        assert files_with(home, SECRET, "all is well", "plan.txt") == []
        kd.cancel(fork)
        kd.advance(fork)
    shutil.copytree(home, copy)
    with killick.open(str(home / "killick.db"), keys=KEY) as kd:
        erased = kd.store.erase(SUBJECT)
        assert erased.runs == 2
        with pytest.raises(killick.errors.KeyRefused, match="these files with it"):
            kd.restore("r", "now")
        assert len(list((home / "killick.files").glob("subjects-*/*"))) == 1
        held = vaults.verify(kd.runtime.log, ["r", "other", fork])
        assert (held.holds, held.runs) == (True, 1)
        plan["other"].write_text("changed")
        kd.restore("other", "now")
        assert plan["other"].read_text() == "of somebody else"
        # A copy of the vault from before is unreadable, too: its key is gone.
        shutil.rmtree(home / "killick.files")
        shutil.copytree(copy / "killick.files", home / "killick.files")
        with pytest.raises(killick.errors.KeyRefused, match="these files with it"):
            kd.restore("r", "now")
        found = vaults.clean(kd.runtime.log, vaults.of_runs(kd.runtime.log, ()))
        (cleaned,) = [each for each in found if each.bytes_kept]
        assert cleaned.problem is None
        assert len(list((home / "killick.files").glob("subjects-*/*"))) == 1
        kd.run(writer, "back again", id="back", subject=SUBJECT)
        assert vaults.verify(kd.runtime.log, ["back"]).holds


def test_an_answer_and_a_message_to_a_run_in_memory_are_encrypted() -> None:
    with killick.open("memory:", keys=KEY) as kd:
        live(kd)
        raw = raw_store(kd.runtime.store)
        assert isinstance(raw, MemoryStore)
        for run in ("r", "below", "forked"):
            assert all(SECRET.encode() not in message.body for message in raw.messages(run))
            assert all(SECRET.encode() not in (row.data or b"") + row.body for row in raw.read(run))
        with pytest.raises(RunWaiting):
            kd.run(clerk, SECRET, id="again")
