"""What was erased reads as such: no hash, no Python name, and no verb that was not given."""

from __future__ import annotations

from pathlib import Path

import pytest

import killick
from claims import call, move_in
from killick.cli.main import main

Capture = pytest.CaptureFixture[str]


@killick.agent(name="erased_asks")
async def asks(run: killick.Run) -> str:
    return (await run.ask("When?", to="mia", options=["now", "later"])).kind


def test_an_erased_question_and_its_answer_print_as_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    move_in(tmp_path, monkeypatch)
    with killick.open("killick.db") as kd:
        kd.start(asks, id="r")
        kd.advance("r")
        kd.answer("r", "respond", value="now", by="mia", comment="for the record")
        kd.advance("r")
    assert main(["store", "erase", "r", "--step", "1", "--reason", "asked for", "--yes"]) == 0
    for words in (("show", "r"), ("show", "r", "--why", "1"), ("find", "answers")):
        out = call(capsys, *words).out
        assert "(erased)" in out
        for said in ("Erased(", "$erased", "None", "now", "for the record"):
            assert said not in out
