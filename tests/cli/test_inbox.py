"""`killick inbox`, `killick answer` and `killick message say`: what waits for people, and what they say to it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import killick
from claims import call, move_in, on_terminal, open_office, plain_environment
from killick.cli.main import main
from killick.client import inbox
from killick.client.inbox import urgency
from killick.engine.views import Wait
from killick.model import events as e

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    move_in(tmp_path, monkeypatch)
    open_office()
    return tmp_path


# inbox --------------------------------------------------------------------------------------------


def test_the_inbox_says_what_is_asked_of_whom_until_when_and_what_to_type(office: Path, capsys: Capture) -> None:
    found = call(capsys, "inbox")
    assert found.code == 0
    first, second = found.out.strip().split("\n\n")
    lines = first.splitlines()
    assert lines[0] == "claim_17:9  Pay 80 to Ann?"
    assert lines[1].startswith("  asked of managers ")
    assert "; until 20" in lines[1]
    assert lines[2] == "  killick answer claim_17:9 approve  (or reject, edit --value VALUE, respond --value VALUE)"
    assert second.startswith("claim_18:9  ")


def test_the_most_urgent_comes_first() -> None:
    def wait(name: str, deadline: int | None, since: int) -> Wait:
        return Wait(
            id=name, run=name, step="1", waits_for="answer", name="ask", prompt="?", to=(), deadline_us=deadline,
            since_us=since,
        )  # fmt: skip

    waits = [wait("young", None, 9), wait("old", None, 1), wait("later", 8, 2), wait("soon", 5, 7)]
    assert [each.id for each in sorted(waits, key=urgency)] == ["soon", "later", "old", "young"]


def test_the_inbox_of_one_group_holds_what_is_asked_of_it(office: Path, capsys: Capture) -> None:
    main(["run", "app.py:choose", "--id", "c1"])
    assert [wait["id"] for wait in json.loads(call(capsys, "inbox", "--to", "managers", "--json").out)] == [
        "claim_17:9",
        "claim_18:9",
    ]
    found = call(capsys, "inbox", "--to", "nobody")
    assert (found.code, found.out, found.err) == (0, "", "nothing waits for nobody\n")


def test_options_are_commands_of_their_own(office: Path, capsys: Capture) -> None:
    main(["run", "app.py:choose", "--id", "c1"])
    waits = {wait["id"]: wait for wait in json.loads(call(capsys, "inbox", "--json").out)}
    assert waits["c1:1"]["commands"][:2] == [
        "killick answer c1:1 respond --value left",
        "killick answer c1:1 respond --value right",
    ]


def test_what_is_in_doubt_names_the_call_and_takes_other_answers(office: Path, capsys: Capture) -> None:
    main(["run", "app.py:doubt", "--id", "d1"])
    found = call(capsys, "inbox").out
    assert "lose() was started and its outcome is not known (OSError: the line went dead). Did it happen?" in found
    assert "killick answer d1:1 happened  (or happened --value VALUE, not, stop)" in found


def test_what_is_in_doubt_names_the_key_and_suggests_an_answer_that_is_taken(office: Path, capsys: Capture) -> None:
    Path("bank.py").write_text(
        "import killick\n"
        "@killick.tool\n"
        "async def transfer(amount: int) -> str:\n"
        "    raise OSError('gone')\n"
        "@killick.agent\n"
        "async def pays(run: killick.Run) -> str:\n"
        "    return await run.call(transfer, 5)\n"
    )
    main(["run", "bank.py:pays", "--id", "p1"])
    capsys.readouterr()
    with killick.open() as kd:
        [started] = [each.event for each in kd.events("p1") if isinstance(each.event, e.StepStarted)]
    for command in (["inbox"], ["show", "p1"], ["inbox", "--json"], ["show", "p1", "--json"]):
        assert started.key in call(capsys, *command).out, command
    assert "killick answer p1:1 happened --value VALUE  (or not, stop)" in call(capsys, "inbox").out
    found = call(capsys, "answer", "p1:1", "happened")
    assert (found.code, "'happened' needs a value" in found.err) == (2, True)
    assert main(["answer", "p1:1", "happened", "--value", "receipt 7"]) == 0
    assert call(capsys, "run", "bank.py:pays", "--id", "p1").out == "receipt 7\n"


def test_a_limit_says_that_there_are_more_and_logs_beyond_it_are_not_read(
    office: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killick.open("killick.db") as kd:
        kd.fork("claim_17", at="head", id="claim_20")
    read, reading = list[str](), inbox.readable
    monkeypatch.setattr(
        inbox, "readable", lambda log, row, **more: (read.append(row.run), reading(log, row, **more))[1]
    )
    found = call(capsys, "inbox", "--limit", "1")
    assert found.out.count("killick answer") == 1
    assert "there are more; --limit 10 shows up to so many" in found.err
    assert len(read) == 2


def test_what_is_answered_leaves_the_inbox_before_the_run_goes_on(office: Path, capsys: Capture) -> None:
    main(["answer", "claim_17", "approve"])
    found = call(capsys, "inbox")
    assert "claim_17" not in found.out
    assert "claim_17: answered; to continue: killick run app.py:review --id claim_17, or start a worker" in found.err


# answer -------------------------------------------------------------------------------------------


def test_an_answer_is_on_record_with_who_and_why_and_says_what_comes_next(office: Path, capsys: Capture) -> None:
    found = call(capsys, "answer", "claim_17", "reject", "--by", "mia", "--comment", "no receipt")
    assert (found.code, found.out) == (0, "claim_17:9  reject\n")
    assert found.err == "to continue: killick run app.py:review --id claim_17, or start a worker\n"
    assert call(capsys, "run", "app.py:review", "--id", "claim_17").out == "not paid: no receipt\n"


def test_a_second_answer_is_told_who_was_first(office: Path, capsys: Capture) -> None:
    main(["answer", "claim_17", "approve", "--by", "mia"])
    for _ in range(2):  # before the run takes the first answer, and after
        found = call(capsys, "answer", "claim_17:9", "reject", "--by", "max")
        assert (found.code, found.out) == (2, "")
        assert found.err.startswith("killick: claim_17:9: was answered by mia at 20")
        main(["run", "app.py:review", "--id", "claim_17"])


def test_the_run_is_not_enough_where_several_waits_are_open(office: Path, capsys: Capture) -> None:
    (office / "two.py").write_text(
        "import killick\n@killick.agent\nasync def two(run: killick.Run) -> str:\n"
        "    await run.gather(run.ask('a?'), run.ask('b?'))\n    return 'done'\n",
        encoding="utf-8",
    )
    main(["run", "two.py", "--id", "t1"])
    found = call(capsys, "answer", "t1", "approve")
    assert found.code == 2
    assert "several waits are open; name one of t1:1.1.1, t1:1.2.1" in found.err


@pytest.mark.parametrize(("given", "step"), [("left", "1"), ('"left"', "1")])
def test_a_value_is_json_or_text(office: Path, capsys: Capture, given: str, step: str) -> None:
    main(["run", "app.py:choose", "--id", "c1"])
    assert main(["answer", "c1", "respond", "--value", given]) == 0
    main(["run", "app.py:choose", "--id", "c1"])
    found = call(capsys, "answer", "c1", "respond", "--value", "far")
    assert (found.code, "'far' is not of type integer" in found.err) == (2, True)
    assert main(["answer", "c1", "respond", "--value", "3"]) == 0
    assert call(capsys, "run", "app.py:choose", "--id", "c1").out == "left 3\n"


def test_what_is_in_doubt_is_settled(office: Path, capsys: Capture) -> None:
    main(["run", "app.py:doubt", "--id", "d1"])
    assert main(["answer", "d1", "happened"]) == 0
    assert call(capsys, "run", "app.py:doubt", "--id", "d1").out == "known\n"


def test_json_tells_who_answered_what(office: Path, capsys: Capture) -> None:
    found = json.loads(call(capsys, "answer", "claim_17", "approve", "--by", "mia", "--json").out)
    assert found == {
        "run": "claim_17", "wait": "claim_17:9", "answer": "approve", "by": "mia",
        "next": "to continue: killick run app.py:review --id claim_17, or start a worker",
    }  # fmt: skip


# approvals ----------------------------------------------------------------------------------------


@pytest.fixture
def refund(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A refund to which two managers have to agree."""
    move_in(tmp_path, monkeypatch)
    assert main(["run", "app.py:give_back", "-q", "-i", "400", "--id", "r1"]) == 3
    return tmp_path


