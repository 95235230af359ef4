"""What undoing a step would mean: how it is undone, what shares its effect, and what a rewind leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import killick
from killick.definitions.tools import TOOLS
from killick.errors import BoundaryUnknown, TimeRefused
from killick.history.rewind_preview import preview_rewind
from killick.history.undo_preview import UndoPreview, shared_by, undoing
from killick.log import Entry, Log
from killick.model import events as e
from killick.presenting import previews
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
    [use] = shared_by(kd.runtime.log, "r", "4")
    assert (use.run, use.step, use.name, use.how) == ("r", "5", "greet", "adopted")


def test_undoing_says_how_it_is_undone(kd: killick.Client) -> None:
    found = kd.undoing("r", "1")
    assert isinstance(found, UndoPreview)
    assert (found.tool, found.status, found.compensated_by, found.refuses) == ("pay", "happened", "refund", None)
    assert found.arguments == {"to": "bob", "token": "T-1"}
    assert found.result == "PA-bob-2211"
    assert found.key is not None
    assert found.key.startswith("r:step_1:pay:")
    assert found.shared_by == ()
    assert [claim.partition(":")[0] for claim in found.claims] == ["token"]


def test_undoing_refuses_in_one_line_what_cannot_be_undone(kd: killick.Client) -> None:
    assert kd.undoing("r", "2").refuses == "shout has no compensate="
    assert kd.undoing("r", "3").refuses == "it did nothing to the world (read reads)"
    assert undoing(kd.runtime.log, "r", "1", {}).refuses == "its tool pay is not declared here"
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
    assert [(use.run, use.step, use.how) for use in shared_by(kd.runtime.log, "r", "1")] == [
        ("later", "1", "inherited"),
        ("earlier", "1", "adopted"),
        ("latest", "1", "inherited"),
    ]
    assert [use.run for use in shared_by(kd.runtime.log, "later", "1")] == ["r", "latest"]
    assert kd.undoing("later", "1").refuses == "it was done by r; undo it there"
    assert kd.undoing("earlier", "1").refuses == "it was done by r; undo it there"
    kd.undo("r", "1")
    assert kd.undoing("later", "1").refuses == "it was undone already"


def test_leaving_lists_what_a_rewind_does_not_take_back(kd: killick.Client) -> None:
    kd.undo("r", "1")
    found = preview_rewind(kd.runtime.log, "r", "1:before")
    assert found.steps == ("1", "2", "3", "4", "5")
    assert [(effect.step, effect.tool, effect.status) for effect in found.effects] == [
        ("1", "pay", "undone"),
        ("2", "shout", "happened"),
        ("4", "greet", "happened"),
        ("5", "greet", "happened"),
    ]
    assert found.consumed == ("token",)
    assert preview_rewind(kd.runtime.log, "r", "3:before").consumed == ()


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
    found = preview_rewind(told.log, "r", "2:before")
    assert (found.spend.model_calls, found.spend.tokens_in, found.spend.cost_micros) == (1, 100, 700)
    assert [(child.run, child.status) for child in found.children] == [("c", "running")]
    assert [(answer.step, answer.by, answer.answer) for answer in found.answers] == [("4", "mia", "approve")]
    assert found.effects == ()
    assert preview_rewind(told.log, "r", "now").steps == ()
    told.event(e.RunRenewed(at=1, run="r+2"), input=None)
    with pytest.raises(TimeRefused, match=r"r: continues as r\+2; rewind that, or fork this one"):
        preview_rewind(told.log, "r", "2:before")


def test_the_preview_of_an_undo_names_the_runs_that_share_the_effect(kd: killick.Client) -> None:
    kd.fork("r", "2:after", id="later")
    will = previews.undo(kd.undoing("r", "1"), None)
    assert will.more[0] == "shared by: later, step 1 pay: shares the same effect"
