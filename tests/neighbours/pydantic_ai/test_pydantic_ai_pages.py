"""What the page and the example of Pydantic AI show is so."""

from __future__ import annotations

from pathlib import Path

from neighbours.trying import try_example, try_page


def test_what_the_page_shows_is_so(tmp_path: Path) -> None:
    try_page("pydantic-ai", tmp_path)


def test_the_example_pays_once_and_asks_its_model_three_times(tmp_path: Path) -> None:
    waiting, output, counts = try_example("pydantic_ai_agent", tmp_path).splitlines()
    assert "pay(to='Ferry Co', euros=170)" in waiting
    assert "asked of treasurer" in waiting
    assert output == "The ferry is paid."
    assert counts == "paid: ['170 to Ferry Co']; model asked 3 times"
