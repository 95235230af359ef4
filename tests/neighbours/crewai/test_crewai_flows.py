"""What a flow's persistence owes CrewAI: the same of theirs and of ours."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crewai.flow import human_feedback
from crewai.flow.async_feedback import HumanFeedbackPending, PendingFeedbackContext
from crewai.flow.flow import Flow, listen, start
from crewai.flow.persistence import SQLiteFlowPersistence, persist
from crewai.flow.persistence.base import FlowPersistence
from pydantic import BaseModel

import killick
from killick.adapters.crewai import KillickFlowPersistence


class OrderState(BaseModel):
    id: str = "A7"
    paid: list[int] = []
    due: datetime.date | None = None


@pytest.fixture(params=["sqlite", "killick", "killick over a client"])
def persistence(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FlowPersistence]:
    match request.param:
        case "sqlite":
            yield SQLiteFlowPersistence(str(tmp_path / "flows.db"))
        case "killick":
            ours = KillickFlowPersistence(tmp_path / "killick.db")
            yield ours
            ours.close()
        case _:
            with killick.open("memory:") as kd:
                yield KillickFlowPersistence(kd)


def test_the_state_that_was_saved_last_is_loaded_by_the_flows_id(persistence: FlowPersistence) -> None:
    assert persistence.load_state("A7") is None
    persistence.save_state("A7", "one", {"id": "A7", "n": 1})
    persistence.save_state("A7", "two", OrderState(paid=[5], due=datetime.date(2031, 4, 1)))
    persistence.save_state("B8", "one", {"id": "B8"})
    assert persistence.load_state("A7") == {"id": "A7", "paid": [5], "due": "2031-04-01"}
    assert persistence.load_state("B8") == {"id": "B8"}


def test_what_a_person_is_asked_is_kept_with_the_state_until_they_answer(persistence: FlowPersistence) -> None:
    asked = PendingFeedbackContext(
        flow_id="A7", flow_class="Orders", method_name="review", method_output={"sum": 5}, message="Pay?"
    )
    assert persistence.load_pending_feedback("A7") is None
    persistence.save_pending_feedback("A7", asked, {"id": "A7"})
    found = persistence.load_pending_feedback("A7")
    assert found is not None
    state, context = found
    assert state == persistence.load_state("A7") == {"id": "A7"}
    assert (context.message, context.method_output, context.method_name) == ("Pay?", {"sum": 5}, "review")
    persistence.clear_pending_feedback("A7")
    assert persistence.load_pending_feedback("A7") is None
    assert persistence.load_state("A7") == {"id": "A7"}


def test_a_flow_goes_on_with_its_state_and_its_answer_in_another_process(persistence: FlowPersistence) -> None:
    class Elsewhere:
        def request_feedback(self, context: Any, flow: Any) -> str:
            raise HumanFeedbackPending(context=context)

    @persist(persistence)
    class Orders(Flow[OrderState]):
        @start()
        @human_feedback(message="Pay 5?", provider=Elsewhere())
        def review(self) -> str:
            self.state.paid.append(5)
            return "5"

        @listen(review)
        def end(self, answer: Any) -> str:
            return f"{self.state.paid} {answer.feedback}"

    pending = Orders(suppress_flow_events=True).kickoff(inputs={"id": "A7"})
    assert isinstance(pending, HumanFeedbackPending)
    resumed = Orders.from_pending("A7", persistence)
    assert resumed.resume("do") == "[5] do"
    assert persistence.load_pending_feedback("A7") is None


def test_a_state_that_cannot_be_stored_is_refused_by_its_path(tmp_path: Path) -> None:
    ours = KillickFlowPersistence(tmp_path / "killick.db")
    with pytest.raises(TypeError, match="open_file"):
        ours.save_state("A7", "one", {"id": "A7", "open_file": object()})
    assert ours.load_state("A7") is None
    ours.close()


def test_all_that_a_state_was_is_in_the_log_and_a_growing_one_costs_what_is_new(tmp_path: Path) -> None:
    theirs, ours = SQLiteFlowPersistence(str(tmp_path / "flows.db")), KillickFlowPersistence(tmp_path / "killick.db")
    said: list[str] = []
    for turn in range(60):
        said.append(f"{turn}: " + f"{turn * 7919 % 1000:04d} " * 400)
        for each in (theirs, ours):
            each.save_state("A7", f"turn {turn}", {"id": "A7", "said": said})
    ours.close()
    with killick.open(tmp_path / "killick.db") as kd:
        assert kd.store.verify().problems == []
    big, small = (sum(f.stat().st_size for f in tmp_path.glob(f"{name}*")) for name in ("flows.db", "killick.db"))
    print(f"60 turns of 2 KB, each saved: SQLiteFlowPersistence {big / 1e6:.1f} MB, Killick {small / 1e6:.2f} MB")
    assert small < big / 8
