"""Questions in Slack: what a button answers is the person's, counts once, and the message says who answered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

import killick
from killick.errors import DeclarationRefused
from killick.workers.hooks import ensure
from web import desk as at
from web.desk import Desk, desk
from web.elsewhere import (
    PUBLIC,
    SIGNING,
    TOKEN,
    Request,
    Slack,
    attended,
    configured,
    send,
    signed,
    slack,
)

PEOPLE = {"U1": "mia", "U2": "max", "U3": "eve", "U4": "lea", "U5": "leo"}
FIRST = "17000.000001"


@pytest.fixture(autouse=True)
def environment() -> Iterator[pytest.MonkeyPatch]:
    with configured() as made:
        yield made


@pytest.fixture
def far() -> Iterator[Slack]:
    with slack() as made:
        yield made


@pytest.fixture
def office(tmp_path: Path, far: Slack) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        killick.slack("C1", token=TOKEN, signing_secret=SIGNING, people=PEOPLE, api=far.api)
        ensure(made.kd.runtime.engine)
        made.web = TestClient(made.web.app)  # without a login
        yield made


def claim(office: Desk, run: str = "claim") -> str:
    office.at(at.claim, at.Claim(name="bob", amount=2400), run=run)
    attended(office.kd, "slack")
    return run


def press(office: Desk, far: Slack, button: str, user: str = "U1", ts: str = FIRST) -> Request:
    request = far.pressed(ts, button, user=user, at_us=office.clock.now_us())
    send(office.web, request)
    return request


def answers(office: Desk, run: str = "claim") -> list[str | None]:
    return [each.by for each in office.kd.runtime.store.messages(run)]


def test_a_question_is_posted_with_its_evidence_and_buttons(office: Desk, far: Slack) -> None:
    claim(office)
    title, about, *buttons = far.texts(FIRST)
    assert title == 'Approve desk_pay(to="bob", amount=2400)?'
    for text in ("large sums are put to people", "the storm is on record", "max, mia", "claim, step 1"):
        assert text in about
    assert buttons == ["Approve", "Look and edit…", "Reject"]
    [(path, headers)] = far.calls
    assert (path, headers["authorization"]) == ("/api/chat.postMessage", f"Bearer {TOKEN}")
    assert far.messages[FIRST]["channel"] == "C1"


def test_a_button_answers_as_the_person_and_the_message_says_so(office: Desk, far: Slack) -> None:
    claim(office)
    press(office, far, "approve")
    assert far.texts(FIRST)[0] == 'Approve desk_pay(to="bob", amount=2400)?'
    assert re.fullmatch(r"Approved by mia at 2026-11-\d\d \d\d:\d\d:\d\d UTC", far.texts(FIRST)[-1])
    assert answers(office) == ["mia"]
    office.kd.advance("claim")
    assert office.kd.state("claim").result == "paid 2400 to bob"


def test_a_rejection_is_one_too(office: Desk, far: Slack) -> None:
    claim(office)
    press(office, far, "reject", "U2")
    assert far.texts(FIRST)[-1].startswith("Rejected by max at ")
    office.kd.advance("claim")
    assert office.kd.state("claim").result.startswith("not paid")


def test_a_crash_between_the_answer_and_the_update_is_mended_by_the_worker(office: Desk, far: Slack) -> None:
    claim(office)
    far.fails = [(500, {}, {})]  # the server's reply is lost, as it is when the server dies
    press(office, far, "approve")
    assert far.texts(FIRST)[-1] == "Reject"  # the buttons are still there
    assert answers(office) == ["mia"]
    office.kd.advance("claim")
    attended(office.kd, "slack")
    assert far.calls[-1][0] == "/api/chat.update"
    assert far.texts(FIRST)[-1].startswith("Approved by mia at ")


def test_a_question_that_was_posted_twice_is_answered_once_and_both_copies_say_so(office: Desk, far: Slack) -> None:
    far.loses = 1  # the message is posted, and the worker does not learn of it
    office.at(at.claim, at.Claim(name="bob", amount=2400), run="claim")
    attended(office.kd, "slack", rests=3)
    assert len(far.messages) == 2
    press(office, far, "approve")
    office.kd.advance("claim")
    attended(office.kd, "slack")
    assert answers(office) == ["mia"]
    assert far.texts(FIRST)[-1] == far.texts("17000.000002")[-1]
    assert far.texts(FIRST)[-1].startswith("Approved by mia at ")


def test_a_second_press_after_a_lost_update_says_the_outcome_and_answers_nothing(office: Desk, far: Slack) -> None:
    claim(office)
    far.fails = [(500, {}, {})]
    press(office, far, "approve")
    office.clock.advance(1)
    press(office, far, "reject", "U2")
    assert answers(office) == ["mia"]
    assert far.texts(FIRST)[-1].startswith("Approved by mia at ")


def test_an_answer_given_elsewhere_is_on_the_message_too(office: Desk, far: Slack) -> None:
    claim(office)
    claim(office, "other")
    office.kd.answer("claim", "edit", value={"amount": 5}, by="max")
    office.kd.advance("claim")
    attended(office.kd, "slack")
    assert far.texts(FIRST)[-1].startswith("Edited by max at ")
    assert far.texts("17000.000002")[-1] == "Reject"


def test_a_question_that_expired_loses_its_buttons(office: Desk, far: Slack) -> None:
    claim(office)
    office.clock.advance(4 * 86_400)
    office.kd.advance("claim")
    attended(office.kd, "slack")
    assert far.texts(FIRST)[-1] == "Not asked any more: expired"


def test_an_update_that_slack_refuses_is_repeated(office: Desk, far: Slack) -> None:
    claim(office)
    office.kd.answer("claim", "approve", by="max")
    office.kd.advance("claim")
    far.fails = [(200, {"ok": False, "error": "internal_error"}, {}), (429, {}, {"retry-after": "30"})]
    attended(office.kd, "slack", rests=6)
    assert far.texts(FIRST)[-1].startswith("Approved by max at ")
    kinds = [str(each.event.__struct_config__.tag) for each in office.kd.events("hook:slack", after=2)]
    assert kinds == ["hook.called", "hook.failed", "hook.failed", "hook.called"]


def test_a_message_that_was_deleted_delays_no_other_question(office: Desk, far: Slack) -> None:
    claim(office)
    office.kd.answer("claim", "approve", by="max")
    office.kd.advance("claim")
    far.fails = [(200, {"ok": False, "error": "message_not_found"}, {})]
    claim(office, "other")
    kinds = [str(each.event.__struct_config__.tag) for each in office.kd.events("hook:slack", after=2)]
    assert kinds == ["hook.called", "hook.dropped", "hook.called"]
    assert len(far.messages) == 2


def test_a_wait_that_is_for_no_person_is_no_concern_of_slack(office: Desk, far: Slack) -> None:
    office.at(at.waits)
    office.kd.send("r", "paid", {})
    office.kd.advance("r")
    attended(office.kd, "slack")
    assert office.kd.info("r").status == "completed"
    assert far.calls == []


def test_a_question_that_was_answered_before_is_not_posted(office: Desk, far: Slack) -> None:
    office.at(at.claim, at.Claim(name="bob", amount=2400), run="claim")
    office.kd.answer("claim", "approve", by="mia")
    office.kd.advance("claim")
    attended(office.kd, "slack")
    assert far.calls == []


def test_editing_opens_a_link_that_is_the_persons_own(office: Desk, far: Slack) -> None:
    claim(office)
    press(office, far, "edit", "U2")
    [text] = far.alone
    [token] = re.findall(rf"<{re.escape(PUBLIC)}/answer#(\S+)\|look at it, and answer as max>", text)
    assert far.texts(FIRST)[-1] == "Reject"
    assert office.web.post("/api/v1/answer/question", json={"link": token}).json()["by"] == "max"
    done = office.web.post(
        "/api/v1/answer", json={"link": token, "verb": "edit", "value": {"amount": 7}, "digest": None}
    )
    assert done.status_code == 200
    office.kd.advance("claim")
    assert office.kd.state("claim").result == "paid 7 to bob"


def test_the_value_of_a_button_is_no_link(office: Desk, far: Slack) -> None:
    claim(office)
    value = far.messages[FIRST]["blocks"][-1]["elements"][0]["value"]
    refused = office.web.post("/api/v1/answer", json={"link": value, "verb": "approve"})
    assert (refused.status_code, refused.json()["code"]) == (403, "link_refused")
    assert "this link is for another way to answer" in refused.json()["detail"]


def test_a_quorum_is_counted_and_the_buttons_stay_until_it_is_complete(office: Desk, far: Slack) -> None:
    office.at(at.rollout, 3)
    attended(office.kd, "slack")
    press(office, far, "approve", "U4")
    assert "1 more of leo has to agree" in far.alone[-1]
    office.clock.advance(1)
    press(office, far, "approve", "U4")
    assert "lea agreed already" in far.alone[-1]
    press(office, far, "approve", "U5")
    assert far.texts(FIRST)[-1].startswith("Approved by lea, leo at ")


@pytest.mark.parametrize("button", ["approve", "edit", "reject"])
def test_who_is_not_asked_cannot_answer_and_gets_no_link(office: Desk, far: Slack, button: str) -> None:
    claim(office)
    press(office, far, button, "U3")
    assert far.alone == ["claim:1: eve may not answer this; it is asked of max, mia"]
    assert answers(office) == []


def test_a_slack_user_without_a_name_is_told_so(office: Desk, far: Slack) -> None:
    claim(office)
    press(office, far, "approve", "U999")
    assert "U999 has no name here" in far.alone[0]
    assert answers(office) == []


def test_a_replayed_request_is_refused(office: Desk, far: Slack) -> None:
    claim(office)
    request = press(office, far, "edit")
    assert "it was received before" in send(office.web, request, 401)["detail"]
    assert len(far.alone) == 1


def test_a_request_with_a_wrong_signature_an_altered_body_or_an_old_stamp_is_refused(office: Desk, far: Slack) -> None:
    claim(office)
    now = office.clock.now_us()
    right = far.pressed(FIRST, "approve", at_us=now)
    wrong = [
        (signed(right.body, now // 1_000_000, "another-secret"), "its signature does not fit"),
        (right._replace(body=right.body.replace(b"U1", b"U2")), "its signature does not fit"),
        (right._replace(headers={**right.headers, "X-Slack-Request-Timestamp": str(now // 1_000_000 + 1)}), "not fit"),
        (far.pressed(FIRST, "approve", at_us=now - 301_000_000), "it was sent 301 s ago"),
        (far.pressed(FIRST, "approve", at_us=now + 301_000_000), "in the future"),
        (right._replace(headers={"Content-Type": "application/x-www-form-urlencoded"}), "it has no valid"),
        (right._replace(headers={**right.headers, "X-Slack-Signature": "v0="}), "not fit"),
    ]
    for request, said in wrong:
        refused = send(office.web, request, 401)
        assert refused["code"] == "webhook_refused"
        assert said in refused["detail"]
    assert answers(office) == []
    send(office.web, right)
    assert answers(office) == ["mia"]


@pytest.mark.parametrize(
    "payload", ["", "[]", "{", "{}", '{"actions": []}', '{"actions": [{"action_id": 1}]}', "[" * 9999]
)
def test_a_signed_request_that_is_no_pressed_button_is_refused(office: Desk, payload: str) -> None:
    body = urlencode({"payload": payload}).encode()
    refused = send(office.web, signed(body, office.clock.now_us() // 1_000_000), 400)
    assert refused["code"] == "not_an_interaction"


def test_a_button_of_another_message_answers_nothing_of_this_store(office: Desk, far: Slack) -> None:
    claim(office)
    far.messages[FIRST]["blocks"][-1]["elements"][0]["value"] = "made.up"
    press(office, far, "approve")
    assert "this link was altered, or is not of this server" in far.alone[0]
    far.messages[FIRST]["blocks"][-1]["elements"][0]["action_id"] = "explode"
    assert answers(office) == []


def test_an_unknown_channel_is_404(office: Desk, far: Slack) -> None:
    claim(office)
    request = far.pressed(FIRST, "approve", at_us=office.clock.now_us())
    assert send(office.web, request, 404, name="other")["code"] == "not_found"
    killick.on("run.failed", name="mine")(print)
    assert send(office.web, request, 404, name="mine")["code"] == "not_found"


def test_a_prompt_mentions_nobody_and_links_nowhere(office: Desk, far: Slack) -> None:
    office.at(at.asks, "<!channel> <https://evil.example|Approve here> " + "x" * 9000)
    attended(office.kd, "slack")
    message = far.messages[FIRST]
    assert "<!channel>" not in message["text"]
    assert all(block["text"]["type"] == "plain_text" for block in message["blocks"] if block["type"] == "section")
    assert all(len(text) <= 3000 for text in far.texts(FIRST))
    assert far.texts(FIRST)[-2:] == ["Answer…", "Reject"]  # of several options, one is chosen on the page


def test_a_declaration_without_people_is_refused() -> None:
    with pytest.raises(DeclarationRefused, match="nobody could answer"):
        killick.slack("C1", token="t", signing_secret=SIGNING, people={})
    with pytest.raises(DeclarationRefused, match="has a secret of fewer than 16 bytes"):
        killick.slack("C1", token="t", signing_secret="fifteen bytes..", people=PEOPLE)
