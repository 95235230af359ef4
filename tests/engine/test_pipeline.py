"""One way to the world: R10 (durable writes), R11 (outcomes), R12 (keys), R13 (attempts); retries, limits, failures."""

from __future__ import annotations

import asyncio
import http.server
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import killick
from killick.errors import DeclarationRefused, ValueRefused
from killick.model import event_codec
from killick.model import events as e

SECOND = 1_000_000
"""In the microseconds of the record."""


@killick.agent(name="calls_one")
async def calls_one(run: killick.Run, name: str) -> Any:
    """Calls the tool of that name, which each test declares anew."""
    from killick.definitions.tools import TOOLS

    return await run.call(TOOLS[name])


def outcomes(world: Any, run: str = "r") -> list[str]:
    return [ended.outcome for ended in world.told(run, e.AttemptEnded)]


def parks(kd: killick.Client, agent: Any, value: Any = None, run: str = "r") -> killick.RunWaiting:
    """Run until somebody must be asked."""
    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(agent, value, id=run)
    return waiting.value


def fails(kd: killick.Client, agent: Any, value: Any = None, run: str = "r") -> Any:
    """Run until it has failed; gives the failure on record."""
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, value, id=run)
    return failed.value.failure


# R10: durable writes ------------------------------------------------------------------------------


def waited_for(kd: killick.Client) -> list[list[str]]:
    """The appends that somebody waits for, as kinds of events, from now on."""
    seen: list[list[str]] = []
    committer = kd.runtime.log.committer
    inner = committer.begin

    def counted(item: Any) -> Any:
        seen.append([str(event_codec.decode(row.body).__struct_config__.tag) for row in item.rows])
        return inner(item)

    committer.begin = counted  # type: ignore[method-assign]
    return seen


def test_r10_an_effectful_step_costs_one_durable_write_of_intention_and_start(disk: Any) -> None:
    @killick.tool
    async def act(n: int) -> int:
        return n

    @killick.agent
    async def acts(run: killick.Run) -> int:
        return sum([await run.call(act, n) for n in range(20)])

    kd = disk.process(behind=True)
    seen = waited_for(kd)
    assert kd.run(acts, id="r") == 190
    assert [kinds[-1:] for kinds in seen[:-1]] == [["step.started"]] * 20
    assert seen[-1][-1] == "run.completed"


def test_r10_reads_model_calls_and_decisions_wait_for_no_write(disk: Any) -> None:
    @killick.tool(effect="reads")
    async def look(n: int) -> int:
        return n

    async def model(**asked: Any) -> str:
        return "yes"

    @killick.agent
    async def looks(run: killick.Run) -> int:
        found = 0
        for n in range(10):
            found += await run.call(look, n)
            said = await run.model(model, prompt=str(n))
            await run.decided("again?", said, options=["yes", "no"], because="it said so")
        return found

    kd = disk.process(behind=True)
    seen = waited_for(kd)
    assert kd.run(looks, id="r") == 45
    # The first step of a process is durable whatever it does, so that one that kills its process is counted.
    assert [kinds[-1] for kinds in seen] == ["step.started", "run.completed"]


def test_r10_the_last_outcome_shares_the_next_intentions_commit(disk: Any) -> None:
    @killick.tool
    async def act(n: int) -> int:
        return n

    @killick.agent
    async def acts(run: killick.Run) -> None:
        for n in range(60):
            await run.call(act, n)

    disk.process(behind=True).run(acts, id="r")
    whole = ["attempt.ended", "step.started"]
    # A machine that is busy elsewhere may take longer than an outcome may wait for company.
    assert disk.line.appends.count(whole) > 30, disk.line.appends


def test_an_intention_is_on_record_with_its_arguments_its_effect_and_its_reason(world: Any) -> None:
    @killick.tool
    async def act(what: str, how: str = "well") -> None: ...

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(act.options(because="it was asked for"), "this")

    world.kd.run(agent, id="r")
    [intended] = world.told("r", e.StepIntended)
    assert (intended.sort, intended.name, intended.effect) == ("tool", "act", "at_most_once")
    step = world.kd.state("r").fold.step("1")
    told = world.kd.runtime.log.data("r", step.intended)
    assert told == {"arguments": {"what": "this", "how": "well"}, "because": "it was asked for"}


def test_r10_nothing_is_applied_before_intention_and_start_are_durable(world: Any) -> None:
    seen: list[list[str]] = []

    @killick.tool
    async def act() -> None:
        seen.append([str(each.event.__struct_config__.tag) for each in world.kd.events("r")][-1:])

    world.process(behind=True).run(calls_one, "act", id="r")
    assert seen == [["step.started"]]


# R11: returned, refused, unknown ------------------------------------------------------------------


