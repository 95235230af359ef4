"""`fork`, `rewind` and `undo`: each says first what stays as it is, then does it, and says what next."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import pytest

import killick
from claims import Called, call, move_in, on_terminal, plain_environment
from killick.cli.main import main
from leasing import leased_by

Capture = pytest.CaptureFixture[str]

APP: Final = '''
"""An agent that pays bills."""

from pathlib import Path

import killick


def said(line: str) -> None:
    with Path("bank.txt").open("a") as book:
        book.write(line + "\\n")


def refund(effect: killick.Effect) -> str:
    if Path("line-is-dead").exists():
        raise OSError("the line is dead")
    said(f"refund {effect.result['receipt']}")
    return f"refunded {effect.result['receipt']}"


@killick.tool(effect="reads")
async def bill(number: int) -> dict:
    return {"payee": "b-17", "amount": 1250}


@killick.tool(effect="reads")
async def rate(currency: str) -> dict:
    return {"status": "up", "rate": 2}


@killick.tool(compensate=refund, identity=("to",), consumes=("token",))
async def pay(to: str, amount: int, token: str) -> dict:
    said(f"pay {amount} to {to}")
    return {"receipt": "PA-2211", "amount": amount}


@killick.tool
async def mail(to: str, text: str) -> str:
    said("mail")
    return "M-77012"


@killick.agent
async def payer(run: killick.Run, number: int) -> str:
    due = await run.call(bill, number)
    today = await run.call(rate, "EUR")
    if today["status"] == "down":
        return "not paid: no rate today"
    answer = await run.ask(f"Pay {due['amount']}?", to="managers")
    if not answer.approved:
        return "rejected"
    note = await run.wait("note")
    paid = await run.call(pay, due["payee"], due["amount"] * today["rate"], getattr(run.context, "token", "T-1"))
    await run.update(receipt=paid["receipt"])
    sent = await run.call(mail, "ann@example.org", f"Paid, see {paid['receipt']}: {note}")
    await run.decided("Is anything left?", "no", options=["yes", "no"], because=f"mail {sent} is out")
    return f"paid, {paid['receipt']}"


@killick.agent
async def lasting(run: killick.Run, count: int) -> int:
    if count < 2:
        await run.renew(count + 1)
    return count


@killick.agent
async def reader(run: killick.Run, count: int) -> int:
    await run.call(bill, count)
    await run.call(rate, "EUR")
    return count
'''


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where a bill was paid, by the run bill_17."""
    move_in(tmp_path, monkeypatch)
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('[tool.killick]\napp = "app.py"\n', encoding="utf-8")
    assert main(["run", "app.py:payer", "-q", "-i", "17", "--id", "bill_17"]) == 3
    assert main(["answer", "bill_17", "approve", "--by", "mia"]) == 0
    assert main(["message", "send", "bill_17", "note", "thanks"]) == 0
    assert main(["run", "--id", "bill_17", "-q"]) == 0
    return tmp_path


def bank() -> list[str]:
    return Path("bank.txt").read_text(encoding="utf-8").splitlines()


def status(run: str) -> str:
    with killick.open("killick.db") as kd:
        return kd.info(run).status


# mistakes -----------------------------------------------------------------------------------------


