"""`killick find`: one block a hit, newest first, and one line for every mistake."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.cli.main import main
from killick.store import SqliteStore

LONG = "The customer has been with us for eleven years and the sum is below what the policy asks about. " * 6


async def take_back(effect: killick.Effect) -> str:
    return "back"


@killick.tool(compensate=take_back)
async def refund(order: str, amount: float) -> str:
    return f"refunded {amount}"


@killick.tool(effect="reads")
async def look_up(order: str) -> dict[str, Any]:
    raise LookupError(f"no order {order} in the archive")


@killick.agent
async def desk(run: killick.Run, order: str) -> str:
    await run.decided("What to do?", "refund", options=["refund", "refuse"], because=LONG, by="model")
    await run.call(refund, order=order, amount=12.5)
    with contextlib.suppress(killick.StepFailed):
        await run.call(look_up, order=order)
    answer = await run.ask(f"Close order {order}?", to=["managers"])
    return answer.kind


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A store with three runs: one ended, one waits, one was cancelled and undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("KILLICK_STORE", raising=False)
    with killick.open("killick.db") as kd:
        for order in ("17", "18", "A-19"):
            with pytest.raises(killick.RunWaiting):
                kd.run(desk, order, id=f"order_{order}")
        kd.answer("order_17", "approve", by="ann", comment="all papers are here")
        kd.advance("order_17")
        kd.cancel("order_A-19", compensate=True)
        kd.advance("order_A-19")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["find", *words])
        out, err = capsys.readouterr()
        assert all(len(line) <= 80 for line in out.splitlines()) or "--json" in words, out
        return code, out, err

    return run


def test_a_call_is_found_by_its_arguments_as_people_write_them(cli: Cli) -> None:
    code, out, _ = cli("calls", "refund", "--where", "order=17", "--where", "amount=12.50")
    assert code == 0
    first, what, output = out.splitlines()
    assert first.split()[2:] == ["order_17", "step", "2", "desk"]
    assert what == '  ✓ refund(order="17", amount=12.5)'
    assert output == "    → refunded 12.5"
    assert cli("calls", "--where", "order=A-19")[1].count("order_A-19") == 2


def test_decisions_show_their_reason_cut_to_a_few_lines(cli: Cli) -> None:
    _, out, _ = cli("decisions", "--choice", "REFUND", "--because", "eleven years", "--limit", "1")
    lines = out.splitlines()
    assert lines[1] == "  What to do? → refund  by model"
    assert lines[2].startswith("    because: The customer has been with us")
    assert lines[4].endswith("…")
    assert lines[5] == "    of: refund | refuse"


def test_failures_show_what_was_tried_and_what_it_said(cli: Cli) -> None:
    _, out, _ = cli("failures", "lookuperror", "--tool", "look_up", "--run", "order_18")
    assert "  ✗ look_up, attempt 1: LookupError" in out
    assert "    no order 18 in the archive" in out


def test_effects_are_told_apart_by_whether_they_stand(cli: Cli) -> None:
    assert cli("effects", "--undone")[1].splitlines()[1] == '  ↶ refund(order="A-19", amount=12.5)  undone'
    standing = cli("effects", "refund", "--standing")[1]
    assert standing.count("stands") == 2
    assert "order_A-19" not in standing
    assert cli("effects", "--in-doubt")[:2] == (0, "no effects found\n")


def test_answers_show_who_and_what_they_said(cli: Cli) -> None:
    _, out, _ = cli("answers", "--by", "Ann", "--verb", "approve", "--to", "managers")
    assert out.splitlines()[1:] == [
        "  ann: approve", "    said: all papers are here", "    asked of managers: Close order 17?",
    ]  # fmt: skip


def test_the_newest_come_first_and_what_is_left_out_is_told_aside(cli: Cli) -> None:
    _, out, err = cli("decisions", "--limit", "2")
    runs = [line.split()[2] for line in out.splitlines() if not line.startswith(" ")]
    assert runs == ["order_A-19", "order_18"]
    assert err == "the newest 2 decisions; --limit N or --all shows more\n"
    _, out, err = cli("decisions", "--all", "--agent", "desk", "--since", "1h")
    assert (out.count("What to do?"), err) == (3, "")


def test_nothing_found_is_no_error(cli: Cli) -> None:
    for words in (["calls", "--until", "2d"], ["answers", "--by", "zed"], ["decisions", "--agent", "nobody"]):
        assert cli(*words) == (0, f"no {words[0]} found\n", "")


def test_json_says_all_there_is(cli: Cli) -> None:
    _, out, _ = cli("decisions", "--json", "--limit", "1")
    told = json.loads(out)
    assert (told["more"], told["unread"], told["scanned"]) == (True, [], None)
    [hit] = told["found"]
    assert (hit["kind"], hit["run"], hit["step"], hit["because"]) == ("decision", "order_A-19", "1", LONG)
    assert json.loads(cli("answers", "--by", "zed", "--json")[1])["found"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["failuers"], "killick: failuers: killick find has no such command; did you mean failures?"),
        (["wibble"], "killick: wibble: killick find has no such command; it has answers, calls, decisions, effects,"),
        (["calls", "--where", "to"], "killick: 'to': no name and value; write it as name=value"),
        (["calls", "--run", "order_1"], "killick: order_1: no such run in killick.db; did you mean order_1"),
        (["calls", "--since", "tea"], "killick: 'tea'"),
        (["calls", "--limit", "0"], "killick: --limit: 0 is not in the range x>=1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(cli: Cli, words: list[str], said: str) -> None:
    code, out, err = cli(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(said)


def test_an_index_that_cannot_be_written_is_done_without_and_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SqliteStore, items: object) -> None:
        raise killick.errors.StoreReadOnly(self.place)

    monkeypatch.setattr(SqliteStore, "index_terms", refuse)
    code, out, err = cli("calls", "refund", "--where", "order=18")
    assert (code, out.count("order_18")) == (0, 1)
    assert err.startswith("read every log, since the index cannot be written: ")


def test_help_shows_what_may_be_asked(cli: Cli) -> None:
    assert "killick find calls send_email --where to=ada@x.org" in cli("calls", "--help")[1]
    lines = [line.split()[0] for line in cli("effects", "--help")[1].splitlines() if line.startswith("  --")]
    assert lines[:4] == ["--where", "--standing", "--undone", "--in-doubt"]
