"""Master keys, their errors, rotation, and the destruction of data keys."""

from __future__ import annotations

import asyncio
import os
from base64 import b64encode
from pathlib import Path
from typing import cast

import pytest
from starlette.testclient import TestClient

import killick
from killick.archive.export import read
from killick.cli.main import main
from killick.encryption import keyring
from killick.encryption.master_key import LocalKey, described, master_keys
from killick.encryption.store import DecryptingStore, decrypting
from killick.errors import KeyRefused, RunWaiting
from killick.log import Log
from killick.model import events as e
from killick.permissions import create_private
from killick.store import SqliteStore, Store
from killick.store.protocol import raw_store
from killick.store.records import Head
from killick.triggers import TRIGGERS, on_event
from killick.web.app import asgi
from killick.web.auth.access import Identified

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))


@killick.tool(effect="idempotent")
async def look_up(name: str) -> str:
    return f"found {name}"


@killick.agent
async def clerk(run: killick.Run, name: str) -> str:
    found = await run.call(look_up, name)
    answer = await run.ask(f"Write to {name}?")
    return f"{found}: {answer.kind}"


@killick.agent
async def quick(run: killick.Run, name: str) -> str:
    return await run.call(look_up, name)


class KeyService:
    """A key service of another company: it only wraps and unwraps."""

    def __init__(self) -> None:
        self.calls = 0
        self._local = LocalKey(OTHER)

    def wrap(self, key: bytes) -> bytes:
        return b"service:" + self._local.wrap(key)

    def unwrap(self, wrapped: bytes) -> bytes:
        self.calls += 1
        if not wrapped.startswith(b"service:"):
            raise PermissionError("not a key of this service")
        return self._local.unwrap(wrapped.removeprefix(b"service:"))


def refused(tmp_path: Path, **options: object) -> str:
    with pytest.raises(KeyRefused) as caught:
        killick.open(str(tmp_path / "killick.db"), **options)
    return str(caught.value)


# master keys --------------------------------------------------------------------------------------


def private(path: Path, text: str) -> None:
    with create_private(path) as file:
        file.write(text.encode())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_master_key_that_others_may_read_or_change_is_refused_in_one_line(tmp_path: Path, mode: int) -> None:
    private(tmp_path / "master.key", KEY.hex())
    (tmp_path / "master.key").chmod(mode)
    said = refused(tmp_path, keys=tmp_path / "master.key")
    assert "master.key" in said
    assert "chmod 600" in said
    assert "\n" not in said


