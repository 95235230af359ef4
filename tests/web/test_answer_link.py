"""An answer link shows one question to one person, and takes their answer once, without a login."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import killick
from killick.client import answers
from killick.errors import DeclarationRefused
from killick.log.slots import of_wait
from killick.web.app import asgi
from killick.workers.answer_links import links
from killick.workers.hooks import HookEvent, ensure
from web import desk as at
from web.desk import Desk, desk
from web.elsewhere import PUBLIC, SECRET, Collected, attended, configured, token_of


class Guest:
    """A person who has a link, and nothing else."""

    def __init__(self, office: Desk) -> None:
        self.office = office
        self.web = TestClient(office.web.app)

    def get(self, link: str, status: int = 200) -> Any:
        answer = self.web.post("/api/v1/answer/question", json={"link": link})
        assert answer.status_code == status, answer.text
        return answer.json()

    def page(self, link: str, status: int = 200) -> str:
        answer = self.web.post("/answer/question", json={"link": link})
        assert answer.status_code == status, answer.text
        return answer.text

    def post(self, link: str, status: int = 200, **body: Any) -> Any:
        answer = self.web.post("/api/v1/answer", json={"link": link, **body})
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture(autouse=True)
def environment() -> Iterator[pytest.MonkeyPatch]:
    with configured() as made:
        yield made


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        yield made


@pytest.fixture
def sent(office: Desk) -> Collected:
    return Collected(office.kd)


def claim(office: Desk, amount: int = 2400, run: str = "claim") -> str:
    return office.at(at.claim, at.Claim(name="bob", amount=amount), run=run)


def test_a_link_leads_to_the_server_and_there_is_one_for_each_person_who_is_asked(
    office: Desk, sent: Collected
) -> None:
    claim(office)
    sent.link("claim", "mia")
    assert set(sent.links["claim"]) == {"mia", "max"}
    assert all(url.startswith(f"{PUBLIC}/answer#") for url in sent.links["claim"].values())
    assert len(set(sent.links["claim"].values())) == 2


def test_the_page_shows_the_question_and_nothing_else_and_changes_nothing(office: Desk, sent: Collected) -> None:
    link = sent.link(claim(office), "mia")
    guest, before = Guest(office), office.kd.runtime.log.head("claim")
    for _ in range(3):  # a mail scanner, a preview, the person
        page = guest.page(link)
    assert guest.web.head("/answer").status_code == 200
    assert office.kd.runtime.log.head("claim") == before
    assert office.kd.runtime.store.messages("claim") == []
    for text in ("desk_pay", "2400", "the storm is on record", "large sums are put to people", "Approve", "mia"):
        assert text in page
    for text in ("killick.db", 'href="/runs', 'href="/inbox', 'href="/api"', "Sign out", "palette"):
        assert text not in page


def test_a_link_opens_nothing_but_its_question(office: Desk, sent: Collected, tmp_path: Path) -> None:
    link = sent.link(claim(office), "mia")
    app = asgi(office.kd)  # by tokens
    with TestClient(app) as web:
        assert web.post("/api/v1/answer/question", json={"link": link}).status_code == 200
        for path in ("/api/v1/inbox", "/api/v1/runs/claim", "/api/v1/inbox/claim:1"):
            assert web.get(path, params={}).status_code == 401
        assert web.get("/api/v1/runs", headers={"Authorization": f"Bearer {link}"}).status_code == 401


def test_an_answer_by_link_is_the_persons_and_takes_the_way_of_the_inbox(office: Desk, sent: Collected) -> None:
    link = sent.link(claim(office), "mia")
    guest = Guest(office)
    digest = guest.get(link)["question"]["digest"]
    told = guest.post(link, verb="edit", value={"amount": 100}, comment="less", digest=digest)
    assert told["did"].endswith("with amount=100")
    office.kd.advance("claim")
    assert office.kd.state("claim").result == "paid 100 to bob"
    assert [each.by for each in office.kd.runtime.store.messages("claim")] == ["mia"]


def test_an_answered_question_says_by_whom_and_when(office: Desk, sent: Collected) -> None:
    mia, max_ = sent.link(claim(office), "mia"), sent.links["claim"]["max"].partition("#")[2]
    guest = Guest(office)
    guest.post(mia, verb="approve")
    first = guest.post(max_, 409, verb="reject")
    assert first["code"] == "already_answered"
    assert first["detail"].startswith("Approved by mia at 2026-11-")
    office.kd.advance("claim")
    assert guest.get(max_, 409)["detail"] == first["detail"]
    page = guest.page(max_, 409)
    assert "This was answered" in page
    assert "Approved by mia at" in page
    assert "desk_pay" not in page


def test_a_replayed_answer_is_refused_also_with_its_key(office: Desk, sent: Collected) -> None:
    link = sent.link(claim(office), "mia")
    web = Guest(office).web
    again = [
        web.post("/api/v1/answer", json={"link": link, "verb": "approve"}, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]
    assert [each.status_code for each in again] == [200, 409]
    assert "Approved by mia" in again[1].json()["detail"]
    assert len(office.kd.runtime.store.messages("claim")) == 1


def test_a_forged_or_altered_link_is_refused(office: Desk, sent: Collected) -> None:
    link = sent.link(claim(office), "mia")
    other = sent.links["claim"]["max"].partition("#")[2]
    said, _, signature = link.partition(".")
    guest = Guest(office)
    others, theirs = other.split(".")
    altered = [
        f"{said}.{theirs}", f"{others}.{signature}", said, f"{said}.", f".{signature}", f"{said[:-1]}A.{signature}",
        f"{said}.{signature[:-1]}", f"{said}.{signature}=", f"{link}.", "x", "ü.ü", f"{link} ",
    ]  # fmt: skip
    for each in altered:
        refused = guest.get(each, 403)
        assert refused["code"] == "link_refused"
        assert "this link was altered, or is not of this server" in refused["detail"]
        assert guest.post(each, 403, verb="approve")["code"] == "link_refused"
    assert "There is nothing to answer by this link" in guest.page("x", 403)
    assert office.kd.runtime.store.messages("claim") == []


@pytest.mark.parametrize("place", range(0, 200, 7))
def test_no_changed_character_of_a_link_passes(office: Desk, sent: Collected, place: int) -> None:
    link = sent.link(claim(office), "mia")
    place %= len(link)
    changed = link[:place] + ("B" if link[place] == "A" else "A") + link[place + 1 :]
    assert Guest(office).get(changed, 403)["code"] == "link_refused"


def test_a_link_of_another_store_is_refused(office: Desk, sent: Collected, tmp_path: Path) -> None:
    claim(office)
    (tmp_path / "other").mkdir()
    with desk(tmp_path / "other") as elsewhere:
        there = Collected(elsewhere.kd)
        link = there.link(claim(elsewhere), "mia")
    assert Guest(office).get(link, 403)["code"] == "link_refused"


def test_an_expired_link_says_when_and_the_deadline_of_the_question_ends_it(office: Desk, sent: Collected) -> None:
    with pytest.MonkeyPatch.context() as longer:
        longer.setenv("KILLICK_LINK_EXPIRES", "30d")
        link = sent.link(claim(office), "mia")
    office.clock.advance(3 * 86_400 - 60)
    assert Guest(office).get(link)["by"] == "mia"
    office.clock.advance(60)
    refused = Guest(office).post(link, 403, verb="approve")
    assert refused["code"] == "link_refused"
    assert "this link expired at 2026-11-" in refused["detail"]


def test_a_link_holds_for_a_day_unless_the_setting_says_otherwise(
    office: Desk, sent: Collected, environment: pytest.MonkeyPatch
) -> None:
    link = sent.link(office.at(at.asks, "When?"), "mia")
    environment.setenv("KILLICK_LINK_EXPIRES", "3d")
    longer = sent.link(office.at(at.asks, "When?", run="r2"), "mia")
    office.clock.advance(3 * 86_400 - 60)
    Guest(office).get(link, 403)
    assert Guest(office).get(longer)["by"] == "mia"
    office.clock.advance(60)
    Guest(office).get(longer, 403)


def test_a_link_holds_until_its_day_is_over(office: Desk, sent: Collected) -> None:
    link = sent.link(office.at(at.asks, "When?"), "mia")
    office.clock.advance(86_400 - 60)
    assert Guest(office).get(link)["question"]["prompt"] == "When?"
    office.clock.advance(60)
    Guest(office).get(link, 403)


def test_a_question_that_changed_is_not_answered_by_the_old_link(office: Desk, sent: Collected) -> None:
    office.at(at.rollout, 3)
    old = sent.link("r", "lea")
    office.be("leo")
    digest = office.get("/inbox/r:1")["questions"][0]["digest"]
    office.post("/inbox/r:1", verb="edit", value={"hosts": 2}, digest=digest)
    office.kd.advance("r")
    guest = Guest(office)
    assert "Edited by leo" in guest.get(old, 409)["detail"]
    new = sent.link("r", "lea")
    assert guest.get(new)["question"]["intention"]["arguments"] == {"hosts": 2}
    guest.post(new, verb="approve", digest=guest.get(new)["question"]["digest"])
    office.kd.advance("r")
    assert office.kd.state("r").result == "2 hosts"


def test_a_question_that_is_asked_again_after_a_rewind_needs_its_new_link(office: Desk, sent: Collected) -> None:
    old = sent.link(office.at(at.asks, "When?"), "mia")
    office.kd.rewind("r", "start")
    office.kd.advance("r")
    refused = Guest(office).get(old, 409)
    assert refused["code"] == "answer_refused"
    assert "the question has changed since this was sent" in refused["detail"]
    assert Guest(office).get(sent.link("r", "mia"))["by"] == "mia"


def test_a_question_that_is_not_asked_any_more_says_so(office: Desk, sent: Collected) -> None:
    link = sent.link(office.at(at.asks, "When?"), "mia")
    office.kd.cancel("r")
    office.kd.advance("r")
    assert "it is not asked any more; the run is cancelled" in Guest(office).get(link, 409)["detail"]


def test_a_quorum_counts_each_person_once(office: Desk, sent: Collected) -> None:
    office.at(at.rollout, 3)
    lea, leo = sent.link("r", "lea"), sent.links["r"]["leo"].partition("#")[2]
    guest = Guest(office)
    assert guest.post(lea, verb="approve")["did"].endswith("1 of 2 approved (lea)")
    assert guest.post(lea, 409, verb="approve")["code"] == "already_agreed"
    assert "lea approved it already" in guest.page(lea)
    guest.post(leo, verb="approve")
    assert "Approved by lea, leo at" in guest.get(lea, 409)["detail"]


class OneReader:
    """A hook that sends the links of everyone to one place, of which one reader answers in every name."""

    def __init__(self, office: Desk) -> None:
        self.office = office
        self.guest = Guest(office)
        self.links: dict[str, str] = {}

        @killick.on("wait.opened", name="sink")
        def sink(event: HookEvent) -> None:
            self.links = {name: token_of(url) for name, url in links(event).items()}

        ensure(office.kd.runtime.engine)
        self.opened()

    def opened(self) -> None:
        """The newest question reaches the place."""
        attended(self.office.kd, "sink")

    def says(self, name: str, status: int = 200, **body: Any) -> Any:
        return self.guest.post(self.links[name], status, **body)


@pytest.fixture
def reader(office: Desk, environment: pytest.MonkeyPatch) -> OneReader:
    made = OneReader(office)
    office.at(at.rollout, 3)
    made.opened()
    return made


def votes(office: Desk) -> tuple[str, ...]:
    [wait] = office.kd.inbox()
    return wait.votes


def test_two_answers_by_links_of_one_delivery_count_once(office: Desk, reader: OneReader) -> None:
    reader.says("lea", verb="approve")
    refused = reader.says("leo", 409, verb="approve")  # the run took nothing yet: the store decides
    assert "lea answered by a link of the same channel" in refused["detail"]
    assert votes(office) == ("lea",)
    office.kd.advance("r")
    assert reader.says("leo", 409, verb="approve")["code"] == "answer_refused"
    office.kd.advance("r")
    assert office.kd.info("r").status == "waiting"
    office.kd.answer("r", "approve", by="leo")  # as himself
    office.kd.advance("r")
    assert office.kd.state("r").result == "3 hosts"


def test_the_reader_of_one_channel_does_not_edit_in_one_name_and_approve_in_another(
    office: Desk, reader: OneReader
) -> None:
    reader.says("leo", verb="edit", value={"hosts": 900})  # counts as leo's approval of what he wrote
    office.kd.advance("r")
    reader.opened()
    assert votes(office) == ("leo",)
    assert "leo answered by a link of the same channel" in reader.says("lea", 409, verb="approve")["detail"]
    assert office.kd.info("r").status == "waiting"


def test_a_person_who_answered_by_link_counts_once_in_the_inbox_too(office: Desk, reader: OneReader) -> None:
    reader.says("lea", verb="approve")
    with pytest.raises(killick.errors.AlreadyAgreed):
        office.kd.answer("r", "approve", by="lea")
    office.kd.advance("r")
    assert votes(office) == ("lea",)


def test_two_votes_of_one_person_that_meet_in_the_store_are_counted_once_and_the_place_returns(
    office: Desk, reader: OneReader
) -> None:
    [wait] = office.kd.inbox()
    reader.says("lea", verb="approve")
    # What a process does that read the inbox before the vote by link came.
    engine, body = office.kd.runtime.engine, {"kind": "approve", "value": None, "comment": None, "digest": wait.digest}
    id_ = f"answer:r:{wait.step}@{wait.opened}#lea"
    slot = of_wait("r", wait.step, wait.opened, 1, engine.store.secret_key)
    answers.deliver(engine, "r", "killick.vote", body, id=id_, by="lea", slot=slot)
    office.kd.advance("r")
    assert votes(office) == ("lea",)
    office.kd.answer("r", "approve", by="leo")
    office.kd.advance("r")
    assert office.kd.state("r").result == "3 hosts"


def test_the_page_that_a_link_opens_gets_no_token_and_says_what_to_do_without_a_script(
    office: Desk, sent: Collected
) -> None:
    url = sent.links["claim"]["mia"] if sent.link(claim(office), "mia") else ""
    answer = Guest(office).web.get(url.removeprefix(PUBLIC))  # a client sends no fragment
    assert (answer.status_code, answer.request.url.query) == (200, b"")
    assert "JavaScript" in answer.text
    assert "desk_pay" not in answer.text
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert Guest(office).web.get("/api/v1/answer", params={"link": token_of(url)}).status_code == 405


def test_an_effect_in_doubt_is_settled_by_link(office: Desk, sent: Collected) -> None:
    office.at(at.checkout, "4242")
    link = sent.link("r", "collect")  # asked of any person: the link is in the name of the hook
    guest = Guest(office)
    assert guest.get(link)["question"]["asks"] == "doubt"
    assert "It happened" in guest.page(link)
    guest.post(link, verb="happened", value="charged")
    office.kd.advance("r")
    assert office.kd.state("r").result == "charged"


def test_an_answer_that_does_not_fit_is_refused_and_the_link_stays_good(office: Desk, sent: Collected) -> None:
    link = sent.link(office.at(at.asks, "When?"), "mia")
    guest = Guest(office)
    assert guest.post(link, 409, verb="respond", value="never")["code"] == "answer_refused"
    assert guest.post(link, 409, verb="approve")["code"] == "answer_refused"
    guest.post(link, verb="respond", value="later")
    office.kd.advance("r")
    assert office.kd.state("r").result == ["respond", "later", "mia"]


@killick.agent(name="link_roles")
async def to_clerks(run: killick.Run) -> str:
    return (await run.ask("Pay?", to="clerks")).kind


def test_who_lost_the_role_cannot_answer_by_an_old_link(tmp_path: Path) -> None:
    roles: dict[str, set[str]] = {"ann": {"clerks"}, "bob": {"clerks"}, "eve": {"guests"}}
    got: dict[str, str] = {}

    @killick.on("wait.opened", name="by_role")
    def collect(event: HookEvent) -> None:
        assert links(event) == {}  # no person has the name of the role
        got.update(links(event, ["ann", "bob", "eve", "zoe"]))

    clock = killick.clock.ManualClock(1_794_819_600_000_000)
    with killick.open(str(tmp_path / "killick.db"), clock=clock, roles=roles.get) as kd, Desk(kd, clock).web as web:
        ensure(kd.runtime.engine)
        kd.start(to_clerks, id="r")
        kd.advance("r")
        attended(kd, "by_role")
        assert set(got) == {"ann", "bob"}
        del roles["ann"]
        refused = web.post("/api/v1/answer/question", json={"link": token_of(got["ann"])})
        assert (refused.status_code, refused.json()["code"]) == (403, "not_asked")
        answer = web.post("/api/v1/answer", json={"link": token_of(got["bob"]), "verb": "approve"})
        assert answer.status_code == 200


def test_no_redacted_value_and_no_hash_of_it_is_on_the_page_or_in_the_link(tmp_path: Path) -> None:
    with desk(tmp_path, redact=["to"]) as office:
        sent = Collected(office.kd)
        link = sent.link(claim(office), "mia")
        guest = Guest(office)
        assert "bob" not in guest.page(link)
        [wait] = office.kd.inbox()
        said = urlsafe_b64decode(link.partition(".")[0] + "==")
        assert wait.digest is not None
        assert wait.digest.encode() not in said
        assert b"bob" not in said
        digest = guest.get(link)["question"]["digest"]
        assert digest != wait.digest
        guest.post(link, verb="approve", digest=digest)


def test_secrets_rotate_and_the_first_signs(office: Desk, sent: Collected, environment: pytest.MonkeyPatch) -> None:
    old = sent.link(claim(office), "mia")
    environment.setenv("KILLICK_LINK_SECRET", f"another-secret-of-16 {SECRET}")
    assert Guest(office).get(old)["by"] == "mia"
    new = sent.link(claim(office, run="c2"), "mia")
    environment.setenv("KILLICK_LINK_SECRET", "another-secret-of-16")
    assert Guest(office).get(new)["by"] == "mia"
    Guest(office).get(old, 403)


def test_without_the_variables_there_are_no_links(
    office: Desk, sent: Collected, environment: pytest.MonkeyPatch
) -> None:
    link = sent.link(claim(office), "mia")
    environment.delenv("KILLICK_LINK_SECRET")
    environment.delenv("KILLICK_PUBLIC_URL")
    assert "this server has no answer links" in Guest(office).get(link, 404)["detail"]
    claim(office, run="c2")
    attended(office.kd, "collect")
    assert sent.links["c2"] == {}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KILLICK_PUBLIC_URL", "http://killick.example.org", "KILLICK_PUBLIC_URL: .* is not encrypted"),
        ("KILLICK_PUBLIC_URL", "killick.example.org", "KILLICK_PUBLIC_URL: is not the address of a service"),
        ("KILLICK_PUBLIC_URL", "", "KILLICK_PUBLIC_URL: is not the address of a service"),
        ("KILLICK_LINK_SECRET", "", "KILLICK_LINK_SECRET: is empty"),
        ("KILLICK_LINK_EXPIRES", "soon", "KILLICK_LINK_EXPIRES: 'soon' is not a duration"),
        ("KILLICK_LINK_SECRET", f"short {SECRET}", "KILLICK_LINK_SECRET: has a secret of fewer than 16 bytes"),
    ],
)
def test_a_server_says_at_once_that_its_links_cannot_work(
    office: Desk, environment: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(DeclarationRefused, match=said):
        asgi(office.kd)
