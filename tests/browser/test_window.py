"""The window of a run, as people use it: on a phone in the dark, by keyboard, and from a bar to its step."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

import killick
from browser.browsing import Watch, bridge
from browser.test_every_page import PHONE, looked_over
from sessions import coder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with killick.open(str(tmp_path_factory.mktemp("window") / "killick.db")) as kd:
        kd.run(coder, {"provider": "anthropic", "calls": 60, "budget": 4_000}, id="held")
        with bridge(kd) as made:
            yield made


def test_a_window_can_be_read_by_eye_and_by_ear_wide_and_on_a_phone(server: str, watch: Watch) -> None:
    wrong: list[str] = []
    for window in (watch(server), watch(server, viewport=PHONE, dark=True)):
        page = window.goto("/runs/held?tab=window")
        for each in page.locator("main details:not(.step)").all():
            each.evaluate("(details) => { details.open = true }")
        wrong += looked_over(page, "window")
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        wrong += [f"{wider} px too wide"] if wider > 0 else []
    assert not wrong, "\n".join(wrong)


def test_from_the_tab_a_bar_and_an_eviction_lead_to_their_steps(server: str, watch: Watch) -> None:
    page = watch(server).goto("/runs/held")
    page.get_by_role("navigation", name="Parts of the run").get_by_role("link", name="Window").press("Enter")
    expect(page.get_by_role("group", name=re.compile("Tokens of each call"))).to_be_visible()
    expect(page.locator("svg.calls rect.sent")).to_have_count(60)
    left = page.get_by_role("region", name="What left")
    left.locator("a[data-show-step]").first.press("Enter")
    expect(page.locator("#timeline .step.shown")).to_be_visible()
    page.go_back()
    page.locator("svg.calls a").last.click()
    expect(page.locator("#timeline .step.shown")).to_be_visible()
