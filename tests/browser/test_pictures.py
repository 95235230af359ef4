"""The pictures of the documentation: made from the office's record, which is the same each time, when somebody asks.

KILLICK_SHOTS=write pytest tests/browser/test_pictures.py
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from browser import office
from browser.browsing import SHOTS, Watch, Watched, bridge
from killick.client.client import Client
from killick.triggers import TRIGGERS
from sessions import coder

pytestmark = pytest.mark.slow

WIDE: Final = ViewportSize(width=1280, height=800)
PHONE: Final = ViewportSize(width=390, height=780)
BYTES_MAX: Final = 150_000
PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "dashboard.md"


def test_every_picture_of_the_page_is_there_and_small() -> None:
    named = re.findall(r"\]\(images/([\w-]+\.png)\)", PAGE.read_text(encoding="utf-8"))
    assert named
    assert sorted(set(named)) == sorted(file.name for file in SHOTS.glob("*.png"))
    for name in named:
        data = (SHOTS / name).read_bytes()
        width, _ = struct.unpack(">II", data[16:24])
        assert (len(data) <= BYTES_MAX, width in (1280, 390)) == (True, True), f"{name}: {len(data)} bytes, {width} px"


@pytest.fixture
def kd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)
    declared = TRIGGERS.copy()
    office.triggers()
    with office.opened("killick.db") as made:
        office.fill(made)
        made.fork("claim-17", at="2:after", id="claim-17-if", by="max", because="what if the policy did not cover it?",
                  output={"2": {"covers": [], "limit": 0, "deductible": 150}}, effects="recorded")  # fmt: skip
        office.went_on(made, "claim-17-if")
        made.triggers.fire("report", by="ann", input="2026-11-16")
        made.triggers.fire("noon", by="max")
        made.pause("trigger:noon", by="max", because="the numbers look odd")
        yield made
    TRIGGERS.clear()
    TRIGGERS.update(declared)


@pytest.mark.skipif(
    os.environ.get("KILLICK_SHOTS") != "write", reason="pictures are made when KILLICK_SHOTS=write asks"
)
def test_pictures_are_made(kd: Client, watch: Watch) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    with (
        bridge(kd) as server,
        watch(server, viewport=WIDE) as window,
        watch(server, viewport=WIDE, dark=True) as dark,
        watch(server, viewport=PHONE) as phone,
    ):
        for each in (window, dark, phone):
            _set_clock(each, kd)
        for name, path in {
            "runs": "/runs",
            "run": "/runs/claim-18",
            "workflow": "/runs/claim-17?tab=workflow",
            "trace": "/runs/claim-18?tab=trace",
            "failures": "/runs/close-2026-10?tab=failures",
            "compare": "/compare?a=claim-17&b=claim-17-if",
            "triggers": "/triggers",
            "workers": "/workers",
            "health": "/health",
            "find": "/find?what=effects",
            "start": "/start?agent=claims.review",
        }.items():
            _shot(window, name, path)
        _shot(dark, "runs-dark", "/runs")
        _shot(phone, "phone", "/runs/claim-18")
        page = window.goto("/inbox/claim-18%3A5")
        page.get_by_text("Edit the arguments").click()
        page.get_by_role("textbox", name="amount").fill("900")
        _shot(window, "inbox")
        page = window.goto("/runs/claim-17?tab=state")
        expect(page.get_by_role("slider")).to_be_enabled()
        page.get_by_role("slider").focus()
        page.keyboard.press("Home")
        for _ in range(6):
            page.keyboard.press("ArrowRight")
        _shot(window, "time")
        page = window.goto("/runs/sub-acme")
        page.get_by_role("button", name="Pause…").click()
        expect(page.get_by_role("dialog").get_by_role("button", name="Pause", exact=True)).to_be_enabled()
        _shot(window, "act")
        kd.run(coder, {"provider": "anthropic", "calls": 60, "budget": 4_000}, id="mend-parser")
        _shot(window, "window", "/runs/mend-parser?tab=window")
        office.week(kd)
        _set_clock(window, kd)
        _shot(window, "overview", "/overview?period=7d")


def _set_clock(window: Watched, kd: Client) -> None:
    window.page.clock.set_fixed_time(datetime.fromtimestamp(kd.runtime.clock.now_us() / 1e6, UTC))


def _shot(window: Watched, name: str, path: str | None = None) -> None:
    page: Page = window.goto(path) if path is not None else window.page
    if path is not None and path.startswith("/runs/"):
        expect(page.get_by_role("button", name="Fork…")).to_be_visible()
    page.wait_for_timeout(700)  # for what a page fetches when it has come
    if "?tab=" in page.url:
        page.evaluate("scrollTo(0, document.querySelector('nav.tabs').offsetTop - 60)")
        page.wait_for_timeout(100)
    page.screenshot(path=SHOTS / f"{name}.png", animations="disabled", caret="hide")