class Unlucky(killick.NotDone):
    """A tool's own way to say that nothing happened."""


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (killick.NotDone("no"), "refused"),
        (Unlucky("no"), "refused"),
        (killick.RateLimited(), "refused"),
        (ConnectionRefusedError("no"), "refused"),
        (ConnectionResetError("half way"), "unknown"),
        (ValueError("who knows"), "unknown"),
        (TimeoutError("its own"), "unknown"),
        (ExceptionGroup("two", [killick.NotDone("no"), ValueError("who knows")]), "unknown"),
        (asyncio.CancelledError(), "unknown"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_r11_what_a_tool_raises_says_whether_nothing_happened(world: Any, error: BaseException, outcome: str) -> None:
    @killick.tool(retry=1, nothing_happened=ConnectionRefusedError, patience=0)
    async def act() -> None:
        raise error

    with pytest.raises((killick.RunFailed, killick.RunWaiting)):
        world.kd.run(calls_one, "act", id="r")
    assert outcomes(world) == [outcome]
    assert world.kd.info("r").status == ("failed" if outcome == "refused" else "waiting")


@pytest.mark.parametrize("blocking", [False, True])
def test_r11_a_timeout_is_unknown(world: Any, blocking: bool) -> None:
    release = threading.Event()

    async def act() -> None:
        await asyncio.sleep(30)

    def act_blocking() -> None:
        release.wait(300)
        raise ValueError("too late to tell")

    killick.tool(name="act", timeout=0.02)(act_blocking if blocking else act)
    threading.Thread(target=_once_ended, args=(world, release)).start()
    parks(world.kd, calls_one, "act")
    assert outcomes(world) == ["unknown"]
    assert world.kd.state("r").failures[0].error["kind"] == "timeout"


def _once_ended(world: Any, release: threading.Event) -> None:
    """Let the tool go on when its attempt is on record as ended, whatever it raises then."""
    while not any("attempt.ended" in kinds for kinds in world.line.appends):
        time.sleep(0.001)
    release.set()


def test_r11_a_cancelled_attempt_is_unknown(world: Any) -> None:
    give_up: list[Callable[[], object]] = []

    @killick.tool
    async def act() -> None:
        give_up[0]()
        await asyncio.sleep(3_600)

    @killick.agent
    async def impatient(run: killick.Run) -> None:
        async with asyncio.timeout(None) as limit:
            give_up.append(lambda: limit.reschedule(0.0))
            await run.call(act)

    parks(world.kd, impatient)
    assert outcomes(world) == ["unknown"]
    assert world.kd.state("r").failures[0].error["kind"] == "cancelled"


def test_r11_an_attempt_of_a_dead_process_is_in_doubt(world: Any) -> None:
    @killick.tool
    async def act() -> None:
        world.die()

    kd = world.killed(calls_one, "act", run="r")
    waiting = parks(kd, calls_one, "act")
    assert outcomes(world) == []
    assert waiting.waits[0].waits_for == "settlement"
    assert "the process died" in str(waiting.waits[0].prompt)


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True])
def test_r11_a_tool_that_exits_ends_the_call_of_the_client_and_is_in_doubt(tmp_path: Path, blocking: bool) -> None:
    """In a process of its own, for a loop that died would never answer again."""
    program = f"""
import killick
{"def" if blocking else "async def"} act() -> None:
    raise SystemExit(3)
act = killick.tool(act)
@killick.agent
async def agent(run):
    await run.call(act)
with killick.open({str(tmp_path / "killick.db")!r}) as kd:
    try:
        kd.run(agent, id="r")
    except BaseException as error:
        print(type(error).__name__)
    try:
        kd.run(agent, id="r")
    except BaseException as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300, text=True, check=False)
    assert done.stdout.split()[-1] == "RunWaiting", done


# R12: keys ----------------------------------------------------------------------------------------


def test_r12_a_key_names_run_step_tool_and_eight_digits_of_the_arguments(world: Any) -> None:
    keys: list[str] = []

    @killick.tool
    async def send(to: str, key: killick.Key = killick.KEY) -> None:
        keys.append(str(key))

    @killick.agent
    async def sends(run: killick.Run) -> None:
        await run.call(send, "ann")
        await run.call(send, to="bob")
        await run.gather(run.call(send, "ann"), run.call(send, "cleo"))

    world.kd.run(sends, id="task_abc123")
    assert [re.sub("[0-9a-f]{8}$", "…", key) for key in keys] == [
        "task_abc123:step_1:send:…",
        "task_abc123:step_2:send:…",
        "task_abc123:step_3.1.1:send:…",
        "task_abc123:step_3.2.1:send:…",
    ]
    digits = [key[-8:] for key in keys]
    assert digits[0] == digits[2]
    assert len(set(digits)) == 3


def test_r12_all_attempts_of_an_action_have_its_key(world: Any) -> None:
    keys: list[str] = []

    @killick.tool(effect="idempotent", retry=killick.Retry(attempts=5))
    async def send(key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> int:
        keys.append(str(key))
        assert step.key == key
        if len(keys) == 2:
            world.die()
        if len(keys) < 4:
            raise ConnectionResetError
        return step.attempt

    kd = world.killed(calls_one, "send", run="r")
    assert kd.run(calls_one, "send", id="r") == 4
    assert len(keys) == 4
    assert len(set(keys)) == 1
    assert {started.key for started in world.started("r")} == set(keys)


def test_r12_after_a_rewind_the_step_of_a_key_carries_the_generation(world: Any) -> None:
    keys: list[str] = []

    @killick.tool
    async def send(n: int, key: killick.Key = killick.KEY) -> int:
        keys.append(str(key))
        return n

    first, second = [1, 2], [1, 3, 4]
    wanted = [first]

    @killick.agent
    async def sends(run: killick.Run) -> None:
        for n in wanted[-1]:
            await run.call(send.options(because="so"), n)

    world.kd.run(sends, id="r")
    wanted.append(second)
    world.rewind_to("r", "2")
    parks(world.kd, sends)
    world.kd.answer("r", "approve")
    parks(world.kd, sends)
    world.kd.answer("r", "approve")
    world.kd.run(sends, id="r")
    assert [key.split(":")[1] for key in keys] == ["step_1", "step_2", "step_2~1", "step_3~1"]


def test_r12_a_key_and_its_arguments_are_not_computed_again_when_a_default_was_edited(world: Any) -> None:
    seen: list[tuple[str, str]] = []

    def declare(default: str) -> None:
        @killick.tool(effect="idempotent")
        async def send(to: str = "ann", text: str = default, key: killick.Key = killick.KEY) -> str:
            seen.append((text, str(key)))
            if len(seen) == 1:
                world.die()
            return text

    declare("hello")
    kd = world.killed(calls_one, "send", run="r")
    declare("good day")
    assert kd.run(calls_one, "send", id="r") == "hello"
    assert seen[0] == seen[1]


def test_r12_an_argument_that_is_given_stays_the_same_action_when_a_default_changes_to_or_from_it(world: Any) -> None:
    seen: list[str] = []

    def declare(default: str) -> Any:
        @killick.tool(effect="idempotent")
        async def send(text: str = default, key: killick.Key = killick.KEY) -> str:
            seen.append(str(key))
            return text

        return send

    tools = [declare("hello")]

    @killick.agent
    async def sends(run: killick.Run) -> str:
        said: str = await run.call(tools[-1], "hello")
        await run.ask("go on?")
        return said

    parks(world.kd, sends)
    tools.append(declare("good day"))
    kd = world.process()
    kd.answer("r", "approve")
    assert kd.run(sends, id="r") == "hello"
    assert len(seen) == 1


# R13: attempts ------------------------------------------------------------------------------------


def test_r13_no_attempts_left_fails_with_the_last_failure_on_record(world: Any) -> None:
    @killick.tool(effect="idempotent", retry=killick.Retry(attempts=3))
    async def act(step: killick.ToolStep = killick.STEP) -> None:
        raise ConnectionResetError(f"try {step.attempt}")

    failure = fails(world.kd, calls_one, "act")
    assert failure.cause.message == "try 3"
    assert [each.attempts for each in world.kd.state("r").retries] == [3]


def test_a_failed_run_is_resumed_at_the_step_that_failed_with_its_attempts_anew(world: Any) -> None:
    done: list[str] = []
    down = [True]

    @killick.tool(effect="idempotent", retry=killick.Retry(attempts=2))
    async def act(what: str) -> str:
        done.append(what)
        if what == "flight" and down:
            raise ConnectionResetError("down")
        return what

    @killick.agent
    async def agent(run: killick.Run) -> list[str]:
        return [await run.call(act, "hotel"), await run.call(act, "flight")]

    fails(world.kd, agent)
    down.clear()
    world.kd.resume("r")
    assert world.kd.run(agent, id="r") == ["hotel", "flight"]
    assert done == ["hotel", "flight", "flight", "flight"]


# retries, timeouts, backoff -----------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_timeout_is_for_each_attempt_and_is_told_as_such(world: Any, blocking: bool) -> None:
    async def slow(step: killick.ToolStep = killick.STEP) -> int:
        if step.attempt < 3:
            await asyncio.sleep(3_600)
        return step.attempt

    def slow_blocking(step: killick.ToolStep = killick.STEP) -> int:
        if step.attempt < 3:
            while outcomes(world).count("unknown") < step.attempt:
                time.sleep(0.05)
            raise ValueError("late")
        return step.attempt

    # A busy machine may be too slow for the third attempt too: then a later one is in time.
    tool = killick.tool(name="slow", effect="idempotent", timeout=0.2, retry=killick.Retry(attempts=99, first=0))
    tool(slow_blocking if blocking else slow)
    last = world.kd.run(calls_one, "slow", id="r")
    errors = world.kd.state("r").retries[0].errors
    assert last >= 3
    assert [error["kind"] for error in errors] == ["timeout"] * (last - 1)
    started = world.started("r")
    assert [each.deadline - each.at for each in started] == [200_000] * last


def test_a_long_backoff_parks_the_run_and_the_state_says_until_when_and_why(world: Any, clock: Any) -> None:
    tries: list[int] = []

    @killick.tool(effect="idempotent", retry=killick.Retry(attempts=4, first="2h", max="8h", jitter=0))
    async def act() -> str:
        tries.append(clock.now_us())
        if len(tries) < 3:
            raise ConnectionResetError(f"try {len(tries)}")
        return "done"

    world.kd.start(calls_one, "act", id="r")
    began = clock.now_us()
    advanced = world.kd.advance("r")
    assert (advanced.status, advanced.wake_at_us) == ("waiting", began + 7200 * SECOND)
    [retry] = world.process().state("r").retries
    assert (retry.step, retry.name, retry.attempts, retry.next_at) == ("1", "act", 1, began + 7200 * SECOND)
    assert [error["message"] for error in retry.errors] == ["try 1"]
    assert world.kd.advance_due() == []
    clock.advance(7200)
    [advanced] = world.kd.advance_due()
    [retry] = world.kd.state("r").retries
    assert [error["message"] for error in retry.errors] == ["try 1", "try 2"]
    assert retry.next_at == clock.now_us() + 14400 * SECOND
    clock.advance(14400)
    assert [each.result for each in world.kd.advance_due()] == ["done"]
    assert tries == [began, began + 7200 * SECOND, began + 21600 * SECOND]


def test_a_backoff_is_sat_out_by_whoever_runs_the_agent_here(world: Any, clock: Any) -> None:
    tries: list[float] = []

    @killick.tool(retry=killick.Retry(attempts=3, first="1d", max="9d", jitter=0))
    async def act() -> int:
        tries.append(clock.now_us() / SECOND / 86_400)
        if len(tries) < 3:
            raise killick.NotDone("come back")
        return len(tries)

    assert world.kd.run(calls_one, "act", id="r") == 3
    assert [round(later - tries[0], 3) for later in tries] == [0, 1, 3]


def test_a_crash_during_a_backoff_does_not_shorten_it(world: Any, clock: Any) -> None:
    tries: list[int] = []

    @killick.tool(effect="idempotent", retry=killick.Retry(attempts=3, first="1h", jitter=0))
    async def act() -> str:
        tries.append(clock.now_us())
        if len(tries) == 1:
            raise ConnectionResetError
        return "done"

    world.kd.start(calls_one, "act", id="r")
    world.kd.advance("r")
    clock.advance(60)
    assert world.process().run(calls_one, "act", id="r") == "done"
    assert tries[1] - tries[0] == 60 * SECOND  # no longer than `max`, a minute


def test_an_error_that_is_not_transient_is_not_tried_again_unless_a_retry_is_declared(world: Any) -> None:
    made: list[int] = []

    @killick.tool(effect="idempotent")
    async def act() -> None:
        made.append(1)
        raise KeyError("no such thing")

    assert fails(world.kd, calls_one, "act").cause.is_a(KeyError)
    assert len(made) == 1


# limits -------------------------------------------------------------------------------------------


def test_a_limit_is_shared_by_tools_and_waiting_for_it_is_no_attempt(world: Any, clock: Any) -> None:
    crm = killick.Limit("crm", "1/min")
    called: list[tuple[str, float]] = []

    @killick.tool(limit=crm)
    async def write(n: int) -> int:
        called.append(("write", clock.monotonic()))
        return n

    @killick.tool(effect="reads", limit=[crm, killick.Limit("all", "100/s")])
    def look(n: int) -> int:
        called.append(("look", clock.monotonic()))
        return n

    @killick.agent
    async def calls(run: killick.Run) -> None:
        await run.call(write, 1)
        await run.call(look, 2)
        await run.call(write, 3)

    world.kd.run(calls, id="r")
    assert [(name, round(at)) for name, at in called] == [("write", 0), ("look", 60), ("write", 120)]
    assert [started.attempt for started in world.started("r")] == [1, 1, 1]
    assert {delayed.because for delayed in world.told("r", e.StepDelayed)} == {"limit crm, all", "limit crm"}


def test_a_limit_by_an_argument_holds_up_nobody_else(world: Any, clock: Any) -> None:
    called: list[tuple[str, float]] = []

    @killick.tool(limit=killick.Limit("crm", "1/min", by="tenant"))
    async def write(tenant: str) -> None:
        called.append((tenant, clock.monotonic()))

    @killick.agent
    async def calls(run: killick.Run) -> None:
        for tenant in "aba":
            await run.call(write, tenant)

    world.kd.run(calls, id="r")
    assert [(tenant, round(at)) for tenant, at in called] == [("a", 0), ("b", 0), ("a", 60)]


def test_a_rate_limit_is_waited_out_and_is_no_attempt(world: Any, clock: Any) -> None:
    called: list[float] = []

    @killick.tool
    async def act() -> str:
        called.append(clock.monotonic())
        if len(called) < 4:
            raise killick.RateLimited(retry_after=7)
        return "done"

    assert world.kd.run(calls_one, "act", id="r") == "done"
    assert [round(at) for at in called] == [0, 7, 14, 21]
    assert [ended.limited for ended in world.told("r", e.AttemptEnded)] == [True, True, True, False]


def test_rate_limits_do_not_use_up_the_attempts_across_a_crash(world: Any) -> None:
    made: list[str] = []
    story = ["limited", "reset", "dies", "limited", "limited", "done"]

    @killick.tool(effect="idempotent", retry=killick.Retry(attempts=3))
    async def act() -> str:
        made.append(story[len(made)])
        if made[-1] == "limited":
            raise killick.RateLimited(retry_after=1)
        if made[-1] == "reset":
            raise ConnectionResetError
        if made[-1] == "dies":
            world.die()
        return made[-1]

    kd = world.killed(calls_one, "act", run="r")
    assert kd.run(calls_one, "act", id="r") == "done"
    assert made == story


def test_waiting_for_a_rate_limit_has_an_end(world: Any, clock: Any) -> None:
    made: list[float] = []

    @killick.tool(patience="10m")
    async def act() -> None:
        made.append(clock.monotonic())
        raise killick.RateLimited("busy", retry_after=60)

    failure = fails(world.kd, calls_one, "act")
    assert failure.cause.is_a(killick.RateLimited)
    assert 540 <= made[-1] <= 600


def test_waiting_for_a_declared_limit_has_an_end_too(world: Any, clock: Any) -> None:
    @killick.tool(limit=killick.Limit("rare", "1/d"), patience="10m")
    async def act() -> str:
        return "done"

    assert world.kd.run(calls_one, "act", id="one") == "done"
    with pytest.raises(killick.RunFailed):
        world.kd.run(calls_one, "act", id="two")
    assert clock.monotonic() <= 600


@contextmanager
def answering(*answers: tuple[int, dict[str, str]]) -> Generator[str]:
    """A server of this machine that gives these answers, and 200 after them."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers = left.pop(0) if left else (200, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def getting(url: str, **options: Any) -> None:
    @killick.tool(name="get", **options)
    async def get() -> int:
        async with httpx.AsyncClient(verify=False) as client:
            reply = await client.get(url)
            reply.raise_for_status()
            return int(reply.status_code)


