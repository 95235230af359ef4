"""Whatever agents, users and senders put on record is text on every page, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, expect

from browser import hostile, office
from browser.browsing import Watch, bridge
from browser.places import places
from killick.client.client import Client
from killick.workers.tokens import issue

pytestmark = pytest.mark.slow

MADE: Final = f"""() => {{
  for (const each of document.querySelectorAll("main details:not([open]) > summary")) each.click();
  for (const each of document.querySelectorAll("main input, main textarea")) each.focus();
  const leads = (each) => ["href", "action", "formaction", "src"].map((name) => each.getAttribute(name) || "");
  const made = [];
  if (window.{hostile.FIRED} !== undefined) made.push(`a payload ran: ${{window.{hostile.FIRED}}}`);
  const inside = 'img[src="x"], svg[onload], [onfocus], [onerror], script:not([src]), [autofocus][x]';
  for (const each of document.querySelectorAll(inside)) made.push(`it became an element: <${{each.localName}}>`);
  for (const each of document.querySelectorAll("[href], [action], [formaction], [src]")) {{
    if (leads(each).some((to) => /^\\s*(javascript|data|vbscript):/i.test(to))) made.push("it became an address");
  }}
  if (document.body.innerText.includes("//49")) made.push("it was evaluated");
  return made;
}}"""
"""Opens and touches everything on a page; gives back what became of what was on record, other than text."""


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    with office.opened(str(tmp_path / "killick.db")) as made:
        hostile.fill(made)
        issue(made.runtime.engine, hostile.PERSON, by=hostile.PERSON)
        yield made


def test_nothing_on_record_gets_out_of_its_place_on_any_page(kd: Client, watch: Watch) -> None:
    with bridge(kd, hostile.PERSON) as server, watch(server) as window:
        wrong: list[str] = []
        everywhere = places([hostile.RUN], [f"{hostile.RUN}:5", f"{hostile.RUN}:6"], parts=True)
        for path in dict.fromkeys([*everywhere, *places([hostile.ANSWERED, hostile.FORK], whole=False)]):
            page = window.goto(path)
            found = page.evaluate(MADE)
            page.wait_for_timeout(60)  # for what comes when it is opened
            if path.startswith(("/runs", "/inbox", "/triggers", "/workers", "/compare?")):
                expect(page.locator("main, body").first).to_contain_text("{{7*7}}")
            wrong += [f"{path[:60]}…{path[-30:]}: {line}" for line in {*found, *page.evaluate(MADE)}]
        assert not wrong, "\n".join(wrong)


def test_the_payloads_do_get_out_of_a_page_that_lets_them(browser: Browser) -> None:
    page = browser.new_page()
    page.set_content(f"<main><a href='javascript:void 0'>y</a><p>{hostile.evil('x')}</p></main>")
    page.wait_for_function(f"window.{hostile.FIRED}")
    found = page.evaluate(MADE)
    page.close()
    assert {"it became an element: <img>", "it became an address"} <= set(found)
    assert any(line.startswith("a payload ran") for line in found)