def goes_on(capsys: Capture) -> str:
    return call(capsys, "run", "app.py:give_back", "--id", "r1", "-q").out


def test_the_inbox_says_which_call_why_of_whom_and_how_many_agreed(refund: Path, capsys: Capture) -> None:
    lines = call(capsys, "inbox").out.splitlines()
    assert lines[0] == 'r1:1  refund(to="Ann", amount=400, note=null)'
    assert lines[1] == "  amount is 400; at most 100 is allowed (rule large sums)"
    assert lines[2].startswith("  asked of managers (max, mia, moe) ")
    assert lines[3].startswith("  0 of 2 approved; until 20")
    assert lines[4] == "  killick answer r1:1 approve  (or reject, edit --set amount=100, respond --value VALUE)"
    main(["answer", "r1", "approve", "--by", "mia"])
    assert call(capsys, "inbox").out.splitlines()[3].startswith("  1 of 2 approved (mia); until 20")
    [wait] = json.loads(call(capsys, "inbox", "--to", "moe", "--json").out)
    assert (wait["need"], wait["approved_by"], wait["rule"], wait["may"]) == (
        2,
        ["mia"],
        "large sums",
        ["max", "mia", "moe"],
    )


def test_one_of_two_who_agrees_is_told_who_has_to_agree_yet(refund: Path, capsys: Capture) -> None:
    found = call(capsys, "answer", "r1", "approve", "--by", "mia")
    assert (found.code, found.out) == (
        0,
        'r1:1  approve refund(to="Ann", amount=400, note=null): 1 of 2 approved (mia)\n',
    )
    assert found.err == "1 more of max or moe has to agree; the votes are kept until then\n"
    again = call(capsys, "answer", "r1", "approve", "--by", "mia")
    assert (again.code, again.out) == (2, "")
    assert again.err.startswith("killick: r1:1: mia agreed already; 1 of 2")
    found = call(capsys, "answer", "r1", "approve", "--by", "max")
    assert found.out == 'r1:1  approve refund(to="Ann", amount=400, note=null): 2 of 2 approved (mia, max)\n'
    assert found.err.startswith("to continue: ")
    assert goes_on(capsys) == "gave 400 back to Ann\n"


