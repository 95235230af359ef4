"""`killick token`: a token is printed once, alone; lists and revocations say whose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import killick
from claims import call, move_in
from killick.workers.tokens import Tokens, tokens

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_in(tmp_path, monkeypatch)
    with killick.open("killick.db"):
        pass


def test_a_token_stands_alone_on_stdout_and_the_remark_beside_it(capsys: Capture) -> None:
    code, out, err = call(capsys, "token", "create", "ann", "--scope", "operator", "--expires", "30d", "--by", "root")
    assert code == 0
    text = out.removesuffix("\n")
    with killick.open("killick.db") as kd:
        made = Tokens(kd.runtime.engine).check(text, kd.runtime.clock.now_us())
    assert made is not None
    assert (made.name, made.scope, made.by) == ("ann", "operator", "root")
    assert "ann, operator (looks and acts on runs), until " in err
    assert "the only time that it is shown" in err
    assert text not in err


def test_a_token_goes_to_a_new_file_that_only_its_maker_may_read(capsys: Capture) -> None:
    code, out, err = call(capsys, "token", "create", "ann", "--out", "ann.token")
    assert (code, out) == (0, "")
    file = Path("ann.token")
    assert file.stat().st_mode & 0o777 == 0o600
    with killick.open("killick.db") as kd:
        made = Tokens(kd.runtime.engine).check(file.read_text().strip(), kd.runtime.clock.now_us())
    assert made is not None
    assert file.read_text().strip() not in err
    code, out, err = call(capsys, "token", "create", "bob", "--out", "ann.token")
    assert (code, out) == (2, "")
    assert "ann.token: is there already" in err
    with killick.open("killick.db") as kd:
        assert [each.name for each in tokens(kd.runtime.engine)] == ["ann"], "no token is lost with its file"
    code, out, err = call(capsys, "token", "create", "cid", "--out", "cid.token", "--json")
    assert code == 0
    assert Path("cid.token").read_text().strip() not in out


def test_a_list_says_whose_each_is_and_whether_it_holds_and_shows_no_secret(capsys: Capture) -> None:
    _, text, _ = call(capsys, "token", "create", "ann")
    call(capsys, "token", "create", "bob", "--scope", "admin")
    call(capsys, "token", "revoke", "bob", "--by", "root")
    _, out, _ = call(capsys, "token")
    first, second = out.splitlines()
    assert "ann  viewer    until it is revoked" in first
    assert "bob  admin     revoked by root" in second
    assert text.strip() not in out
    _, out, _ = call(capsys, "token", "list", "--json")
    told = json.loads(out)
    assert [(each["name"], each["holds"]) for each in told] == [("ann", True), ("bob", False)]
    assert "hash" not in told[0]


def test_no_tokens_is_a_remark_with_the_next_move(capsys: Capture) -> None:
    code, out, err = call(capsys, "token", "list")
    assert (code, out) == (0, "")
    assert "`killick token create NAME`" in err


def test_a_token_is_revoked_by_name_or_id_and_why_is_on_record(capsys: Capture) -> None:
    call(capsys, "token", "create", "ann")
    with killick.open("killick.db") as kd:
        [made] = tokens(kd.runtime.engine)
    code, out, _ = call(capsys, "token", "revoke", made.id, "--because", "lost")
    assert (code, out) == (0, f"{made.id}  ann  revoked\n")
    with killick.open("killick.db") as kd:
        assert kd.runtime.log.data("killick:tokens", 3) == {"because": "lost"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("revoke", "nobody"), "nobody: no token in force has this id or name; `killick token list` lists them"),
        (("create", "ann", "--expires", "soon"), "'soon' is not a duration"),
        (("create", "ann", "--expires", "0s"), "would have expired already"),
        (("create", "ann", "--scope", "root"), "--scope"),
        (("create", " "), "is not a valid token name"),
        (("make", "ann"), "make"),
    ],
)
def test_what_is_mistyped_is_one_line_and_changes_nothing(capsys: Capture, words: tuple[str, ...], says: str) -> None:
    code, out, err = call(capsys, "token", *words)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1
    with killick.open("killick.db") as kd:
        assert tokens(kd.runtime.engine) == []
