"""`killick contract`: rules in plain words, and what another contract would change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import killick
from killick import rules
from killick.cli.main import main

claims = killick.Contract(
    "claims",
    [
        rules.allow("assess", "pay", "post_the_letter"),
        rules.arguments("pay", amount={"type": "integer", "min": 1, "max": 5_000}, name="sums"),
        rules.arguments("pay", amount={"max": 1_000}, name="large sums", ask="managers"),
        rules.after("pay", "assess"),
    ],
    people={"managers": ["mia", "max"]},
)

STRICTER = """\
name = "stricter"

[[rules]]
name = "sums"
tools = "pay"
arguments.amount = {type = "integer", min = 1, max = 300}

[[rules]]
name = "few"
tools = "pay"
budget.effects = 1
ask = "managers"
"""

BROKEN = """\
name = "broken"
rejections = 0

[[rules]]
alow = ["pay"]

[[rules]]
name = "sums"
tools = "pay"
arguments.amount = {maxx = 300}
"""


@killick.tool(effect="reads")
async def assess(claim: int) -> int:
    return claim * 10


@killick.tool
async def pay(to: str, amount: int) -> str:
    return f"paid {amount} to {to}"


@killick.agent(contract=claims)
async def review(run: killick.Run, claim: int) -> list[str]:
    said: list[str] = []
    amount = await run.call(assess, claim)
    for part in (amount, amount * 2, 9_000):
        try:
            said.append(await run.call(pay, "ann", part))
        except killick.StepFailed as failed:
            said.append(str(failed))
    return said


@killick.agent
async def free(run: killick.Run, claim: int) -> str:
    return await run.call(pay, "ann", claim)


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A store with three runs under a contract and one without."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("KILLICK_STORE", raising=False)
    Path("stricter.toml").write_text(STRICTER, encoding="utf-8")
    Path("broken.toml").write_text(BROKEN, encoding="utf-8")
    with killick.open("killick.db") as kd:
        kd.run(review, 7, id="claim_7")
        kd.run(review, 20, id="claim_20")
        with pytest.raises(killick.RunWaiting):
            kd.run(review, 60, id="claim_60")
        kd.run(free, 400, id="free_1")

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["contract", *args])
        out, err = capsys.readouterr()
        assert all(len(line) <= 80 for line in out.splitlines()) or "--json" in args, out
        return code, out, err

    return run


# mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["show", "nowhere.toml"], "nowhere.toml: no such file"),
        (["show", "nonsense"], "nonsense: no such run"),
        (["show", f"{__name__}:pay"], "is neither a contract nor an agent"),
        (["show", f"{__name__}:free"], "the agent has no contract"),
        (["show", "claim_8"], "claim_8: no such run in killick.db; did you mean claim_7?"),
        (["show", "free_1"], "free_1: no contract is on record of it"),
        (["rejudge"], "rejudge what? Name runs, or select them"),
        (["rejudge", "claim_7", "--all"], "named runs or selected ones, not both"),
        (
            ["rejudge", "claim_7", "--contract", "broken.toml"],
            "broken.toml: rule rule: alow is not known; did you mean allow?",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(cli: Cli, args: list[str], line: str) -> None:
    code, out, err = cli(*args)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1


# show ---------------------------------------------------------------------------------------------


def test_the_rules_of_a_file_an_agent_and_a_run_are_shown(cli: Cli) -> None:
    _, of_file, _ = cli("show", "stricter.toml")
    assert "1  sums  arguments=" in of_file
    assert '"max": 300' in of_file
    assert '2  few   budget={"effects": 1}, tools=["pay"], ask={"to": ["managers"]}' in of_file
    _, of_agent, _ = cli("show", f"{__name__}:review")
    _, of_name, _ = cli("show", "review", "--app", __name__)
    assert of_agent == of_name
    assert of_agent.splitlines()[1].strip() == f"sha256 {claims.digest}"
    assert "managers are mia and max" in of_agent
    assert "no tool is called post_the_letter; " in " ".join(of_agent.split())
    _, of_run, _ = cli("show", "claim_7")
    assert "claims  4 rules, in force since event" in of_run
    assert of_run.splitlines()[1:] == of_agent.splitlines()[1:]


def test_showing_prints_the_whole_contract_for_programs(cli: Cli) -> None:
    _, out, _ = cli("show", "claim_7", "--json")
    [told] = json.loads(out)
    assert (told["digest"], [rule["name"] for rule in told["rules"]][1:3]) == (claims.digest, ["sums", "large sums"])


def test_a_number_that_is_limited_on_one_side_is_warned_of(cli: Cli) -> None:
    Path("stricter.toml").write_text(STRICTER.replace("min = 1, ", ""), encoding="utf-8")
    _, text, _ = cli("show", "stricter.toml")
    assert "~ amount has max 300 and no min" in text
    _, data, _ = cli("show", "stricter.toml", "--json")
    [warning] = json.loads(data)[0]["warnings"]
    assert warning.endswith("write {min = 0, max = 300}")


# rejudge ------------------------------------------------------------------------------------------


def test_by_the_contracts_on_record_everything_comes_out_as_it_is_there(cli: Cli) -> None:
    code, out, _ = cli("rejudge", "--all")
    assert (code, out) == (0, "✓ of 12 intentions in 4 runs: all verdicts are as recorded\n")


def test_another_contract_tells_what_it_would_have_stopped_and_asked(cli: Cli) -> None:
    code, out, err = cli("rejudge", "--agent", "review", "--contract", "stricter.toml")
    assert code == 1
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0].split() == ["RUN", "STEP", "THEN", "→", "NOW", "RULE", "CALL"]
    told = [line.split() for line in lines if line.startswith("claim_")]
    assert [line[:6] for line in told] == [
        ["claim_7", "3", "accept", "→", "ask", "few"],
        ["claim_20", "3", "accept", "→", "reject", "sums"],
        ["claim_60", "2", "accept", "→", "reject", "sums"],
        ["claim_60", "3?", "ask", "→", "reject", "sums"],
    ]
    assert "amount is 400; at most 300 is allowed" in out
    assert lines[-1] == "✗ of 11 intentions in 3 runs: 3 would be stopped, 1 asked"
    assert "might never have been" in err


def test_a_contract_that_changes_nothing_says_so(cli: Cli) -> None:
    Path("lax.toml").write_text('name = "lax"\n[[rules]]\ndeny = "delete_*"\n', encoding="utf-8")
    code, out, _ = cli("rejudge", "free_1", "--contract", "lax.toml")
    assert (code, out) == (0, "✓ of 1 intention in 1 run: nothing would be different\n")
    code, out, _ = cli("rejudge", "claim_7", "--contract", "lax.toml")
    assert code == 1
    assert out.endswith("✗ of 4 intentions in 1 run: 1 would be accepted\n")


def test_judging_again_prints_data_for_programs(cli: Cli) -> None:
    code, out, _ = cli("rejudge", "claim_60", "--contract", "stricter.toml", "--json")
    told = json.loads(out)
    assert code == 1
    [run] = told["runs"]
    assert (run["run"], run["intentions"], run["hypothetical_from"]) == ("claim_60", 3, "2")
    assert [(each["change"], each["if_so"]) for each in run["judged"]] == [("stopped", False), ("stopped", True)]
    assert run["judged"][0]["now"]["code"] == "argument_refused"
