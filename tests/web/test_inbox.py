"""The inbox page and its API: what is shown is what is asked, and an answer is of whoever gives it to what they saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from killick.clock import microseconds
from web import desk as at
from web.desk import Desk, desk


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        yield made


def claim(office: Desk, amount: int = 2400, run: str = "claim") -> str:
    office.at(at.claim, at.Claim(name="bob", amount=amount), run=run)
    return f"{run}:1"


def digest(office: Desk, wait: str) -> str:
    """What an answer is bound to, as it is shown."""
    return str(office.get(f"/inbox/{wait}")["questions"][0]["digest"])


def test_an_approval_tells_what_would_be_done_why_and_who_may_say(office: Desk) -> None:
    claim(office)
    [question] = office.get("/inbox")["questions"]
    assert (question["asks"], question["intention"]["tool"]) == ("approval", "desk_pay")
    assert question["intention"]["arguments"] == {"to": "bob", "amount": 2400}
    assert (question["rule"], question["because"]) == ("large", "the storm is on record")
    assert (question["to"], question["may"], question["why_not"]) == (["managers"], ["max", "mia"], None)
    assert microseconds(question["deadline"]) == microseconds(question["opened_at"]) + 3 * 86_400_000_000
    page = office.page("/inbox")
    for text in ("desk_pay", "2400", "the storm is on record", "large sums are put to people", "Approve", "managers"):
        assert text in page


def test_whoever_is_not_asked_is_told_so_and_cannot_answer(office: Desk) -> None:
    wait = claim(office)
    office.be("eve")
    [question] = office.get("/inbox")["questions"]
    assert question["why_not"] == "it is asked of managers (max, mia)"
    assert "You cannot answer this" in office.page("/inbox")
    assert office.get("/inbox?mine=true")["questions"] == []
    assert office.post(f"/inbox/{wait}", 403, verb="approve", digest=digest(office, wait))["code"] == "not_asked"
    office.be("mia", "viewer")
    assert "an operator may answer" in office.page("/inbox")
    office.post(f"/inbox/{wait}", 403, verb="approve", digest=digest(office, wait))


def test_the_answer_is_the_callers_own_whatever_the_body_says(office: Desk) -> None:
    wait = claim(office)
    assert office.post(f"/inbox/{wait}", 422, verb="approve", by="max")["code"] == "body_refused"
    refused = office.post(f"/inbox/{wait}", 422, verb="aprove")
    assert "'aprove'" in refused["detail"]
    assert refused["detail"].endswith("; it is one of approve, reject, edit, respond, happened, not, stop")
    told = office.post(f"/inbox/{wait}", verb="approve", comment="fine", digest=digest(office, wait))
    assert told["did"] == 'approved desk_pay(to="bob", amount=2400)'
    office.kd.advance("claim")
    assert office.kd.state("claim").result == "paid 2400 to bob"


def test_an_edit_names_only_what_changes_and_is_judged_again(office: Desk) -> None:
    wait = claim(office)
    digest = office.get("/inbox")["questions"][0]["digest"]
    refused = office.post(f"/inbox/{wait}", 409, verb="edit", value={"amount": "much"}, digest=digest)
    assert "amount" in refused["detail"]
    told = office.post(f"/inbox/{wait}", verb="edit", value={"amount": 100}, digest=digest, comment="less")
    assert told["did"].endswith("with amount=100")
    office.kd.advance("claim")
    assert office.kd.state("claim").result == "paid 100 to bob"


def test_an_old_screen_answers_no_new_question(office: Desk) -> None:
    wait = claim(office)
    digest = office.get("/inbox")["questions"][0]["digest"]
    office.kd.rewind("claim", "1:before", by="max")
    office.kd.advance("claim")
    assert office.get("/inbox")["questions"][0]["digest"] != digest
    refused = office.post(f"/inbox/{wait}", 409, verb="approve", digest=digest)
    assert "the question has changed; read it again" in refused["detail"]


def test_the_first_answer_counts_and_the_second_is_told_who_was_first(office: Desk) -> None:
    wait = claim(office)
    office.post(f"/inbox/{wait}", verb="approve", digest=digest(office, wait))
    assert "mia" in office.be("max").post(f"/inbox/{wait}", 409, verb="reject")["detail"]
    found = office.get("/inbox")
    assert found["questions"] == []
    assert [(each["by"], each["verb"]) for each in found["answered"]] == [("mia", "approve")]
    assert "mia</strong> approved" in office.page("/inbox")
    assert "You</strong> approved" in office.be("mia").page("/inbox")
    assert office.get(f"/inbox/{wait}")["gone"] == "mia answered first: approve"
    office.kd.advance("claim")
    assert office.get(f"/inbox/{wait}")["gone"] == "mia answered first: approve"
    assert "nothing to answer here any more" in office.page(f"/inbox/{wait}")


def test_an_approval_names_what_was_shown(office: Desk) -> None:
    wait = claim(office)
    for body in ({"verb": "approve"}, {"verb": "edit", "value": {"amount": 1}}):
        refused = office.post(f"/inbox/{wait}", 409, **body)
        assert (refused["code"], "digest" in refused["detail"]) == ("answer_refused", True)


def test_an_approval_that_carries_changed_fields_pays_nothing(office: Desk) -> None:
    wait = claim(office)
    refused = office.post(f"/inbox/{wait}", 409, verb="approve", value={"amount": 1}, digest=digest(office, wait))
    assert refused["detail"].endswith("use edit")
    office.post(f"/inbox/{wait}", 422, verb="approve", amount=1, digest=digest(office, wait))
    assert [each["id"] for each in office.get("/inbox")["questions"]] == [wait]


def test_a_question_that_wants_a_value_offers_no_approval_and_takes_none(office: Desk) -> None:
    office.at(at.asks, "When?", run="asks")
    office.at(at.offers, run="offers")
    assert "data-approve" not in office.page("/inbox")
    refused = office.post("/inbox/asks:1", 409, verb="approve", digest=digest(office, "asks:1"))
    assert "'later'" in refused["detail"]
    office.post("/inbox/offers:1", 409, verb="approve", digest=digest(office, "offers:1"))


def test_two_who_have_to_agree_are_counted_one_by_one(office: Desk) -> None:
    office.at(at.rollout, 5, run="r")
    told = office.be("lea").post("/inbox/r:1", verb="approve", digest=digest(office, "r:1"))
    assert told["did"].endswith(": 1 of 2 approved (lea)")
    assert told["next"].startswith("1 more of leo has to agree")
    [question] = office.get("/inbox")["questions"]
    assert (question["approved_by"], question["why_not"]) == (["lea"], "lea approved it already")
    assert office.post("/inbox/r:1", 409, verb="approve", digest=question["digest"])["code"] == "already_agreed"
    office.be("leo").post("/inbox/r:1", verb="approve", digest=question["digest"])
    office.kd.advance("r")
    assert office.kd.state("r").result == "5 hosts"


def test_options_are_buttons_and_a_schema_is_a_form(office: Desk) -> None:
    office.at(at.asks, "When?", run="asks")
    office.at(at.offers, run="offers")
    page = office.page("/inbox")
    assert 'data-value="&#34;later&#34;"' in page
    assert 'data-field="reason"' in page
    assert (
        "amount" in office.post("/inbox/offers:1", 409, verb="respond", value={"amount": "x", "reason": ""})["detail"]
    )
    assert (
        "amount takes at least 0"
        in office.post("/inbox/offers:1", 409, verb="respond", value={"amount": -5, "reason": "late"})["detail"]
    )
    office.post("/inbox/offers:1", verb="respond", value={"amount": 5, "reason": "late"})
    assert office.post("/inbox/asks:1", 409, verb="respond", value="never")["code"] == "answer_refused"
    office.post("/inbox/asks:1", verb="respond", value="later")
    office.kd.advance_due()
    assert office.kd.state("asks").result == ["respond", "later", "mia"]


def test_what_is_in_doubt_is_shown_with_what_is_known_and_settled(office: Desk) -> None:
    office.at(at.checkout, "4111", run="r")
    [question] = office.get("/inbox")["questions"]
    assert (question["asks"], question["intention"]["tool"]) == ("doubt", "desk_charge")
    assert question["attempt"]["idempotency_key"].startswith("r:step_2:desk_charge:")
    assert "the bank did not answer" in question["attempt"]["errors"][0]["message"]
    assert "It did not happen" in office.page("/inbox")
    office.post("/inbox/r:2", verb="happened", value="receipt 1", comment="I looked")
    office.kd.advance("r")
    assert office.kd.state("r").result == "receipt 1"


def test_what_is_in_doubt_comes_first(office: Desk) -> None:
    claim(office)
    office.at(at.checkout, "4111", run="r")
    assert [each["asks"] for each in office.get("/inbox")["questions"]] == ["doubt", "approval"]
    assert [each["id"] for each in office.get("/inbox?asks=approval")["questions"]] == ["claim:1"]


def test_pages_of_the_inbox_follow_each_other(office: Desk) -> None:
    for n in range(5):
        office.at(at.asks, "When?", run=f"r{n}")
        office.clock.advance(1)
    first = office.get("/inbox?limit=2")
    rest = office.get(f"/inbox?limit=10&cursor={first['next']}")
    assert [each["run"] for each in first["questions"] + rest["questions"]] == [f"r{n}" for n in range(5)]
    assert rest["next"] is None
    assert office.get("/inbox?cursor=x", 422)["code"] == "value_refused"


def test_what_an_agent_wrote_is_text_on_the_page(office: Desk) -> None:
    office.at(at.asks, "<script>alert(1)</script>'\"><img src=x onerror=alert(1)>", run="r")
    page = office.page("/inbox")
    assert "<script>alert" not in page
    assert "<img src=x" not in page


def test_a_hidden_argument_is_neither_shown_nor_lost_by_an_edit(tmp_path: Path) -> None:
    with desk(tmp_path, redact=["to"]) as office:
        wait = claim(office)
        page = office.page(f"/inbox/{wait}")
        assert "(redacted)" in page
        assert "bob" not in page.replace("combobox", "")
        office.post(f"/inbox/{wait}", verb="edit", value={"amount": 7, "to": "(redacted)"}, digest=digest(office, wait))
        office.kd.advance("claim")
        assert office.kd.state("claim").result == "paid 7 to bob"


def test_a_wait_that_never_was_is_not_found(office: Desk) -> None:
    office.at(at.asks, "When?", run="r")
    assert office.get("/inbox/r:9", 404)["code"] == "wait_unknown"
    assert office.get("/inbox/nobody:1", 404)["code"] == "run_unknown"
    assert "nobody" in office.page("/inbox/nobody:1", 404)
    assert office.page("/inbox?to=somebody").count("Nothing waits for somebody") == 1