def test_a_429_of_the_far_side_is_waited_out_for_as_long_as_it_says(world: Any, clock: Any) -> None:
    with answering((429, {"retry-after": "30"}), (429, {"retry-after-ms": "1500"})) as url:
        getting(url, effect="reads")
        assert world.kd.run(calls_one, "get", id="r") == 200
    assert outcomes(world) == ["unknown", "unknown", "returned"]
    assert round(clock.monotonic(), 1) == 31.5
    error = world.kd.state("r").retries[0].errors[0]
    assert error["details"]["status"] == 429
    assert error["details"]["headers"]["retry-after"] == "30"


def test_a_503_may_have_done_something_so_only_what_may_be_repeated_is_repeated(world: Any) -> None:
    with answering((503, {"retry-after": "5"}), (503, {"retry-after": "5"})) as url:
        getting(url)
        parks(world.kd, calls_one, "get", run="once")
        assert outcomes(world, "once") == ["unknown"]
        getting(url, effect="idempotent")
        assert world.kd.run(calls_one, "get", id="again") == 200
        assert len(outcomes(world, "again")) == 2


# the failure on record ----------------------------------------------------------------------------


def test_a_failure_is_on_record_with_its_chain_its_notes_and_where_it_came_from(world: Any) -> None:
    @killick.tool(effect="idempotent")
    async def act(what: str = "x") -> None:
        try:
            os.environ["MISSING_FOR_SURE"]
        except KeyError as missing:
            try:
                raise OSError(5, "disk") from missing
            except OSError:
                error = ValueError("cannot")
                error.add_note("look at the disk")
                raise error  # noqa: B904

    fails(world.kd, calls_one, "act")
    failure = world.process().state("r").failures[0]
    assert (failure.step, failure.tool, failure.attempt, failure.input) == ("1", "act", 1, {"what": "x"})
    error = failure.error
    assert (error["type"], error["message"], list(error["notes"])) == ("ValueError", "cannot", ["look at the disk"])
    assert error["context"]["type"] == "OSError"
    assert error["context"]["cause"]["type"] == "KeyError"
    assert error["frames"][-1]["function"].endswith("act")
    assert error["frames"][-1]["file"] == __file__