@pytest.mark.gate(9)
@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["time", "fork", "bill17"], "bill17: no such run in killick.db; did you mean bill_17?"),
        (["time", "fork", "bill_17", "--at", "9:after"], "bill_17: there is no step 9; it has step 1 to 7"),
        (["time", "fork", "bill_17", "--at", "soon"], "'soon' is not a position; write 6:before"),
        (["time", "fork", "bill_17", "--output", "2={status: down}"], "2: is not JSON"),
        (["time", "fork", "bill_17", "--output", "2"], "'2': no name and value; write it as name=value"),
        (["time", "fork", "bill_17", "--output", "=1"], "'=1': no name and value"),
        (["time", "fork", "bill_17", "--set", "route"], "'route': no name and value; write it as name=value"),
        (["time", "fork", "bill_17", "--input", "{"], "--input: is not JSON"),
        (["time", "fork", "bill_17", "--input", "many"], "input: expected int, got str; payer takes int"),
        (["time", "fork", "bill_17", "--output", "2=[1]"], "step 2 (rate)"),
        (["time", "fork", "bill_17", "--at", "1:after", "--output", "2={}"], "fork at 2:after to change it"),
        (["time", "fork", "bill_17", "--at", "5:after", "--output", "2={}"], "fork at 2:after to change it"),
        (["time", "fork", "bill_17", "--id", "bill_17"], "bill_17"),
        (["time", "fork", "bill_17", "--effects", "some"], "--effects: 'some' is not one of"),
        (["time", "rewind", "bill17", "--to", "1"], "bill17: no such run in killick.db; did you mean bill_17?"),
        (["time", "rewind", "bill_17"], "rewind: needs"),
        (["time", "rewind", "bill_17", "--to", "9:before"], "bill_17: there is no step 9; it has step 1 to 7"),
        (["time", "rewind", "bill_17", "--to", "4~3:before"], "there is no generation 3"),
        (
            ["time", "rewind", "bill_17", "--to", "5:before"],
            "There is no terminal to confirm at; add --yes, or --dry-run to only look",
        ),
        (["time", "rewind", "old", "--to", "start"], "old: continues as old+2; rewind that, or fork this one"),
        (["time", "undo", "bill17", "--step", "5"], "bill17: no such run in killick.db; did you mean bill_17?"),
        (["time", "undo", "bill_17"], "undo: needs"),
        (["time", "undo", "bill_17", "--step", "9"], "bill_17: there is no step 9; it has step 1 to 7"),
        (
            ["time", "undo", "bill_17", "--step", "1"],
            "step 1 cannot be undone: it did nothing to the world (bill reads)",
        ),
        (
            ["time", "undo", "bill_17", "--step", "3"],
            "step 3 cannot be undone: it did nothing to the world (ask is a wait)",
        ),
        (
            ["time", "undo", "bill_17", "--step", "6"],
            "step 6 cannot be undone: mail has no compensate=; undo it by hand, then --settled happened",
        ),
        (
            ["time", "undo", "bill_17", "--step", "5"],
            "There is no terminal to confirm at; add --yes, or --dry-run to only look",
        ),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(office: Path, capsys: Capture, args: list[str], line: str) -> None:
    main(["run", "app.py:lasting", "-q", "-i", "1", "--id", "old"])
    with killick.open("killick.db") as kd:
        before = {each.id: kd.runtime.log.head(each.id).seq for each in kd.list()}
    found = call(capsys, *args)
    assert found.code == 2
    assert found.err.startswith("killick: ")
    assert found.err.count("\n") == 1
    assert line in found.err
    with killick.open("killick.db") as kd:
        assert {each.id: kd.runtime.log.head(each.id).seq for each in kd.list()} == before
    assert bank() == ["pay 2500 to b-17", "mail"]


def test_an_app_that_does_not_know_the_tool_is_asked_for(office: Path, capsys: Capture) -> None:
    (office / "pyproject.toml").unlink()
    for name in ("pay", "mail"):
        killick.definitions.tools.TOOLS.pop(name)
    found = call(capsys, "time", "undo", "bill_17", "--step", "5")
    assert found.err == (
        "killick: bill_17: step 5 cannot be undone: its tool pay is not declared here; name its module with --app\n"
    )


# fork ---------------------------------------------------------------------------------------------


