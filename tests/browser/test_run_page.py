"""The page of a run, looked at: when its steps happened, and what the address says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import FloatRect, Locator, ViewportSize, expect

import killick
from browser import office
from browser.browsing import Watch, bridge
from killick.client.client import Client
from killick.triggers import TRIGGERS

pytestmark = pytest.mark.slow


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    """The office after a morning; a manager approved two hours later."""
    declared = TRIGGERS.copy()
    with office.opened(str(tmp_path / "killick.db")) as made:
        office.fill(made)
        office.CLOCK.advance(7_200)
        made.answer("claim-18", "approve", by="max")
        office.went_on(made, "claim-18")
        yield made
    TRIGGERS.clear()
    TRIGGERS.update(declared)


def box(found: Locator) -> FloatRect:
    shape = found.bounding_box()
    assert shape is not None
    return shape


def test_steps_are_bars_on_one_time_axis_with_waits_hatched_and_hours_folded(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/claim-18")
        axis = page.get_by_role("img", name=re.compile("^Time axis: 0, 2 s, .*; folded: 2h 18m$"))
        expect(axis).to_be_visible()
        expect(page.locator("#step-2 rect.attempt.unknown")).to_have_count(2)
        expect(page.locator("#step-2 rect.attempt.returned")).to_have_count(1)
        waited, paid = box(page.locator("#step-5 rect.wait")), box(page.locator("#step-5 rect.attempt"))
        assert page.locator("#step-5 rect.wait").get_attribute("fill") == "url(#gantt-hatch)"
        assert abs(waited["x"] + waited["width"] - paid["x"]) < 3
        first, model = box(page.locator("#step-1 rect.attempt")), box(page.locator("#step-3 rect.attempt"))
        assert 5 < model["width"] / first["width"] < 7, "2.6 s beside 0.42 s"
        expect(page.locator("#step-5 .took")).to_contain_text("wait answered 2h 18m")


def test_parallel_steps_overlap_on_a_phone_as_on_a_wide_screen(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server:
        for viewport in (ViewportSize(width=1280, height=800), ViewportSize(width=390, height=780)):
            with watch(server, viewport=viewport) as window:
                page = window.goto("/runs/batch-9")
                lanes = [box(page.locator(f'[id="step-1.{n}.1"] .lane')) for n in (1, 2, 3)]
                assert len({(lane["x"], lane["width"]) for lane in [*lanes, box(page.locator(".scale .lane"))]}) == 1
                one, two = (box(page.locator(f'[id="step-1.{n}.1"] rect.attempt')) for n in (1, 2))
                assert max(one["x"], two["x"]) < min(one["x"] + one["width"], two["x"] + two["width"])


def test_an_opened_step_is_in_the_address_and_the_address_opens_it(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/claim-18")
        page.locator("#step-3 > summary .lane").click()
        expect(page).to_have_url(re.compile("/runs/claim-18#step-3$"))
        page.reload()
        expect(page.locator("#step-3")).to_have_attribute("open", "")
        page.locator("#step-3 > summary").click()
        expect(page).to_have_url(re.compile("/runs/claim-18$"))


def test_a_page_that_follows_the_newest_step_scrolls_to_it(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server, viewport=ViewportSize(width=1000, height=500)) as window:
        page = window.goto("/runs/onboard-dora")
        expect(page.locator("[data-live-state]")).to_have_text("live")
        page.get_by_label("Follow newest").check()
        kd.answer("onboard-dora", "respond", value="claims", by="ann")
        office.went_on(kd, "onboard-dora")
        expect(page.locator(".steps > :last-child")).to_contain_text("completed")
        expect(page.locator(".steps > :last-child")).to_be_in_viewport()


def test_the_head_of_a_run_is_small_on_every_tab_and_names_what_belongs_to_the_run(kd: Client, watch: Watch) -> None:
    kd.fork("claim-17", at="2:after", id="claim-17-if", by="max")
    with bridge(kd) as server, watch(server) as window:
        for path in ("/runs/claim-18", "/runs/claim-18?tab=state", "/runs/claim-17-if", "/runs/letter-3"):
            page = window.goto(path)
            expect(page.get_by_role("button", name="Fork…")).to_be_visible()
            top, tabs = box(page.locator(".run-heading")), box(page.locator("nav.tabs"))
            assert tabs["y"] - top["y"] < 180, path
        page = window.goto("/runs/claim-17-if")
        facts = page.get_by_role("region", name="Facts")
        expect(facts.get_by_role("link", name="Export")).to_be_visible()
        facts.get_by_role("link", name="Compare with parent").click()
        expect(page).to_have_url(re.compile(r"/compare\?a=claim-17&b=claim-17-if"))
        page = window.goto("/runs/batch-9")
        expect(page.get_by_role("region", name="Facts").get_by_role("link", name="batch-9-child")).to_be_visible()


@killick.agent
async def counts(run: killick.Run, steps: int) -> None:
    for each in range(steps):
        await run.call(office.fetch_documents, each)


def test_steps_that_the_workflow_folds_open_in_place_and_it_can_be_zoomed(kd: Client, watch: Watch) -> None:
    office.ran(kd, counts, 20, "count")
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/count?tab=workflow")
        drawn = page.locator("[data-graph-drawn]")
        drawn.get_by_role("link", name=re.compile(r"… \d+ steps …")).click()
        expect(drawn.get_by_role("link", name=re.compile(r"… \d+ steps …"))).to_have_count(0)
        expect(drawn.locator('a[data-step="3"]')).to_be_focused()
        expect(drawn.locator('a[data-step="10"]')).to_be_visible()
        wide = box(drawn.locator("svg"))["width"]
        page.get_by_role("button", name="Larger").click()
        assert box(drawn.locator("svg"))["width"] == pytest.approx(wide * 1.25, abs=2)
        page.get_by_role("button", name="Fit").click()
        assert box(drawn.locator("svg"))["width"] <= box(drawn)["width"]
        page.get_by_role("button", name="Fold steps").click()
        expect(drawn.get_by_role("link", name=re.compile(r"… \d+ steps …"))).to_have_count(1)


def test_two_moments_of_one_run_are_compared_by_holding_one_and_moving_to_the_other(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/claim-18?tab=state#at=1:after")
        expect(page.locator("[data-time-place]")).to_have_text("1:after")
        page.get_by_role("button", name="Compare with…").click()
        expect(page.get_by_role("button", name="Let go of 1:after", pressed=True)).to_be_visible()
        for place in ("2:before", "2:after", "3:before"):
            page.keyboard.press("ArrowRight")
            expect(page.locator("[data-time-place]")).to_have_text(place)
        page.get_by_role("link", name="Compare 1:after with 3:before").click()
        expect(page.get_by_role("heading", name="claim-18 at 1:after and 3:before")).to_be_visible()
        expect(page.locator(".changes")).to_contain_text(["deductible"])
        assert page.get_by_text("Who decides?").count() == 0, "step 4 came later"
        page.get_by_role("combobox", name="To", exact=True).select_option("4:after")
        page.locator("form.actions").get_by_role("button", name="Compare").click()
        expect(page.get_by_text("Who decides?").first).to_be_visible()


def test_two_runs_are_compared_by_picking_them(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs")
        for run in ("claim-17", "claim-18"):
            page.get_by_role("checkbox", name=f"Choose {run}", exact=True).check()
        page.get_by_role("link", name="Compare", exact=True).last.click()
        expect(page).to_have_url(re.compile(r"/compare\?a=claim-17&b=claim-18"))
        page = window.goto("/runs")
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Compare").click()
        picks = page.get_by_role("navigation", name="Runs to compare with")
        picks.get_by_role("link", name="claim-17 recent").click()
        picks.get_by_role("link", name="claim-18 same agent").click()
        expect(page).to_have_url(re.compile(r"/compare\?a=claim-17&b=claim-18"))


def test_a_fork_offers_steps_their_recorded_values_and_their_options(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/claim-17")
        page.get_by_role("button", name="Fork…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Place").select_option("4:before")
        dialog.get_by_text("Another output of a step").click()
        output = dialog.get_by_label(re.compile("^Its output"))
        dialog.get_by_role("combobox", name="Step", exact=True).select_option("4")
        expect(output).to_have_value('"automatic"')
        will = dialog.locator("[data-will]")
        expect(will).to_contain_text("4:before")
        expect(will).not_to_contain_text("manager")
        dialog.get_by_role("button", name="manager", exact=True).click()
        expect(output).to_have_value('"manager"')
        expect(will).to_contain_text("manager")
        dialog.get_by_role("button", name="Fork", exact=True).click()
        page.wait_for_url(re.compile("/runs/(?!claim-17$)"))
        page.get_by_role("link", name="Compare with parent").click()
        expect(page.locator("main")).to_contain_text("They share 3 steps")


def test_one_command_goes_to_several_runs_after_its_preview(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs?status=waiting")
        chosen = [str(each.get_attribute("data-pick")) for each in page.locator("[data-pick]").all()[:2]]
        for run in chosen:
            page.locator(f'[data-pick="{run}"]').check()
        page.locator("#chosen [data-command=pause]").click()
        dialog = page.locator("#act-many")
        expect(dialog.locator("[data-will] li")).to_have_count(2)
        assert [kd.info(run).status for run in chosen] == ["waiting", "waiting"], "a preview changes nothing"
        dialog.locator("[data-do]").click()
        expect(dialog).to_be_hidden()
        assert [kd.info(run).status for run in chosen] == ["paused", "paused"]


def test_a_record_is_verified_from_its_page(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        page = window.goto("/runs/claim-18")
        page.locator("[data-verify]").dispatch_event("click")
        expect(page.locator("[data-verified]")).to_contain_text("events hold")
