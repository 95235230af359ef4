"""What the page and the example of MCP show is so."""

from __future__ import annotations

from pathlib import Path

from neighbours.trying import try_example, try_page


def test_what_the_page_shows_is_so(tmp_path: Path) -> None:
    try_page("mcp", tmp_path)


def test_the_example_books_once(tmp_path: Path) -> None:
    assert try_example("mcp_tools", tmp_path).splitlines() == [
        "trip: waits for answer at step 9: Booked 7c to Oslo. Keep it?; "
        "call kd.answer('trip:9', 'approve' | 'reject' | 'edit' | 'respond', value=…)",
        "Booked 7c to Oslo.",
        "booked: ['7c']",
    ]
