"""`killick store seal`, `killick store prove` and what `killick store verify` says of them."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.audit.checkpoint import new_key
from killick.audit.proof import verify_proof
from killick.cli.main import main
from killick.errors import SealRefused
from killick.log import Entry
from killick.model import events as e
from killick.permissions import create_private

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store of two runs, and a key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("KILLICK_SEAL_KEY", raising=False)
    for run in ("a", "b"):
        grow(run, 3)
    private, public = new_key()
    for name, data in (("key.pem", private), ("key.pem.pub", public)):
        with create_private(name) as file:
            file.write(data)
    return tmp_path


def test_a_private_key_that_others_may_read_seals_nothing(capsys: Capture) -> None:
    Path("key.pem").chmod(0o644)
    assert "chmod 600" in did(capsys, "store", "seal", "--key", "key.pem", code=2)[1]


def grow(run: str, count: int = 1) -> None:
    with killick.open("killick.db") as kd:
        if kd.runtime.store.head(run) is None:
            kd.runtime.log.create(e.RunStarted(at=1, run=run, agent="claims"), {"input": run})
        kd.runtime.log.open(run).append(*(Entry(e.NoteMade(at=2), {"note": f"{run} {n}"}) for n in range(count)))


def did(capsys: Capture, *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(list(words)) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return out, err


def data(capsys: Capture, *words: str, code: int = 0) -> Any:
    out, err = did(capsys, *words, "--json", code=code)
    assert err == ""
    return json.loads(out)


def sealed(capsys: Capture, out: str) -> None:
    did(capsys, "store", "seal", "--key", "key.pem", "--out", out)


# seal ---------------------------------------------------------------------------------------------


def test_without_a_key_the_next_move_is_named(capsys: Capture) -> None:
    assert did(capsys, "store", "seal", code=2)[1] == (
        "killick: seal: needs a key to sign with; --new-key FILE makes one, --key FILE or KILLICK_SEAL_KEY names it\n"
    )


def test_a_new_key_is_for_its_owner_alone_and_never_overwritten(capsys: Capture) -> None:
    out, err = did(capsys, "store", "seal", "--new-key", "new.pem", "--out", "one.seal")
    assert err == "made a new key: new.pem, keep it private; new.pem.pub is the verifier's key\n"
    assert out.startswith("✓ seal 1: 2 runs, 8 new events, signed with key ")
    assert stat.S_IMODE(os.stat("new.pem").st_mode) == 0o600
    assert did(capsys, "store", "verify", "--key", "new.pem.pub", "--checkpoint", "one.seal")[0].startswith("✓")
    grow("a")
    before = Path("new.pem").read_bytes()
    assert "is there already, and a key is never" in did(capsys, "store", "seal", "--new-key", "new.pem", code=2)[1]
    assert Path("new.pem").read_bytes() == before
    assert b"PRIVATE" not in Path("killick.db").read_bytes()


def test_the_key_may_come_from_the_environment(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILLICK_SEAL_KEY", "key.pem")
    out, _ = did(capsys, "store", "seal")
    assert "\n— store_" in out, "the checkpoint is printed where no file is named"
    assert "nothing changed since seal 1" in did(capsys, "store", "seal")[0]


def test_a_key_that_is_none_is_one_line(capsys: Capture) -> None:
    assert "is not a private key in PEM" in did(capsys, "store", "seal", "--key", "key.pem.pub", code=2)[1]
    assert "gone.pem: cannot be read" in did(capsys, "store", "seal", "--key", "gone.pem", code=2)[1]


def test_as_json_it_has_the_checkpoint_and_what_was_sealed(capsys: Capture) -> None:
    found = data(capsys, "store", "seal", "--key", "key.pem")
    assert (found["number"], found["size"], found["runs"], found["fresh"]) == (1, 2, ["a", "b"], True)
    assert found["file"].startswith("store_")


def test_what_is_not_what_was_sealed_is_named_and_the_exit_code_says_so(capsys: Capture) -> None:
    sealed(capsys, "one.seal")
    with killick.open("killick.db") as kd:
        kd.runtime.store.remove("b")
    out, _ = did(capsys, "store", "seal", "--key", "key.pem", "--out", "two.seal", code=1)
    assert "✗ b  is missing, and no archive of it is on record" in out


def test_a_kept_checkpoint_gives_way_only_to_one_that_grew_out_of_it(capsys: Capture) -> None:
    sealed(capsys, "kept.seal")
    shutil.copy("killick.db", "monday.db")
    grow("a")
    sealed(capsys, "kept.seal")
    kept = Path("kept.seal").read_bytes()
    shutil.copy("monday.db", "killick.db")
    grow("b")
    _, err = did(capsys, "store", "seal", "--key", "key.pem", "--out", "kept.seal", code=1)
    assert err.startswith("killick: kept.seal: this store does not match that checkpoint, which is kept; see ")
    assert Path("kept.seal").read_bytes() == kept
    assert (
        "is no checkpoint; name another file"
        in did(capsys, "store", "seal", "--key", "key.pem", "--out", "key.pem", code=2)[1]
    )


# verify -------------------------------------------------------------------------------------------


def test_verify_says_that_the_record_is_what_was_sealed(capsys: Capture) -> None:
    assert "sealed" not in did(capsys, "store", "verify")[0]
    sealed(capsys, "one.seal")
    assert did(capsys, "store", "verify")[0].splitlines()[-1] == "✓ and matches its seals: 1 seal"
    assert data(capsys, "store", "verify", "a", "--checkpoint", "one.seal", "--key", "key.pem.pub")["holds"] is True


def test_a_rolled_back_store_names_the_runs_that_were_lost(capsys: Capture) -> None:
    sealed(capsys, "monday.seal")
    shutil.copy("killick.db", "monday.db")
    grow("a")
    grow("c")
    sealed(capsys, "tuesday.seal")
    shutil.copy("monday.db", "killick.db")
    words = ("store", "verify", "--checkpoint", "tuesday.seal", "--key", "key.pem.pub")
    out, _ = did(capsys, *words, code=1)
    assert "✗ a  breaks at event 5: ends at event 4, and was sealed at event 5 (seals)\n" in out
    assert "✗ c  is missing: it was sealed at event 2, and no prune is on record (seals)\n" in out
    assert f"✗ {Path('killick.db').resolve()}  was rolled back or cut: " in out
    assert "repair" not in out
    found = data(capsys, *words, code=1)
    assert found["holds"] is False
    assert {each["run"] for each in found["broken"]} >= {"a", "c", None}


def test_what_is_explained_is_told_and_is_no_failure(capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        kd.runtime.log.open("b").append(Entry(e.RunCompleted(at=3), {"result": None}))
    sealed(capsys, "one.seal")
    did(capsys, "store", "prune", "--older", "1d", "--to", "old.gz", "--yes")
    words = ("store", "verify", "--checkpoint", "one.seal", "--key", "key.pem.pub", "--archive", "old.gz")
    assert "~ b  was pruned into old.gz, which no seal records yet\n" in did(capsys, *words)[0]
    assert [each["run"] for each in data(capsys, *words)["explained"]] == ["b"]
    assert "~ b  was pruned into old.gz\n" in did(capsys, "store", "seal", "--key", "key.pem", "--out", "one.seal")[0]
    assert "~" not in did(capsys, *words)[0]


def test_pruned_evidence_is_needed_to_verify_what_was_sealed(capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        kd.runtime.log.open("b").append(Entry(e.RunCompleted(at=3), {"result": None}))
    sealed(capsys, "one.seal")
    did(capsys, "store", "prune", "--older", "1d", "--to", "old.gz", "--yes")
    words = ("store", "verify", "--checkpoint", "one.seal", "--key", "key.pem.pub")
    for _ in range(2):  # before the next seal, and after it
        out, _ = did(capsys, *words, code=1)
        assert f"✗ b  was pruned by {getpass.getuser()} into old.gz" in out
        assert "the record is intact" not in out
        assert data(capsys, *words, code=1)["holds"] is False
        did(capsys, *words, "--archive", "old.gz")
        did(capsys, "store", "seal", "--key", "key.pem", "--out", "one.seal")
    Path("old.gz").write_bytes(Path("old.gz").read_bytes() + b"x")
    did(capsys, *words, "--archive", "old.gz", code=1)


def test_a_checkpoint_or_key_that_is_none_is_one_line(capsys: Capture) -> None:
    sealed(capsys, "one.seal")
    assert "--checkpoint: needs --key PUB" in did(capsys, "store", "verify", "--checkpoint", "one.seal", code=2)[1]
    assert "is a private key" in did(capsys, "store", "verify", "--key", "key.pem", code=2)[1]
    words = ("store", "verify", "--key", "key.pem.pub", "--checkpoint")
    found = did(capsys, *words, "key.pem", code=1)[1]
    assert found == "killick: key.pem: is not a checkpoint; give a file of `killick store seal --out`\n"
    changed = Path("one.seal").read_text().replace("\n2\n", "\n1\n")
    Path("bare.seal").write_text(changed.partition("\n{")[0])
    assert did(capsys, *words, "bare.seal", code=1)[1] == (
        "killick: bare.seal: its signature is invalid: it was changed\n"
    )


def test_the_values_of_the_seals_are_not_erased(capsys: Capture) -> None:
    sealed(capsys, "one.seal")
    _, err = did(capsys, "store", "erase", "seal", "--seq", "2", "--reason", "tidy", "--yes", code=2)
    assert err.startswith("killick: seal: without its values nothing that was sealed could be proved")


# prove --------------------------------------------------------------------------------------------


def test_a_proof_is_verified_without_a_store(capsys: Capture, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    sealed(capsys, "one.seal")
    out, _ = did(capsys, "store", "prove", "a", "@3", "--values", "--out", "a.proof")
    assert out.splitlines()[-1] == "    killick store verify --proof a.proof --key PUB"
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    for name in ("a.proof", "key.pem.pub", "one.seal"):
        shutil.copy(name, elsewhere)
    monkeypatch.chdir(elsewhere)
    words = ("store", "verify", "--proof", "a.proof", "--key", "key.pem.pub")
    out, _ = did(capsys, *words, "--checkpoint", "one.seal")
    assert out.startswith("✓ proved: event 3 of a  note.made, ")
    assert "  note: a 1\n" in out
    found = data(capsys, *words)
    assert (found["holds"], found["run"], found["seq"], found["values"]) == (True, "a", 3, {"note": "a 1"})
    assert [each.name for each in elsewhere.iterdir() if each.suffix == ".db"] == []
    Path("a.proof").write_bytes(Path("a.proof").read_bytes().replace(b"a 1", b"a 9"))
    assert did(capsys, *words, code=1)[0] == "✗ a.proof  the values are not the ones that the event refers to\n"
    found = data(capsys, *words, code=1)
    assert (found["holds"], found["broken"]) == (False, "the values are not the ones that the event refers to")


def test_a_proof_without_a_file_is_printed(capsys: Capture) -> None:
    sealed(capsys, "one.seal")
    out, _ = did(capsys, "store", "prove", "a", "1")
    assert verify_proof(out, Path("key.pem.pub").read_bytes()).run == "a"
    found = data(capsys, "store", "prove", "a", "1", "--out", "a.proof")
    assert (found["run"], found["seq"], found["bytes"]) == ("a", 1, Path("a.proof").stat().st_size)


def test_what_cannot_be_proved_is_one_line(capsys: Capture) -> None:
    sealed(capsys, "one.seal")
    grow("a")
    assert "event 5 is not sealed yet, only events up to 4 are" in did(capsys, "store", "prove", "a", "5", code=2)[1]
    assert "x: is no event's number" in did(capsys, "store", "prove", "a", "x", code=2)[1]
    assert "no such run" in did(capsys, "store", "prove", "q", "1", code=2)[1]
    assert "--proof: needs --key PUB" in did(capsys, "store", "verify", "--proof", "one.seal", code=2)[1]
    assert "is not a proof" in did(capsys, "store", "verify", "--proof", "one.seal", "--key", "key.pem.pub", code=1)[0]
    assert "is a private key" in did(capsys, "store", "verify", "--proof", "one.seal", "--key", "key.pem", code=2)[1]


def test_a_checkpoint_that_cannot_be_written_leaves_the_seal_in_the_store(capsys: Capture) -> None:
    _, err = did(capsys, "store", "seal", "--key", "key.pem", "--out", "nowhere/one.seal", code=2)
    assert "nowhere/one.seal: cannot be written" in err
    sealed(capsys, "one.seal")
    assert "nothing changed since seal 1" in did(capsys, "store", "seal", "--key", "key.pem")[0]


def test_a_run_called_seal_is_left_alone(capsys: Capture) -> None:
    grow("seal")
    assert did(capsys, "store", "seal", "--key", "key.pem", code=2)[1].startswith("killick: seal: is a run of claims")
    with killick.open("killick.db") as kd, pytest.raises(SealRefused):
        kd.store.seal(Path("key.pem").read_bytes())
