"""The page of workers: who has runs, and what each is at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser import office
from browser.browsing import Watch, bridge
from killick.client.client import Client
from killick.log.writer import Entry
from killick.model import events as e
from killick.triggers import TRIGGERS
from leasing import leased_by

pytestmark = pytest.mark.slow


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    """The office after a morning, with a run whose worker has it, and one whose worker died."""
    declared = TRIGGERS.copy()
    with office.opened(str(tmp_path / "killick.db")) as made:
        office.fill(made)
        for run, holder in (("report-7", "4312-works"), ("report-8", "4313-gone")):
            made.start(office.report, "today", id=run)
            log = leased_by(holder, made.runtime.log, run, seconds=30)
            place = {"host": "web-1", "slots": 10} if run == "report-7" else {}
            taken = e.RunTaken(at=made.runtime.clock.now_us(), epoch=log.epoch, holder=holder, **place)
            log.append(Entry(taken))
        made.runtime.store.release("report-8", epoch=log.epoch, left=True)
        yield made
    TRIGGERS.clear()
    TRIGGERS.update(declared)


def test_each_worker_has_one_row_with_what_it_is_at(kd: Client, watch: Watch) -> None:
    with bridge(kd) as server, watch(server) as window:
        rows = window.goto("/workers").get_by_role("region", name=re.compile("^Workers")).locator("tbody tr")
        expect(rows).to_have_count(2)
        works, gone = rows.filter(has_text="process 4312"), rows.filter(has_text="process 4313")
        expect(works).to_contain_text("OK")
        expect(works).to_contain_text("process 4312 on web-1")
        expect(works).to_contain_text("1 of 10")
        expect(works.get_by_role("link", name="report-7")).to_be_visible()
        expect(gone).to_contain_text("lost: its runs are abandoned")
