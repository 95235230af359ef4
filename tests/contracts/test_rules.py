"""What each kind of rule says of an intention, one rule at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.contracts import rules
from killick.contracts.contract import Approval, Contract, Intention, Others, PolicyInput, Ruling
from killick.errors import ContractRefused
from killick.model.ledger import Counts, Spend

HOUR = 3_600_000_000


def judged(rule: rules.Rule, intention: Intention, prices: Any = None, **state: Any) -> Ruling:
    return Contract("one", [rule], prices=prices).judge(intention, PolicyInput(**state))


def pay(effect: str | None = "at_most_once", **arguments: Any) -> Intention:
    return Intention(name="pay", effect=effect, arguments=arguments)


def model(name: str = "gpt-4o") -> Intention:
    return Intention(name=f"model:{name}", sort="model", model=name)


UPDATE = Intention(name="update", sort="context", arguments={"approved": True})
CHILD = Intention(name="spawn:payer", sort="child")
SEND = Intention(name="send", sort="send")


# Tools


def test_only_what_is_allowed_is_allowed() -> None:
    rule = rules.allow("pay", "get_*")
    assert judged(rule, pay()).ruling == "accept"
    assert judged(rule, Intention(name="get_rate")).ruling == "accept"
    told = judged(rule, Intention(name="Pay"))
    assert (told.ruling, told.code, told.rule) == ("reject", "tool_not_allowed", "allow")
    assert told.message == "Pay is not one of the allowed tools: pay, get_*"
    assert told.allowed == {"tools": ["pay", "get_*"]}


def test_an_allow_list_is_about_acts_and_not_about_models_and_the_context() -> None:
    rule = rules.allow("pay")
    assert judged(rule, CHILD).code == "tool_not_allowed"
    assert judged(rule, SEND).code == "tool_not_allowed"
    assert judged(rule, model()).ruling == "accept"
    assert judged(rule, UPDATE).ruling == "accept"
    assert judged(rules.allow("spawn:*", "send"), CHILD).ruling == "accept"


def test_a_deny_list_is_about_everything() -> None:
    rule = rules.deny("delete_*", "model:gpt-*", "spawn:*", "update")
    for denied in (Intention(name="delete_all"), model(), CHILD, UPDATE):
        assert judged(rule, denied).code == "tool_denied"
    assert judged(rule, pay()).ruling == "accept"


def test_a_pattern_for_all_tools_does_not_mean_models_and_the_context() -> None:
    rule = rules.context("*", approved={"one_of": [True]})
    assert judged(rule, pay()).code == "context_not_ready"
    assert judged(rule, UPDATE).ruling == "accept"
    assert judged(rule, model()).ruling == "accept"
    assert judged(rules.context("model:*", approved={"one_of": [True]}), model()).code == "context_not_ready"


# Arguments


def test_arguments_keep_within_their_bounds() -> None:
    rule = rules.arguments("pay", amount={"type": "integer", "min": 1, "max": 5000}, currency={"one_of": ["EUR"]})
    assert judged(rule, pay(amount=5000, currency="EUR")).ruling == "accept"
    told = judged(rule, pay(amount=5001, currency="EUR"))
    assert told.code == "argument_refused"
    assert told.message == "amount is 5001; at most 5000 is allowed"
    assert told.allowed == {"amount": {"type": "integer", "min": 1, "max": 5000}}
    assert judged(rule, pay(amount=1)).message == "currency is missing; it is needed"
    assert judged(rule, Intention(name="refund", arguments={"amount": 10**9})).ruling == "accept"


def test_an_argument_may_be_called_as_the_rules_own_words() -> None:
    rule = rules.arguments("pay", {"name": {"length": 3}, "to.iban": {"length": 4}}, amount={"max": 5})
    assert judged(rule, pay(name="Ann", to={"iban": "DE12"}, amount=5)).ruling == "accept"
    assert judged(rule, pay(name="Anna", to={"iban": "DE12"}, amount=5)).code == "argument_refused"
    assert judged(rule, pay(name="Ann", to={"iban": "DE123"}, amount=5)).code == "argument_refused"


def test_a_rule_may_ask_instead_and_say_it_in_its_own_words() -> None:
    rule = rules.arguments(
        "pay", amount={"max": 5}, name="large", ask="mia", code="large_sum", message="large sums take a manager"
    )
    told = judged(rule, pay(amount=6))
    assert (told.ruling, told.rule, told.code, told.message) == (
        "ask",
        "large",
        "large_sum",
        "large sums take a manager",
    )
    assert told.approval is not None
    assert told.approval.to == ("mia",)


# Paths


def write(path: Any, really: Mapping[str, str] | None = None) -> Intention:
    return Intention(name="write", arguments={"path": path}, paths=really or {})


def test_a_path_stays_inside_its_root() -> None:
    rule = rules.paths(["read", "write"], path=["work"])
    assert judged(rule, write("a.txt")).ruling == "accept"
    told = judged(rule, write("../a.txt"))
    assert told.code == "path_outside"
    assert told.message == "path goes through '..'; write the path without it"
    assert told.allowed == {"path": {"inside": ["work/"]}}
    assert judged(rule, write("/etc/passwd")).message == 'path is "/etc/passwd", which is not inside work/'


def test_where_links_lead_counts() -> None:
    rule = rules.paths("write", path=["work"])
    assert judged(rule, write("a", {"path": "/w/work/a", "work/": "/w/work"})).ruling == "accept"
    assert judged(rule, write("a", {"path": "/etc/a", "work/": "/w/work"})).code == "path_outside"


def test_every_path_of_a_list_is_judged() -> None:
    rule = rules.paths("write", path=["work"])
    assert judged(rule, write(["a", "b"])).ruling == "accept"
    assert judged(rule, write(["a", "../b"])).message == "path[1] goes through '..'; write the path without it"
    linked = Intention(
        name="write", arguments={"path": ["a", "b"]}, paths={"path[0]": "/w/a", "path[1]": "/etc/b", "work/": "/w"}
    )
    assert judged(rule, linked).code == "path_outside"


@pytest.mark.parametrize("value", [None, 5, {"path": "a"}, [["a"]], b"a"])
def test_what_stands_for_a_path_and_is_none_is_refused(value: object) -> None:
    assert judged(rules.paths("write", path="work"), write(value)).code == "path_outside"


def test_a_path_that_is_not_there_is_refused() -> None:
    assert judged(rules.paths("write", path="work"), Intention(name="write")).code == "path_outside"


def test_an_argument_called_as_a_root_is_not_taken_for_it() -> None:
    contract = Contract("c", [rules.paths("write", work=["work"])])
    (root,) = contract.path_arguments("write")["work"]
    escaped = Intention(name="write", arguments={"work": "link"}, paths={"work": "/etc", root: "/w/work"})
    assert contract.judge(escaped, PolicyInput()).code == "path_outside"


# Budgets


def test_a_budget_is_spent_when_it_is_reached() -> None:
    rule = rules.budget(calls=3)
    assert judged(rule, pay(), own=Counts(calls={"pay": 1, "model:x": 1})).ruling == "accept"
    told = judged(rule, pay(), own=Counts(calls={"pay": 1, "model:x": 2}))
    assert (told.code, told.message) == ("budget_spent", "the calls are used up: 3 of 3 were made")
    assert told.allowed == {"budget": {"calls": 3}}


def test_what_was_begun_is_not_counted_against_itself() -> None:
    own = Counts(calls={"pay": 3}, effects={"pay": 3})
    assert judged(rules.budget(calls=3), pay(), own=own, mine=1).ruling == "accept"
    assert judged(rules.budget("pay", effects=3), pay(), own=own, mine=1).ruling == "accept"


def test_what_was_begun_and_refused_does_not_hide_the_effect_of_another() -> None:
    own = Counts(calls={"pay": 2}, effects={"pay": 1})
    assert judged(rules.once("pay"), pay(), own=own, mine=1, mine_acts=0).code == "budget_spent"
    assert judged(rules.budget(calls=2), pay(), own=own, mine=1, mine_acts=0).ruling == "accept"


def test_a_budget_of_tools_counts_these_alone() -> None:
    own = Counts(calls={"pay": 5, "get_a": 2, "get_b": 1})
    assert judged(rules.budget("pay", calls=5), pay(), own=own).code == "budget_spent"
    assert judged(rules.budget("get_*", calls=4), Intention(name="get_a"), own=own).ruling == "accept"
    assert judged(rules.budget("get_*", calls=3), Intention(name="get_c"), own=own).code == "budget_spent"
    assert judged(rules.budget("get_*", calls=3), pay(), own=own).ruling == "accept"


def test_effects_hold_back_only_what_has_one() -> None:
    rule, own = rules.budget(effects=2), Counts(effects={"pay": 1, "mail": 1})
    assert judged(rule, pay(), own=own).code == "budget_spent"
    assert judged(rule, pay(effect="reads"), own=own).ruling == "accept"
    assert judged(rule, model(), own=own).ruling == "accept"


def test_children_and_messages_are_effects() -> None:
    own = Counts(calls={"spawn:payer": 1, "send": 2})
    assert judged(rules.budget("spawn:*", effects=1), CHILD, own=own).code == "budget_spent"
    assert judged(rules.once("spawn:payer"), CHILD, own=own).code == "budget_spent"
    assert judged(rules.budget("send", effects=3), SEND, own=own).ruling == "accept"
    assert judged(rules.budget(effects=3), pay(), own=own).code == "budget_spent"


def test_the_family_counts_unless_the_rule_is_for_the_run() -> None:
    own, others = (
        Counts(calls={"pay": 1}, effects={"pay": 1}),
        Others(counts=Counts(calls={"pay": 2}, effects={"pay": 2})),
    )
    for scope, verdict in (("lineage", "reject"), ("run", "accept")):
        assert judged(rules.budget("pay", calls=3, scope=scope), pay(), own=own, others=others).ruling == verdict  # type: ignore[arg-type]
        assert judged(rules.budget("pay", effects=3, scope=scope), pay(), own=own, others=others).ruling == verdict  # type: ignore[arg-type]
    assert judged(rules.once("pay", scope="run"), pay(), others=others).ruling == "accept"
    assert judged(rules.once("pay"), pay(), others=others).message == "pay was done already; it is allowed once"


def test_tokens_hold_back_what_would_spend_more_of_them() -> None:
    rule, own = rules.budget(tokens=100), Counts(spend=Spend(tokens_in=60, tokens_out=40))
    assert judged(rule, model(), own=own).message == "the tokens are used up: 100 of 100 were spent"
    assert judged(rule, CHILD, own=own).code == "budget_spent"
    assert judged(rule, pay(), own=own).ruling == "accept"
    assert judged(rules.budget("pay", tokens=100), pay(), own=own).code == "budget_spent"
    assert judged(rule, model(), own=Counts(spend=Spend(tokens_in=99))).ruling == "accept"


@pytest.mark.parametrize("money", ["0.05 USD", Decimal("0.05"), "0.05"])
def test_money_is_counted_in_millionths(money: Any) -> None:
    rule = rules.budget(money=money)
    assert judged(rule, model(), own=Counts(spend=Spend(cost_micros=49_999))).ruling == "accept"
    told = judged(rule, model(), own=Counts(spend=Spend(cost_micros=50_000)))
    assert told.message == "the money is used up: 0.05 of 0.05 USD were spent"


def test_under_a_budget_of_money_a_model_without_a_price_is_rejected_with_what_to_add() -> None:
    rule = rules.budget(money="5 USD")
    told = judged(rule, model("house-7b"))
    assert told.code == "budget_spent"
    assert told.message is not None
    assert told.message.endswith('add [prices."house-7b"] to the contract')
    assert judged(rule, model("house-7b"), prices={"house-*": {"input": 1, "output": 2}}).ruling == "accept"


def test_time_runs_from_the_runs_start() -> None:
    rule = rules.budget(time="2h")
    assert judged(rule, pay(), started_us=5, now_us=5 + 2 * HOUR - 1).ruling == "accept"
    told = judged(rule, pay(), started_us=5, now_us=5 + 2 * HOUR)
    assert told.message == "the time is used up: 7200 of 7200 seconds have passed"


# Totals


def past(*given: Mapping[str, Any]) -> Any:
    def of(name: str) -> Sequence[Mapping[str, Any]]:
        return given if name == "pay" else ()

    return of


def test_nothing_is_gained_by_splitting_an_amount() -> None:
    rule = rules.total("pay", "amount", max=5000)
    assert judged(rule, pay(amount=1000), past=past({"amount": 4000})).ruling == "accept"
    told = judged(rule, pay(amount=1001), past=past({"amount": 2000}, {"amount": 2000}))
    assert (told.code, told.allowed) == ("total_exceeded", {"amount": {"max": 1000}})
    assert told.message == "amount would add up to 5001; at most 5000 is allowed"


@pytest.mark.parametrize(
    "trick",
    [
        "1",
        True,
        None,
        -1,
        -0.5,
        math.nan,
        math.inf,
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("-1"),
        [1],
        {},
        Decimal("1e999999"),
        10**400,
        Decimal("1e-999999"),
    ],
)
def test_what_cannot_be_added_up_is_refused(trick: object) -> None:
    assert judged(rules.total("pay", "amount", max=10**60), pay(amount=trick)).code == "total_exceeded"


def test_tenths_add_up_exactly() -> None:
    rule = rules.total("pay", "amount", max=0.3)
    assert judged(rule, pay(amount=0.1), past=past({"amount": 0.1}, {"amount": Decimal("0.1")})).ruling == "accept"
    assert judged(rule, pay(amount=0.11), past=past({"amount": 0.2})).message == (
        "amount would add up to 0.31; at most 0.3 is allowed"
    )


def test_the_decimals_of_the_callers_thread_have_no_part_in_it() -> None:
    rule = rules.total("pay", "amount", max=Decimal("1000000.01"))
    with localcontext() as context:
        context.prec = 3
        assert judged(rule, pay(amount=Decimal("0.02")), past=past({"amount": 1_000_000})).message == (
            "amount would add up to 1000000.02; at most 1000000.01 is allowed"
        )


@given(st.lists(st.one_of(st.integers(0, 10**6), st.decimals(0, 1000, places=3)), max_size=8), st.integers(0, 10**6))
def test_a_total_is_the_sum_whatever_the_kinds(amounts: list[Any], wanted: int) -> None:
    rule = rules.total("pay", "amount", max=10**6)
    ruling = judged(rule, pay(amount=wanted), past=past(*({"amount": amount} for amount in amounts))).ruling
    assert (ruling == "accept") == (sum(amounts) + wanted <= 10**6)


def test_a_total_by_somebody_knows_them_in_any_spelling() -> None:
    rule = rules.total("pay", "amount", max=100, by="to")
    before = past({"amount": 60, "to": "Bob"}, {"amount": 90, "to": "Ann"})
    for name in ("Bob", "bob ", "BOB", "Ｂｏｂ", "b\u200bob"):
        assert judged(rule, pay(amount=41, to=name), past=before).code == "total_exceeded"
    assert judged(rule, pay(amount=40, to="bob"), past=before).ruling == "accept"
    assert judged(rule, pay(amount=100, to="Eve"), past=before).ruling == "accept"
    assert judged(rule, pay(amount=1), past=before).message == "to is missing; it is needed"


def test_a_total_adds_up_inside_lists() -> None:
    rule = rules.total("pay", "items[].price", max=10)
    assert judged(rule, pay(items=[{"price": 4}, {"price": 6}])).ruling == "accept"
    assert judged(rule, pay(items=[{"price": 4}, {"price": 7}])).code == "total_exceeded"
    assert judged(rule, pay(items=[{"price": "4"}])).code == "total_exceeded"


def test_a_total_of_several_tools_is_one_total() -> None:
    rule = rules.total(["pay", "refund"], "amount", max=100)
    calls = {"pay": [{"amount": 50}], "refund": [{"amount": 40}]}
    assert judged(rule, pay(amount=11), past=lambda name: calls.get(name, ())).code == "total_exceeded"
    wild = rules.total("p*", "amount", max=100)
    more = {"pay": [{"amount": 50}], "put": [{"amount": 40}]}
    told = judged(wild, pay(amount=11), past=lambda name: more.get(name, ()), own=Counts(effects={"pay": 1, "put": 1}))
    assert told.code == "total_exceeded"


def test_the_family_adds_to_a_total() -> None:
    others = Others(past={"pay": [{"amount": 60}]})
    assert judged(rules.total("pay", "amount", max=100), pay(amount=41), others=others).code == "total_exceeded"
    assert judged(rules.total("pay", "amount", max=100, scope="run"), pay(amount=41), others=others).ruling == "accept"


def test_what_was_begun_is_added_once() -> None:
    rule, before = rules.total("pay", "amount", max=100), past({"amount": 60}, {"amount": 40})
    assert judged(rule, pay(amount=40), past=before, mine=1).ruling == "accept"
    assert judged(rule, pay(amount=40), past=before, mine=1, mine_acts=0).code == "total_exceeded"
    assert judged(rule, pay(amount=41), past=before, mine=1).code == "total_exceeded"


def test_an_earlier_call_that_cannot_be_counted_rejects() -> None:
    told = judged(rules.total("pay", "amount", max=100), pay(amount=1), past=past({"amount": "60"}))
    assert told.code == "total_exceeded"
    assert told.message is not None
    assert "of an earlier call" in told.message


# Order and context


def test_a_tool_has_to_wait_for_another_to_return() -> None:
    rule = rules.after("pay", "assess", "check_*")
    told = judged(rule, pay())
    assert (told.code, told.message) == ("too_early", "pay is allowed only after assess has returned")
    assert told.allowed == {"first": ["assess", "check_*"]}
    assert judged(rule, pay(), done={"assess": 1}).code == "too_early"
    assert judged(rule, pay(), done={"assess": 1, "check_a": 0}).code == "too_early"
    assert judged(rule, pay(), done={"assess": 1, "check_a": 1}).ruling == "accept"


def test_the_context_has_to_be_ready_and_seen() -> None:
    rule = rules.context("pay", approved={"one_of": [True]}, latest=True)
    ready = {"context": lambda: {"approved": True}, "context_version": 3, "context_seen": 3}
    assert judged(rule, pay(), **ready).ruling == "accept"
    told = judged(rule, pay(), **{**ready, "context": lambda: {"approved": 1}})
    assert (told.code, told.message) == ("context_not_ready", "context.approved is 1; allowed is true")
    assert told.allowed == {"context": {"approved": {"one_of": [True]}}}
    assert judged(rule, pay(), **{**ready, "context": dict}).message == "context.approved is missing; it is needed"
    assert judged(rule, pay(), **{**ready, "context_version": 4}).code == "context_stale"


# Functions


def no_friends(intention: Intention, state: PolicyInput) -> Any:
    answers: dict[str, Any] = {
        "bob": "friends are not paid",
        "eve": rules.Reject("never Eve", code="eve", allowed={"to": "others"}),
        "max": rules.Ask("mia", "Max takes Mia"),
        "yes": True,
        "no": False,
        "raise": 1,
    }
    to = intention.arguments["to"]
    return 1 // 0 if to == "raise" else answers.get(to)


async def later(intention: Intention, state: PolicyInput) -> None: ...


def test_what_a_function_says_is_the_verdict() -> None:
    rule = rules.check(no_friends, tools="pay", name="friends", ask="ann", code="friendly")
    assert judged(rule, pay(to="ann")).ruling == "accept"
    assert judged(rule, Intention(name="other")).ruling == "accept"
    said = judged(rule, pay(to="bob"))
    assert (said.ruling, said.message, said.code) == ("ask", "friends are not paid", "friendly")
    rejected = judged(rule, pay(to="eve"))
    assert (rejected.ruling, rejected.code, rejected.allowed) == ("reject", "eve", {"to": "others"})
    asked = judged(rule, pay(to="max"))
    assert (asked.ruling, asked.approval) == ("ask", Approval("mia"))


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_a_function_that_says_something_else_rejects(answer: str) -> None:
    told = judged(rules.check(no_friends, tools="pay", ask="ann"), pay(to=answer))
    assert (told.ruling, told.code) == ("reject", "check_failed")


def test_a_function_that_raises_rejects_and_says_where() -> None:
    for intention in (pay(to="raise"), pay()):
        told = judged(rules.check(no_friends, tools="pay", name="friends", ask="ann"), intention)
        assert (told.ruling, told.code, told.rule) == ("reject", "check_failed", "friends")
        assert told.message is not None
        assert "test_rules.py:" in told.message
        assert "\n" not in told.message


def test_a_recorded_function_is_taken_from_loaded_modules_and_none_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_a_record.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    recorded = Contract("c", [rules.check(no_friends)]).spec
    assert Contract.from_spec(recorded).spec == recorded
    recorded["rules"][0]["check"]["function"] = "named_by_a_record:check"
    with pytest.raises(ContractRefused, match="import its module first"):
        Contract.from_spec(recorded)


def test_a_function_is_known_by_its_place_and_its_source() -> None:
    one, two = Contract("c", [rules.check(no_friends)]), Contract("c", [rules.check(lambda i, s: None)])
    assert one.spec["rules"][0]["check"]["function"].endswith("test_rules:no_friends")
    assert len(one.spec["rules"][0]["check"]["source"]) == 32
    assert one.digest != two.digest


def changed(before: str, after: str) -> tuple[str, str]:
    """The digests of contracts whose function was written so, and then so."""
    import linecache

    digests = []
    for source in (before, after):
        linecache.cache["<rule>"] = (len(source), None, source.splitlines(True), "<rule>")
        space: dict[str, Any] = {"__name__": "rule"}
        exec(compile(source, "<rule>", "exec"), space)
        digests.append(Contract("c", [rules.check(space["f"])]).digest)
    return digests[0], digests[1]


def test_a_changed_function_is_another_contract() -> None:
    one, two = changed("def f(i, s):\n    return None\n", "def f(i, s):\n    return 'no'\n")
    assert one != two


# What cannot be said


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: rules.allow(), "allow=\\[\\]"),
        (lambda: rules.arguments("pay"), "bounds no argument"),
        (lambda: rules.arguments("", amount={"max": 1}), "which tools"),
        (lambda: rules.arguments("pay", amount={"mx": 1}), "amount: mx is not known; did you mean max"),
        (lambda: rules.arguments("pay", {"a..b": {"max": 1}}), "give a name such as"),
        (lambda: rules.paths("pay", path=[]), "root '' is empty"),
        (lambda: rules.paths("pay", path="a\\b"), "backslash"),
        (lambda: rules.budget(), "one or more of"),
        (lambda: rules.budget(calls=-1), "whole number from 0"),
        (lambda: rules.budget(calls=True), "whole number from 0"),
        (lambda: rules.budget(money="5 EUR"), "US dollars"),
        (lambda: rules.budget(money="much"), "such as 5 USD"),
        (lambda: rules.budget(time="soon"), "is not a duration"),
        (lambda: rules.total("pay", "amount", max="much"), "is not a number"),
        (lambda: rules.total("pay", "amount", max=5, by="to[]"), "by one value"),
        (lambda: rules.context("pay"), "has no condition on the context"),
        (lambda: rules.check("nowhere.at_all:f"), "cannot be imported"),
        (lambda: rules.check(later), "plain function"),  # type: ignore[arg-type]
        (lambda: rules.check(5), "plain function"),  # type: ignore[arg-type]
        (lambda: rules.deny("x", ask=[]), "names no person"),
        (lambda: rules.deny("x", ask={"too": "mia"}), "did you mean to"),
        (lambda: rules.rule_of({"allow": "a", "deny": "b"}), "exactly one of"),
        (lambda: rules.rule_of({"name": "n"}), "says nothing"),
        (lambda: rules.rule_of({"allow": "a", "mesage": "b"}), "did you mean message"),
        (lambda: rules.rule_of({"deny": "a", "scope": "run"}), "to a budget"),
        (lambda: rules.rule_of({"budget": {"calls": 1}, "latest": True}), "to a rule of the context"),
    ],
)
def test_a_rule_that_says_what_cannot_be_is_refused_by_its_name(make: Any, told: str) -> None:
    with pytest.raises(ContractRefused, match=told) as refused:
        make()
    assert str(refused.value).startswith("rule ")
