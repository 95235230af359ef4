"""R31: an answer is what the person meant: approving names no value, and changes none."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import killick
from claims import on_terminal, plain_environment
from killick.client import answers
from killick.client.answers import deliver
from killick.engine.control.inbox import ANSWER, answer_id
from killick.errors import AnswerRefused
from killick.model import events as e


@killick.tool(name="verbs_pay", approve="ann")
async def pay(amount: int) -> str:
    return f"paid {amount}"


@killick.agent(name="verbs_pays")
async def pays(run: killick.Run, amount: int) -> str:
    return await run.call(pay, amount)


@killick.agent(name="verbs_asks")
async def asks(run: killick.Run, options: list[str]) -> Any:
    answer = await run.ask("Which team?", options=options)
    return [answer.kind, answer.value]


@killick.agent(name="verbs_types")
async def types(run: killick.Run) -> Any:
    answer = await run.ask("How much?", returns=int)
    return [answer.kind, answer.value]


def waits(kd: killick.Client, agent: Any, value: Any = None) -> killick.RunWaiting:
    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(agent, value, id="r")
    return waiting.value


def test_r31_an_approval_that_carries_changed_arguments_is_refused(world: Any) -> None:
    waits(world.kd, pays, 1300)
    with pytest.raises(AnswerRefused, match="use edit"):
        world.kd.answer("r", "approve", value={"amount": 1}, by="ann")
    world.kd.answer("r", "edit", value={"amount": 1}, by="ann")
    assert world.kd.run(pays, 1300, id="r") == "paid 1"


@pytest.mark.parametrize(("agent", "value", "told"), [(asks, ["a", "b"], "'a', 'b'"), (types, None, "respond")])
def test_r31_a_bare_approve_answers_no_question_that_wants_a_value(
    world: Any, agent: Any, value: Any, told: str
) -> None:
    waits(world.kd, agent, value)
    with pytest.raises(AnswerRefused, match=told):
        world.kd.answer("r", "approve")
    assert "approve" not in world.kd.inbox()[0].verbs


def test_r31_the_engine_sets_aside_what_a_client_should_have_refused(world: Any) -> None:
    """As an older client, or one of another language, would deliver it."""
    waits(world.kd, asks, ["a", "b"])
    for body in ({"kind": "approve"}, {"kind": "respond", "value": "c"}):
        [wait] = world.kd.inbox()
        opened = world.kd.state("r").fold.facts.waits["1"].opened
        told = {**body, "digest": wait.digest}
        deliver(world.kd.runtime.engine, "r", ANSWER, told, id=answer_id("r", "1", opened), by="ann")
        waits(world.kd, asks, ["a", "b"])
    log = world.kd.runtime.log
    notes = [log.data("r", each.seq)["note"] for each in world.kd.events("r") if isinstance(each.event, e.NoteMade)]
    assert "respond with one of them" in notes[0]
    assert "is not one of 'a', 'b'" in notes[1]
    world.kd.answer("r", "respond", value="b")
    assert world.kd.run(asks, ["a", "b"], id="r") == ["respond", "b"]


def test_r31_a_default_among_the_options_is_a_choice_and_no_verb(world: Any, clock: Any) -> None:
    @killick.agent(name="verbs_defaults")
    async def agent(run: killick.Run) -> Any:
        answer = await run.ask("Do it?", options=["approve", "wait"], timeout="1h", default="approve")
        return [answer.kind, answer.value]

    waits(world.kd, agent)
    clock.advance(3_601)
    assert world.kd.run(agent, id="r") == ["respond", "approve"]


def test_a_run_that_waits_is_told_to_the_caller_and_never_asked_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "serves.py").write_text(
        "import sys, killick\n"
        "@killick.agent\n"
        "async def agent(run): return (await run.ask('Pay?')).kind\n"
        "assert sys.stdin.isatty() and sys.stderr.isatty()\n"
        "with killick.open('memory:') as kd:\n"
        "    try: kd.run(agent)\n"
        "    except killick.RunWaiting: print('told', 'the caller')\n"
    )
    code, seen = on_terminal(
        [sys.executable, "serves.py"], cwd=tmp_path, env=plain_environment(), types={"Enter: later": "approve\n"}
    )
    assert (code, "told the caller" in seen, "Enter: later" in seen) == (0, True, False), seen


def test_only_the_command_line_reads_the_terminal() -> None:
    root = Path(killick.__file__).parent
    reads = re.compile(r"sys\.stdin|isatty\(|(?<!def )(?<![\w.])input\(")
    found = {file.relative_to(root).as_posix() for file in root.rglob("*.py") if reads.search(file.read_text("utf-8"))}
    # The process of an isolated tool reads its call from a pipe.
    assert {each for each in found if not each.startswith("cli/")} <= {"engine/steps/isolation.py"}


def test_an_answer_to_a_wait_that_closes_meanwhile_is_refused_or_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    @killick.agent(name="closes_meanwhile")
    async def agent(run: killick.Run) -> str:
        return (await run.ask("well?", timeout=5)).kind

    clock = killick.clock.ManualClock()
    with killick.open("memory:", clock=clock) as kd:
        kd.start(agent, id="r")
        kd.advance("r")
        found = answers._open_wait

        def closing(*args: Any) -> Any:
            wait = found(*args)
            kd.rewind("r", "start")
            return wait

        monkeypatch.setattr(answers, "_open_wait", closing)
        with contextlib.suppress(killick.errors.KillickError):
            kd.answer("r", "approve")
        monkeypatch.undo()
        kd.advance("r")
        assert kd.info("r").waits[0].prompt == "well?"
