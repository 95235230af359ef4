"""What a person does at the bridge: starts, watches, answers, travels, forks, compares, acts. Nothing is reloaded."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

import killick
from browser import office
from browser.browsing import Watch, bridge, serving
from killick.cli import demo
from killick.client.client import Client
from killick.definitions.agents import AGENTS
from killick.triggers import TRIGGERS
from killick.web.app import asgi
from killick.web.auth.access import OwnerAccess, TokenAccess
from killick.workers.tokens import issue, revoke

pytestmark = pytest.mark.slow

STAYS = "window.killick_stays = true"
STAYED = "window.killick_stays === true"


@contextlib.contextmanager
def worker(folder: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own, as somebody would start it; gone when this ends."""
    environment = os.environ | {"CALENDAR_API": address}
    process = subprocess.Popen(
        [sys.executable, "-m", "killick", "worker", "meeting.py", "--store", "killick.db"],
        cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def declared(file: Path) -> Any:
    """The demo's own module, so that the page where runs are started knows its agent."""
    spec = importlib.util.spec_from_file_location("meeting", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["meeting"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    AGENTS.add(module.arrange)
    return module


def test_the_demo_is_started_seen_to_die_at_step_6_and_to_go_on_without_a_reload(tmp_path: Path, watch: Watch) -> None:
    folder = tmp_path / "demo"
    demo.prepare(folder)
    with (
        demo.serving(folder) as address,
        killick.open(str(folder / "killick.db")) as kd,
        bridge(kd) as server,
        watch(server) as window,
    ):
        declared(folder / "meeting.py")
        page = window.goto("/start?agent=arrange")
        page.get_by_role("textbox", name=re.compile("Input", re.I)).first.fill("the launch")
        page.get_by_text("Id, priority, tags").click()
        page.get_by_role("textbox", name=re.compile(r"^Id")).fill("launch_meeting")
        page.get_by_role("button", name="Start", exact=True).click()
        page.wait_for_url("**/runs/launch_meeting")
        page.evaluate(STAYS)
        status = page.locator("main .chip").first
        expect(status).to_have_text("queued")
        with worker(folder, address) as first:
            expect(status).to_have_text("running")
            _until(lambda: bool(demo.calendar(address)["invites"]))
            first.send_signal(signal.SIGKILL)
            first.wait()
        # Nobody is told of a death; who looks, sees it.
        with watch(server) as another:
            row = another.goto("/workers").get_by_role("row", name=re.compile("launch_meeting.*abandoned")).first
            expect(row).to_be_visible()
        with worker(folder, address):
            expect(status).to_have_text("completed")
        assert page.evaluate(STAYED)
        assert sorted(each["to"] for each in demo.calendar(address)["invites"]) == ["ann", "bob", "cyd"]


def _until(holds: Any, seconds: float = 300) -> None:
    late = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < late, "it never came to that"
        time.sleep(0.02)


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    """The office after a morning. What a test declares is gone with it."""
    declared = TRIGGERS.copy()
    with office.opened(str(tmp_path / "killick.db")) as made:
        office.fill(made)
        yield made
    TRIGGERS.clear()
    TRIGGERS.update(declared)


def test_an_approval_is_answered_with_an_edit_in_the_form_and_the_run_goes_on_with_it(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/inbox")
        page.evaluate(STAYS)
        page.get_by_role("list", name="Questions").get_by_role("link", name="claim-18:5").click()
        asked = page.get_by_role("article", name="claim-18:5")
        asked.get_by_text("Edit the arguments").click()
        amount = asked.get_by_role("textbox", name="amount")
        amount.fill("900")
        expect(asked.locator("[data-changes]")).to_contain_text("2400 → 900")
        asked.get_by_role("button", name="Approve with amount 900").click()
        expect(page.get_by_role("article", name="claim-18:5")).to_have_count(0)
        kd.advance("claim-18")
        page.goto(f"{server}/runs/claim-18")
        expect(page.locator("main .chip").first).to_have_text("completed")
    [paid] = kd.find.calls("pay", run="claim-18")
    assert (paid.arguments["amount"], paid.status) == (900, "done")
    [answer] = kd.find.answers(run="claim-18")
    assert (answer.verb, answer.by) == ("edit", "ann")


def test_the_inbox_is_a_list_and_the_chosen_question_and_the_address_says_which(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/inbox")
        rows = page.get_by_role("list", name="Questions").locator("[data-choose]")
        expect(rows.first).to_contain_text("in doubt")
        expect(page.get_by_role("article")).to_have_count(1)
        expect(page.get_by_role("article")).to_have_attribute("aria-label", "letter-3:1")
        expect(page).to_have_url(re.compile("wait=letter-3%3A1"))
        order = [str(row.get_attribute("data-choose")) for row in rows.all()]
        for key, chosen in (("j", 1), ("j", 2), ("k", 1)):
            page.keyboard.press(key)
            expect(page.get_by_role("article")).to_have_attribute("aria-label", order[chosen])
        page = window.goto("/inbox?wait=claim-18:5")
        shown = page.get_by_role("article")
        expect(shown).to_contain_text("the agent’s reason")
        expect(shown).to_contain_text("is called with these arguments, and the run continues")
        waiting = rows.count()
        bar, at = shown.locator(".answer-bar").bounding_box(), page.viewport_size
        assert bar is not None
        assert at is not None
        assert bar["y"] + bar["height"] <= at["height"]
        shown.get_by_role("button", name="Reject").click()
        expect(rows).to_have_count(waiting - 1)
        expect(page.get_by_role("article")).to_have_count(1)
        expect(page).not_to_have_url(re.compile("claim-18"))
    assert [wait.id for wait in kd.inbox(answered=True)] == ["claim-18:5"]


def test_a_question_that_comes_later_does_not_take_the_place_of_the_one_that_is_read(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/inbox?asks=question")
        shown = page.get_by_role("article")
        name = str(shown.get_attribute("aria-label"))
        shown.get_by_role("textbox", name="Comment").fill("half a sentence")
        shown.locator(".prompt").click()
        office.ran(kd, office.onboard, "gil", "onboard-gil", priority=9)
        office.CLOCK.advance(2)
        expect(page.locator('[data-choose^="onboard-gil"]')).to_have_count(1)
        expect(shown).to_have_attribute("aria-label", name)
        expect(shown.get_by_role("textbox", name="Comment")).to_have_value("half a sentence")


def test_an_update_asked_for_before_a_question_was_chosen_does_not_choose_another(kd: Client, watch: Watch) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        if "killick-live" in route.request.headers:
            held.append(route)
        else:
            route.continue_()

    with bridge(kd) as server, watch(server) as window:
        window.page.route("**/inbox*", hold)
        with window.page.expect_request(lambda request: "killick-live" in request.headers):
            page = window.goto("/inbox")
        rows = page.get_by_role("list", name="Questions").locator("[data-choose]")
        first, second = (str(row.get_attribute("data-choose")) for row in rows.all()[:2])
        assert [f"wait={first.replace(':', '%3A')}" in route.request.url for route in held] == [True]
        page.keyboard.press("j")
        expect(page.get_by_role("article")).to_have_attribute("aria-label", second)
        office.ran(kd, office.onboard, "gil", "onboard-gil")
        held[0].continue_()  # every later update stays held, so that none mends what this one draws
        expect(page.locator('[data-choose^="onboard-gil"]')).to_have_count(1)
        expect(page.get_by_role("article")).to_have_count(1)
        expect(page.get_by_role("article")).to_have_attribute("aria-label", second)
        expect(page).to_have_url(re.compile(f"wait={second.replace(':', '%3A')}"))
        page.unroute_all(behavior="ignoreErrors")


def test_on_a_phone_the_list_leads_to_a_question_and_back(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server, viewport={"width": 390, "height": 780}) as window:
        page = window.goto("/inbox")
        expect(page.get_by_role("article")).to_have_count(0)
        page.get_by_role("list", name="Questions").get_by_role("link", name="claim-18:5").click()
        page.wait_for_url("**wait=claim-18*")
        expect(page.get_by_role("article", name="claim-18:5")).to_be_visible()
        expect(page.get_by_role("button", name="Approve")).to_be_in_viewport(ratio=1)
        expect(page.get_by_role("list", name="Questions")).to_have_count(0)
        page.get_by_role("link", name="← All questions").click()
        expect(page.get_by_role("list", name="Questions")).to_be_visible()
        expect(page.get_by_role("article")).to_have_count(0)


def test_what_was_typed_is_what_is_approved_and_no_button_approves_anything_else(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/inbox/claim-18%3A5")
        asked = page.get_by_role("article", name="claim-18:5")
        asked.get_by_text("Edit the arguments").click()
        amount = asked.get_by_role("textbox", name="amount")
        amount.fill("1")
        expect(asked.get_by_role("button", name=re.compile("^Approve"))).to_have_text(
            re.compile("Approve with amount 1")
        )
        amount.fill("2400")
        expect(asked.get_by_role("button", name=re.compile("^Approve"))).to_have_text(re.compile(r"^Approve a$"))
        asked.get_by_text("Answer instead of doing it").click()
        instead = asked.get_by_role("textbox", name="Answer")
        instead.fill("ask me tomorrow")
        expect(asked.get_by_role("button", name=re.compile("^Approve"))).to_be_disabled()
        instead.fill("")
        amount.fill("1")
        asked.get_by_role("textbox", name="Comment").fill("one is enough")
        expect(asked.get_by_role("textbox", name="Comment")).to_have_count(1)
        asked.locator("h2").click()
        page.keyboard.press("a")
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="claim-18:5")).to_have_count(0)
        kd.advance("claim-18")
    [paid] = kd.find.calls("pay", run="claim-18")
    assert (paid.arguments["amount"], paid.status) == (1, "done")


def test_a_rejection_takes_no_edit_along(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/inbox/claim-18%3A5")
        asked = page.get_by_role("article", name="claim-18:5")
        asked.get_by_text("Edit the arguments").click()
        asked.get_by_role("textbox", name="amount").fill("much")
        asked.get_by_role("button", name="Reject").click()
        expect(page.get_by_role("article", name="claim-18:5")).to_have_count(0)
    kd.advance("claim-18")
    [answer] = kd.find.answers(run="claim-18")
    assert (answer.verb, answer.value) == ("reject", None)


def test_a_question_with_options_shows_them_alone_and_no_key_approves_it(kd: Client, watch: Watch) -> None:
    [wait] = [each for each in kd.inbox() if each.options]
    with bridge(kd) as server, watch(server) as window:
        page = window.goto(f"/inbox/{wait.id.replace(':', '%3A')}")
        asked = page.get_by_role("article", name=wait.id)
        assert asked.get_by_role("button").all_inner_texts() == ["claims", "sales", "boats"]
        page.keyboard.press("a")
        page.keyboard.press("Enter")
        asked.get_by_role("button", name="sales").click()
        expect(page.get_by_role("article", name=wait.id)).to_have_count(0)
    kd.advance(wait.run)
    assert kd.state(wait.run).result.endswith("joins sales")


def test_one_answer_is_given_to_all_that_ask_the_same_after_each_was_named(kd: Client, watch: Watch) -> None:
    office.CLOCK.is_open = True
    for number, amount in ((31, 2600), (32, 2700)):
        office.ran(kd, office.review, office.Claim(number, "Gil Hart", amount), f"claim-{number}")
    office.CLOCK.is_open = False
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/inbox?wait=claim-31:5")
        asked = page.get_by_role("article", name="claim-31:5")
        also = asked.get_by_role("checkbox", name="and to the 2 others that ask the same")
        also.check()
        asked.get_by_text("Edit the arguments").click()
        asked.get_by_role("textbox", name="amount").fill("900")
        expect(also).to_have_count(0)  # an edit is for one call
        asked.get_by_role("textbox", name="amount").fill("2600")
        asked.get_by_role("button", name="Reject").click()
        dialog = page.get_by_role("dialog", name="Give this answer to 3 questions?")
        for run, amount in (("claim-18", "2400"), ("claim-31", "2600"), ("claim-32", "2700")):
            expect(dialog.get_by_role("listitem").filter(has_text=run)).to_contain_text(amount)
        assert not kd.inbox(answered=True)
        dialog.get_by_role("button", name="Reject").click()
        expect(page.locator(".toast")).to_have_text("3 of 3 questions answered. 2 left on this page.")
    assert {wait.run for wait in kd.inbox(answered=True)} == {"claim-18", "claim-31", "claim-32"}
    assert not [wait for wait in kd.inbox() if wait.rule is not None]


def test_a_new_question_is_announced_by_the_system_to_whom_asked_for_it(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        window.context.grant_permissions(["notifications"], origin=server)
        page = window.goto("/inbox")
        page.get_by_role("button", name="Notify me").click()
        expect(page.get_by_role("button", name="Notifications on")).to_have_attribute("aria-pressed", "true")
        page.evaluate("""() => {
          Object.defineProperty(document, "hidden", { get: () => true });
          window.shown = [];
          window.Notification = class extends Notification {
            constructor(title, options) { super(title, options); window.shown.push(options.body); }
          };
          document.dispatchEvent(new Event("visibilitychange"));
        }""")
        office.ran(kd, office.onboard, "gil", "onboard-gil")
        page.wait_for_function("() => window.shown.length > 0")
        assert page.evaluate("window.shown") == ["4 questions are open"]


def test_an_edit_that_does_not_fit_is_refused_at_its_field_and_nothing_is_sent(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/inbox/claim-18%3A5")
        asked = page.get_by_role("article", name="claim-18:5")
        asked.get_by_text("Edit the arguments").click()
        amount = asked.get_by_role("textbox", name="amount")
        amount.fill("much")
        asked.get_by_role("button", name="Approve with amount much").click()
        expect(asked.get_by_role("alert").filter(has_text="whole number")).to_be_visible()
        expect(amount).to_be_focused()
        expect(amount).to_have_attribute("aria-invalid", "true")
    assert [wait.id for wait in kd.inbox()].count("claim-18:5") == 1


def test_time_is_travelled_by_keyboard_and_each_boundary_shows_what_was_known_there(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/claim-17?tab=state")
        moment = page.locator("[data-time-moment]")
        assert "1:after" in _travel(page, "3:before")
        expect(moment).to_contain_text("invoice-17.pdf")
        expect(moment).not_to_contain_text("T-17-640")
        page.keyboard.press("End")
        expect(page.locator("[data-time-place]")).to_have_text("now")
        expect(moment).to_contain_text("T-17-640")


def _travel(page: Page, to: str) -> list[str]:
    """Go from the start to a place, boundary by boundary, with the arrow key; gives back where it went."""
    slider = page.get_by_role("slider")
    expect(slider).to_be_enabled()
    slider.focus()
    page.keyboard.press("Home")
    place = page.locator("[data-time-place]")
    expect(place).to_have_text("start")
    seen = ["start"]
    while seen[-1] != to:
        assert seen[-1] != "now", f"{to} is not among {seen}"
        page.keyboard.press("ArrowRight")
        expect(place).not_to_have_text(seen[-1])
        seen.append(place.inner_text())
    return seen


def test_a_fork_from_a_place_in_time_with_another_output_is_compared_with_its_parent(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/claim-17?tab=state")
        _travel(page, "2:after")
        page.get_by_role("button", name="Fork from here").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        dialog.get_by_text("Another output of a step").click()
        expect(dialog.get_by_role("combobox", name="Step", exact=True)).to_have_value("2")
        expect(dialog.get_by_label(re.compile("^Its output"))).to_have_value(re.compile('"deductible": 150'))
        dialog.get_by_label(re.compile("^Its output")).fill('{"covers": [], "limit": 0}')
        dialog.get_by_text("Model, id").click()
        dialog.get_by_label(re.compile("^Id of the fork")).fill("what-if")
        expect(dialog.locator("[data-will]")).to_contain_text(re.compile("fork", re.I))
        dialog.get_by_role("button", name="Fork", exact=True).click()
        page.wait_for_url("**/runs/what-if")
        assert kd.runtime.log.head("what-if").parent == "claim-17"
        page.get_by_role("link", name="Compare with parent").click()
        expect(page.locator("main")).to_contain_text("what-if")
        expect(page.get_by_text("another output").first).to_be_visible()


def test_a_run_is_paused_resumed_and_cancelled_each_told_before_it_is_done(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/sub-acme")
        page.evaluate(STAYS)
        status = page.locator("main .chip").first
        for button, does, becomes in (
            ("Pause…", "Pause", "paused"),
            ("Resume…", "Resume", "waiting"),
            ("Cancel…", "Cancel the run", "cancelled"),
        ):
            _open(page, button)
            dialog = page.get_by_role("dialog")
            button_does = dialog.get_by_role("button", name=does, exact=True)
            expect(button_does).to_be_enabled()
            expect(dialog.locator("[data-will]")).to_contain_text("sub-acme")
            dialog.get_by_label(re.compile("^Why")).fill("to see it")
            button_does.click()
            dialog.get_by_role("button", name="Close").click()
            if becomes == "cancelled":
                kd.advance("sub-acme")
            expect(status).to_have_text(becomes)
        assert page.evaluate(STAYED)
    told = [each.event for each in kd.events("sub-acme")]
    assert [event.by for event in told if type(event).__name__ in ("RunPaused", "RunResumed", "CancelRequested")] == [
        "ann"
    ] * 3


def _open(page: Page, label: str) -> None:
    """Press a button of what can be done, where it is."""
    button = page.get_by_role("button", name=label)
    if not button.is_visible():
        page.locator("#act-more > summary").click()
    button.click()


def test_a_trigger_is_fired_with_an_input_paused_and_resumed_from_its_page(kd: Client, watch: Watch) -> None:
    office.triggers()
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/triggers")
        page.evaluate(STAYS)
        page.locator("#fire-noon > summary").click()
        page.get_by_role("form", name="Fire noon").get_by_label(re.compile("^Input")).fill('"2026-11-16"')
        page.get_by_role("form", name="Fire noon").get_by_role("button", name="Fire").click()
        expect(page.locator("#trigger-noon")).to_contain_text("noon@hand")
        page.reload()
        for act, becomes in (("pause", "paused"), ("resume", "")):
            page.locator(f"#{act}-noon > summary").click()
            page.locator(f"#{act}-noon button").click()
            expect(page.locator("#trigger-noon .chip.paused")).to_have_count(1 if becomes else 0)
    [run] = kd.list(agent="report")
    assert kd.runtime.log.data(run.id, 1)["input"] == "2026-11-16"


def test_whoever_has_a_token_signs_in_and_a_viewer_is_refused_what_changes_things(kd: Client, watch: Watch) -> None:
    token, text = issue(kd.runtime.engine, "vera", "viewer")
    with serving(asgi(kd, access=TokenAccess(kd))) as server, watch(server) as window:
        page = window.goto("/runs/claim-18")
        page.wait_for_url("**/login?next=*")
        page.get_by_label("Your token").fill("killick_nobody_nothing")
        window.expected.add(401)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("no token of this store")
        page.get_by_label("Your token").fill(text)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/runs/claim-18")
        expect(page.locator("header .who")).to_contain_text("vera")
        expect(page.get_by_role("button", name="Pause…")).to_have_count(0)
        window.expected.add(403)
        refused = page.evaluate(_FORGED)
        assert refused == 403
        revoke(kd.runtime.engine, token.id)
        page.goto(f"{server}/runs")
        page.wait_for_url("**/login?next=*")
    assert kd.info("claim-18").status == "waiting"


def test_the_owner_signs_in_by_the_link_once_and_by_the_key_of_the_store(kd: Client, watch: Watch) -> None:
    access = OwnerAccess(kd)
    with serving(asgi(kd, access=access)) as server:
        link = str(access.link(f"{server}/"))
        with watch(server) as window:
            page = window.goto(link.removeprefix(server))
            page.wait_for_url(f"{server}/*")
            expect(page.locator("header .who")).to_be_visible()
        with watch(server) as window:
            window.expected.add(401)
            page = window.goto(link.removeprefix(server))
            expect(page.get_by_role("main")).to_contain_text("signs in once")
            page.goto(f"{server}/runs/claim-18")
            page.wait_for_url("**/login?next=*")
            page.get_by_label("The key of this store").fill(access.key.text)
            page.get_by_role("button", name="Sign in").click()
            page.wait_for_url("**/runs/claim-18")


def test_a_session_stays_at_the_host_name_of_its_store(kd: Client, watch: Watch) -> None:
    access = OwnerAccess(kd)
    with serving(asgi(kd, access=access)) as server, serving(_echo) as other:
        pages = f"http://{access.use_page_host()}:{server.rpartition(':')[2]}"
        with watch(pages) as window:
            page = window.goto(str(access.link("/")))
            expect(page.locator("header .who")).to_be_visible()
            assert {cookie["domain"] for cookie in window.context.cookies()} == {access.page_host}
            page.goto(f"{pages}/runs/claim-18")
            expect(page.locator("header .who")).to_be_visible()
            for host in ("127.0.0.1", "localhost"):
                window.server = f"http://{host}:{other.rpartition(':')[2]}"
                page.goto(window.server)
                assert page.locator("body").inner_text() == "no cookie"
            window.expected |= {401, 421}
            window.server = server
            page.goto(f"{server}/runs")
            expect(page.get_by_role("main")).to_contain_text("open the address for browsers")


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Another server of this machine, which says which cookies it is sent."""
    if scope["type"] == "http":
        cookie = dict(scope["headers"]).get(b"cookie", b"no cookie")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"<link rel=icon href=data:,>" + cookie})


_FORGED = """async () => (await fetch("/api/v1/runs/claim-18/pause", {
  method: "POST", body: "{}",
  headers: {
    "Content-Type": "application/json",
    "X-Killick-CSRF": document.querySelector("meta[name=killick-csrf]").content,
  },
})).status"""


def test_runs_are_searched_and_filtered(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs")
        page.get_by_role("searchbox").fill("CLAIM")
        page.get_by_role("button", name="Filter").click()
        page.wait_for_url("**q=CLAIM*")
        rows = page.locator("tr[data-row]")
        expect(rows).to_have_count(4)
        page.get_by_role("link", name=re.compile("^Waiting")).click()
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("claim-18")
        page.get_by_role("link", name=re.compile("^Clear")).click()
        page.locator("form.filters").get_by_label("Agent").select_option("onboard")
        page.wait_for_url("**agent=onboard*")
        expect(rows).to_have_count(2)


def test_everything_is_reached_by_keyboard_alone(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs")
        page.keyboard.press("/")
        expect(page.get_by_role("searchbox")).to_be_focused()
        page.keyboard.type("claim-1")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=claim-1*")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs/claim-18*")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.keyboard.press("g")
        page.keyboard.press("i")
        page.wait_for_url("**/inbox")
        for _ in range(3):
            page.keyboard.press("j")
        page.keyboard.press("r")
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="claim-18:5")).to_have_count(0)
    assert kd.inbox(answered=True)[0].id == "claim-18:5"