def test_a_fork_says_what_it_shares_what_differs_and_how_to_go_on(office: Path, capsys: Capture) -> None:
    found = call(capsys, "time", "fork", "bill_17", "--at", "4:after", "--set", "limit=9", "--because", "what if?")
    assert found.code == 0
    assert found.out.splitlines() == [
        "bill_17-fork branches off bill_17 at 4:after @13",
        "  shares      steps 1 to 4, nothing is copied",
        "  differs     context limit=9",
        "  world       adopts the effects of bill_17 (5 pay, 6 mail); a new effect needs a person's approval first",
        "  next        killick run --id bill_17-fork",
        "              killick time diff bill_17 bill_17-fork",
    ]
    assert status("bill_17-fork") == "queued"
    assert call(capsys, "time", "fork", "bill_17", "--at", "start", "--effects", "none").out.splitlines()[:4] == [
        "bill_17-fork-2 branches off bill_17 at start @1",
        "  shares      its start, nothing is copied",
        "  differs     in nothing",
        "  world       adopts the effects of bill_17 (5 pay, 6 mail); a new effect fails its step",
    ]


def test_another_output_forks_right_after_its_step_and_says_what_to_type(office: Path, capsys: Capture) -> None:
    found = call(capsys, "time", "fork", "bill_17", "--output", '2={"status": "down", "rate": 0}')
    assert found.code == 0
    assert found.out.splitlines() == [
        "bill_17-fork branches off bill_17 at 2:after @6",
        "  shares      steps 1 to 2, nothing is copied",
        '  differs     2 returned {"status":"down","rate":0}',
        "  world       adopts the effects of bill_17 (5 pay, 6 mail); a new effect needs a person's approval first",
        "  next        killick run --id bill_17-fork",
        "              killick time diff bill_17 bill_17-fork",
    ]
    assert call(capsys, "run", "--id", "bill_17-fork").out == "not paid: no rate today\n"
    assert bank() == ["pay 2500 to b-17", "mail"]
    assert status("bill_17") == "completed"


def test_a_fork_pays_once_with_its_parent(office: Path, capsys: Capture) -> None:
    assert call(capsys, "time", "fork", "bill_17", "--at", "4:after", "--id", "other").code == 0
    assert call(capsys, "run", "--id", "other").code == 0
    assert bank() == ["pay 2500 to b-17", "mail"]


def test_a_fork_can_have_another_input_and_a_program_reads_it_as_json(office: Path, capsys: Capture) -> None:
    main(["run", "app.py:reader", "-q", "-i", "1", "--id", "read"])
    found = call(capsys, "time", "fork", "read", "--at", "start", "--input", "7", "--model", "m-2", "--json")
    told = json.loads(found.out)
    assert (found.code, told["run"], told["parent"], told["at"], told["status"]) == (
        0, "read-fork", "read", "start", "queued",
    )  # fmt: skip
    assert (told["generation"], told["effects"]) == (1, "recorded")
    assert [(each["what"], each["value"]) for each in told["conditions"]] == [
        ("input", 7),
        ("model", "m-2"),
        ("effects", "recorded"),
    ]
    with killick.open("killick.db") as kd:
        assert kd.state("read-fork").input == 7


# rewind -------------------------------------------------------------------------------------------

LEAVES_3: Final = [
    "bill_17 would be rewound to 3:before @6",
    "  rewinds     steps 3 to 7, which stay on record",
    '  stays done  step 5, pay(to="b-17", amount=2500, token="T-1") → {"receipt": "PA-2211", "amount": 2500}',
    '              step 6, mail(to="ann@example.org", text="Paid, see PA-2211: thanks") → M-77012',
    "              the same call again gets this result; nothing is done twice",
    "  consumed    token; stays so",
    "  returns     to the inbox: note, 1×",
    "  asks again  step 3: mia answered approve",
]


def test_a_rewind_says_first_what_it_does_not_take_back(office: Path, capsys: Capture) -> None:
    found = call(capsys, "time", "rewind", "bill_17", "--to", "3:before", "--dry-run")
    assert found == Called(0, "\n".join(LEAVES_3) + "\n", "nothing done; without --dry-run, rewind does this\n")
    assert status("bill_17") == "completed"
    found = call(capsys, "time", "rewind", "bill_17", "--to", "3:before", "--yes", "--because", "the wrong payee")
    assert found.out.splitlines() == [
        *LEAVES_3,
        "bill_17  rewound to 3:before",
        "  next        killick run --id bill_17",
    ]
    assert status("bill_17") == "queued"


