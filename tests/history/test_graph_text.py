"""An outline says all that there is to say once, in lines of limited width."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from families import Family, claim
from killick.history.graph.graph import run_graph
from killick.history.graph.text import Line, cells, cut, outline
from killick.log import Entry
from killick.model import events as e


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


@pytest.mark.slow
def test_a_thousand_steps_on_twenty_lanes_are_folded_to_an_outline_that_can_be_looked_at() -> None:
    lines = plain(outline(run_graph(long_family().log, "r")))
    assert len(lines) < 1_000
    assert any(re.search(r"… \d+ steps …", line) for line in lines)


def test_a_run_and_a_step_are_named_where_a_page_can_link_them_and_what_was_rewound_is_not() -> None:
    spans = [span for line in outline(run_graph(claim().log, "r")) for span in line if span.run]
    named = {(span.run, span.step): span.text for span in spans}
    assert named["r", "3"] == "3"
    assert named["r/2", ""] == "r/2"
    assert named["r-fork", ""] == "r-fork"
    assert ("r", "") not in named, "that run is the page"
    assert [span.step for span in spans if span.run == "r"].count("3") == 1
