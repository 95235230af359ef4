"""Commands from an engine: each counts once, however often the engine repeats it, and a wrong one says why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.adapters.engines import commands
from killick.errors import AlreadyAnswered, AnswerRefused, RunMismatch, RunUnknown


@killick.agent
async def asked_by_engines(run: killick.Run, who: str) -> str:
    answer = await run.ask(f"Pay {who}?")
    return f"{answer.kind} {await run.wait('word')} {await run.wait('word')}"


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(str(tmp_path / "killick.db")) as made:
        yield made


def obey(kd: killick.Client, command: str, request: str, **given: Any) -> None:
    asyncio.run(commands.obey(kd, "r", command, given, request=request))


def create(kd: killick.Client, given: Any) -> None:
    kd.start("asked_by_engines", given, id="r")


def test_a_repeated_request_counts_once_and_another_answer_is_refused(kd: killick.Client) -> None:
    create(kd, "ann")
    kd.advance("r")
    for _ in range(2):
        obey(kd, "answer", "a1", verb="approve", by="mia")
        obey(kd, "send", "m1", name="word", body=1)
    with pytest.raises(AlreadyAnswered):
        obey(kd, "answer", "a2", verb="reject", by="mia")
    obey(kd, "send", "m2", name="word", body=2)
    assert kd.advance("r").result == "approve 1 2"
    obey(kd, "cancel", "c1", by="mia")  # it is over
    assert kd.info("r").status == "completed"


def test_a_run_is_created_once_and_only_with_its_input(kd: killick.Client) -> None:
    create(kd, "ann")
    create(kd, "ann")
    create(kd, None)  # any input: the run is on record
    assert len(kd.list()) == 1
    with pytest.raises(RunMismatch):
        create(kd, "bob")


def test_commands_pause_and_resume_a_run_and_refuse_unknown_fields(kd: killick.Client) -> None:
    with pytest.raises(RunUnknown):
        obey(kd, "pause", "p0")
    create(kd, "ann")
    obey(kd, "pause", "p1", by="ops")
    assert kd.advance("r").status == "paused"
    obey(kd, "resume", "p2", by="ops")
    assert kd.advance("r").status == "waiting"
    for wrong in ({"when": "now"}, {"verb": 1}, {}):
        with pytest.raises(AnswerRefused):
            obey(kd, "answer", "a1", **wrong)
