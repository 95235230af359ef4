"""A browser, a server of its own for each test that wants one, and what no page may do.

Every page that a test opens is watched: an error on its console, a script that fails, a dialog that nobody wanted, or a
request to anywhere but the server fails the test, whatever else it looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from playwright.sync_api import Browser, ViewportSize

from browser.browsing import Watch, Watched, launched

WIDE: Final = ViewportSize(width=1280, height=860)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for a module: while it is open, the thread has a running loop, which other tests could not bear."""
    with launched() as made:
        yield made


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watch]:
    """Opens pages that are watched; at the end nothing may have gone wrong on any of them."""
    opened: list[Watched] = []

    def open_page(server: str, *, viewport: ViewportSize = WIDE, dark: bool = False, zone: str = "UTC") -> Watched:
        made = Watched(browser, server, viewport=viewport, dark=dark, zone=zone)
        opened.append(made)
        return made

    yield open_page
    for each in opened:
        each.context.close()
    wrong = [line for each in opened for line in each.wrong]
    assert not wrong, "\n".join(wrong)
