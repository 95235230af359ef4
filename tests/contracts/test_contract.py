"""A contract as a whole: the order of its rules, its one form, and what judging costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from killick.contracts import rules
from killick.contracts.contract import Approval, Contract, Escalation, Intention, PolicyInput, unreadable
from killick.errors import ContractRefused
from killick.model import codec
from killick.model.ledger import Counts
from seeds import repeats


def never(intention: Intention, state: PolicyInput) -> None:
    """A function for rules."""


def claims() -> Contract:
    return Contract(
        "claims",
        [
            rules.allow("assess", "pay", "send_letter", "read_file", "write_file", "close_account"),
            rules.deny("delete_*"),
            rules.arguments("pay", amount={"type": "integer", "min": 1, "max": 5000}, currency={"one_of": ["EUR"]}),
            rules.arguments("pay", amount={"max": 1000.0}, name="large sums", ask="managers", message="ask first"),
            rules.paths(["read_file", "write_file"], path=["workspace"]),
            rules.budget(calls=50, tokens=200_000, money="5 USD", time="2h"),
            rules.budget("pay", effects=3),
            rules.once("close_account"),
            rules.total("pay", "amount", max=5000, by="to"),
            rules.after("pay", "assess"),
            rules.context("pay", approved={"one_of": [True]}, latest=True),
            rules.check(never, tools="pay", ask=Approval("directors", 2, "1d", [("board", "48h")], "Really?")),
        ],
        people={"managers": ["mia", "max"], "directors": "ann"},
        rejections=5,
        prices={"house-*": {"input": 0.5, "output": 1}},
    )


CLAIMS = f'''
name = "claims"
rejections = 5

[people]
managers = ["mia", "max"]
directors = "ann"

[prices."house-*"]
input = "0.50"
output = 1

[[rules]]
allow = ["assess", "pay", "send_letter", "read_file", "write_file", "close_account"]

[[rules]]
deny = "delete_*"

[[rules]]
tools = "pay"
arguments.amount = {{ type = "integer", min = 1, max = 5000 }}
arguments.currency = {{ one_of = ["EUR"] }}

[[rules]]
name = "large sums"
tools = ["pay"]
arguments = {{ amount = {{ max = 1000 }} }}
ask = "managers"
message = "ask first"

[[rules]]
tools = ["read_file", "write_file"]
paths = {{ path = "./workspace/" }}

[[rules]]
budget = {{ calls = 50, tokens = 200_000, money = "5.00 USD", time = "2h" }}

[[rules]]
tools = "pay"
budget.effects = 3

[[rules]]
once = "close_account"

[[rules]]
tools = "pay"
total = {{ argument = "amount", max = 5000, by = "to" }}

[[rules]]
tools = "pay"
after = "assess"

[[rules]]
tools = "pay"
context.approved = {{ one_of = [true] }}
latest = true

[[rules]]
tools = "pay"
check = "{__name__}:never"
[rules.ask]
to = "directors"
need = 2
timeout = "24h"
escalate = [["board", "2d"]]
prompt = "Really?"
'''


def pay(**arguments: Any) -> Intention:
    given = {"amount": 100, "currency": "EUR", "to": "ann", "note": "thanks"} | arguments
    return Intention(name="pay", effect="at_most_once", arguments=given)


def ready(**more: Any) -> PolicyInput:
    kept: dict[str, Any] = {"done": {"assess": 1}, "context": lambda: {"approved": True}} | more
    return PolicyInput(**kept)


# One form


def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are no modules to import from by name; a contract's functions are."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__("types").ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "never", never, raising=False)


def test_a_contract_is_the_same_in_python_and_in_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    importable(monkeypatch)
    assert Contract.parse(CLAIMS).spec == claims().spec
    assert Contract.parse(CLAIMS).digest == claims().digest


def test_a_contract_comes_back_from_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    importable(monkeypatch)
    contract = claims()
    for spec in (contract.spec, json.loads(json.dumps(contract.spec))):
        again = Contract.from_spec(spec)
        assert again == contract
        assert hash(again) == hash(contract)
        assert again.rules == contract.rules


def test_the_data_of_a_contract_can_be_stored() -> None:
    spec = claims().spec
    assert codec.plain(spec) == spec


def test_whatever_is_changed_changes_the_digest() -> None:
    base = [rules.deny("a")]
    others = [
        Contract("c", [rules.deny("b")]),
        Contract("c", [rules.deny("a", name="n")]),
        Contract("d", base),
        Contract("c", [*base, *base]),
        Contract("c", base, rejections=3),
        Contract("c", base, people={"x": ["y"]}),
        Contract("c", base, prices={"m": {"input": 1, "output": 1}}),
        Contract("c", [rules.deny("a", ask="x")]),
        Contract("c", [rules.deny("a", code="no")]),
        Contract("c", base, arguments_bytes_max=5),
    ]
    digests = {contract.digest for contract in [Contract("c", base), *others]}
    assert len(digests) == len(others) + 1
    assert Contract("c", base) != "c"


def test_rules_without_a_name_get_one_that_is_theirs_alone() -> None:
    contract = Contract("c", [rules.deny("a"), rules.deny("b"), rules.after("x", "y"), rules.deny("z", name="deny 2")])
    assert [rule.name for rule in contract.rules] == ["deny", "deny 3", "after x", "deny 2"]


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ContractRefused, match="two rules are called same"):
        Contract("c", [rules.deny("a", name="same"), rules.deny("b", name="same")])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name = ", "is not valid TOML"),
        ("rules = []", "give it a name"),
        ('name = "c"\nrule = []', "did you mean rules"),
        ('name = "c"\nrules = 5', "not a list of tables"),
        ('name = "c"\npeople = 5', "people is not a table"),
        ('name = "c"\nrejections = 0', "whole number from 1"),
        ('name = "c"\n[people]\nx = []', "x=\\[\\] names no person"),
        (
            'name = "c"\n[[rules]]\nname = "r"\ntools = "t"\narguments.a = {min = 2, max = 1}',
            "rule r: a: min 2 is above max 1",
        ),
    ],
)
def test_a_text_that_is_no_contract_is_refused_in_one_line(text: str, told: str) -> None:
    with pytest.raises(ContractRefused, match=told) as refused:
        Contract.parse(text)
    assert "\n" not in str(refused.value)


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(ContractRefused, match="is not a rule"):
        Contract("c", ["allow"])  # type: ignore[list-item]


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["pay", "1h", "5 USD"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["amount", "max", "min", "one_of", "to", "calls", "money", "argument", "x"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
WORDS = [
    "name",
    "tools",
    "ask",
    "code",
    "message",
    "scope",
    "latest",
    "allow",
    "deny",
    "arguments",
    "paths",
    "budget",
    "total",
    "after",
    "once",
    "context",
    "check",
]


@given(st.lists(st.dictionaries(st.sampled_from(WORDS), ANYTHING, max_size=4), max_size=3), ANYTHING, ANYTHING)
@settings(max_examples=repeats(75, 300))
def test_whatever_is_written_is_a_contract_or_is_refused_and_judges_without_raising(
    given: Any, people: Any, prices: Any
) -> None:
    for more in ({}, {"people": people}, {"prices": prices}):
        try:
            contract = Contract.from_spec({"name": "c", "rules": given, **more})
        except ContractRefused:
            continue
        assert Contract.from_spec(contract.spec) == contract
        assert contract.judge(pay(), PolicyInput()).ruling in ("accept", "reject", "ask")


# Judging


def test_what_keeps_to_all_rules_is_accepted() -> None:
    ruling = claims().judge(pay(), ready())
    assert (ruling.ruling, ruling.rule, ruling.code) == ("accept", None, None)


def test_the_first_rule_that_rejects_is_the_verdict() -> None:
    contract = Contract("c", [rules.after("t", "x", name="one"), rules.deny("t", name="two")])
    assert contract.judge(Intention(name="t"), PolicyInput()).rule == "one"


def test_nobody_is_asked_about_what_is_rejected_anyway() -> None:
    contract = Contract("c", [rules.deny("t", name="one", ask="mia"), rules.after("t", "x", name="two")])
    assert contract.judge(Intention(name="t"), PolicyInput()).rule == "two"
    assert contract.judge(Intention(name="t"), PolicyInput(done={"x": 1})).rule == "one"


def test_a_rule_that_was_granted_asks_no_more_but_still_lets_others_speak() -> None:
    contract = Contract("c", [rules.deny("t", name="one", ask="mia"), rules.deny("t", name="two", ask="max")])
    asked = contract.judge(Intention(name="t"), PolicyInput())
    assert (asked.ruling, asked.rule, asked.approval) == ("ask", "one", Approval("mia"))
    assert contract.judge(Intention(name="t"), PolicyInput(), {"one"}).rule == "two"
    assert contract.judge(Intention(name="t"), PolicyInput(), ["one", "two"]).ruling == "accept"
    both = Contract("c", [rules.deny("t", name="one", ask="mia"), rules.after("t", "x", name="two")])
    assert both.judge(Intention(name="t"), PolicyInput(), {"one"}).ruling == "reject"


def test_a_grant_for_a_rule_does_not_silence_its_rejection() -> None:
    def strict(intention: Intention, state: PolicyInput) -> Any:
        return rules.Reject("never") if intention.arguments["n"] > 1 else rules.Ask("mia")

    contract = Contract("c", [rules.check(strict, name="strict")])
    assert contract.judge(Intention(name="t", arguments={"n": 1}), PolicyInput(), {"strict"}).ruling == "accept"
    assert contract.judge(Intention(name="t", arguments={"n": 2}), PolicyInput(), {"strict"}).ruling == "reject"


def test_an_approval_from_monday_does_not_outlive_tuesdays_spent_budget() -> None:
    spent = ready(own=Counts(effects={"pay": 3}))
    assert claims().judge(pay(amount=2000), ready()).rule == "large sums"
    assert claims().judge(pay(amount=2000), ready(), {"large sums"}).ruling == "accept"
    assert claims().judge(pay(amount=2000), spent, {"large sums"}).code == "budget_spent"


def test_an_empty_contract_accepts() -> None:
    assert Contract("c").judge(Intention(name="t"), PolicyInput()).ruling == "accept"


def test_what_is_allowed_instead_is_small_and_json() -> None:
    intentions = [
        pay(amount=9999),
        pay(currency="X"),
        Intention(name="x"),
        Intention(name="write_file", arguments={"path": "/e"}),
    ]
    for intention in intentions:
        ruling = claims().judge(intention, ready())
        assert ruling.ruling == "reject"
        assert len(json.dumps(ruling.allowed)) < 200


# Size


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_arguments_too_large_or_too_deep_are_rejected_before_any_rule_looks() -> None:
    looked: list[Intention] = []

    def look(intention: Intention, state: PolicyInput) -> None:
        looked.append(intention)

    contract = Contract("c", [rules.check(look)])
    tricks: list[Any] = [
        "x" * 1_000_001,
        ["x" * 600_000] * 2,
        {"a": {"b": "é" * 600_000}},
        list(range(200_000)),
        1 << 10_000_000,
        nested(33),
        {"k" * 1_000_001: 1},
        b"x" * 1_000_001,
        nested(10_000),
    ]
    for trick in tricks:
        ruling = contract.judge(Intention(name="t", arguments={"a": trick}), PolicyInput())
        assert (ruling.ruling, ruling.code, ruling.rule) == ("reject", "arguments_too_large", None)
    assert not looked
    contract.judge(Intention(name="t", arguments={"a": nested(32), "b": "x" * 900_000}), PolicyInput())
    assert len(looked) == 1


def test_a_value_that_holds_itself_ends() -> None:
    knot: list[Any] = []
    knot.append(knot)
    assert unreadable({"a": knot}, 1000, 32) is not None


def test_a_conversation_is_not_measured() -> None:
    talk = Intention(name="model:gpt-4o", sort="model", arguments={"messages": ["x" * 2_000_000]})
    assert Contract("c").judge(talk, PolicyInput()).ruling == "accept"


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=20,
)


@given(JSON)
def test_what_passes_is_no_larger_than_the_limit(value: Any) -> None:
    limit = 200
    if unreadable({"a": value}, limit, 8) is None:
        assert len(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) <= 4 * limit


# What the runtime asks


def test_a_contract_says_which_arguments_are_paths() -> None:
    contract = Contract("c", [rules.paths("w*", path="a"), rules.paths("write", path=["b", "/c/"], to="a")])
    assert contract.path_arguments("write") == {"path": ("a/", "b/", "/c/"), "to": ("a/",)}
    assert contract.path_arguments("read") == {}


@pytest.mark.parametrize(
    ("rule", "counts"),
    [
        (rules.budget(calls=1), True),
        (rules.budget(calls=1, scope="run"), False),
        (rules.budget(time="1h"), False),
        (rules.once("a"), True),
        (rules.total("a", "b", max=1), True),
        (rules.total("a", "b", max=1, scope="run"), False),
        (rules.deny("a"), False),
    ],
)
def test_a_contract_says_whether_the_family_counts(rule: rules.Rule, counts: bool) -> None:
    assert Contract("c", [rule]).counts_family is counts


def test_a_contract_says_which_tools_it_adds_up() -> None:
    contract = Contract("c", [rules.total(["pay", "refund_*"], "amount", max=1), rules.budget("x", calls=1)])
    assert contract.totals == {"pay", "refund_*"}


# People


def test_an_approval_is_written_in_many_ways_and_kept_in_one() -> None:
    assert Approval("mia") == Approval(["mia"]) == Approval(("mia", "mia"))
    assert Approval("mia", timeout="24h").timeout == 86_400
    wanted = Approval(["mia"], 1, 60, [("ann", 120)])
    for escalate in ([("ann", "2m")], [["ann", 120]], [(["ann"], "120s")]):
        assert Approval("mia", timeout="1m", escalate=escalate) == wanted  # type: ignore[arg-type]
    assert Approval("mia", timeout=1, escalate=[("ann", None)]).escalate == (Escalation(("ann",)),)
    assert Approval().to == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Approval([""]),
        lambda: Approval(5),  # type: ignore[arg-type]
        lambda: Approval("m", need=0),
        lambda: Approval("m", need=True),
        lambda: Approval("m", escalate=[("ann", "1h")]),
        lambda: Approval("m", timeout=1, escalate=["ann"]),  # type: ignore[list-item]
        lambda: Approval("m", timeout=1, escalate="ann"),  # type: ignore[arg-type]
        lambda: Approval("m", timeout=1, escalate=[5]),  # type: ignore[list-item]
        lambda: Approval("m", prompt=5),  # type: ignore[arg-type]
        lambda: Approval("m", timeout=1, escalate=[([], "1h")]),
    ],
)
def test_an_approval_by_nobody_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ContractRefused):
        make()


# Speed and threads


def twenty() -> Contract:
    more = [
        rules.deny("drop_*"),
        rules.arguments("pay", to={"none_of": ["evil corp"], "length": 60}),
        rules.arguments("pay", note={"type": "string", "length": 200}),
        rules.budget("pay", "refund", calls=40),
        rules.after("close_account", "pay"),
        rules.arguments("p*", to={"matches": "[a-z ]+"}),
        rules.context("send_letter", address={"type": "string"}),
        rules.budget("spawn:*", effects=2),
    ]
    return Contract("twenty", [*claims().rules, *more], people={"managers": "mia"})


def test_twenty_rules_are_judged_together() -> None:
    contract, intention = twenty(), pay()
    assert len(contract.rules) == 20
    state = ready(
        own=Counts(calls={"assess": 1, "pay": 2, "model:gpt-4o": 9}, effects={"pay": 2}),
        past=lambda name: [{"amount": 10, "to": "bob"}, {"amount": 20, "to": "ann"}],
    )
    assert contract.judge(intention, state).ruling == "accept"


def test_many_threads_may_judge_by_one_contract() -> None:
    contract, wrong = claims(), list[Any]()

    def judge(number: int) -> None:
        for n in range(200):
            told = (
                contract.judge(pay(amount=n + 4950), ready()),
                contract.judge(Intention(name=f"x{number}{n}"), ready()),
            )
            if (told[0].ruling == "ask") != (n <= 50) or told[1].code != "tool_not_allowed":
                wrong.append(told)

    threads = [threading.Thread(target=judge, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_names_that_a_model_makes_up_fill_no_memory() -> None:
    contract = Contract("c", [rules.allow("a")])
    for number in range(5000):
        contract.judge(Intention(name=f"made_up_{number}"), PolicyInput())
        contract.path_arguments(f"made_up_{number}")
    assert len(contract._plans) <= 2048


# Text that UTF-8 cannot hold


HALF = "\ud83d"

READING = [
    rules.arguments("t", a={"excludes": "(?i)drop table"}),
    rules.arguments("t", a={"matches": r"[\s\S]*"}),
    rules.arguments("t", a={"type": "string"}),
    rules.arguments("t", a={"length": 100}),
    rules.arguments("t", a={"one_of": [f"x{HALF}", "x"]}),
    rules.arguments("t", a={"none_of": ["mallory"]}),
    rules.paths("t", a="/srv"),
    rules.check(lambda intention, state: None),
    rules.budget(calls=5),
]


@pytest.mark.parametrize("rule", READING, ids=[f"{n} {rule.kind}" for n, rule in enumerate(READING)])
def test_text_that_utf8_cannot_hold_is_rejected_by_whatever_rule_reads_it(rule: rules.Rule) -> None:
    ruling = Contract("c", [rule]).judge(Intention(name="t", arguments={"a": f"x{HALF}"}), PolicyInput())
    assert (ruling.ruling, ruling.code) == ("reject", "argument_refused")
    assert "lone surrogate" in str(ruling.message)
    str(ruling.message).encode()


@pytest.mark.parametrize(
    "arguments",
    [
        {"a": [HALF]}, {"a": {HALF: 1}}, {"a": {"b": [{"c": f"é{HALF}"}]}}, {HALF: 1}, {f"k{HALF}": "x"},
        {"a": (1, {HALF})}, json.loads('{"a": "\\ud83d"}'), {"b": HALF}, {"a": "x", "b": {"é": HALF}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("sort", ["tool", "child", "send", "context"])
def test_text_that_utf8_cannot_hold_is_rejected_wherever_it_is(arguments: dict[str, Any], sort: Any) -> None:
    looked: list[Intention] = []
    contract = Contract("c", [rules.check(lambda intention, state: looked.append(intention))])
    ruling = contract.judge(Intention(name="t", sort=sort, arguments=arguments), PolicyInput())
    assert (ruling.ruling, ruling.code) == ("reject", "argument_refused")
    assert not looked


@pytest.mark.parametrize("bound", [{"excludes": "drop"}, {"matches": ".*"}, {"type": "string"}, {"one_of": [HALF]}])
def test_no_bound_accepts_text_of_the_context_or_of_a_model_that_utf8_cannot_hold(bound: dict[str, Any]) -> None:
    for said, ok in ((HALF, False), ({"inner": HALF}, False)):
        name = "said" if isinstance(said, str) else "said.inner"
        of_context = Contract("c", [rules.context("t", {name: bound})])
        state = PolicyInput(context=lambda said=said: {"said": said})  # type: ignore[misc]
        assert (of_context.judge(Intention(name="t"), state).ruling == "accept") is ok
        of_model = Contract("c", [rules.arguments("model:m", {name: bound})])
        call = Intention(name="model:m", sort="model", arguments={"said": said})
        assert (of_model.judge(call, PolicyInput()).ruling == "accept") is ok


def test_text_of_many_scripts_is_no_such_text() -> None:
    contract = Contract("c", [rules.arguments("t", a={"excludes": "drop"})])
    ruling = contract.judge(Intention(name="t", arguments={"a": "Zoë 👩‍🚀 \U0010ffff \x00"}), PolicyInput())
    assert ruling.ruling == "accept"
