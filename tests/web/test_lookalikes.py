"""An approver reads arguments with nothing invisible in them, and sees which words mix scripts, wherever they read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import killick
from claims import call, move_in
from killick.workers import slack
from killick.workers.answer_links import evidence, headline
from web.desk import Desk, desk

Capture = pytest.CaptureFixture[str]
MIXED, WRITTEN, UNSEEN = "mаllory", "m\\u0430llory", "\u3164\u2800\u0336"
ESCAPED: Final = "\\u3164\\u2800\\u0336"


@killick.tool(effect="at_most_once", approve="mia", name="lookalikes_pay")
async def pay(to: str, memo: str) -> str:
    return "paid"


@killick.agent(name="lookalikes")
async def pays(run: killick.Run) -> str:
    return await run.call(pay.options(because=f"{MIXED} asked{UNSEEN}"), MIXED, f"refund{UNSEEN}")


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        made.kd.start(pays, id="r")
        made.kd.advance("r")
        yield made


def test_in_slack_and_in_mail(office: Desk) -> None:
    [wait] = office.kd.inbox()
    sections = [each["text"]["text"] for each in slack.asking(wait, "t")["blocks"] if each["type"] == "section"]
    for text in (" ".join(sections), " ".join([headline(wait), *evidence(wait).values()])):
        assert WRITTEN in text
        assert ESCAPED in text
        assert MIXED not in text
        assert not set(UNSEEN) & set(text)


def test_on_the_page(office: Desk) -> None:
    page = office.page("/inbox")
    assert f"{WRITTEN} (Cyrillic, Latin)" in page
    assert "mixed scripts" in page
    assert not set(UNSEEN) & set(
        page.partition('class="call"')[2].partition("<form")[0]
    )  # a field has the value itself, to be edited


def test_in_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    move_in(tmp_path, monkeypatch)
    with killick.open("killick.db") as kd:
        kd.start(pays, id="r")
        kd.advance("r")
    for words in (("inbox",), ("show", "r")):
        out = call(capsys, *words).out.replace("\n", "").replace(" ", "")
        assert WRITTEN in out
        assert not set(UNSEEN) & set(out)
