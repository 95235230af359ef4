"""The page of an answer link, as the person who follows it sees it: on a phone, in the dark, without a login."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from browser import office
from browser.browsing import Watch, Watched, serving
from browser.conftest import WIDE
from browser.test_every_page import _COME, _FOUND, _GO, AXE, PHONE, looked_over
from killick.client.client import Client
from killick.store.records import OutboxItem
from killick.triggers import TRIGGERS
from killick.web.app import asgi
from killick.workers.answer_links import links as links_of
from killick.workers.hooks import HookEvent
from web.elsewhere import PUBLIC, configured

pytestmark = pytest.mark.slow

WAITS: Final = ("claim-18", "letter-3", "onboard-dora")


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    declared = TRIGGERS.copy()
    with configured(), office.opened(str(tmp_path / "killick.db")) as made:
        yield made
    TRIGGERS.clear()
    TRIGGERS.update(declared)


@pytest.fixture
def links(kd: Client) -> dict[str, str]:
    """The addresses of three questions, by run."""
    office.fill(kd)
    found: dict[str, str] = {}
    for run in WAITS:
        [wait] = kd.info(run).waits
        item = OutboxItem(position=1, run=run, seq=wait.opened, kind="wait.opened")
        event = HookEvent(kd.runtime.engine, item, agent="", hook="collect", attempt=1, sent_at=0)
        found[run] = next(iter(links_of(event).values())).removeprefix(PUBLIC)
    return found


def follow(window: Watched, path: str) -> Page:
    """The page of a link, with what its token was exchanged for."""
    window.page.goto("about:blank")  # another fragment alone loads no page
    page = window.goto(path)
    expect(page.locator("[data-linked]")).to_have_count(0)
    assert page.url.endswith("/answer")
    return page


@pytest.mark.parametrize(("viewport", "dark"), [(WIDE, False), (PHONE, True)], ids=["wide-light", "phone-dark"])
def test_every_question_of_a_link_can_be_read_by_eye_and_by_ear(
    kd: Client, links: dict[str, str], watch: Watch, viewport: ViewportSize, dark: bool
) -> None:
    source = AXE.read_text(encoding="utf-8")
    with serving(asgi(kd)) as server, watch(server, viewport=viewport, dark=dark) as window:
        window.expected.add(403)
        for path in [*links.values(), "/answer#forged"]:
            page = follow(window, path)
            wrong = looked_over(page, path)
            page.evaluate(_GO)
            page.wait_for_function(_COME)
            wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            said = len(window.wrong)
            page.evaluate(source)
            wrong += page.evaluate(_FOUND)
            del window.wrong[said:]  # axe tries styles of its own, which the page's policy refuses
            assert (wrong, max(wider, 0)) == ([], 0)
            if folder := os.environ.get("KILLICK_LOOK"):
                name = f"{[*links.values(), path].index(path)}-{viewport['width']}-{'dark' if dark else 'light'}.png"
                page.screenshot(path=str(Path(folder) / name), full_page=True)


def test_a_person_edits_and_approves_and_the_page_then_says_who_answered(
    kd: Client, links: dict[str, str], watch: Watch
) -> None:
    with serving(asgi(kd)) as server, watch(server, viewport=PHONE) as window:
        page = follow(window, links["claim-18"])
        page.get_by_text("Edit the arguments").click()
        page.get_by_role("textbox", name=re.compile("amount", re.I)).fill("700")
        window.expected.add(409)
        page.get_by_role("button", name=re.compile("Approve with amount 700")).click()
        expect(page.get_by_role("heading", name="This was answered")).to_be_visible()
        expect(page.locator("main")).to_contain_text(re.compile(r"Edited by \w+ at"))
        assert len(kd.runtime.store.messages("claim-18")) == 1
        if folder := os.environ.get("KILLICK_LOOK"):
            page.screenshot(path=str(Path(folder) / "answered.png"), full_page=True)


def test_a_refused_answer_says_why_and_the_form_stays(kd: Client, links: dict[str, str], watch: Watch) -> None:
    with serving(asgi(kd)) as server, watch(server) as window:
        page = follow(window, links["claim-18"])
        page.get_by_text("Edit the arguments").click()
        page.get_by_role("textbox", name=re.compile("amount", re.I)).fill("many")
        page.get_by_role("button", name=re.compile("Approve with")).click()
        expect(page.get_by_role("alert")).to_contain_text("takes a whole number")
        assert kd.runtime.store.messages("claim-18") == []


def test_a_link_leaves_the_address_and_its_page_can_be_loaded_again(
    kd: Client, links: dict[str, str], watch: Watch
) -> None:
    with serving(asgi(kd)) as server, watch(server) as window:
        page = follow(window, links["claim-18"])
        page.reload()
        expect(page.get_by_role("heading", name="Your approval is needed")).to_be_visible()
        page.evaluate(f"location.hash = {links['letter-3'].partition('#')[2]!r}")  # the next link, in the same tab
        expect(page.locator("main")).to_contain_text("letter-3")


def test_without_a_token_the_page_says_what_to_do(kd: Client, watch: Watch) -> None:
    with serving(asgi(kd)) as server, watch(server) as window:
        page = window.goto("/answer")
        expect(page.locator("main")).to_contain_text("Open the link of the message again")