def test_a_group_is_on_record_with_its_members(world: Any) -> None:
    @killick.tool(effect="reads")
    async def act() -> None:
        raise ExceptionGroup("both", [ValueError("one"), ExceptionGroup("inner", [KeyError("two")])])

    fails(world.kd, calls_one, "act")
    error = world.kd.state("r").failures[0].error
    assert [member["type"] for member in error["members"]] == ["ValueError", "ExceptionGroup"]
    assert error["members"][1]["members"][0]["type"] == "KeyError"


@pytest.mark.parametrize("blocking", [False, True])
def test_a_failure_says_how_far_the_tool_got(world: Any, blocking: bool) -> None:
    async def act(step: killick.ToolStep = killick.STEP) -> None:
        step.progress({"sent": 1})
        step.progress({"sent": 2})
        raise ValueError("half way")

    def act_blocking(step: killick.ToolStep = killick.STEP) -> None:
        step.progress({"sent": 1})
        step.progress({"sent": 2})
        raise ValueError("half way")

    killick.tool(name="act", effect="idempotent")(act_blocking if blocking else act)
    fails(world.kd, calls_one, "act")
    assert world.kd.state("r").failures[0].progress == {"sent": 2}


def test_the_agent_sees_the_same_failure_live_and_on_replay(world: Any) -> None:
    seen: list[Any] = []

    @killick.tool(effect="idempotent")
    async def act() -> None:
        raise LookupError("gone") from ValueError("why")

    @killick.agent
    async def catches(run: killick.Run) -> None:
        try:
            await run.call(act)
        except killick.StepFailed as failed:
            seen.append((failed.step, failed.name, failed.failure, failed.is_a(LookupError), failed.is_a("KeyError")))
        await run.ask("go on?")

    parks(world.kd, catches)
    parks(world.process(), catches)
    assert seen[0] == seen[1]
    assert seen[0][3:] == (True, False)


