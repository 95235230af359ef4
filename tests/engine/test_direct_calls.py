"""R21: agent code reaches the world only through its run, and whoever goes past it is told where."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.definitions.current import UnrecordedIO, watch_io
from killick.errors import CalledDirectly


@killick.tool(effect="reads")
async def look(n: int) -> int:
    """Looks."""
    return n + 1


@killick.tool(effect="reads")
def look_blocking(n: int) -> int:
    return n + 1


# direct calls -------------------------------------------------------------------------------------


def test_r21_outside_an_agent_a_tool_is_the_plain_function() -> None:
    assert asyncio.run(look(1)) == 2
    assert look_blocking(1) == 2
    assert look.__doc__ == "Looks."
    assert list(inspect.signature(look).parameters) == ["n"]


def test_r21_inside_an_agent_a_tool_called_directly_raises_and_names_run_call(world: Any) -> None:
    @killick.agent
    async def agent(run: killick.Run, way: str) -> int:
        return await look(1) if way == "async" else look_blocking(1)

    for way, name in (("async", "look"), ("blocking", "look_blocking")):
        with pytest.raises(killick.RunFailed) as failed:
            world.kd.run(agent, way, id=way)
        assert failed.value.failure.is_a(CalledDirectly)
        assert f"run.call({name}, …)" in failed.value.failure.message


def test_r21_nor_in_a_blocking_agent_nor_in_a_branch_nor_in_a_thread_that_it_starts(world: Any) -> None:
    refused: list[str] = []

    def attempt(where: str) -> None:
        with pytest.raises(CalledDirectly):
            look_blocking(1)
        refused.append(where)

    @killick.agent
    def blocking(run: killick.SyncRun) -> None:
        attempt("blocking")
        run.gather(lambda: attempt("branch of a blocking one"))

    @killick.agent
    async def agent(run: killick.Run) -> None:
        async def branch() -> None:
            attempt("branch")

        await run.gather(branch())
        await asyncio.to_thread(attempt, "thread")

    world.kd.run(blocking, id="blocking")
    world.kd.run(agent, id="async")
    assert refused == ["blocking", "branch of a blocking one", "branch", "thread"]


def test_r21_a_tool_may_call_another_tool_as_the_plain_function(world: Any) -> None:
    @killick.tool(effect="reads")
    async def both(n: int) -> int:
        return await look(n) + look_blocking(n)

    @killick.tool(effect="reads")
    def both_blocking(n: int) -> int:
        return look_blocking(n) + asyncio.run(look(n))

    @killick.agent
    async def agent(run: killick.Run) -> int:
        return await run.call(both, 1) + await run.call(both_blocking, 2)

    assert world.kd.run(agent, id="r") == 10


def test_r21_reconcilers_confirmers_and_compensations_are_no_agent_code(world: Any) -> None:
    def reconcile(effect: killick.Effect) -> killick.Happened:
        return killick.Happened(look_blocking(1))

    async def confirm(effect: killick.Effect) -> bool:
        return await look(1) == 2

    def undo(effect: killick.Effect) -> None:
        look_blocking(1)

    @killick.tool(reconcile=reconcile, confirm=confirm, compensate=undo)
    async def act() -> int:
        raise ValueError("?")

    @killick.agent(on_failure="compensate")
    async def agent(run: killick.Run) -> None:
        assert await run.call(act) == 2
        raise LookupError("no")

    with pytest.raises(killick.RunFailed) as failed:
        world.kd.run(agent, id="r")
    assert failed.value.failure.is_a(LookupError)


def test_r21_after_a_run_tools_are_plain_functions_again(world: Any) -> None:
    @killick.agent
    async def agent(run: killick.Run) -> int:
        return await run.call(look, 1)

    async def here() -> tuple[int, int]:
        return await world.kd.as_async().run(agent, id="r"), await look(1)

    assert asyncio.run(here()) == (2, 2)


def test_r21_run_call_takes_tools_only(world: Any) -> None:
    def plain() -> None: ...

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(plain)  # type: ignore[arg-type]

    with pytest.raises(killick.RunFailed, match=r"@killick\.tool"):
        world.kd.run(agent, id="r")


# I/O outside a step -------------------------------------------------------------------------------


@pytest.fixture
def strays() -> Iterator[list[UnrecordedIO]]:
    seen: list[UnrecordedIO] = []
    stop = watch_io(seen.append)
    yield seen
    stop()


def line_of(fn: Callable[..., Any], text: str) -> int:
    """The line of a function's source that holds a text."""
    lines, first = inspect.getsourcelines(fn)
    return first + next(number for number, line in enumerate(lines) if text in line)


