"""A drawing fits where it is shown, says all that there is to say once, and is safe to open anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from families import Family, claim
from killick.log import Entry
from killick.model import events as e
from killick.presenting.graph.graph import Lane, run_graph
from killick.presenting.graph.svg import CHAR, svg
from killick.presenting.graph.text import cells, cut

SVG = "{http://www.w3.org/2000/svg}"


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


def lines(told: Family, run: str = "r") -> list[str]:
    """The lines of text of a drawing."""
    return ["".join(element.itertext()) for element in drawn(told, run).iter(f"{SVG}text")]


def test_each_lane_says_what_it_is_and_each_step_what_it_did() -> None:
    said = lines(claim(), "r-fork")
    for line in (
        '1 check → {"status": "up"}', "fork at 1:after", "rewound, generation 0", "rewound to 3:before by ann",
        "“the wrong Ann”", "3 pay → paid", "undone", "child, child of step 2", "↩ from step 3~0", "undone by 0.1",
        'context route="manager"', "4 Who? → manager", "input 18", "model big-one", "waiting",
        "5 asks managers: The bank is down. Pa…", "0.1 undo 3 pay",
    ):  # fmt: skip
        assert line in said, line


def test_a_long_run_is_folded_and_says_how_many_steps_are_not_shown() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 90)
    told.fork("f", "r", 1 + 3 * 40)
    said = lines(told)
    assert [line for line in said if "…" in line] == ["… 36 steps …", "… 46 steps …"]
    assert sum(bool(re.match(r"\d+ ", line)) for line in said) + 36 + 46 == 90


def test_what_went_wrong_is_never_folded_away() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 50)
    told.begin("r", "51", "pay", effect="at_most_once")
    told.append("r", Entry(e.AttemptEnded(at=told.now(), step="51", attempt=1, outcome="unknown")))
    told.steps("r", 52, 99)
    said = lines(told)
    assert said[said.index("51 pay") + 1] == "in doubt"


def test_a_gather_shows_its_branches_and_counts_those_that_are_too_many() -> None:
    told = Family()
    told.start()
    told.scope("r", "1", 20)
    for branch in range(1, 21):
        told.step("r", f"1.{branch}.1", "look")
    told.end_scope("r", "1")
    said = lines(told)
    at = said.index("1 gather 20 branches")
    assert said[at + 1 : at + 3] == ["1.1.1 look → ok", "1.2.1 look → ok"]
    assert "… 12 steps inside …" in said


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
