"""`killick show --window`: what fills a run's window, what left and what it saved, on a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.cli.main import main
from killick.cli.window import share
from sessions import coder, without_models


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("window") / "killick.db"
    with killick.open(str(path)) as kd:
        kd.run(coder, {"provider": "anthropic", "calls": 60, "budget": 4_000}, id="held")
        kd.run(coder, {"provider": "openai", "calls": 12}, id="short")
        kd.run(without_models, id="none")
    return path


@pytest.fixture(autouse=True)
def here(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    monkeypatch.delenv("KILLICK_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    def shown(*args: str) -> str:
        assert main(["show", *args]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return shown


def test_a_held_window_says_what_it_saved(show: Any) -> None:
    told = show("held", "--window")
    assert re.search(r"^held  the model's input at step \d+, call 60 of 60$", told, re.MULTILINE)
    assert re.search(r"^  [\d,]+ of 4,000 tokens in \d+ messages$", told, re.MULTILINE)
    assert re.search(r"^  file reads +\d+ +[\d,]+ +\d+ %  [█▏▎▍▌▋▊▉]+$", told, re.MULTILINE)
    assert re.search(r"^  tombstones +\d+ +[\d,]+ +\d+ %  ", told, re.MULTILINE)
    assert re.search(r"^instead  [\d,]+ tokens without the window: \d+ % fewer$", told, re.MULTILINE)
    assert re.search(r"^left     \d+ pages in \d+ batches; [\d,]+ tokens fewer at the last call$", told, re.MULTILINE)
    assert re.search(r"^back     \d+ faults \(.*\d+ recalled", told, re.MULTILINE)
    calls = re.findall(r"^ +(\d+)  \d+ +[\d,]+ +[\d,]+ +[\d,]+  [█▏▎▍▌▋▊▉]+", told, re.MULTILINE)
    assert (len(calls), calls[0], calls[-1]) == (24, "37", "60")
    assert told.endswith("36 earlier calls; killick show held --window --all lists them\n")
    assert all(len(line) <= 100 for line in told.splitlines())


def test_a_short_run_has_a_line_a_call(show: Any) -> None:
    told = show("short", "--window")
    lines = told.partition("CALL")[2].splitlines()[1:13]
    assert [line.split()[0] for line in lines] == [str(number) for number in range(1, 13)]
    assert "WITHOUT" not in told
    assert "left     nothing: no window was used; killick.loop(…, budget=…) or killick.Window keeps one" in told
    assert "instead" not in told


def test_all_lists_every_call_of_a_long_run(show: Any) -> None:
    told = show("held", "--window", "--all")
    assert len(re.findall(r"^ +\d+  \d+ +[\d,]+ +[\d,]+ +[\d,]+  [█▏▎▍▌▋▊▉]", told, re.MULTILINE)) >= 58
    assert "earlier calls" not in told


def test_the_page_of_a_run_with_models_leads_to_it(show: Any) -> None:
    assert "  --window" in show("short").splitlines()[-1]
    assert "--window" not in show("none")


def test_it_is_told_as_it_was_at_any_place(show: Any) -> None:
    told = show("held", "--window", "--at", "10")
    assert re.match(r"held  the model's input at step \d+, call (\d+) of \1\n", told)


def test_a_program_gets_the_document(show: Any) -> None:
    found = json.loads(show("held", "--window", "--json"))
    assert (found["version"], found["run"], len(found["calls"])) == (1, "held", 60)
    assert found["sent"] < found["without"]
    assert {fill["kind"] for fill in found["fills"]} >= {"files", "left", "system"}
    assert found["evictions"][0]["pages"][0].keys() == {"page", "kind", "what", "tokens", "why"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["none", "--window"],
            "none: called no model, so there is no window; killick show none shows its steps",
        ),
        (["held", "--window", "--log"], "--log and --window do not go together; choose one"),
    ],
    ids=["none", "two"],
)
def test_what_cannot_be_shown_is_told_in_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *arguments]) == 2
    assert capsys.readouterr().err == f"killick: {told}\n"


def test_shares_are_never_rounded_away() -> None:
    assert (share(0, 10), share(1, 1_000), share(1, 3), share(5, 0)) == ("0 %", "<1 %", "33 %", "0 %")