def test_what_was_done_before_a_rewind_is_not_done_again(office: Path, capsys: Capture) -> None:
    assert call(capsys, "time", "rewind", "bill_17", "--to", "3:before", "--yes").code == 0
    assert call(capsys, "run", "--id", "bill_17", "-q").code == 3  # it asks again, and has its note back
    assert call(capsys, "answer", "bill_17", "approve").code == 0
    assert call(capsys, "run", "--id", "bill_17", "-q").out == "paid, PA-2211\n"
    assert bank() == ["pay 2500 to b-17", "mail"]


@pytest.mark.slow
def test_a_terminal_is_asked_before_effects_are_left_behind(office: Path) -> None:
    command = [sys.executable, "-m", "killick", "time", "rewind", "bill_17", "--to", "5:before"]
    question = "rewind bill_17 to 5:before? [y/N]:"
    code, seen = on_terminal(command, cwd=office, env=plain_environment(), types={question: "n\n"})
    assert (code, "killick: nothing done" in seen, status("bill_17")) == (1, True, "completed")
    code, seen = on_terminal(command, cwd=office, env=plain_environment(), types={question: "y\n"})
    assert (code, "rewound to 5:before" in seen, status("bill_17")) == (0, True, "queued")


def test_nobody_is_asked_where_nothing_was_done_to_the_world(office: Path, capsys: Capture) -> None:
    main(["run", "app.py:reader", "-q", "-i", "1", "--id", "read"])
    assert call(capsys, "time", "rewind", "read", "--to", "2:before").out.splitlines() == [
        "read would be rewound to 2:before @4",
        "  rewinds     step 2, which stays on record",
        "read  rewound to 2:before",
        "  next        killick run --id read",
    ]


def test_a_program_is_told_what_stays_as_json(office: Path, capsys: Capture) -> None:
    found = json.loads(call(capsys, "time", "rewind", "bill_17", "--to", "5:before", "--yes", "--json").out)
    assert (found["run"], found["to"], found["done"]) == ("bill_17", "5:before", "rewound to 5:before")
    assert [(effect["step"], effect["tool"], effect["status"]) for effect in found["effects"]] == [
        ("5", "pay", "happened"),
        ("6", "mail", "happened"),
    ]
    assert found["effects"][0]["arguments"] == {"to": "b-17", "amount": 2500, "token": "T-1"}
    assert (found["steps"], found["consumed"], found["messages"]) == (["5", "6", "7"], ["token"], [])


def test_a_run_that_somebody_is_at_is_taken_back_by_them(office: Path, capsys: Capture) -> None:
    with killick.open("killick.db") as holder:
        leased_by("somebody", holder.runtime.log, "bill_17")
        found = call(capsys, "time", "rewind", "bill_17", "--to", "5:before", "--yes")
        assert found.code == 0
        assert "will be rewound to 5:before, by somebody, which holds it" in found.out
        undo = call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes")
        assert undo.code == 4
        assert undo.err.count("\n") == 1


# undo ---------------------------------------------------------------------------------------------


def test_an_undo_says_what_it_undoes_then_undoes_it_and_says_what_came_of_it(office: Path, capsys: Capture) -> None:
    found = call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes", "--because", "paid twice")
    assert found.code == 0
    with killick.open("killick.db") as kd:
        key = kd.undoing("bill_17", "5").key
    assert found.out.splitlines() == [
        'bill_17 step 5: pay(to="b-17", amount=2500, token="T-1")',
        '  returned    {"receipt": "PA-2211", "amount": 2500}',
        f"  effect      happened  {key}",
        "  undone by   refund",
        "  consumed    token; stays so",
        "bill_17  undid step 5, pay",
        "  came to     refunded PA-2211",
        "  next        keep it, or rewind the run to before it:",
        "              killick time rewind bill_17 --to 5:before",
    ]
    assert bank() == ["pay 2500 to b-17", "mail", "refund PA-2211"]
    again = call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes")
    assert again == Called(2, "", "killick: bill_17: step 5 cannot be undone: it was undone already, by step 0.1\n")
    assert (
        "  undone      step 5, pay(" in call(capsys, "time", "rewind", "bill_17", "--to", "5:before", "--dry-run").out
    )