# what cannot be stored ----------------------------------------------------------------------------


class Unstorable:
    """Nothing that a record could hold."""


def test_an_argument_that_cannot_be_stored_fails_at_once_naming_step_and_path(world: Any) -> None:
    touched: list[Any] = []

    @killick.tool
    async def act(what: Any) -> None:
        touched.append(what)

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.note("first")
        await run.call(act, 1)
        await run.call(act, {"list": [0, Unstorable()]})

    with pytest.raises(killick.RunFailed) as failed:
        world.kd.run(agent, id="r")
    assert failed.value.failure.is_a(ValueRefused)
    assert "step 2 (act)" in failed.value.failure.message
    assert "what.list[1]" in failed.value.failure.message
    assert touched == [1]


def test_a_refused_argument_leaves_the_other_steps_where_they_are(world: Any) -> None:
    @killick.tool
    async def act(what: Any) -> Any:
        return what

    @killick.agent
    async def agent(run: killick.Run) -> str:
        with pytest.raises(ValueRefused):
            await run.call(act, Unstorable())
        said: str = await run.call(act, "fine")
        await run.ask("go on?")
        return said

    parks(world.kd, agent)
    state = world.kd.state("r")
    done = state.position.committed
    assert {step: state.outputs[step] for step in done} == {done[0]: "fine"}
    assert state.fold.step(done[0]).name == "act"
    kd = world.process()
    kd.answer("r", "approve")
    assert kd.run(agent, id="r") == "fine"


