"""What a page shows is so: every number, time, sign and name of it, and the focus of whoever reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser import office
from browser.browsing import Watch, bridge
from killick.client.client import Client
from killick.log.writer import Entry
from killick.model import events as e
from killick.triggers import TRIGGERS
from leasing import leased_by

pytestmark = pytest.mark.slow


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    """The office after a morning, with a run whose process died."""
    declared = TRIGGERS.copy()
    with office.opened(str(tmp_path / "killick.db")) as made:
        office.fill(made)
        made.start(office.report, "today", id="report-7")
        log = leased_by("4312-gone", made.runtime.log, "report-7", seconds=30)
        log.append(Entry(e.RunTaken(at=made.runtime.clock.now_us(), epoch=log.epoch, holder="4312-gone")))
        made.runtime.store.release("report-7", epoch=log.epoch, left=True)
        yield made
    TRIGGERS.clear()
    TRIGGERS.update(declared)


def test_what_needs_a_person_is_on_top_and_each_count_leads_to_as_many(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs")
        expect(page).to_have_title("(3) Runs · Killick")
        strip = page.get_by_role("navigation", name="Needs you")
        told = [re.sub(r"\s+", " ", each) for each in strip.get_by_role("link").all_inner_texts()]
        assert told == ["1 abandoned", "1 in doubt", "1 failed", "2 ask you"]
        for name, rows, count in (
            ("1 abandoned", "tr[data-row]", 1), ("1 in doubt", "article.wait", 1), ("2 ask you", "article.wait", 2),
        ):  # fmt: skip
            page = window.goto("/runs")
            page.get_by_role("link", name=name).click()
            expect(page.locator(rows)).to_have_count(count)
        page.goto(f"{server}/runs?status=waiting")
        page.get_by_role("link", name="a message", exact=True).click()
        expect(page.locator("tr[data-row]")).to_have_count(1)
        kd.answer("onboard-dora", "respond", value="claims", by="ann")
        expect(page).to_have_title("(2) Runs · Killick")
        expect(page.locator("header .count")).to_contain_text("2")


def test_the_reason_a_run_is_abandoned_can_be_read(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs?status=abandoned")
        reason = page.get_by_text("its process died")
        expect(reason).to_be_visible()
        box, head = reason.bounding_box(), page.get_by_role("columnheader", name="Run").bounding_box()
        assert box is not None
        assert head is not None
        assert box["width"] > head["width"]
        assert reason.evaluate("(at) => at.scrollWidth <= at.clientWidth")


def test_every_time_is_in_one_zone_that_is_named_and_a_click_goes_to_utc(kd: Client, watch: Watch) -> None:
    kd.pause("claim-18", by="max", because="a question")
    with bridge(kd) as server, watch(server, zone="Asia/Tokyo") as window:
        page = window.goto("/runs/claim-18")
        switch, banner, first = (
            page.locator("[data-zone-switch]"),
            page.locator(".position"),
            page.locator(".steps .at"),
        )
        expect(switch).to_have_text("Asia/Tokyo")
        expect(first.first).to_have_text(re.compile("^18:1"))
        expect(banner).to_contain_text(re.compile(r"paused at 16 Nov 2026, 18:\d\d:\d\d by max"))
        switch.click()
        expect(switch).to_have_text("UTC")
        expect(first.first).to_have_text(re.compile("^09:1"))
        expect(banner).to_contain_text(re.compile(r"paused at 16 Nov 2026, 09:\d\d:\d\d by max"))
        page.reload()
        expect(switch).to_have_text("UTC")
        page = window.goto("/runs/claim-18?tab=log")
        expect(page.locator(".events time").first).to_have_text(re.compile(r"09:\d\d:\d\d\.\d{3}$"))


def test_a_live_update_leaves_the_focus_where_it_was(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs")
        expect(page.locator("[data-live-state]")).to_have_text("live")
        page.get_by_role("link", name="claim-18", exact=True).focus()
        kd.start(office.report, "tomorrow", id="report-8")
        office.CLOCK.advance(2)  # the hub counts runs once a second, by this clock, which stands still
        expect(page.locator("tr[data-row]").first).to_contain_text("report-8")
        expect(page.get_by_role("link", name="claim-18", exact=True)).to_be_focused()


def test_an_opened_step_covers_nothing_of_itself(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/letter-3")
        step = page.locator("#step-1")
        step.locator("> summary").click()
        expect(step.get_by_text("Asked whether it happened").last).to_be_visible()
        line, body = step.locator("> summary").bounding_box(), step.locator("[data-detail]").bounding_box()
        assert line is not None
        assert body is not None
        assert line["y"] + line["height"] <= body["y"] + 1


def test_the_dialog_for_many_runs_names_each_of_them(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs")
        for run in ("claim-17", "sub-acme"):
            page.get_by_role("checkbox", name=f"Choose {run}", exact=True).check()
        page.get_by_role("button", name="Pause…").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.locator("[data-will] b")).to_have_text(["sub-acme", "claim-17"])
        expect(dialog.locator("[data-will] li.not")).to_contain_text("claim-17: ")


def test_the_reason_or_result_of_a_run_has_the_most_room_and_its_start_and_duration_are_there(
    kd: Client, watch: Watch
) -> None:
    office.CLOCK.advance(3_600)
    kd.fork("claim-17", at="2:after", id="claim-17-if", by="max")
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs")
        widths = {th.inner_text(): (th.bounding_box() or {})["width"] for th in page.locator(".runs th").all()}
        assert max(widths, key=lambda name: widths[name]) == "Waits for, error or result"
        ended = page.locator("tr", has=page.get_by_role("checkbox", name="Choose claim-17", exact=True))
        expect(ended.locator(".took")).to_have_text("10.0 s")
        expect(page.get_by_role("row", name="sub-acme").locator(".took")).to_contain_text("so far")