@pytest.mark.slow
def test_an_undo_asks_a_terminal_and_may_only_look(office: Path, capsys: Capture) -> None:
    assert "nothing done" in call(capsys, "time", "undo", "bill_17", "--step", "5", "--dry-run").err
    command = [sys.executable, "-m", "killick", "time", "undo", "bill_17", "--step", "5"]
    question = "undo step 5 of bill_17? [y/N]:"
    code, seen = on_terminal(command, cwd=office, env=plain_environment(), types={question: "n\n"})
    assert (code, "killick: nothing done" in seen, bank()) == (1, True, ["pay 2500 to b-17", "mail"])
    code, _ = on_terminal(command, cwd=office, env=plain_environment(), types={question: "y\n"})
    assert (code, bank()[-1]) == (0, "refund PA-2211")


def test_what_was_undone_by_hand_is_put_on_record(office: Path, capsys: Capture) -> None:
    found = call(capsys, "time", "undo", "bill_17", "--step", "6", "--yes", "--settled", "happened", "--by", "mia")
    assert (found.code, "step 6, mail, is undone by hand" in found.out) == (0, True)
    found = call(capsys, "time", "undo", "bill_17", "--step", "6", "--yes")
    assert "it was undone already, by step 0.1" in found.err
    assert bank() == ["pay 2500 to b-17", "mail"]


def test_an_undoing_that_is_lost_sight_of_is_settled_and_done_again(office: Path, capsys: Capture) -> None:
    (office / "line-is-dead").touch()
    lost = call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes")
    assert (lost.code, lost.err.count("\n")) == (1, 1)
    assert "undoing pay began and its outcome is not known (OSError: the line is dead)" in lost.err
    assert "--settled happened, or --settled not" in lost.err
    again = call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes")
    assert (again.code, again.out) == (2, "")
    assert (
        "undoing it began, as step 0.1, and whether that happened is not known; check, then say which it is"
        in again.err
    )
    (office / "line-is-dead").unlink()
    assert call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes", "--settled", "not").code == 0
    assert call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes").code == 0
    assert bank() == ["pay 2500 to b-17", "mail", "refund PA-2211"]


def test_a_program_is_told_of_an_undo_as_json(office: Path, capsys: Capture) -> None:
    found = json.loads(call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes", "--json").out)
    assert (found["tool"], found["status"], found["compensated_by"], found["done"]) == (
        "pay",
        "happened",
        "refund",
        "undid step 5, pay",
    )
    assert found["shared_by"] == []


def test_pay_undo_rewind_pay_is_charged_again_but_not_by_the_same_token(office: Path, capsys: Capture) -> None:
    assert call(capsys, "time", "undo", "bill_17", "--step", "5", "--yes").code == 0
    assert call(capsys, "time", "rewind", "bill_17", "--to", "5:before", "--yes").code == 0
    refused = call(capsys, "run", "--id", "bill_17", "-q")
    assert (refused.code, "token was claimed by bill_17" in refused.err) == (1, True)
    assert call(capsys, "time", "rewind", "bill_17", "--to", "4:before", "--yes").code == 0
    assert call(capsys, "edit", "set", "bill_17", "token=T-2").code == 0
    assert call(capsys, "run", "--id", "bill_17", "-q").out == "paid, PA-2211\n"
    assert bank() == ["pay 2500 to b-17", "mail", "refund PA-2211", "pay 2500 to b-17"]
