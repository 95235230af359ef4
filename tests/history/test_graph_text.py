"""A drawing fits where it is shown, says all that there is to say once, and is safe to open anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from families import Family, claim
from killick.history.graph.graph import Lane, run_graph
from killick.history.graph.svg import CHAR, svg
from killick.history.graph.text import Line, cells, cut, outline
from killick.log import Entry
from killick.model import events as e

SVG = "{http://www.w3.org/2000/svg}"


def plain(lines: Iterable[Line]) -> list[str]:
    return ["".join(span.text for span in line).rstrip() for line in lines]


def long_family(steps: int = 1_000, forks: int = 19) -> Family:
    """A long run, and forks of it at many places, each as long again."""
    told = Family()
    told.start()
    told.steps("r", 1, steps)
    for number in range(forks):
        first = (number * steps) // forks + 1
        told.fork(f"fork_{number}", "r", 1 + 3 * first, effects="live")
        told.steps(f"fork_{number}", first + 1, first + steps // 2)
        told.complete(f"fork_{number}")
    return told


# text ---------------------------------------------------------------------------------------------


def test_a_branch_is_indented_below_the_step_that_it_leaves() -> None:
    assert plain(outline(run_graph(claim().log, "r-fork"))) == [
        "r",
        "  review",
        '  ✓ 1  check → {"status":"up"}',
        "    r-fork-2",
        "      fork at 1:after",
        "      effects live",
        '      ✓ 2  check → {"status":"down"}',
        "      queued",
        "  ✓ 2  starts r/2",
        "    rewound, generation 0",
        "      rewound to 3:before by ann",
        "      “the wrong Ann”",
        "      ✓ 3  pay  undone → paid",
        "      ▸ 4  mail",
        "      left",
        "    r/2",
        "      child, child of step 2",
        "      ✓ 1  look → 17 pages",
        "      completed",
        "  ✓ 3  pay  ↩ from step 3~0  undone by 0.1 → paid",
        "    r-fork  ◀ this one",
        "      fork at 3:after by ann",
        '      context route="manager"',
        "      effects none",
        "      ✓ 4  Who? → manager",
        "        r-fork-fork",
        "          fork at 4:after",
        "          input 18",
        "          model big-one",
        "          effects recorded",
        "          queued",
        "      … 5  asks managers: The bank is down. Pay by hand?",
        "      waiting",
        "  ✓ 4  Who? → auto",
        "  ✓ 0.1  undo 3 pay",
        "  completed",
    ]


def test_every_text_is_on_one_line_and_of_limited_width() -> None:
    told = claim()
    told.ask("r-fork-2", "3", "銀行は閉まっています。\n手で払いますか？" * 20)
    lines = plain(outline(run_graph(told.log, "r")))
    assert not any("\n" in line for line in lines)
    assert max(map(cells, lines)) < 250


def test_a_long_run_is_folded_and_says_how_many_steps_are_not_shown() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 90)
    told.fork("f", "r", 1 + 3 * 40)
    lines = plain(outline(run_graph(told.log, "r")))
    assert len(lines) < 25
    assert [line for line in lines if "…" in line] == ["  … 36 steps …", "  … 47 steps …"]
    shown = sum(bool(re.match(r"  ✓ \d+ ", line)) for line in lines)
    assert shown + 36 + 47 == 90


def test_what_went_wrong_is_never_folded_away() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 50)
    told.begin("r", "51", "pay", effect="at_most_once")
    told.append("r", Entry(e.AttemptEnded(at=told.now(), step="51", attempt=1, outcome="unknown")))
    told.steps("r", 52, 99)
    assert "  ? 51  pay  in doubt" in plain(outline(run_graph(told.log, "r")))


def test_what_was_left_is_dim_what_was_undone_is_struck_and_the_one_asked_for_is_marked() -> None:
    lines = list(outline(run_graph(claim().log, "r")))
    styles = {span.text.strip(): span.style for line in lines for span in line}
    assert styles["rewound, generation 0"] == "left"
    assert styles["◀ this one"] == "asked"
    assert {span.style for line in lines for span in line if span.text == "pay"} == {"undone"}
    assert {span.style for line in lines for span in line if span.text == "mail"} == {"left"}


def test_a_gather_shows_its_branches_and_counts_those_that_are_too_many() -> None:
    told = Family()
    told.start()
    told.scope("r", "1", 20)
    for branch in range(1, 21):
        told.step("r", f"1.{branch}.1", "look")
    told.end_scope("r", "1")
    lines = plain(outline(run_graph(told.log, "r")))
    assert lines[2:5] == ["  ✓ 1  gather 20 branches", "    ✓ 1.1.1  look → ok", "    ✓ 1.2.1  look → ok"]
    assert "    … 13 steps inside …" in lines


@pytest.mark.parametrize(
    ("said", "room", "is_shown"),
    [("short", 5, "short"), ("longer", 5, "long…"), ("a\n b\x00c", 9, "a b c"), ("日本語", 5, "日本…"), ("", 5, "")],
)
def test_a_text_is_cut_by_the_room_that_its_letters_take(said: str, room: int, is_shown: str) -> None:
    assert cut(said, room) == is_shown


# svg ----------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """Where a text stands, as wide as its letters can be."""

    left: float
    top: float
    right: float
    bottom: float
    text: str

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def boxes(root: ElementTree.Element) -> list[Box]:
    found = []
    for element in root.iter(f"{SVG}text"):
        said = "".join(element.itertext())
        left, base = float(element.attrib["x"]), float(element.attrib["y"])
        found.append(Box(left, base - 10, left + cells(said) * CHAR, base + 3, said))
    return found


def across(root: ElementTree.Element) -> Iterator[tuple[float, float, float]]:
    """The horizontal lines by which lanes leave: from, to, and how high."""
    for element in root.iter(f"{SVG}path"):
        made = re.match(r"M([\d.]+) ([\d.]+)H([\d.]+)", element.attrib["d"])
        if made:
            yield float(made[1]), float(made[3]), float(made[2])


def drawn(told: Family, run: str = "r") -> ElementTree.Element:
    return ElementTree.fromstring(svg(run_graph(told.log, run), linked))


def linked(lane: Lane, step: str | None) -> str:
    return f"/{step}"


FAMILIES: dict[str, Any] = {"claim": claim, "long": lambda: long_family(300, 12)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_no_two_texts_meet_none_leaves_the_picture_and_no_line_runs_through_words(name: str) -> None:
    root = drawn(FAMILIES[name]())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    found = sorted(boxes(root), key=lambda box: box.top)
    for place, box in enumerate(found):
        assert box.left >= 0, box
        assert box.right <= width, box
        assert box.bottom <= height, box
        for other in found[place + 1 : place + 60]:
            assert not box.meets(other), (box, other)
    for left, right, y in across(root):
        assert not any(box.top < y < box.bottom and box.left < right and left < box.right for box in found)


def test_it_says_what_it_is_and_loads_nothing() -> None:
    made = svg(run_graph(claim().log, "r"), linked)
    root = ElementTree.fromstring(made)
    assert root.attrib["role"] == "group"
    named = {element.get("id"): element.text for element in root.iter() if element.get("id")}
    assert root.attrib["aria-labelledby"].split() == list(named)
    assert named["killick-title"] == "r: its forks, children and rewinds"
    assert "r-fork (fork, leaving at 3:after): 2 steps, waiting." in str(named["killick-desc"])
    for foreign in ("<script", "<style", "url(", "@import", "<image", "<foreignObject", "http://", "https://"):
        assert foreign not in made.replace("http://www.w3.org/2000/svg", "")
    titles = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert any(told.startswith("step 3: pay") and "↩ from step 3~0" in told for told in titles)


def test_nothing_that_somebody_wrote_gets_out_of_its_text() -> None:
    told = Family()
    told.start()
    told.step("r", "1", "<script>alert(1)</script>", "]]>&\x00\x1b[31m\ud7ff'\"", arguments={"a": "</title><b>"})
    told.fork("<r&>", "r", 4, because="<!-- \x07 -->", by='"><script>')
    root = drawn(told, "<r&>")
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg", "title", "desc", "rect", "text", "tspan", "path", "g", "circle", "a",
    }  # fmt: skip
    assert any("<r&>" in "".join(element.itertext()) for element in root.iter(f"{SVG}text"))


def test_what_was_undone_is_struck_and_the_lane_that_was_asked_for_is_lit() -> None:
    root = drawn(claim())
    struck = [element.text for element in root.iter(f"{SVG}tspan") if element.get("class") == "undone"]
    assert struck == ["pay", "pay"]
    assert len([element for element in root.iter(f"{SVG}rect") if element.get("class") == "halo"]) == 1


@pytest.mark.slow
def test_a_thousand_steps_on_twenty_lanes_are_folded_to_a_picture_that_can_be_looked_at() -> None:
    made = svg(run_graph(long_family().log, "r"), linked)
    root = ElementTree.fromstring(made)
    assert len(made) < 1_000_000
    assert float(root.attrib["height"]) < 12_000
    assert float(root.attrib["width"]) < 6_000
    assert re.search(r"… \d+ steps …", made)
