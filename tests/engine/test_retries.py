"""R11: which errors are tried again, by what the tool does to the world, and what the record says of the others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.definitions.tools import TOOLS
from killick.errors import DeclarationRefused
from killick.history.timeline import timeline
from killick.model import events as e
from killick.presenting.explain import why

QUICK = killick.Retry(attempts=4, first=0)
REPEATABLE = ("reads", "idempotent", "transaction", "workspace")


class ApiError(Exception):
    """What a client raises for a status that is none of success."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_code = status


@killick.agent(name="calls_that")
async def calls_that(run: killick.Run, name: str) -> Any:
    return await run.call(TOOLS[name])


def act_of(error: BaseException, **options: Any) -> list[int]:
    """Declare a tool that raises this; gives the attempts that were made of it."""
    made: list[int] = []

    if options.get("effect") == "transaction":

        @killick.tool(name="act", **options)
        def act_tx(step: killick.ToolStep = killick.STEP, tx: killick.Tx = killick.TX) -> None:
            made.append(step.attempt)
            raise error

    else:

        @killick.tool(name="act", **options)
        async def act(step: killick.ToolStep = killick.STEP) -> None:
            made.append(step.attempt)
            raise error

    return made


def ends(world: Any) -> list[e.AttemptEnded]:
    found: list[e.AttemptEnded] = world.told("r", e.AttemptEnded)
    return found


def fails(world: Any, agent: Any = calls_that) -> None:
    with pytest.raises(killick.RunFailed):
        world.kd.run(agent, "act", id="r")


def in_folder(folder: Path) -> Any:
    @killick.agent(name="calls_in_folder", workspace=folder)
    async def agent(run: killick.Run, name: str) -> Any:
        return await run.call(TOOLS[name])

    return agent


# what may be repeated ------------------------------------------------------------------------------


@pytest.mark.gate(8)
@pytest.mark.parametrize("error", [RuntimeError("?"), ValueError("?"), KeyError("?"), ApiError(400), OSError("?")])
@pytest.mark.parametrize("effect", REPEATABLE)
def test_r11_a_retry_repeats_every_exception_of_a_tool_that_may_be_repeated(
    disk: Any, folder: Path, effect: Any, error: Exception
) -> None:
    made = act_of(error, effect=effect, retry=QUICK)
    fails(disk, in_folder(folder) if effect == "workspace" else calls_that)
    assert made == [1, 2, 3, 4]
    assert [end.not_retried for end in ends(disk)] == [None, None, None, "no_attempts_left"]


