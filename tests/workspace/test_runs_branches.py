"""The files of a run where it does not go straight on: side by side, tried again, out of time, paused, cancelled."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import killick
from killick.model import events as e
from killick.workspace.workspace import Workspace
from world import World

QUICK = killick.Retry(attempts=3, first=0.001)
OFTEN = killick.Retry(attempts=99, first=0.001, max=0.001)
"""For a tool with little time: on a busy machine more attempts than the first may be too late."""


@killick.tool(effect="workspace")
def write(name: str, text: str, folder: Path = killick.WORKSPACE) -> str:
    (folder / name).write_text(text)
    return text


def told(folder: Path) -> dict[str, str]:
    return {str(each.relative_to(folder)): each.read_text() for each in folder.rglob("*") if each.is_file()}


def restored(kd: killick.Client, run: str) -> list[e.WorkspaceRestored]:
    return [each.event for each in kd.events(run) if isinstance(each.event, e.WorkspaceRestored)]


def files_at(kd: killick.Client, run: str, seq: int) -> dict[str, str]:
    """The files of a run at a place of its log, as its record has them."""
    ledger = kd.runtime.log.ledger(run)
    root, path, vault = ledger.files_at(seq), ledger.facts.workspace, ledger.facts.vault
    assert root is not None
    assert path is not None
    return files_of(e.from_text(root), path, vault)


def files_of(root: bytes, path: str, vault: str | None) -> dict[str, str]:
    with Workspace(path, vault=vault) as workspace:
        files = [os.fsdecode(name) for name, entry in workspace.files(root) if entry.sort == "file"]
        return {name: workspace.read(root, name).decode() for name in files}


def after(kd: killick.Client, run: str, step: str) -> dict[str, str]:
    found = kd.state(run).fold.step(step)
    assert found is not None
    return files_at(kd, run, found.ended)


# side by side -------------------------------------------------------------------------------------


def test_what_a_branch_finished_stays_when_another_is_tried_again(kd: killick.Client, folder: Path) -> None:
    others = threading.Event()

    @killick.tool(effect="workspace", retry=killick.Retry(attempts=3, first=0.05))
    def flaky(folder: Path = killick.WORKSPACE) -> str:
        with (folder / "flaky").open("a") as file:
            file.write("x")
        if not others.is_set():
            others.set()
            raise ConnectionError("the far side hung up")
        return (folder / "flaky").read_text()

    @killick.agent(workspace=folder)
    async def two(run: killick.Run) -> list[str]:
        return await run.gather(run.call(flaky), run.call(write, "other", "done"))

    assert kd.run(two, id="r") == ["x", "done"]
    assert told(folder) == {"kept": "kept", "flaky": "x", "other": "done"}


def test_what_a_branch_finished_stays_when_the_process_dies_before_another_is_tried_again(
    disk: World, folder: Path
) -> None:
    tried: list[str] = []
    deaths: list[int] = []

    @killick.tool(effect="workspace", retry=killick.Retry(attempts=3, first=1.5, jitter=0))
    def flaky(folder: Path = killick.WORKSPACE) -> str:
        with (folder / "flaky").open("a") as file:
            file.write("x")
        tried.append((folder / "flaky").read_text())
        if len(tried) == 1:
            raise ConnectionError("the far side hung up")
        return (folder / "flaky").read_text()

    @killick.tool(effect="reads")
    def fatal() -> str:
        if not deaths:
            deaths.append(1)
            disk.die()
        return "lives"

    @killick.agent(workspace=folder)
    async def two(run: killick.Run) -> list[Any]:
        async def second() -> str:
            await run.call(write, "other", "done")
            return await run.call(fatal)

        return await run.gather(run.call(flaky), second())

    disk.killed(two, run="r")
    assert disk.kd.run(two, id="r") == ["x", "lives"]
    assert told(folder) == {"kept": "kept", "flaky": "x", "other": "done"}


def test_a_tool_that_changes_the_workspace_and_one_that_may_do_anything_wait_for_each_other(
    kd: killick.Client, folder: Path
) -> None:
    at_it: set[str] = set()
    met: list[set[str]] = []

    async def busy(name: str) -> None:
        at_it.add(name)
        for _ in range(5):
            await asyncio.sleep(0.002)
            met.append(set(at_it))
        at_it.discard(name)

    @killick.tool(effect="workspace")
    async def patch(name: str) -> None:
        await busy(f"patch {name}")

    @killick.tool(effect="idempotent")
    async def anything(name: str) -> None:
        await busy(name)

    @killick.agent(workspace=folder)
    async def many(run: killick.Run) -> None:
        calls = [run.call(patch, "1"), run.call(anything, "a"), run.call(anything, "b"), run.call(patch, "2")]
        await run.gather(*calls)

    kd.run(many, id="r")
    assert {"a", "b"} in met  # these two may
    assert [each for each in met if len(each) > 1 and any("patch" in name for name in each)] == []


# tried again --------------------------------------------------------------------------------------


def test_a_process_that_dies_between_two_tries_changes_nothing_of_that(disk: World, folder: Path) -> None:
    tries: list[dict[str, str]] = []
    deaths: list[int] = []

    @killick.tool(effect="workspace", retry=killick.Retry(attempts=3, first=1.5, jitter=0))
    def half(folder: Path = killick.WORKSPACE) -> str:
        tries.append(told(folder))
        (folder / "half").write_text("half")
        if len(tries) == 1:
            raise ConnectionError("the far side hung up")
        return "done"

    @killick.tool(effect="reads")
    def fatal() -> str:
        while not disk.told("r", e.AttemptEnded):
            time.sleep(0.01)
        if not deaths:
            deaths.append(1)
            disk.die()
        return "lives"

    @killick.agent(workspace=folder)
    async def halver(run: killick.Run) -> list[str]:
        return await run.gather(run.call(half), run.call(fatal))

    disk.killed(halver, run="r")
    assert disk.kd.run(halver, id="r") == ["done", "lives"]
    assert tries == [{"kept": "kept"}] * 2


def test_what_a_person_changes_between_two_tries_is_in_a_snapshot(kd: killick.Client, folder: Path) -> None:
    tries: list[dict[str, str]] = []

    @killick.tool(effect="workspace", retry=QUICK)
    def half(folder: Path = killick.WORKSPACE) -> str:
        tries.append(told(folder))
        (folder / "half").write_text("half")
        (folder / "by_hand").write_text(f"precious {len(tries)}")  # stands for somebody else's hand
        if len(tries) < 2:
            raise ConnectionError("the far side hung up")
        return "done"

    @killick.agent(workspace=folder)
    async def halver(run: killick.Run) -> str:
        return await run.call(half)

    kd.run(halver, id="r")
    [back] = restored(kd, "r")
    assert back.before is not None
    facts = kd.runtime.log.ledger("r").facts
    assert files_of(e.from_text(back.before), str(folder), facts.vault)["by_hand"] == "precious 1"
    assert tries == [{"kept": "kept"}] * 2


def test_an_awaited_tool_whose_time_is_up_finds_the_files_as_they_were(kd: killick.Client, folder: Path) -> None:
    tries: list[dict[str, str]] = []

    @killick.tool(effect="workspace", timeout=0.5, retry=OFTEN)
    async def slow(folder: Path = killick.WORKSPACE) -> str:
        tries.append(told(folder))
        (folder / "half").write_text("half")
        (folder / "kept").unlink()
        if len(tries) == 1:
            await asyncio.sleep(3_600)
        return "done"

    @killick.agent(workspace=folder)
    async def slowly(run: killick.Run) -> str:
        return await run.call(slow)

    assert kd.run(slowly, id="r") == "done"
    assert len(tries) > 1
    assert tries == [{"kept": "kept"}] * len(tries)
    assert told(folder) == {"half": "half"}


def test_a_blocking_tool_whose_time_is_up_is_not_tried_beside_itself(kd: killick.Client, folder: Path) -> None:
    tries: list[dict[str, str]] = []

    @killick.tool(effect="workspace", timeout=0.5, retry=OFTEN)
    def slow(folder: Path = killick.WORKSPACE) -> str:
        tries.append(told(folder))
        (folder / "half").write_text("half")
        if len(tries) == 1:
            while not any(isinstance(each.event, e.AttemptEnded) for each in kd.events("r")):
                time.sleep(0.01)
            (folder / "half").write_text("late")
            raise ConnectionError("too late")
        return "done"

    @killick.agent(workspace=folder)
    async def slowly(run: killick.Run) -> str:
        return await run.call(slow)

    assert kd.run(slowly, id="r") == "done"
    assert len(tries) > 1
    assert tries == [{"kept": "kept"}] * len(tries)
    assert told(folder) == {"kept": "kept", "half": "half"}


def test_a_step_that_failed_is_resumed_on_the_files_that_it_found_at_first(kd: killick.Client, folder: Path) -> None:
    tries: list[dict[str, str]] = []

    @killick.tool(effect="workspace")
    def broken(folder: Path = killick.WORKSPACE) -> str:
        tries.append(told(folder))
        (folder / "half").write_text("half")
        if len(tries) == 1:
            raise RuntimeError("a mistake of the tool")
        return "done"

    @killick.agent(workspace=folder)
    async def unlucky(run: killick.Run) -> str:
        return await run.call(broken)

    with pytest.raises(killick.RunFailed):
        kd.run(unlucky, id="r")
    kd.resume("r")
    assert kd.run(unlucky, id="r") == "done"
    assert tries == [{"kept": "kept"}] * 2


def test_a_tool_that_fails_for_good_leaves_what_it_did_and_that_can_be_seen(kd: killick.Client, folder: Path) -> None:
    @killick.tool(effect="workspace")
    def broken(folder: Path = killick.WORKSPACE) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("a mistake of the tool")

    @killick.agent(workspace=folder)
    async def careful(run: killick.Run) -> str:
        try:
            await run.call(broken)
        except killick.StepFailed:
            return await run.call(write, "note", "it failed")
        return "never"

    assert kd.run(careful, id="r") == "it failed"
    assert after(kd, "r", "1") == {"kept": "kept", "half": "half"}
    assert told(folder) == {"kept": "kept", "half": "half", "note": "it failed"}


def test_what_a_timed_out_tool_left_running_is_ended_before_it_is_tried_again(kd: killick.Client, folder: Path) -> None:
    left: list[subprocess.Popen[bytes]] = []

    @killick.tool(effect="workspace", timeout=0.5, retry=OFTEN)
    async def leaves(folder: Path = killick.WORKSPACE) -> str:
        if not left:
            script = "while true; do echo x >> spoilt; sleep 0.01; done"
            left.append(subprocess.Popen(["sh", "-c", script], cwd=folder))
            await asyncio.sleep(3_600)
        return "done"

    @killick.agent(workspace=folder)
    async def slowly(run: killick.Run) -> str:
        return await run.call(leaves)

    assert kd.run(slowly, id="r") == "done"
    assert left[0].wait(300) < 0
    assert told(folder) == {"kept": "kept"}


# other ways through a run -------------------------------------------------------------------------


def test_what_a_tool_that_says_it_only_reads_changed_is_seen_all_the_same(kd: killick.Client, folder: Path) -> None:
    @killick.tool(effect="reads")
    def lies(folder: Path = killick.WORKSPACE) -> str:
        (folder / "lie").write_text("x")
        return "read"

    @killick.agent(workspace=folder)
    async def believer(run: killick.Run) -> str:
        return await run.call(lies)

    kd.run(believer, id="r")
    assert after(kd, "r", "1") == {"kept": "kept", "lie": "x"}


def test_the_effect_may_depend_on_the_arguments(kd: killick.Client, folder: Path) -> None:
    tries: list[str] = []

    def effect_of(command: str) -> e.EffectClass:
        return "reads" if command == "ls" else "workspace"

    @killick.tool(effect=effect_of, retry=QUICK)
    def shell(command: str, folder: Path = killick.WORKSPACE) -> str:
        tries.append(command)
        with (folder / "log").open("a") as file:
            file.write(command)
        if len(tries) == 2:
            raise ConnectionError("x")
        return (folder / "log").read_text()

    @killick.agent(workspace=folder)
    async def asker(run: killick.Run) -> list[str]:
        return [await run.call(shell, "ls"), await run.call(shell, "make")]

    assert kd.run(asker, id="r") == ["ls", "lsmake"]


def test_a_blocking_agent_has_a_workspace_too(kd: killick.Client, folder: Path) -> None:
    @killick.agent(workspace=folder)
    def plain(run: killick.SyncRun) -> str:
        run.call(write, "a", "1")
        run.call(write, "b", "2")
        return str(run.workspace)

    assert kd.run(plain, id="r") == str(folder)
    assert after(kd, "r", "1") == {"kept": "kept", "a": "1"}
    assert after(kd, "r", "2") == {"kept": "kept", "a": "1", "b": "2"}


def test_a_paused_run_has_finished_its_tool_and_its_files_are_on_record(kd: killick.Client, folder: Path) -> None:
    @killick.tool(effect="workspace")
    def slow(folder: Path = killick.WORKSPACE) -> str:
        kd.pause("r", by="ada")
        (folder / "slow").write_text("done")
        return "done"

    @killick.agent(workspace=folder)
    async def paused(run: killick.Run) -> str:
        await run.call(slow)
        return await run.call(write, "more", "done")

    with pytest.raises(killick.RunWaiting):
        kd.run(paused, id="r")
    assert after(kd, "r", "1") == {"kept": "kept", "slow": "done"}
    kd.resume("r")
    kd.run(paused, id="r")
    assert told(folder) == {"kept": "kept", "slow": "done", "more": "done"}


def test_a_cancelled_run_can_be_undone_with_its_files(kd: killick.Client, folder: Path) -> None:
    @killick.tool(effect="workspace")
    async def slow(folder: Path = killick.WORKSPACE) -> str:
        (folder / "half").write_text("half")
        await kd.as_async().cancel("r", compensate=True, by="ada")
        await asyncio.sleep(0.05)
        return "done"

    @killick.agent(workspace=folder)
    async def doomed(run: killick.Run) -> str:
        await run.call(write, "first", "1")
        await run.call(slow)
        return await run.call(write, "never", "written")

    with pytest.raises(killick.errors.RunCancelled) as cancelled:
        kd.run(doomed, id="r")
    assert told(folder) == {"kept": "kept"}
    assert not cancelled.value.not_undone


# several ------------------------------------------------------------------------------------------


def test_a_run_that_was_parked_goes_on_with_its_files_in_another_process(tmp_path: Path, folder: Path) -> None:
    @killick.agent(name="parked", workspace=folder)
    async def patient(run: killick.Run) -> str:
        await run.call(write, "a", "1")
        await run.ask("Go on?")
        await run.call(write, "a", "2")
        return run.workspace.name

    with killick.open(tmp_path / "killick.db") as first, pytest.raises(killick.RunWaiting):
        first.run(patient, id="r")
    (folder / "by_hand").write_text("x")
    with killick.open(tmp_path / "killick.db") as second:
        second.answer("r", "approve")
        assert second.run(patient, id="r") == "work"
        assert after(second, "r", "1") == {"kept": "kept", "a": "1"}
        assert after(second, "r", "3") == {"kept": "kept", "a": "2", "by_hand": "x"}


def test_a_child_works_in_the_folder_that_its_agent_declares(kd: killick.Client, folder: Path, tmp_path: Path) -> None:
    @killick.agent(workspace=tmp_path / "child_{run}")
    async def child(run: killick.Run, text: str) -> str:
        await run.call(write, "child", text)
        return run.workspace.name

    @killick.agent(workspace=folder)
    async def parent(run: killick.Run) -> list[str]:
        await run.call(write, "a", "1")
        first, second = await run.spawn(child, "x"), await run.spawn(child, "y")
        return [await first.result(), await second.result()]

    names = kd.run(parent, id="r")
    assert len(set(names)) == 2
    assert [told(tmp_path / name) for name in names] == [{"child": "x"}, {"child": "y"}]
    assert told(folder) == {"kept": "kept", "a": "1"}


def test_a_renewed_run_stays_in_its_folder(kd: killick.Client, tmp_path: Path) -> None:
    @killick.agent(workspace=tmp_path / "of_{run}")
    async def renewing(run: killick.Run, number: int) -> str:
        await run.call(write, f"{number}", "x")
        if number < 3:
            await run.renew(number + 1)
        return " ".join(sorted(told(run.workspace)))

    assert kd.run(renewing, 1, id="r") == "1 2 3"


def test_a_machine_has_its_files_at_every_transition(kd: killick.Client, folder: Path) -> None:
    @killick.machine(workspace=folder)
    async def counter(run: killick.Run, state: int) -> killick.Next | killick.Done:
        await run.call(write, "state", str(state))
        return killick.Next(state + 1) if state < 3 else killick.Done(state)

    assert kd.run(counter, 1, id="r") == 3
    assert told(folder) == {"kept": "kept", "state": "3"}


class TooManyRequests(Exception):
    status_code = 429
    response = SimpleNamespace(status_code=429, headers={"retry-after": "0.01"})


def test_files_go_back_before_another_try_also_where_a_far_side_asks_to_wait(kd: killick.Client, folder: Path) -> None:
    tries: list[list[str]] = []

    @killick.tool(effect="workspace")
    def half(folder: Path = killick.WORKSPACE) -> int:
        tries.append(sorted(told(folder)))
        (folder / f"half-{len(tries)}").write_text("half")
        if len(tries) == 1:
            raise TooManyRequests
        return len(tries)

    @killick.agent(workspace=folder)
    async def halving(run: killick.Run) -> int:
        return await run.call(half)

    assert kd.run(halving, id="r") == 2
    assert tries == [["kept"], ["kept"]]
    assert sorted(told(folder)) == ["half-2", "kept"]
