"""The site: every page is in its navigation once, under one kind, and statements that age are made in one place."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import demo_picture
from pages import ROOT, pages

DOCS: Final = ROOT / "docs"
NAVIGATION: Final = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = Counter(re.findall(r": (\S+\.md)$", NAVIGATION, re.MULTILINE))
    elsewhere = {name for name in listed if name == "examples.md" or name.startswith("project/")}
    assert set(listed) - elsewhere == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert max(listed.values()) == 1


def test_one_page_says_what_is_not_there_yet() -> None:
    promises = re.compile(
        r"\b(?:not (?:there|supported|implemented) yet|not yet (?:there|supported|implemented))", re.IGNORECASE
    )
    assert [page.name for page in pages(ROOT) if promises.search(page.read_text(encoding="utf-8"))] == ["README.md"]


def test_the_glossary_has_at_most_thirty_terms() -> None:
    rows = re.findall(r"^\| (.+?) \|", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    terms = [row for row in rows if row != "term"]
    assert 10 < len(terms) <= 30
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.slow
def test_the_picture_of_the_demo_is_what_the_demo_prints(tmp_path: Path) -> None:
    picture = demo_picture.PICTURE.read_text(encoding="utf-8")
    assert demo_picture.words(picture) == demo_picture.words(demo_picture.svg(demo_picture.demo(tmp_path)))