def test_a_folder_of_keys_that_others_may_enter_and_a_key_there_that_others_may_read_are_refused(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(0o755)
    assert "chmod 700" in refused(tmp_path, keys=folder)
    folder.chmod(0o700)
    with killick.open(str(tmp_path / "killick.db"), keys=folder) as kd:
        kd.run(quick, "ada", id="r")
    [key, *_] = folder.iterdir()
    key.chmod(0o644)
    assert "chmod 600" in refused(tmp_path, keys=folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_master_key_of_another_user_is_refused(tmp_path: Path) -> None:
    private(tmp_path / "master.key", KEY.hex())
    os.chown(tmp_path / "master.key", 12345, -1)
    assert "chown" in refused(tmp_path, keys=tmp_path / "master.key")


def test_a_master_key_is_a_file_a_variable_bytes_or_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path / "hex.key", KEY.hex() + "\n")
    private(tmp_path / "base64.key", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
    monkeypatch.setenv("MY_KEY", KEY.hex())
    wrapped = LocalKey(KEY).wrap(OTHER)
    for given in (KEY, str(tmp_path / "hex.key"), tmp_path / "base64.key", "env:MY_KEY"):
        assert [each.unwrap(wrapped) for each in master_keys(given)] == [OTHER]
    service = KeyService()
    assert master_keys([service, KEY])[0] is service
    assert master_keys(None) == []
    monkeypatch.setenv("KILLICK_KEYS", f"env:MY_KEY,{tmp_path / 'hex.key'}")
    assert len(master_keys(None)) == 2


def test_only_keys_that_another_process_can_find_are_described(tmp_path: Path) -> None:
    assert described(["env:A", tmp_path / "b"]) == f"env:A,{tmp_path / 'b'}"
    assert described("a.key") == "a.key"
    assert [described(each) for each in (None, KEY, KeyService(), ["a", KEY])] == [None] * 4


@pytest.mark.parametrize("given", ["nowhere.key", "env:NOT_SET", b"short", "empty.key"])
def test_an_unusable_master_key_is_one_line_that_says_what_it_needs(
    tmp_path: Path, given: str | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    private(tmp_path / "empty.key", "no key\n")
    said = refused(tmp_path, keys=given)
    assert "killick store new-key FILE" in said
    assert "\n" not in said


def test_a_missing_key_and_a_wrong_key_are_one_line_that_names_the_next_move(tmp_path: Path) -> None:
    killick.open(str(tmp_path / "killick.db"), keys=KEY).close()
    assert refused(tmp_path).endswith("its values are encrypted; give keys=, or set KILLICK_KEYS")
    said = refused(tmp_path, keys=OTHER)
    assert said.endswith("give the key that wrapped them")
    assert "none of the given keys opens its data keys" in said
    assert "not a key of this service" in refused(tmp_path, keys=KeyService())


def test_a_store_with_runs_in_clear_takes_no_keys(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.run(quick, "ada", id="r")
        with pytest.raises(KeyRefused, match="needs an encrypted store"):
            kd.start(quick, "ada", subject="ada")
        for operation in (kd.store.rotate_keys, lambda: kd.store.erase("ada")):
            with pytest.raises(KeyRefused, match="is not encrypted"):
                operation()
    assert "has unencrypted runs" in refused(tmp_path, keys=KEY)


def test_two_processes_may_open_a_new_store_at_once(tmp_path: Path) -> None:
    class Slow(SqliteStore):
        """The other process is quicker: it opens the store and starts a run after this one's first look."""

        def head(self, run: str) -> Head | None:
            found = super().head(run)
            if not others:
                others.append(killick.open(str(tmp_path / "killick.db"), keys=KEY))
                others[0].run(quick, "ada", id="r")
            return found

    others: list[killick.Client] = []
    with killick.Client(decrypting(cast(Store, Slow(tmp_path / "killick.db")), KEY)) as kd, others[0]:
        assert kd.state("r").result == others[0].state("r").result


# rotation -----------------------------------------------------------------------------------------


def test_rotation_while_a_run_is_parked_changes_no_value_and_retires_the_old_key(tmp_path: Path) -> None:
    place = str(tmp_path / "killick.db")
    with killick.open(place, keys=KEY) as kd:
        kd.start(clerk, "ada", id="r", subject="user-17")
        assert kd.advance("r").status == "waiting"
        before = [row.data for row in kd.runtime.store.raw.read("r")]  # type: ignore[attr-defined]
    old = b64encode(LocalKey(KEY).wrap(b"")[:15])
    assert any(old in path.read_bytes() for path in tmp_path.iterdir())
    with killick.open(place, keys=[OTHER, KEY]) as kd:
        assert kd.store.rotate_keys(by="ann") == 2
        assert kd.store.rotate_keys() == 2
    assert "give the key that wrapped them" in refused(tmp_path, keys=KEY)
    with killick.open(place, keys=OTHER) as kd:
        assert [row.data for row in kd.runtime.store.raw.read("r")] == before  # type: ignore[attr-defined]
        kd.answer("r", "approve", by="ann")
        assert kd.run(clerk, "ada", id="r") == "found ada: approve"
        assert kd.store.verify().problems == []
    for path in tmp_path.iterdir():
        assert old not in path.read_bytes(), "an old wrapping is still there"


def test_a_rotation_that_stops_in_the_middle_leaves_readable_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "killick.db")
    with killick.open(place, keys=KEY) as kd:
        kd.run(quick, "ada", id="r", subject="user-17")
    with killick.open(place, keys=[OTHER, KEY]) as kd:
        with monkeypatch.context() as patch:
            patch.setattr(keyring.Keyring, "_destroy", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                kd.store.rotate_keys()
        assert kd.state("r").result == "found ada"
    with killick.open(place, keys=[OTHER, KEY]) as kd:
        assert kd.store.rotate_keys() == 2
    with killick.open(place, keys=OTHER) as kd:
        assert kd.state("r").result == "found ada"


def test_a_key_that_is_destroyed_while_it_is_rotated_stays_destroyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "killick.db")
    with killick.open(place, keys=KEY) as other, killick.open(place, keys=[OTHER, KEY]) as kd:
        other.run(quick, "ada", id="r", subject="user-17")
        wrap, erased = keyring.Keyring._wrapped, list[object]()

        def erases_meanwhile(ring: keyring.Keyring, key: bytes) -> bytes:
            if not erased:
                erased.append(other.store.erase("user-17"))
            return wrap(ring, key)

        monkeypatch.setattr(keyring.Keyring, "_wrapped", erases_meanwhile)
        kd.store.rotate_keys()
        assert erased
    with killick.open(place, keys=[OTHER, KEY]) as kd:
        assert all(row.data is None for row in kd.runtime.log.rows("r"))


def test_a_key_service_unwraps_each_key_once(tmp_path: Path) -> None:
    service = KeyService()
    with killick.open(str(tmp_path / "killick.db"), keys=service) as kd:
        for number in range(5):
            kd.run(quick, "ada", id=f"r{number}", subject="user-17")
        assert [kd.state(f"r{number}").result for number in range(5)] == ["found ada"] * 5
    assert service.calls == 2, "the store's key and the subject's"


# subjects -----------------------------------------------------------------------------------------


def test_an_erased_subject_is_unreadable_in_forks_children_and_renewals_and_the_log_verifies(tmp_path: Path) -> None:
    @killick.agent
    async def parent(run: killick.Run, name: str) -> str:
        if name == "ada":
            child = await run.spawn(quick, name, id="child")
            await run.renew(await child.result())
        return name

    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        kd.start(parent, "ada", id="r", subject="user-17")
        for run in ("r", "child", "r", "r+2"):
            kd.advance(run)
        kd.run(quick, "ada", id="other")
        kd.run(quick, "ada", id="of_hers", subject="user-18")
        kd.fork("child", at="1:before", id="forked")
        kd.advance("forked")
        assert kd.state("forked").result == "found ada"
        kept = {run: kd.store.export(run) for run in ("child", "forked")}
        done = kd.store.erase("user-17", by="ann")
        assert (done.subject, done.runs, done.purged) == ("user-17", 4, True)
        for run in ("r", "child", "r+2", "forked"):
            assert all(row.data is None for row in kd.runtime.log.rows(run))
        assert [kd.state(run).result for run in ("other", "of_hers")] == ["found ada"] * 2
        report = kd.store.verify()
        assert report.problems == []
        assert report.erased > 4
        for run, data in kept.items():
            loaded = read(data).loaded()  # verifies the chain, and every hash
            with pytest.raises(KeyRefused, match="is encrypted; read it through its store"):
                Log(loaded).data(run, 1)
            with pytest.raises(killick.errors.ValueErased):
                Log(cast("Store", DecryptingStore(loaded, kd.runtime.store.keys))).data(run, 1)  # type: ignore[attr-defined]


def test_a_subject_with_open_runs_is_not_erased_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        kd.start(clerk, "ada", id="r", subject="user-17")
        with pytest.raises(KeyRefused, match=r"user-17: has runs that have not ended \(r\); cancel"):
            kd.store.erase("user-17")
        with pytest.raises(KeyRefused, match="no run was started with this subject"):
            kd.store.erase("user-71")
        assert kd.advance("r").status == "waiting"


@pytest.mark.parametrize("subject", ["", " ", "user-17 ", "user-17\u200b", "user-17\n"])
def test_a_subject_that_looks_like_another_is_refused(tmp_path: Path, subject: str) -> None:
    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        with pytest.raises(KeyRefused, match="exact name"):
            kd.start(quick, "ada", id="r", subject=subject)
        assert kd.list() == []


def test_an_open_run_whose_key_is_destroyed_is_quarantined_and_records_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        kd.start(clerk, "ada", id="r", subject="user-17")
        with pytest.MonkeyPatch.context() as patch:  # as if the run were started while its subject is erased
            patch.setattr(type(raw_store(kd.runtime.store)), "runs", lambda *_, **__: [])  # type: ignore[attr-defined]
            kd.store.erase("user-17")
        before = kd.runtime.log.head("r").seq
        with pytest.raises(killick.errors.RunBroken, match="the key of its data subject was destroyed"):
            kd.advance("r")
        assert (kd.runtime.log.head("r").seq, kd.advance_due()) == (before, [])
    monkeypatch.setenv("KILLICK_KEYS", "env:OURS")
    monkeypatch.setenv("OURS", KEY.hex())
    monkeypatch.setenv("COLUMNS", "160")
    told = "the key of its data subject was destroyed, so no worker can continue it"
    for command in ("ps", "show r"):
        assert main([*command.split(), "--store", str(tmp_path / "killick.db")]) == 0
        out = capsys.readouterr().out
        assert (told in out, "store verify" in out) == (True, False), command


def test_http_and_events_start_runs_under_the_key_of_a_subject(tmp_path: Path) -> None:
    declared = TRIGGERS.copy()

    async def serve() -> None:
        async with kd.worker():
            while {row.id for row in kd.list(status=["completed"])} != {"posted", "fired"}:
                await asyncio.sleep(0.01)

    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        web = TestClient(asgi(kd, access=Identified(kd, lambda request: ("mia", "operator"))))
        body = {"agent": "quick", "input": "Ada Lovelace", "id": "posted", "subject": "user-17"}
        assert web.post("/api/v1/runs", json=body, headers={"Authorization": "Bearer mine"}).status_code == 201
        on_event("came", quick, input="Ada Lovelace", id=lambda _: "fired", subject=lambda firing: firing.body)
        kd.triggers.publish("came", "user-17")
        asyncio.run(serve())
        TRIGGERS.clear()
        TRIGGERS.update(declared)
        kd.store.erase("user-17")
        for run in ("posted", "fired"):
            with pytest.raises(killick.errors.ValueErased):
                kd.runtime.log.data(run, 1)


def test_a_subject_that_comes_back_gets_a_new_key(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        kd.run(quick, "ada", id="before", subject="user-17")
        [wrapped] = [kept.wrapped for kept in kd.runtime.log.keys._kept(kd.runtime.log.keys._owner("user-17"))]  # type: ignore[union-attr]
        kd.store.erase("user-17")
        assert all(b64encode(wrapped)[:-4] not in path.read_bytes() for path in tmp_path.iterdir())
        assert kd.run(quick, "ada", id="after", subject="user-17") == "found ada"
        assert kd.state("after").result == "found ada"
        with pytest.raises(killick.errors.ValueErased):
            kd.runtime.log.data("before", 1)
        assert kd.store.verify().problems == []


def test_another_process_forgets_a_destroyed_key_within_seconds(tmp_path: Path) -> None:
    clock = killick.clock.LeapingClock()
    place = str(tmp_path / "killick.db")
    with killick.open(place, keys=KEY, clock=clock) as kd, killick.open(place, keys=KEY, clock=clock) as other:
        kd.run(quick, "ada", id="r", subject="user-17")
        assert other.state("r").result == "found ada"
        kd.store.erase("user-17")
        clock.advance(keyring.KNOWN_SECONDS + 1)
        with pytest.raises(killick.errors.ValueErased):
            other.runtime.log.data("r", 1)


def test_resume_finds_the_unfinished_run_of_the_same_subject_alone(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        runs = []
        for subject in ("user-17", "user-18", "user-17"):
            with pytest.raises(RunWaiting) as caught:
                kd.run(clerk, "ada", subject=subject, resume=True)
            runs.append(caught.value.run)
        assert runs[0] == runs[2] != runs[1]


def test_no_digest_in_a_log_confirms_a_guess_without_its_key(tmp_path: Path) -> None:
    from killick.model.codec import digest

    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        kd.run(quick, "ada", id="a", subject="user-17")
        kd.run(quick, "ada", id="b", subject="user-18")
        found = [recorded.event for run in "ab" for recorded in kd.events(run)]
        digests = [event.digest for event in found if isinstance(event, e.StepStarted)]
        assert len(set(digests)) == 2, "two trees key their digests differently"
        assert e.to_text(digest({"name": "ada"})) not in digests
        keys = [event.key.rpartition(":")[2] for event in found if isinstance(event, e.StepStarted)]
        assert digest({"name": "ada"}).hex()[:8] not in keys