def test_the_agreement_so_far_is_data_too(refund: Path, capsys: Capture) -> None:
    told = json.loads(call(capsys, "answer", "r1", "approve", "--by", "mia", "--json").out)
    assert (told["answer"], told["agreed"]) == ("approve", ["mia"])


def test_an_edit_names_the_arguments_that_change_and_is_typed_by_the_call(refund: Path, capsys: Capture) -> None:
    edited = ("answer", "r1", "edit", "--by", "mia")
    found = call(capsys, *edited, "--set", "amount=90", "--set", "to=42", "--set", "note=null")
    assert found.out == 'r1:1  edit refund(to="Ann", amount=400, note=null) with amount=90, to="42", note=null\n'
    assert goes_on(capsys) == "gave 90 back to 42\n"


def test_an_edit_can_be_json(refund: Path, capsys: Capture) -> None:
    assert main(["answer", "r1", "edit", "--by", "mia", "--value", '{"amount": 50}']) == 0
    assert goes_on(capsys) == "gave 50 back to Ann\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["edit"], "'edit' needs a value; as in --set amount=100"),
        (["edit", "--set", "amount=much"], 'amount="much" does not fit; refund takes amount as integer'),
        (["edit", "--set", "amont=1"], "'amont' is not an argument of refund; it has to, amount, note"),
        (["edit", "--set", "amount"], "'amount' is not name=value; write it as amount=100"),
        (["edit", "--value", '{"amount": "x"}'], 'amount="x" does not fit; refund takes amount as integer'),
        (["edit", "--value", "5"], "an edit gives arguments by name, as in amount=100"),
        (["edit", "--value", "{}", "--set", "amount=1"], "--value and --set do not go together; choose one"),
        (["approve", "--set", "amount=1"], "--set goes with edit"),
        (["happened"], "'happened' is not an answer to this; give one of approve, reject, edit, respond"),
        (["approve", "--by", "zoe"], "zoe may not answer this; it is asked of max, mia, moe; --by says who answers"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(refund: Path, capsys: Capture, args: list[str], says: str) -> None:
    found = call(capsys, "answer", "r1", *args, *([] if "--by" in args else ["--by", "mia"]))
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("killick: r1")
    assert says in found.err
    assert found.err.count("\n") == 1
    with killick.open("killick.db") as kd:
        assert kd.runtime.store.messages("r1") == []


def test_what_was_passed_on_says_from_whom(refund: Path, capsys: Capture) -> None:
    clock = killick.clock.LeapingClock()
    with killick.open("killick.db") as now:
        clock.advance((now.runtime.clock.now_us() - clock.now_us()) / 1_000_000 + 73 * 3600)
    with killick.open("killick.db", clock=clock) as kd:
        kd.advance("r1")
    lines = call(capsys, "inbox").out.splitlines()
    assert re.fullmatch(r"  asked of directors \(dan, dora\) .*, escalated from managers", lines[2]), lines
    assert call(capsys, "answer", "r1", "approve", "--by", "mia").code == 2
    shown = call(capsys, "show", "r1").out
    assert "escalated from managers\n          0 of 2 approved; until" in shown
    assert "asked managers by rule large sums: no answer in time" in shown


@pytest.mark.slow
def test_a_terminal_asks_who_may_answer_and_takes_an_edit_by_name(refund: Path) -> None:
    me = [sys.executable, "-m", "killick", "run", "--id", "r1"]
    code, seen = on_terminal(me, cwd=refund, env=plain_environment(NO_COLOR="1", LOGNAME="zoe"))
    assert (code, "Enter: later" in seen) == (3, False), seen
    types = {"Enter: later": "edit amount=much\n", "as integer": "edit amount=70 'to=Bob B'\n"}
    env = plain_environment(NO_COLOR="1", LOGNAME="mia")
    code, seen = on_terminal(me, cwd=refund, env=env, types=types)
    assert code == 0, seen
    assert "0 of 2 approved" in seen
    assert "(rule large sums)" in seen
    assert "0 of 2 approved; until 20" in seen
    assert "edit amount=100; respond VALUE" in seen
    assert "edited by mia: to Ann → Bob B, amount 400 → 70" in seen


def test_a_call_hides_nothing_from_whoever_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    move_in(tmp_path, monkeypatch)
    (tmp_path / "sly.py").write_text(
        "import killick\n@killick.tool(approve='mia')\n"
        "async def pay(text: str, pin: killick.Secret, amount: int) -> str:\n"
        "    return 'paid'\n@killick.agent\nasync def sly(run: killick.Run) -> str:\n"
        "    return await run.call(pay, 'a\\u202e\\x1b[8m' + 'x' * 999, killick.Secret('1234'), 5000)\n",
        encoding="utf-8",
    )
    main(["run", "sly.py", "-q", "--id", "s1"])
    for shown in (call(capsys, "inbox").out, call(capsys, "answer", "s1", "approve", "--by", "mia").out):
        told = re.sub(r"\n +", "", shown).rstrip()
        assert re.search(r"\([\d,]+ characters\), ?pin=\(a secret\), ?amount=5000\)", told), "all is there"
        assert told.isprintable(), "nothing turns or colours what is shown"
        assert r'text="a\u202e\u001b[8mxxx' in told
        assert "1234" not in told


# say ----------------------------------------------------------------------------------------------


def test_what_is_said_waits_for_the_run(office: Path, capsys: Capture) -> None:
    found = call(capsys, "message", "say", "claim_17", "look at [page 2] again", "--by", "mia")
    assert (found.code, found.out) == (0, "")
    assert found.err.startswith("claim_17: sent; to continue: ")
    with killick.open("killick.db") as kd:
        [message] = kd.runtime.store.messages("claim_17")
    assert (message.name, message.by) == ("killick.said", "mia")


@killick.tool(name="inbox_wire", effect="idempotent")
async def wire(claim: int, amount: int, fee: int) -> None: ...


@killick.agent(
    name="inbox_wires",
    contract=killick.Contract("wires", [
        killick.rules.arguments("inbox_wire", amount={"max": 100}, ask=killick.Approval("managers")),
    ]),
)  # fmt: skip
async def wires(run: killick.Run) -> None:
    await run.call(wire, 17, 900, 3)


def test_the_suggested_edit_is_of_the_argument_that_the_rule_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    move_in(tmp_path, monkeypatch)
    with killick.open("killick.db") as kd, pytest.raises(killick.RunWaiting):
        kd.run(wires, id="w1")
    assert "edit --set amount=100" in call(capsys, "inbox").out


# answered, and not taken yet ----------------------------------------------------------------------


def test_an_answer_that_the_run_has_not_taken_is_shown_everywhere(office: Path, capsys: Capture) -> None:
    (office / "paying.py").write_text(
        "import killick\n@killick.tool(approve='managers')\nasync def pay(euros: int) -> int: return euros\n"
        "@killick.agent\nasync def payer(run: killick.Run, euros: int) -> int: return await run.call(pay, euros)\n"
    )
    call(capsys, "run", "paying.py:payer", "--input", "900", "--id", "x")
    call(capsys, "answer", "x", "edit", "--set", "euros=700", "--by", "mia")
    said = "answered by mia: edit euros=700; a worker takes it next"
    assert f"  waits   pay(euros=900): {said}\n" in call(capsys, "show", "x").out
    assert said in call(capsys, "ps").out
    why = " ".join(call(capsys, "show", "x", "--why").out.split())
    assert f"{said[:1].upper()}{said[1:]}." in why
    assert "Nothing happens until" not in why
    [line] = [each for each in json.loads(call(capsys, "ps", "--json").out) if each["id"] == "x"]
    assert [each["kind"] for each in line["reasons"]] == ["answered"]
    assert json.loads(call(capsys, "show", "x", "--json").out)["position"]["next"] == f"{said[:1].upper()}{said[1:]}."
    assert 'mia: edit  {"euros": 700}  its run has not taken it yet' in call(capsys, "find", "answers").out
    [found] = json.loads(call(capsys, "find", "answers", "--by", "mia", "--json").out)["found"]
    assert (found["verb"], found["value"], found["taken"]) == ("edit", {"euros": 700}, False)
    assert json.loads(call(capsys, "find", "answers", "--by", "bob", "--json").out)["found"] == []
    call(capsys, "run", "paying.py:payer", "--id", "x")
    [found] = json.loads(call(capsys, "find", "answers", "--json").out)["found"]
    assert (found["verb"], found["taken"]) == ("edit", True)