@pytest.mark.parametrize("effect", ["reads", "idempotent"])
def test_a_result_that_cannot_be_stored_fails_naming_step_and_path(world: Any, effect: Any) -> None:
    made: list[int] = []

    @killick.tool(effect=effect, retry=killick.Retry(attempts=3))
    async def act() -> Any:
        made.append(1)
        return {"list": [0, Unstorable()]}

    failure = fails(world.kd, calls_one, "act")
    assert "step 1 (act)" in str(failure)
    assert "list[1]" in str(failure)
    assert made == [1]


def test_a_result_that_cannot_be_stored_leaves_an_at_most_once_step_in_doubt(world: Any) -> None:
    made: list[int] = []

    @killick.tool
    async def act() -> Any:
        made.append(1)
        return Unstorable()

    waiting = parks(world.kd, calls_one, "act")
    assert "Unstorable" in str(waiting)
    world.kd.answer("r", "happened", value="it did")
    assert world.kd.run(calls_one, "act", id="r") == "it did"
    assert made == [1]


# secrets, resources, effects by arguments ---------------------------------------------------------


@dataclass
class Login:
    """Something with a secret inside."""

    user: str
    password: killick.Secret


def test_a_secret_argument_reaches_the_tool_and_never_the_store(disk: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    @killick.tool(effect="idempotent")
    async def log_in(token: killick.Secret, key: killick.Key = killick.KEY) -> str:
        seen.append((token.reveal(), str(key)))
        if len(seen) == 1:
            disk.die()
        return "in"

    @killick.agent
    async def agent(run: killick.Run) -> str:
        return await run.call(log_in, killick.Secret("hunter2"))

    kd = disk.killed(agent, run="r")
    assert kd.run(agent, id="r") == "in"
    assert seen[0] == seen[1]
    disk.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"hunter2" not in stored
    assert b"log_in" in stored


def test_a_secret_inside_an_argument_reaches_every_attempt(world: Any) -> None:
    seen: list[Any] = []

    @killick.tool(effect="idempotent")
    async def log_in(login: Login) -> str:
        if not seen:
            seen.append(login.password.reveal())
            world.die()
        seen.append(login.password.reveal())
        return login.user

    @killick.agent
    async def agent(run: killick.Run) -> str:
        return await run.call(log_in, Login("ann", killick.Secret("hunter2")))

    kd = world.killed(agent, run="r")
    assert kd.run(agent, id="r") == "ann"
    assert seen == ["hunter2", "hunter2"]


def test_another_secret_is_another_action(world: Any) -> None:
    said = ["one"]

    @killick.tool(effect="idempotent")
    async def log_in(token: killick.Secret) -> str:
        return "in"

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(log_in, killick.Secret(said[0]))
        await run.ask("go on?")

    parks(world.kd, agent)
    parks(world.process(), agent)
    said[0] = "two"
    with pytest.raises(killick.errors.RunDiverged):
        world.process().run(agent, id="r")


class Pool:
    """What a resource may be: only its owner knows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.open = True


async def opened_soon() -> Pool:
    await asyncio.sleep(0)
    return Pool("async")


@pytest.mark.parametrize("way", ["blocking", "soon"])
@pytest.mark.parametrize("opens", ["sync", "async"])
def test_a_resource_is_opened_once_for_all_who_need_it_and_closed_with_the_client(way: str, opens: str) -> None:
    made: list[Pool] = []

    def keep(pool: Pool) -> Pool:
        made.append(pool)
        return pool

    async def open_soon() -> Pool:
        return keep(await opened_soon())

    async def close_soon(pool: Pool) -> None:
        pool.open = False

    def close(pool: Pool) -> None:
        pool.open = False

    kept: Any = (
        killick.Resource(lambda: keep(Pool("sync")), close)
        if opens == "sync"
        else killick.Resource(open_soon, close_soon)
    )

    @killick.tool(effect="reads")
    async def look(n: int, pool: Pool = kept.inject()) -> str:  # noqa: B008
        assert pool.open
        return pool.name

    @killick.tool(effect="reads")
    def look_blocking(n: int, pool: Pool = kept.inject()) -> str:  # noqa: B008
        assert pool.open
        return pool.name

    @killick.agent
    async def agent(run: killick.Run) -> list[str]:
        side = await run.gather(run.call(look, 1), run.call(look_blocking, 2), run.call(look, 3))
        return [*side, await run.call(look, 4)]

    with killick.open("memory:") as kd:
        found = kd.run(agent, id="r") if way == "blocking" else asyncio.run(soon(kd, agent))
        assert found == [opens] * 4
        assert len(made) == 1
    assert [pool.open for pool in made] == [False]


async def soon(kd: killick.Client, agent: Any) -> Any:
    return await kd.as_async().run(agent, id="r")


def test_a_resource_that_cannot_be_opened_is_a_failed_attempt_in_which_nothing_happened(world: Any) -> None:
    tries: list[int] = []

    def connect() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionRefusedError("not up yet")
        return "connection"

    connection: Any = killick.Resource(connect)

    @killick.tool(retry=2, nothing_happened=ConnectionRefusedError)
    async def act(link: str = connection.inject()) -> str:
        return link

    assert world.kd.run(calls_one, "act", id="r") == "connection"
    assert outcomes(world) == ["refused", "returned"]


def test_what_a_tool_does_may_depend_on_its_arguments_and_the_answer_is_on_record(world: Any) -> None:
    asked: list[list[str]] = []

    def judge(argv: list[str]) -> Any:
        asked.append(argv)
        return "reads" if argv == ["status"] else "at_most_once"

    @killick.tool(effect=judge)
    async def git(argv: list[str]) -> str:
        return argv[0]

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(git, ["status"])
        await run.call(git, ["push"])

    world.kd.run(agent, id="r")
    assert [intended.effect for intended in world.told("r", e.StepIntended)] == ["reads", "at_most_once"]
    assert [effect.step for effect in world.kd.state("r").effects] == ["2"]
    assert asked == [["status"], ["push"]]


def test_what_was_recorded_of_an_effect_counts_when_the_code_changed_its_mind(world: Any) -> None:
    said = ["at_most_once"]
    made: list[int] = []

    @killick.tool(effect=lambda: said[0])  # type: ignore[arg-type,return-value]
    async def act() -> None:
        made.append(1)
        world.die()

    kd = world.killed(calls_one, "act", run="r")
    said[0] = "idempotent"
    parks(kd, calls_one, "act")
    assert made == [1]


def test_an_effect_that_is_none_of_the_classes_is_refused_and_not_written(world: Any) -> None:
    touched: list[int] = []

    @killick.tool(effect=lambda: "harmless")  # type: ignore[arg-type,return-value]
    async def act() -> None:
        touched.append(1)

    failure = fails(world.kd, calls_one, "act")
    assert "harmless" in str(failure)
    assert touched == []
    assert world.process().state("r").status == "failed"


# a process of its own -----------------------------------------------------------------------------


@pytest.fixture
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes a module, for tools that run where they can be killed must be importable."""

    def make(source: str) -> Any:
        name = f"isolated_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text("import os, sys, time\nimport killick\n" + source)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        return __import__(name)

    return make


def test_r12_a_tool_in_a_process_of_its_own_is_given_its_key_too(world: Any, isolated: Callable[[str], Any]) -> None:
    isolated(
        """
@killick.tool(isolate="process", effect="idempotent")
def alone(key: killick.Key = killick.KEY) -> list:
    return [str(key), os.getpid()]
"""
    )
    key, process = world.kd.run(calls_one, "alone", id="r")
    assert key == world.started("r")[0].key
    assert process != os.getpid()


@pytest.mark.slow
def test_r11_a_tool_in_a_process_of_its_own_is_refused_and_unknown_as_any_other(
    world: Any, isolated: Callable[[str], Any], tmp_path: Path
) -> None:
    isolated(
        f"""
@killick.tool(isolate="process", retry=killick.Retry(attempts=3, first=0), nothing_happened=ConnectionRefusedError)
def alone() -> str:
    with open({str(tmp_path / "tries")!r}, "a+") as tries:
        tries.write("x")
        tries.seek(0)
        made = len(tries.read())
    if made == 1:
        raise ConnectionRefusedError("not up")
    if made == 2:
        raise killick.RateLimited(retry_after=3)
    raise LookupError("half way") from ValueError("why")
"""
    )
    parks(world.kd, calls_one, "alone")
    assert outcomes(world) == ["refused", "refused", "unknown"]
    assert [ended.limited for ended in world.told("r", e.AttemptEnded)] == [False, True, False]
    error = world.kd.state("r").failures[-1].error
    inner = error if error["type"] == "LookupError" else error["cause"]
    assert (inner["type"], inner["message"], inner["cause"]["type"]) == ("LookupError", "half way", "ValueError")


def test_r11_a_tool_that_cannot_have_a_process_of_its_own_is_refused_and_not_in_doubt(world: Any) -> None:
    with pytest.raises((DeclarationRefused, killick.RunFailed)):

        @killick.tool(isolate="process")
        def alone() -> None: ...

        world.kd.run(calls_one, "alone", id="r")
    assert world.store.head("r") is None or world.kd.runtime.log.ledger("r").in_doubt() == []


@pytest.mark.slow
def test_r15_a_tool_in_a_process_of_its_own_is_killed_for_real_when_its_time_is_up(
    world: Any, isolated: Callable[[str], Any], tmp_path: Path
) -> None:
    isolated(
        f"""
@killick.tool(isolate="process", timeout=20.0)
def alone() -> None:
    with open({str(tmp_path / "pid")!r}, "w") as told:
        told.write(str(os.getpid()))
    time.sleep(600)
"""
    )
    parks(world.kd, calls_one, "alone")
    assert outcomes(world) == ["unknown"]
    process = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_call_in_doubt_with_a_secret_argument_is_asked_about_without_it(world: Any) -> None:
    @killick.tool
    def charge(card: killick.Secret) -> None:
        raise RuntimeError("the line went dead")

    @killick.agent
    async def charges(run: killick.Run) -> None:
        await run.call(charge, killick.Secret("4242"))

    with pytest.raises(killick.RunWaiting):
        world.kd.run(charges, id="r")
    [wait] = world.kd.inbox()
    assert wait.waits_for == "settlement"
    assert "4242" not in str(wait)
