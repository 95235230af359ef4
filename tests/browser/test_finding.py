"""Getting somewhere: the palette, and suggestions; and in how many clicks a task is done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from browser import office
from browser.browsing import Watch, bridge
from browser.test_every_page import LOOKING
from killick.client.client import Client
from killick.triggers import TRIGGERS

pytestmark = pytest.mark.slow


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    declared = TRIGGERS.copy()
    with office.opened(str(tmp_path / "killick.db")) as made:
        office.fill(made)
        yield made
    TRIGGERS.clear()
    TRIGGERS.update(declared)


def test_the_palette_goes_to_runs_agents_and_pages_from_every_page_by_keyboard(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        for start, text, goes in (
            ("/health", "claim-17", "/runs/claim-17$"),
            ("/runs/claim-17", "onboard", r"/runs\?agent=onboard$"),
            ("/inbox", "overv", "/overview$"),
        ):
            page = window.goto(start)
            page.keyboard.press("Control+k")
            dialog = page.get_by_role("dialog", name="Go to")
            expect(dialog.get_by_role("combobox")).to_be_focused()
            page.keyboard.type(text)
            expect(dialog.get_by_role("option", selected=True)).to_contain_text(text, ignore_case=True)
            expect(dialog.get_by_role("option").last).to_contain_text(text, ignore_case=True)
            page.keyboard.press("Enter")
            expect(page).to_have_url(re.compile(goes))


def test_the_palette_is_read_by_ear_moves_by_arrows_and_closes_by_escape(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server, dark=True) as window:
        page = window.goto("/runs")
        page.get_by_role("button", name="Go to a run, an agent or a page").click()
        dialog = page.get_by_role("dialog", name="Go to")
        expect(dialog.get_by_role("option", name="claim-20")).to_be_visible()
        assert page.evaluate(LOOKING) == []
        page.keyboard.press("ArrowUp")
        last = dialog.get_by_role("option").last
        expect(last).to_have_attribute("aria-selected", "true")
        expect(dialog.get_by_role("combobox")).to_have_attribute("aria-activedescendant", str(last.get_attribute("id")))
        page.keyboard.type("nothing is named so")
        expect(dialog.get_by_role("status")).to_have_text("Nothing has this in its name.")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        page.keyboard.press("Meta+k")
        expect(dialog).to_be_visible()


def test_the_form_of_find_suggests_what_is_on_record(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/find")
        page.get_by_label("Tool").focus()
        expect(page.locator('#tools option[value="pay"]')).to_have_count(1)
        expect(page.locator('#arguments option[value="amount="]')).to_have_count(1)
        page.keyboard.type("fetch_documents")
        page.keyboard.press("Enter")
        expect(page.get_by_role("list", name="Calls found, newest first")).to_contain_text("fetch_documents")
        expect(page).to_have_url(re.compile(r"/find\?what=calls&tool=fetch_documents$"))


def test_a_filter_that_is_left_empty_is_not_in_the_address(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs")
        page.get_by_label("Tag").fill("vip")
        page.get_by_role("button", name="Filter").click()
        expect(page).to_have_url(re.compile(r"/runs\?tag=vip$"))


def test_a_read_of_the_api_is_tried_on_its_page(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/api")
        title = page.locator("header code").get_by_text("/api/v1/runs/{run}/steps", exact=True)
        section = page.locator("section.operation").filter(has=title)
        section.get_by_text("Try it").click()
        section.get_by_label(re.compile("^run")).fill("claim-17")
        section.get_by_label("limit").fill("2")
        section.get_by_role("button", name="Send").click()
        expect(section.get_by_role("status")).to_have_text("GET /api/v1/runs/claim-17/steps?limit=2: 200 OK")
        expect(section.locator("[data-answer]")).to_contain_text('"run": "claim-17"')
        writes = page.locator("section.operation").filter(has=page.locator(".method.post"))
        assert writes.get_by_text("Try it").count() == 0


# tasks --------------------------------------------------------------------------------------------


def clicks(page: Page) -> int:
    return int(page.evaluate("window.killick_clicks"))


def begun(page: Page) -> Page:
    """Count the clicks from here on, over all pages of the window."""
    page.add_init_script("""window.killick_clicks = Number(sessionStorage.getItem("killick-clicks") ?? 0);
      addEventListener("click", (event) => {
        if (event.isTrusted) sessionStorage.setItem("killick-clicks", String((window.killick_clicks += 1)));
      }, true);""")
    page.reload()
    return page


def test_why_a_run_is_stuck_is_one_click_away(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = begun(window.goto("/runs"))
        page.get_by_role("link", name="1 in doubt").click()
        expect(page.get_by_role("article", name="letter-3:1")).to_contain_text("send_letter")
        assert clicks(page) == 1
        page.evaluate("sessionStorage.clear()")
        page = window.goto("/runs")
        page.get_by_role("link", name="claim-18", exact=True).click()
        expect(page.locator(".position")).to_contain_text("managers")
        assert clicks(page) == 1


def test_a_call_is_approved_with_an_edit_in_two_clicks_and_typing(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = begun(window.goto("/inbox/claim-18%3A5"))
        asked = page.get_by_role("article", name="claim-18:5")
        asked.get_by_text("Edit the arguments").click()
        amount = asked.get_by_role("textbox", name="amount")
        amount.focus()
        amount.fill("900")
        asked.get_by_role("button", name="Approve with amount 900").click()
        expect(page.get_by_role("article", name="claim-18:5")).to_have_count(0)
        assert clicks(page) == 2
    [answer] = kd.inbox(answered=True)
    assert answer.id == "claim-18:5"


def test_two_moments_are_compared_in_three_clicks(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = begun(window.goto("/runs/claim-17?tab=state#at=1:after"))
        expect(page.locator("[data-time-place]")).to_have_text("1:after")
        page.get_by_role("button", name="Compare with…").click()
        slider = page.get_by_role("slider")
        shape = slider.bounding_box()
        assert shape is not None
        page.mouse.click(shape["x"] + shape["width"] - 8, shape["y"] + shape["height"] / 2)
        expect(page.locator("[data-time-place]")).not_to_have_text("1:after")
        page.get_by_role("link", name=re.compile("^Compare 1:after with")).click()
        expect(page.get_by_role("heading", name=re.compile("claim-17 at 1:after"))).to_be_visible()
        assert clicks(page) == 3


def test_a_fork_with_another_answer_takes_three_clicks_and_no_json(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = begun(window.goto("/runs/claim-17#step-4"))
        page.locator("#step-4").get_by_role("button", name="Fork before…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="manager", exact=True).click()
        expect(dialog.locator("[data-will]")).to_contain_text("manager")
        dialog.get_by_role("button", name="Fork", exact=True).click()
        page.wait_for_url(re.compile("/runs/claim-17-fork"))
        assert clicks(page) == 3
