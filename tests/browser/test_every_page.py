"""Every page, whoever looks at it: in the dark, on a phone, by keyboard, by ear; with much on record or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, ViewportSize

from browser import office
from browser.browsing import Watch, bridge
from browser.conftest import WIDE
from browser.places import places
from killick.triggers import TRIGGERS

pytestmark = pytest.mark.slow

LOOKING: Final = (Path(__file__).parent / "looking.js").read_text(encoding="utf-8")
AXE: Final = Path(__file__).resolve().parents[2] / "build" / "axe.min.js"
PHONE: Final = ViewportSize(width=360, height=740)
TABS_MAX: Final = 25
RUNS: Final = ["claim-18"]
WAITS: Final = ["claim-18:5", "letter-3:1", "onboard-dora:1"]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The office after a morning."""
    declared = TRIGGERS.copy()
    office.triggers()
    with office.opened(str(tmp_path_factory.mktemp("full") / "killick.db")) as kd:
        office.fill(kd)
        with bridge(kd) as server:
            yield server
    TRIGGERS.clear()
    TRIGGERS.update(declared)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An office that nobody has come to yet."""
    with office.opened(str(tmp_path_factory.mktemp("empty") / "killick.db")) as kd, bridge(kd) as server:
        yield server


def looked_over(page: Page, path: str) -> list[str]:
    """What is wrong with a page when all of it has come; some of it comes when somebody goes there."""
    page.evaluate(_GO)
    page.wait_for_function(_COME)
    return [f"{path}: {line}" for line in page.evaluate(LOOKING)]


_GO: Final = """() => [...document.querySelectorAll("main [aria-busy=true]")]
  .filter((each) => each.checkVisibility()).forEach((each) => each.scrollIntoView())"""
_COME: Final = """() => ![...document.querySelectorAll("main [aria-busy=true]")].some((each) => each.checkVisibility())
  && document.getAnimations().every((each) => each.playState !== "running" || each.effect.getTiming().iterations > 9)"""


def test_every_page_can_be_read_by_eye_and_by_ear(full: str, watch: Watch) -> None:
    window = watch(full)
    others = ["/runs/close-2026-10?tab=failures", "/runs/letter-3", "/runs/batch-9?tab=workflow"]
    wrong = [line for path in [*places(RUNS, WAITS), *others] for line in looked_over(window.goto(path), path)]
    assert not wrong, "\n".join(wrong)


def test_every_page_can_be_read_in_the_dark_on_a_phone_and_none_scrolls_sideways(full: str, watch: Watch) -> None:
    window = watch(full, viewport=PHONE, dark=True)
    wrong: list[str] = []
    for path in places(RUNS, WAITS[:1]):
        page = window.goto(path)
        wrong += looked_over(page, path)
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        if wider > 0:
            wrong.append(f"{path}: {wider} px too wide, by {page.evaluate(_WIDEST)}")
    assert not wrong, "\n".join(wrong)


_WIDEST: Final = """() => [...document.querySelectorAll("main *, body > *")]
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
  .slice(-3).map((each) => `<${each.localName} class="${each.getAttribute("class") || ""}">`).join(" ")"""


@pytest.mark.parametrize(("viewport", "dark"), [(WIDE, False), (PHONE, True)], ids=["wide-light", "phone-dark"])
def test_axe_finds_nothing_on_any_page(full: str, watch: Watch, viewport: ViewportSize, dark: bool) -> None:
    assert AXE.is_file(), "no axe-core here, which this test asks; make build/axe.min.js"
    window, source = watch(full, viewport=viewport, dark=dark), AXE.read_text(encoding="utf-8")
    wrong: list[str] = []
    for path in places(RUNS, WAITS):
        page = window.goto(path)
        page.evaluate(_GO)
        page.wait_for_function(_COME)
        said = len(window.wrong)
        page.evaluate(source)
        wrong += [f"{path}: {line}" for line in page.evaluate(_FOUND)]
        del window.wrong[said:]  # axe tries styles of its own, which the page's policy refuses
    assert not wrong, "\n".join(wrong)


_FOUND: Final = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.target.join(" ")}: ${node.failureSummary}`))"""


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_links_of_lists_and_the_buttons_of_the_slider_can_be_hit(
    full: str, watch: Watch, viewport: ViewportSize
) -> None:
    window = watch(full, viewport=viewport)
    for path, found in (
        ("/runs", ".runs td.id a:not(.tag)"),
        ("/runs/claim-18", ".run-heading > a"),
        ("/runs/claim-18?tab=state", "[data-time-to]"),
        ("/api", ".api .contents a"),
    ):
        sizes = window.goto(path).locator(found).evaluate_all(_SIZES)
        assert sizes, path
        least = 24 if path.endswith("state") else 12  # a short name is a short link
        assert [(width, height) for width, height in sizes if height < 24 or width < least] == [], path


_SIZES: Final = "all => all.map((each) => [each.getBoundingClientRect().width, each.getBoundingClientRect().height])"


def test_every_page_says_what_to_do_where_nothing_is_on_record(empty: str, watch: Watch) -> None:
    window = watch(empty)
    wrong = [line for path in places() for line in looked_over(window.goto(path), path)]
    assert not wrong, "\n".join(wrong)


def test_whoever_goes_by_the_tab_key_sees_where_they_are(full: str, watch: Watch) -> None:
    window = watch(full)
    wrong: list[str] = []
    for path in places(RUNS, whole=False):
        page = window.goto(path)
        for _ in range(TABS_MAX):
            page.keyboard.press("Tab")
            line = page.evaluate(_FOCUSED)
            if line == "":
                break
            if line is not None:
                wrong.append(f"{path}: {line}")
    assert not wrong, "\n".join(wrong)


_FOCUSED: Final = """() => {
  const at = document.activeElement;
  if (!at || at === document.body) return "";
  const style = getComputedStyle(at);
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  if (outlined || style.boxShadow !== "none") return null;
  return `nothing shows that the focus is on <${at.localName} id="${at.id}"> ${at.textContent.trim().slice(0, 30)}`;
}"""