@pytest.mark.parametrize(
    "error",
    [TypeError("?"), NameError("?"), AttributeError("?"), SyntaxError("?"), AssertionError("?"), ImportError("?"),
     NotImplementedError("?"), ExceptionGroup("two", [OSError("?"), TypeError("?")])],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_r11_a_programming_error_is_not_repeated_and_the_record_says_so(world: Any, error: Exception) -> None:
    made = act_of(error, effect="idempotent", retry=QUICK)
    fails(world)
    assert made == [1]
    assert [end.not_retried for end in ends(world)] == ["programming_error"]


def test_r11_a_programming_error_that_is_named_is_repeated(world: Any) -> None:
    made = act_of(AttributeError("?"), effect="reads", retry=killick.Retry(attempts=3, first=0, on=AttributeError))
    fails(world)
    assert made == [1, 2, 3]


@pytest.mark.parametrize("effect", ["reads", "idempotent"])
def test_r11_on_narrows_what_is_repeated(world: Any, effect: Any) -> None:
    made = act_of(ValueError("?"), effect=effect, retry=killick.Retry(attempts=4, first=0, on=ConnectionError))
    fails(world)
    assert made == [1]
    assert [end.not_retried for end in ends(world)] == ["not_named_in_on"]


def test_r11_never_excludes_an_error_and_what_derives_from_it(world: Any) -> None:
    made = act_of(KeyError("?"), effect="reads", retry=killick.Retry(attempts=4, first=0, never=LookupError))
    fails(world)
    assert made == [1]
    assert [end.not_retried for end in ends(world)] == ["named_in_never"]


def test_r11_retry_never_makes_a_refusal_of_what_is_unknown(world: Any) -> None:
    act_of(ConnectionError("?"), effect="idempotent", retry=killick.Retry(attempts=2, first=0, on=ConnectionError))
    fails(world)
    assert [end.outcome for end in ends(world)] == ["unknown", "unknown"]


def test_without_a_retry_only_errors_that_pass_by_themselves_are_repeated(world: Any) -> None:
    made = act_of(ValueError("no such customer"), effect="reads")
    fails(world)
    assert made == [1]
    assert [end.not_retried for end in ends(world)] == ["lasting_error"]


@pytest.mark.slow
def test_an_error_of_another_process_is_classified_as_one_of_this(tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text(
        "import killick\n"
        "@killick.tool(effect='reads', isolate='process', retry=killick.Retry(attempts=2, first=0))\n"
        "def breaks(how: str) -> None:\n"
        "    raise {'value': ValueError, 'type': TypeError}[how]('?')\n"
        "@killick.agent\n"
        "def agent(run, how: str) -> None:\n"
        "    run.call(breaks, how)\n"
    )
    program = (
        "import killick, apart\n"
        "kd = killick.open('memory:')\n"
        "for how in ('value', 'type'):\n"
        "    try: kd.run(apart.agent, how, id=how)\n"
        "    except killick.RunFailed: pass\n"
        "    events = [each.event for each in kd.events(how)]\n"
        "    print([each.not_retried for each in events if hasattr(each, 'not_retried')])\n"
        "kd.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines() == ["[None, 'no_attempts_left']", "['programming_error']"]


# at most once --------------------------------------------------------------------------------------


def test_r11_an_invite_that_was_sent_and_then_answered_with_a_502_is_never_sent_again_by_itself(world: Any) -> None:
    sent: list[str] = []

    @killick.tool(name="act", retry=killick.Retry(attempts=3, first=0))
    async def invite() -> None:
        sent.append("invite")
        raise ApiError(502)

    for _ in range(2):
        with pytest.raises(killick.RunWaiting):
            world.kd.run(calls_that, "act", id="r")
        world.process()
    assert sent == ["invite"]
    assert [(end.outcome, end.not_retried) for end in ends(world)] == [("unknown", "may_have_happened")]


@pytest.mark.parametrize("effect", [{}, {"effect": "at_most_once"}])
def test_r11_an_error_named_in_on_is_refused_for_at_most_once_with_the_two_ways_out(effect: Any) -> None:
    ways = r"nothing_happened=\(ApiError,\).*effect='idempotent'"
    with pytest.raises(DeclarationRefused, match=ways):
        act_of(ApiError(502), retry=killick.Retry(attempts=3, on=ApiError), **effect)
    act_of(ApiError(502), **effect)
    with pytest.raises(DeclarationRefused, match=ways):
        TOOLS["act"].options(retry=killick.Retry(attempts=3, on=ApiError))  # type: ignore[attr-defined]


def test_r11_what_the_author_says_proves_that_nothing_happened_is_repeated(world: Any) -> None:
    made = act_of(ConnectionRefusedError("?"), nothing_happened=ConnectionRefusedError, retry=QUICK)
    fails(world)
    assert made == [1, 2, 3, 4]
    assert {end.outcome for end in ends(world)} == {"refused"}


def test_r11_a_status_429_of_a_tool_that_may_have_acted_is_in_doubt(world: Any) -> None:
    made = act_of(ApiError(429), retry=QUICK)
    with pytest.raises(killick.RunWaiting):
        world.kd.run(calls_that, "act", id="r")
    assert made == [1]
    assert [end.outcome for end in ends(world)] == ["unknown"]


def test_r11_a_status_429_that_proves_that_nothing_happened_is_sat_out(world: Any) -> None:
    made: list[int] = []

    @killick.tool(name="act", nothing_happened=ApiError)
    async def act() -> str:
        made.append(1)
        if len(made) < 3:
            raise ApiError(429)
        return "done"

    assert world.kd.run(calls_that, "act", id="r") == "done"
    assert [end.limited for end in ends(world)] == [True, True, False]


@pytest.mark.parametrize(("kind", "made"), [("reads", 3), ("at_most_once", 1)])
def test_r11_an_effect_that_depends_on_the_arguments_is_decided_call_by_call(world: Any, kind: str, made: int) -> None:
    tries: list[str] = []

    @killick.tool(effect=lambda kind: kind, retry=killick.Retry(attempts=3, first=0, on=ValueError))
    async def depends(kind: str) -> None:
        tries.append(kind)
        raise ValueError("?")

    @killick.agent
    async def agent(run: killick.Run, kind: str) -> None:
        await run.call(depends, kind)

    with pytest.raises((killick.RunFailed, killick.RunWaiting)):
        world.kd.run(agent, kind, id="r")
    assert len(tries) == made


# declarations --------------------------------------------------------------------------------------


def test_a_number_is_taken_as_attempts(world: Any) -> None:
    made = act_of(RuntimeError("?"), effect="reads", retry=2)
    fails(world)
    assert made == [1, 2]
    assert TOOLS["act"].options(retry=7).policy.retry == killick.Retry(attempts=7)  # type: ignore[attr-defined]


@pytest.mark.parametrize("retry", [0, -1, True, "4", 2.5, (4,)])
def test_a_retry_that_is_none_is_refused_where_it_is_declared(retry: Any) -> None:
    with pytest.raises(DeclarationRefused, match=r"retry|attempts"):
        act_of(RuntimeError("?"), effect="reads", retry=retry)
    act_of(RuntimeError("?"), effect="reads")
    with pytest.raises(DeclarationRefused, match=r"retry|attempts"):
        TOOLS["act"].options(retry=retry)  # type: ignore[attr-defined]
    with pytest.raises(DeclarationRefused, match=r"retry|attempts"):
        killick.on("run.completed", name="odd", retry=retry)(lambda event: None)


@pytest.mark.parametrize("kinds", ["ApiError", (ValueError, "x"), 3])
def test_what_is_no_exception_proves_nothing(kinds: Any) -> None:
    with pytest.raises(DeclarationRefused, match="nothing_happened"):
        act_of(RuntimeError("?"), nothing_happened=kinds)
    with pytest.raises(DeclarationRefused, match="never"):
        killick.Retry(never=kinds)


# what people read ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (TypeError("?"), {"effect": "reads", "retry": QUICK}, "programming error"),
        (ValueError("?"), {"effect": "reads"}, "retry="),
        (ValueError("?"), {"effect": "reads", "retry": killick.Retry(on=OSError)}, r"Retry\(on="),
        (ValueError("?"), {"effect": "reads", "retry": killick.Retry(never=ValueError)}, r"Retry\(never="),
        (ApiError(502), {"retry": QUICK}, "nothing_happened="),
    ],
)
def test_why_says_why_a_step_was_not_tried_again(world: Any, error: Exception, options: Any, words: str) -> None:
    act_of(error, **options)
    with pytest.raises((killick.RunFailed, killick.RunWaiting)):
        world.kd.run(calls_that, "act", id="r")
    told = " ".join(why(timeline(world.kd.runtime.log, "r"), "1"))
    assert re.search(rf"Not tried again: .*{words}", told), told
