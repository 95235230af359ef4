"""Who used what a step returned: values that were new and turn up again, what derives from them, and the ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import date
from typing import Any
from uuid import UUID

import pytest

import killick
from killick.definitions.tools import TOOLS
from killick.errors import BoundaryUnknown, TimeRefused
from killick.history.provenance import Undoing, Use, undoing, uses
from killick.history.rewind_preview import leaving
from killick.log import Entry, Log
from killick.model import events as e
from killick.model.chunks import Blob
from killick.store import MemoryStore

Said = dict[str, Any]


class Told:
    """A run told event by event: each step as what went in and what came out."""

    def __init__(self, input: Any = None) -> None:  # noqa: A002
        self.log = Log(MemoryStore())
        self.run = self.log.create(e.RunStarted(at=1, run="r", agent="a"), {"input": input})
        self.count = 0

    def call(self, output: Any = None, sort: Any = "tool", effect: Any = "at_most_once", **arguments: Any) -> str:
        self.count += 1
        step = str(self.count)
        self.run.append(
            Entry(
                e.StepIntended(at=1, step=step, sort=sort, name="act", effect=effect if sort == "tool" else None),
                {"arguments": arguments},
            ),
            Entry(e.AttemptStarted(at=1, step=step, attempt=1, key=f"r:step_{step}", epoch=0)),
            Entry(e.AttemptEnded(at=1, step=step, attempt=1, outcome="returned"), {"output": output}),
        )
        return step

    def event(self, event: e.Event, **values: Any) -> None:
        self.run.append(Entry(event, values))

    def uses(self, step: str) -> list[Use]:
        return uses(self.log, "r", step)

    def found(self, step: str) -> list[tuple[str | None, str, str, str]]:
        return [(use.step, use.what, use.value, use.how) for use in self.uses(step) if use.through is None]


# by data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "arguments", "found"),
    [
        ("PA-2211", {"to": "PA-2211"}, ("arguments.to", "PA-2211", "the same value")),
        ({"id": "b-17", "ok": True}, {"to": "b-17"}, ("arguments.to", "b-17", "the same value")),
        ({"amount": 1250}, {"sum": 1250}, ("arguments.sum", "1250", "the same value")),
        ({"amount": 1250}, {"text": "pay 1250 now"}, ("arguments.text", "1250", "within a text")),
        (["Ada Lovelace"], {"text": "Dear Ada Lovelace, hello"}, ("arguments.text", "Ada Lovelace", "within a text")),
        ("see invoice INV-99.", {"ref": "INV-99"}, ("arguments.ref", "INV-99", "the same value")),
        ({"url": "x/y?id=99887"}, {"to": ["a", {"b": "99887"}]}, ("arguments.to[1].b", "99887", "the same value")),
        (date(2031, 4, 5), {"on": date(2031, 4, 5)}, ("arguments.on", "2031-04-05", "the same value")),
        (b"\x00\x01\x02\x03\xff", {"raw": b"\x00\x01\x02\x03\xff"}, ("arguments.raw", "AAECA/8=", "the same value")),
        ({"mail": "ann@x.org"}, {"text": "to ann@x.org"}, ("arguments.text", "ann@x.org", "within a text")),
        ({"tone": "cheerful"}, {"tone": "cheerful"}, ("arguments.tone", "cheerful", "the same value")),
        ("été à Paris", {"text": "c'était l'été à Paris!"}, ("arguments.text", "été à Paris", "within a text")),
    ],
)
def test_a_value_that_was_new_and_turns_up_again_is_a_use(
    output: Any, arguments: Said, found: tuple[str, str, str]
) -> None:
    told = Told({"claim": 17})
    told.call(output, what="first")
    told.call(None, **arguments)
    assert told.found("1") == [("2", *found)]


def test_an_identifier_is_found_whatever_type_it_has() -> None:
    told = Told()
    number = UUID("12345678-1234-5678-1234-567812345678")
    told.call({"id": number})
    told.call(None, ref=str(number))
    assert told.found("1") == [("2", "arguments.ref", str(number), "the same value")]


@pytest.mark.parametrize(
    ("output", "arguments"),
    [
        ("ok", {"to": "ok"}),
        (17, {"to": 17}),
        ({"status": "done"}, {"status": "done"}),
        ({"ok": True, "none": None}, {"ok": True, "none": None}),
        ({"tone": "cheerful"}, {"text": "in a cheerful mood"}),
        ("b-17", {"to": "xb-17"}),
        ("b-17", {"to": "b-171"}),
        (200, {"code": 200}),
        ("claim", {"to": "nothing of it"}),
    ],
)
def test_what_may_be_the_same_by_chance_is_no_evidence(output: Any, arguments: Said) -> None:
    told = Told()
    told.call(output)
    told.call(None, **arguments)
    assert told.uses("1") == []


def test_what_was_known_before_the_step_ended_is_no_evidence() -> None:
    told = Told({"payee": "b-17", "text": "about the order AB-1234"})
    told.call("C-4321", asked="D-5555")
    told.call({"a": "b-17", "b": "AB-1234", "c": "C-4321", "d": "D-5555", "new": "E-9999"})
    told.call(None, a="b-17", b="AB-1234", c="C-4321", d="D-5555", e="E-9999")
    assert told.found("2") == [("3", "arguments.e", "E-9999", "the same value")]


def test_a_whole_document_is_one_use_and_not_one_of_each_leaf() -> None:
    told = Told()
    document = {"name": "Ada Lovelace", "lines": [{"sku": f"S-{n}99", "n": n} for n in range(3)]}
    told.call({"order": document})
    told.call(None, order=document, by="post")
    [use] = told.uses("1")
    assert (use.what, use.how) == ("arguments.order", "the same document")
    assert use.value.startswith('{"name":"Ada Lovelace"')


def test_a_document_with_dates_and_bytes_in_it_is_found_as_one() -> None:
    told = Told()
    document = {"on": date(2031, 4, 5), "raw": b"12345678", "kinds": ("alpha-1", "beta-2")}
    told.call([document])
    told.call(None, order=document, by="post")
    assert [(what, how) for _, what, _, how in told.found("1")] == [("arguments.order", "the same document")]


def test_several_values_in_one_text_are_told_in_their_order() -> None:
    told = Told()
    told.call({"z": "PA-2211", "a": "XB-9000", "m": "KK-1000"})
    told.call(None, text="first KK-1000, then PA-2211, then XB-9000")
    assert [value for _, _, value, _ in told.found("1")] == ["KK-1000", "PA-2211", "XB-9000"]


def test_a_document_is_the_same_whether_it_is_stored_apart_or_not() -> None:
    told = Told()
    document = {"text": "x" * 300, "id": "DOC-1"}
    told.call(document)
    told.call(None, document=document, padding=[f"word{n}" for n in range(400)])
    assert told.found("1")[0][:2] == ("2", "arguments.document")


def test_long_texts_are_looked_into_and_across_the_seams_of_their_pieces() -> None:
    filler = "the quick brown fox jumps over the lazy dog and goes home again " * 600
    for place in range(0, 30_000, 2_500):
        told = Told()
        told.call("PA-2211-XYZ-9")
        told.call(None, text=f"{filler[:place]} PA-2211-XYZ-9 {filler[place:]}")
        assert told.found("1") == [("2", "arguments.text", "PA-2211-XYZ-9", "within a text")], place


def test_a_long_text_passed_on_as_it_is_is_the_same_value() -> None:
    told = Told()
    text = "".join(f"line {n} of a long report\n" for n in range(2_000))
    told.call(text)
    told.call(None, report=text)
    assert told.found("1")[0][:2] == ("2", "arguments.report")
    assert told.found("1")[0][3] == "the same value"


def test_places_inside_long_lists_and_wide_objects_are_told_as_people_write_them() -> None:
    told = Told()
    told.call("PA-2211")
    told.call(None, messages=[{"role": "user", "content": f"turn number {n}"} for n in range(300)] + [{"c": "PA-2211"}])
    told.call(None, wide={f"name of field {n}": f"value of {n}" for n in range(300)} | {"paid": "PA-2211"})
    assert [what for _, what, _, _ in told.found("1")] == ["arguments.messages[300].c", "arguments.wide.paid"]


def test_everything_that_the_agent_puts_on_record_counts() -> None:
    told = Told()
    told.call("PA-2211")
    told.event(e.DecisionMade(at=1, step="2"), question="?", options=["x"], choice="x", because="saw PA-2211")
    told.event(e.ContextChanged(at=1, version=1), set={"receipt": "PA-2211"}, unset=[])
    told.event(e.NoteMade(at=1), note="noted PA-2211")
    told.event(e.StepIntended(at=1, step="3", sort="child", name="other"), arguments={})
    told.event(e.ChildSpawned(at=1, step="3", run="c", agent="other"), input={"receipt": "PA-2211"})
    told.event(e.StepIntended(at=1, step="4", sort="tool", name="send", effect="idempotent"), arguments={})
    told.event(e.MessageSent(at=1, step="4", run="other", name="paid", id="m"), body=["PA-2211"])
    told.event(e.StepIntended(at=1, step="5", sort="wait", name="ask"), arguments={})
    told.event(e.WaitOpened(at=1, step="5", waits_for="answer"), prompt="Is PA-2211 right?")
    told.event(e.RunCompleted(at=1), result={"receipt": "PA-2211"})
    assert [(use.step, use.name, use.what) for use in told.uses("1")] == [
        ("2", "decision", "because"),
        (None, "context", "context.receipt"),
        (None, "note", "note"),
        ("3", "other", "input.receipt"),
        ("4", "send", "body[0]"),
        ("5", "ask", "prompt"),
        (None, "result", "result.receipt"),
    ]


def test_what_comes_from_outside_is_no_use() -> None:
    told = Told()
    told.call("PA-2211")
    told.event(e.MessageTaken(at=1, message=1, name="paid", id="m"), body="PA-2211")
    told.call("I saw PA-2211")
    assert told.uses("1") == []


def test_only_the_current_timeline_counts() -> None:
    told = Told()
    told.call("PA-2211")
    cut = told.log.head("r").seq
    told.call(None, to="PA-2211")
    told.event(e.RunRewound(at=1, cut=cut, generation=1))
    assert told.uses("1") == []


# through other steps ------------------------------------------------------------------------------


def test_what_derives_from_a_use_is_kept_apart_and_says_through_whom() -> None:
    told = Told()
    told.call("PA-2211")
    told.call("M-77012", text="see PA-2211")
    told.call("L-5555", ref="M-77012")
    told.call(None, last="L-5555")
    told.call(None, both=["PA-2211", "L-5555"])
    assert [(use.step, use.value, use.through) for use in told.uses("1")] == [
        ("2", "PA-2211", None),
        ("3", "M-77012", "2"),
        ("4", "L-5555", "3"),
        ("5", "PA-2211", None),
    ]


def test_direct_evidence_goes_before_a_longer_text_that_holds_it() -> None:
    told = Told()
    told.call("PA-2211")
    told.call("I saw that PA-2211 was paid", text="PA-2211")
    told.call(None, text="I saw that PA-2211 was paid")
    assert [(use.step, use.value, use.through) for use in told.uses("1")] == [
        ("2", "PA-2211", None),
        ("3", "PA-2211", None),
    ]


def test_a_step_that_used_nothing_hands_nothing_on() -> None:
    told = Told()
    told.call("PA-2211")
    told.call("M-77012", text="hello")
    told.call(None, ref="M-77012")
    assert told.uses("1") == []


def test_a_model_that_saw_it_hands_on_what_it_said() -> None:
    told = Told()
    told.call({"temperature": "17.25"})
    reply = {"tool_calls": [{"name": "pay", "arguments": '{"to": "acct-555", "amount": 80}'}]}
    told.call(reply, sort="model", messages=[{"role": "tool", "content": '{"temperature": "17.25"}'}])
    told.call(None, to="acct-555", amount=80)
    assert [(use.step, use.what, use.value, use.through) for use in told.uses("1")] == [
        ("2", "arguments.messages[0].content", "17.25", None),
        ("3", "arguments.to", "acct-555", "2"),
    ]


# effects ------------------------------------------------------------------------------------------


def test_of_effects_it_says_whether_they_happened_and_were_undone() -> None:
    told = Told()
    told.call("PA-2211")
    told.call(None, a="PA-2211")
    told.call(None, b="PA-2211", effect="reads")
    step = e.StepIntended(at=1, step="4", sort="tool", name="act", effect="at_most_once")
    told.event(step, arguments={"c": "PA-2211"})
    told.event(e.AttemptStarted(at=1, step="4", attempt=1, key="k4", epoch=0))
    told.event(e.AttemptEnded(at=1, step="4", attempt=1, outcome="refused"), failure={})
    seq = told.log.ledger("r").effects[1].started
    undo = e.StepIntended(at=1, step="5", sort="undo", name="act", effect="at_most_once", undoes="2", undoes_seq=seq)
    told.event(undo, arguments={"key": "PA-2211"})
    told.event(e.AttemptStarted(at=1, step="5", attempt=1, key="k5", epoch=0))
    told.event(e.AttemptEnded(at=1, step="5", attempt=1, outcome="returned"), output=None)
    assert [(use.step, use.effect, use.happened, use.undone) for use in told.uses("1")] == [
        ("2", "at_most_once", True, True),
        ("3", None, False, False),
        ("4", "at_most_once", False, False),
    ]


def refund(effect: killick.Effect) -> str:
    return "refunded"


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    declared = dict(TOOLS)

    @killick.tool(compensate=refund, consumes=("token",))
    async def pay(to: str, token: str) -> str:
        return f"PA-{to}-2211"

    @killick.tool
    async def shout(text: str) -> str:
        return "heard"

    @killick.tool(effect="reads")
    async def read(text: str) -> str:
        return "R-1234"

    @killick.tool(repeat="recorded")
    async def greet(to: str) -> str:
        return "G-1234"

    @killick.agent
    async def payer(run: killick.Run, to: str) -> str:
        paid = await run.call(pay, to, "T-1")
        await run.call(shout, f"paid: {paid}")
        await run.call(read, "x")
        await run.call(greet, "ann")
        await run.call(greet, "ann")
        return paid

    with killick.open("memory:") as client:
        client.run(payer, "bob", id="r")
        yield client
    TOOLS.clear()
    TOOLS.update(declared)


def test_the_same_action_that_took_a_recorded_result_adopted_it(kd: killick.Client) -> None:
    [use] = uses(kd.log, "r", "4")
    assert (use.step, use.name, use.what, use.how) == ("5", "greet", "effect", "adopted it")


def test_undoing_says_how_it_is_undone_and_who_used_it(kd: killick.Client) -> None:
    found = kd.undoing("r", "1")
    assert isinstance(found, Undoing)
    assert (found.tool, found.status, found.compensated_by, found.refuses) == ("pay", "happened", "refund", None)
    assert found.arguments == {"to": "bob", "token": "T-1"}
    assert found.result == "PA-bob-2211"
    assert found.key is not None
    assert found.key.startswith("r:step_1:pay:")
    assert [(use.step, use.name) for use in found.used_by] == [("2", "shout"), (None, "result")]
    assert [claim.partition(":")[0] for claim in found.claims] == ["token"]


def test_undoing_refuses_in_one_line_what_cannot_be_undone(kd: killick.Client) -> None:
    assert kd.undoing("r", "2").refuses == "shout has no compensate="
    assert kd.undoing("r", "3").refuses == "it did nothing to the world (read reads)"
    assert undoing(kd.log, "r", "1", {}).refuses == "its tool pay is not declared here"
    kd.undo("r", "1")
    assert kd.undoing("r", "1").refuses == "it was undone already, by step 0.1"
    assert kd.undoing("r", "0.1").refuses == "it undoes step 1 itself"
    with pytest.raises(BoundaryUnknown, match="there is no step 9; it has step 1 to 5"):
        kd.undoing("r", "9")


def test_what_is_in_doubt_or_did_not_happen_is_not_undone() -> None:
    told = Told()
    step = e.StepIntended(at=1, step="1", sort="tool", name="act", effect="at_most_once")
    told.event(step, arguments={})
    told.event(e.AttemptStarted(at=1, step="1", attempt=1, key="k", epoch=0))
    assert undoing(told.log, "r", "1", {}).refuses == "whether act happened is not known; settle that first"
    told.event(e.AttemptEnded(at=1, step="1", attempt=1, outcome="refused"), failure={})
    assert undoing(told.log, "r", "1", {}).refuses == "act did not happen"


def test_forks_that_share_the_effect_or_adopted_it_stand_on_it_too(kd: killick.Client) -> None:
    kd.fork("r", "2:after", id="later")
    kd.fork("r", "1:before", id="earlier")
    kd.advance("earlier")
    kd.fork("later", "now", id="latest")
    kd.fork("earlier", "now", id="other")
    assert [(use.run, use.step, use.how) for use in uses(kd.log, "r", "1") if use.run] == [
        ("later", "1", "stands on it too"),
        ("earlier", "1", "adopted it"),
        ("latest", "1", "stands on it too"),
    ]
    assert [use.run for use in uses(kd.log, "later", "1") if use.run] == ["r", "latest"]
    assert kd.undoing("later", "1").refuses == "it was done by r; undo it there"
    assert kd.undoing("earlier", "1").refuses == "it was done by r; undo it there"
    kd.undo("r", "1")
    assert kd.undoing("later", "1").refuses == "it was undone already"


def test_leaving_lists_what_a_rewind_does_not_take_back(kd: killick.Client) -> None:
    kd.undo("r", "1")
    found = leaving(kd.log, "r", "1:before")
    assert found.steps == ("1", "2", "3", "4", "5")
    assert [(effect.step, effect.tool, effect.status) for effect in found.effects] == [
        ("1", "pay", "undone"),
        ("2", "shout", "happened"),
        ("4", "greet", "happened"),
        ("5", "greet", "happened"),
    ]
    assert found.consumed == ("token",)
    assert leaving(kd.log, "r", "3:before").consumed == ()


def test_leaving_counts_what_was_spent_started_and_taken_and_names_answers() -> None:
    told = Told()
    told.call("first")
    usage = e.Usage(model="m", tokens_in=100, tokens_out=20, cost_micros=700)
    told.event(e.StepIntended(at=1, step="2", sort="model", name="chat"), arguments={})
    told.event(e.AttemptStarted(at=1, step="2", attempt=1, key="m", epoch=0))
    told.event(e.AttemptEnded(at=1, step="2", attempt=1, outcome="returned", usage=usage), output="hi")
    told.event(e.StepIntended(at=1, step="3", sort="child", name="other"), arguments={})
    told.event(e.ChildSpawned(at=1, step="3", run="c", agent="other"), input=None)
    for step, waits_for, by in (("4", "answer", "mia"), ("5", "event", "ann"), ("6", "time", None)):
        told.event(e.StepIntended(at=1, step=step, sort="wait", name="wait"), arguments={})
        told.event(e.WaitOpened(at=1, step=step, waits_for=waits_for), prompt="?")  # type: ignore[arg-type]
        told.event(e.WaitClosed(at=1, step=step, how="answered", by=by), answer={"kind": "approve"})
    found = leaving(told.log, "r", "2:before")
    assert (found.spend.model_calls, found.spend.tokens_in, found.spend.cost_micros) == (1, 100, 700)
    assert [(child.run, child.status) for child in found.children] == [("c", "running")]
    assert [(answer.step, answer.by, answer.answer) for answer in found.answers] == [("4", "mia", "approve")]
    assert found.effects == ()
    assert leaving(told.log, "r", "now").steps == ()
    told.event(e.RunRenewed(at=1, run="r+2"), input=None)
    with pytest.raises(TimeRefused, match=r"r: goes on as r\+2; rewind that, or fork this one"):
        leaving(told.log, "r", "2:before")


# cost ---------------------------------------------------------------------------------------------


def test_a_conversation_that_grows_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    told.call("PA-2211")
    messages: list[Said] = []
    for turn in range(100):
        messages.append({"role": "user", "content": f"turn {turn}: " + "word " * 100})
        told.call(None, sort="model", messages=messages)
    told.call(None, text="PA-2211")
    fetched: list[bytes] = []
    fetch = told.log.store.pieces

    def counted(hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        fetched.extend(hashes)
        return fetch(hashes)

    monkeypatch.setattr(told.log.store, "pieces", counted)
    assert [use.step for use in told.uses("1")] == ["102"]
    assert len(fetched) > 100
    assert len(fetched) == len(set(fetched))
