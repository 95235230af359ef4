"""Every page of the app, with something to show on it. A page that nobody thought of here is a failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import quote

from browser.office import review
from killick.web.app import ROUTES

TABS: Final = ("workflow", "state", "trace", "window", "decisions", "failures", "effects", "log")
QUERIES: Final[dict[str, tuple[str, ...]]] = {
    "/find": tuple(f"?what={what}" for what in ("calls", "decisions", "failures", "effects", "answers")),
    "/runs/{run}": tuple(f"?tab={tab}" for tab in TABS),
    "/start": (f"?agent={review.name}",),
}
"""What else a page is looked at with."""

PARTS: Final = {"step": "1", "n": "1"}
"""What is asked for of a run."""


def places(
    runs: Sequence[str] = (), waits: Sequence[str] = (), *, parts: bool = False, whole: bool = True
) -> list[str]:
    """The address of every page: of those that are about runs and waits, for each of some; the first two runs are
    compared. With `parts` also what pages are made of, which is no page by itself; unless it is to be the `whole` of
    them, each page once, as it comes."""
    found: list[str] = []
    for route in ROUTES:
        # A page that only a link opens has tests of its own, in test_answer_link.py.
        if route.page is not None and route.scope is not None and (parts or not route.page.startswith("_")):
            found += [filled + query for at in route.pages for filled in _filled(at, runs, waits)
                      for query in ("", *(QUERIES.get(at, ()) if whole else ()))]  # fmt: skip
    if len(runs) > 1:
        found.append(f"/compare?a={quote(runs[0], safe='')}&b={quote(runs[1], safe='')}")
    return list(dict.fromkeys(found))


def _filled(at: str, runs: Sequence[str], waits: Sequence[str]) -> Iterator[str]:
    """An address with its parts in it, percent-encoded."""
    for name, value in PARTS.items():
        at = at.replace(f"{{{name}}}", quote(value, safe=""))
    for name, values in (("run", runs), ("wait", waits)):
        if f"{{{name}}}" in at:
            yield from (at.replace(f"{{{name}}}", quote(value, safe="")) for value in values)
            return
    assert "{" not in at, f"{at}: the browser tests do not know what to put there"
    yield at