def touch_all(folder: Path) -> None:
    (folder / "told").write_text("x")  # open
    (folder / "made").mkdir()  # mkdir
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect(("127.0.0.1", 9))  # connect
    subprocess.run([sys.executable, "-V"], capture_output=True, check=True)  # Popen


def test_r21_io_of_agent_code_outside_a_step_is_told_with_file_and_line(
    world: Any, strays: list[UnrecordedIO], tmp_path: Path
) -> None:
    @killick.agent
    async def agent(run: killick.Run) -> None:
        touch_all(tmp_path)

    world.kd.run(agent, id="r")
    assert {stray.file for stray in strays} == {__file__}
    for what, text in {"open": "# open", "os.mkdir": "# mkdir", "socket.connect": "# connect"}.items():
        found = [stray for stray in strays if stray.what.startswith(what)]
        assert line_of(touch_all, text) in {stray.line for stray in found}, (what, strays)
    assert any(stray.what.startswith("subprocess.Popen") for stray in strays)
    assert f"{__file__}:{strays[0].line}" in str(strays[0])
    assert "run.call" in str(strays[0])


def test_r21_io_of_a_blocking_agent_is_told_too(world: Any, strays: list[UnrecordedIO], tmp_path: Path) -> None:
    @killick.agent
    def agent(run: killick.SyncRun) -> None:
        run.call(look, 1)
        (tmp_path / "told").write_text("x")

    world.kd.run(agent, id="r")
    assert [(stray.file, stray.line) for stray in strays] == [(__file__, line_of(agent.fn, "write_text"))]


def test_r21_io_of_tools_and_of_killick_itself_is_none_of_the_agents(
    disk: Any, strays: list[UnrecordedIO], tmp_path: Path
) -> None:
    @killick.tool
    async def write() -> None:
        touch_all(tmp_path)

    @killick.tool
    def write_blocking() -> None:
        (tmp_path / "more").write_text("x")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        import wave  # what an import reads is code

        assert wave

        await run.call(write)
        await run.gather(run.call(write_blocking), run.call(look, 1))
        await run.note("x" * 100_000)

    async def here() -> None:
        await disk.kd.as_async().run(agent, id="again")

    (tmp_path / "outside").write_text("x")
    disk.kd.run(agent, id="r")
    (tmp_path / "made").rmdir()
    asyncio.run(here())
    assert strays == []


def test_r21_a_watcher_may_stop_the_io(world: Any, tmp_path: Path) -> None:
    def refuse(stray: UnrecordedIO) -> None:
        raise PermissionError(str(stray))

    @killick.agent
    async def agent(run: killick.Run) -> None:
        (tmp_path / "told").write_text("x")

    stop = watch_io(refuse)
    try:
        with pytest.raises(killick.RunFailed, match="outside of a step"):
            world.kd.run(agent, id="r")
    finally:
        stop()
    assert not (tmp_path / "told").exists()


def test_r21_nobody_is_told_any_more_who_stopped_watching(world: Any, tmp_path: Path) -> None:
    seen: list[UnrecordedIO] = []
    watch_io(seen.append)()

    @killick.agent
    async def agent(run: killick.Run) -> None:
        (tmp_path / "told").write_text("x")

    world.kd.run(agent, id="r")
    assert seen == []


def test_r21_io_of_other_threads_is_nobodys_business(world: Any, strays: list[UnrecordedIO], tmp_path: Path) -> None:
    begun, done = threading.Event(), threading.Event()

    def write() -> None:
        begun.wait(300)
        (tmp_path / "told").write_text("x")
        done.set()

    threading.Thread(target=write).start()

    @killick.agent
    async def agent(run: killick.Run) -> None:
        begun.set()
        done.wait(300)

    world.kd.run(agent, id="r")
    assert strays == []
