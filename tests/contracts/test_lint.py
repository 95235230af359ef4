"""Everything that can be said against a contract at once."""

from __future__ import annotations

import pytest

from killick.contracts.contract import Contract
from killick.contracts.lint import Problem, lint
from killick.errors import ContractRefused

HEAD = 'name = "c"\n[people]\nmanagers = ["mia", "max"]\n'


def rule(text: str) -> str:
    return f"[[rules]]\n{text}\n"


def warnings(*texts: str, head: str = HEAD) -> list[str]:
    """What is said of a sound contract of these rules, without the places."""
    problems = lint(head + "".join(rule(text) for text in texts))
    assert [str(problem) for problem in problems if problem.severity == "error"] == []
    return [f"{problem.rule}: {problem.message}" for problem in problems]


PAY = 'tools = "pay"\n'


def test_a_sound_contract_has_no_problem() -> None:
    assert warnings('allow = ["pay", "get_*"]', PAY + "arguments.amount = {max = 5}", PAY + 'after = "get_a"') == []


def test_all_errors_are_found_at_once_with_their_rules_and_lines() -> None:
    text = """name = "c"
rejection = 3

[[rules]]
name = "bounds"
tools = "pay"
arguments.amount = { maxx = 1 }
arguments.to = { matches = "(" }

[[rules]]
tools = "pay"
afterr = "x"
mesage = "y"

[[rules]]
name = "slow"
tools = "pay"
arguments.to = { matches = "(?=a+)b" }

[prices.house]
input = 1
"""
    found = [(problem.severity, problem.rule, problem.line) for problem in lint(text)]
    assert found == [
        ("error", None, 2),
        ("error", None, 20),
        ("error", "bounds", 4),
        ("error", "bounds", 4),
        ("error", "2", 10),
        ("error", "2", 10),
        ("error", "slow", 15),
    ]
    messages = [problem.message for problem in lint(text)]
    for message, part in zip(
        messages,
        [
            "did you mean rejections",
            "prices of house",
            "did you mean max",
            "does not compile",
            "did you mean after",
            "did you mean message",
            "exponential",
        ],
        strict=True,
    ):
        assert part in message
    with pytest.raises(ContractRefused):
        Contract.parse(text)


def test_what_is_no_toml_is_one_problem_with_its_line() -> None:
    (problem,) = lint('name = "c"\nrules = [')
    assert (problem.severity, problem.line) in {("error", 2), ("error", None)}
    assert "not valid TOML" in problem.message


@pytest.mark.parametrize(
    "text",
    ["", "rules = 5", 'name = "c"\nrules = [5]', 'name = "c"\n[people]\nx = 5', 'name = "c"\nprices = 1', "name = 5"],
)
def test_what_lint_calls_an_error_cannot_be_parsed(text: str) -> None:
    assert any(problem.severity == "error" for problem in lint(text))
    with pytest.raises(ContractRefused):
        Contract.parse(text)


def test_two_rules_of_one_name_are_an_error() -> None:
    problems = lint(HEAD + rule('name = "a"\ndeny = "x"') + rule('name = "a"\ndeny = "y"'))
    assert [(problem.severity, problem.message) for problem in problems] == [
        ("error", "two rules are called a; give one another name")
    ]


def test_a_contract_without_rules_is_worth_a_word() -> None:
    assert [str(problem) for problem in lint('name = "c"')] == [
        "warning: has no rules, so everything is allowed; write some under [[rules]]"
    ]


def test_asking_somebody_unknown_is_worth_a_word() -> None:
    said = warnings('deny = "a"\nask = "mangers"', 'deny = "b"\nask = "mia"', 'deny = "c"\nask = "managers"')
    assert said == ["deny: asks mangers, who is not in [people]; add mangers = […] there, or correct the name"]


def test_needing_more_people_than_are_asked_is_worth_a_word() -> None:
    assert warnings('deny = "a"\nask = {to = "managers", need = 3}') == [
        "deny: needs 3 people and asks 2; ask more, or need fewer"
    ]


def test_a_rule_about_a_tool_that_is_not_allowed_never_fires() -> None:
    said = warnings(
        'allow = "get_*"', PAY + "arguments.amount = {max = 5}", 'once = "get_a"', 'tools = "model:x"\nbudget.calls = 1'
    )
    assert said == ["arguments pay: never fires: allow does not allow pay; allow it, or drop this rule"]


def test_a_rule_about_a_tool_that_is_denied_never_fires() -> None:
    said = warnings('deny = "p*"', PAY + "arguments.amount = {max = 5}")
    assert said == ["arguments pay: never fires: deny denies pay; drop one of the two"]


def test_what_one_rule_allows_and_another_forbids_is_worth_a_word() -> None:
    assert warnings('allow = ["a", "b"]', 'deny = "b"') == [
        "allow: allows b, which deny does not; both have to; say it in one place"
    ]
    assert warnings('allow = ["a", "b"]', 'allow = ["a"]') == [
        "allow: allows b, which allow 2 does not; both have to; say it in one place"
    ]


def test_a_rule_that_a_stricter_one_covers_never_fires() -> None:
    strict, wide = (
        PAY + "arguments.amount = {max = 1000}",
        PAY + 'name = "w"\narguments.amount = {max = 5000}\nask = "mia"',
    )
    told = "w: never fires: arguments pay is stricter and rejects; drop it, or correct its bounds"
    assert warnings(strict, wide) == [told]
    assert warnings(wide, strict) == [told]
    assert (
        warnings(PAY + "arguments.amount = {max = 5000}", PAY + 'name = "w"\narguments.amount = {max = 1}\nask = "mia"')
        == []
    )
    assert warnings("budget.calls = 5", 'name = "w"\nbudget = {calls = 9}') == [
        "w: never fires: budget is stricter and rejects; drop it, or correct its bounds"
    ]
    assert warnings("budget.calls = 5", 'name = "w"\nbudget = {calls = 9, tokens = 5}') == []


def test_a_rule_said_twice_is_worth_a_word() -> None:
    assert warnings('deny = "a"', 'name = "again"\ndeny = "a"') == ["again: says what deny says; drop one of the two"]


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("^EUR", "begins with ^"),
        ("EUR$", "ends with $"),
        (".*EUR.*", "matches anything around"),
    ],
)
def test_a_pattern_that_is_hardly_meant_so_is_worth_a_word(pattern: str, told: str) -> None:
    (said,) = warnings(PAY + f"arguments.c = {{each = {{matches = '{pattern}'}}}}")
    assert told in said
    assert warnings(PAY + "arguments.c = {matches = '^[A-Z]{3}$'}") == []


def test_a_model_without_a_price_under_a_budget_of_money_is_worth_a_word() -> None:
    rules = ('budget.money = "5 USD"', 'tools = "model:house-7b"\nbudget.calls = 3')
    assert warnings(*rules) == [
        'budget model:house-7b: house-7b has no price, and money is budgeted; add [prices."house-7b"]'
    ]
    assert warnings(*rules, head=HEAD + '[prices."house-*"]\ninput = 1\noutput = 2\n') == []


def test_a_problem_reads_as_one_line() -> None:
    assert str(Problem("error", "is wrong; mend it", "r", 7)) == "error: line 7: rule r: is wrong; mend it"
