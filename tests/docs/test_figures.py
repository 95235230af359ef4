"""Figures on pages are those that were measured."""

from __future__ import annotations

from pathlib import Path

from bench import figures


def test_the_readme_and_the_comparison_state_the_figures_of_the_bench() -> None:
    stale: list[str] = []

    def compare(page: Path, text: str) -> None:
        if page.read_text(encoding="utf-8") != text:
            stale.append(page.name)

    figures.write(compare)
    assert not stale, f"{stale} differ from bench/RESULTS.md; run `python -m bench.figures`"


def test_a_changed_figure_of_the_bench_changes_the_page() -> None:
    page = f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter"
    assert figures.written(page, "{one}/s", {"one": "7"}) == f"before\n{figures.BEGIN}\n\n7/s\n\n{figures.END}\nafter"
