"""Runs that go back, part and are undone, with their files: what stands in a folder is what the record says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.client import time_travel
from killick.client.answers import deliver
from killick.engine.control.inbox import COMMAND
from killick.engine.steps import workspace_folders
from killick.engine.steps.workspace_hook import Files
from killick.errors import TimeRefused
from killick.log.log import Log
from killick.model import events as e
from killick.workspace.vault.vault import Vault
from killick.workspace.workspace import Workspace


@killick.tool(effect="workspace")
def write(name: str, text: str, folder: Path = killick.WORKSPACE) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return text


@killick.tool(effect="workspace")
def move(old: str, new: str, folder: Path = killick.WORKSPACE) -> None:
    (folder / old).rename(folder / new)


@killick.tool(effect="workspace")
def remove(name: str, folder: Path = killick.WORKSPACE) -> None:
    (folder / name).unlink()


def told(folder: Path) -> dict[str, str]:
    return {str(each.relative_to(folder)): each.read_text() for each in folder.rglob("*") if each.is_file()}


def editing(folder: Path, **options: Any) -> Any:
    """Does what it is given: each item is a tool and its arguments."""
    tools = {"write": write, "move": move, "remove": remove}

    @killick.agent(name="editing", workspace=folder, **options)
    async def agent(run: killick.Run, orders: list[list[str]]) -> list[str]:
        for name, *arguments in orders:
            if name == "ask":
                await run.ask("Go on?")
            elif name == "fail":
                raise LookupError("nothing more to do")
            else:
                await run.call(tools[name], *arguments)
        return sorted(told(run.workspace))

    return agent


ORDERS = [["write", "a", "1"], ["write", "a", "2"], ["write", "deep/b", "3"], ["remove", "kept"], ["move", "a", "c"]]
STATES: list[dict[str, str]] = [
    {"kept": "kept"},
    {"kept": "kept", "a": "1"},
    {"kept": "kept", "a": "2"},
    {"kept": "kept", "a": "2", "deep/b": "3"},
    {"a": "2", "deep/b": "3"},
    {"c": "2", "deep/b": "3"},
]


# rewind -------------------------------------------------------------------------------------------


@pytest.fixture
def unrecorded(kd: killick.Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose process changed a file, and died before the snapshot of it was on record."""
    agent = editing(folder)
    with monkeypatch.context() as patch:
        record: Any = Files._record  # pyright: ignore[reportPrivateUsage]
        patch.setattr(Files, "_record", lambda *given: None if told(folder).get("a") else record(*given))
        with pytest.raises(killick.RunWaiting):
            kd.run(agent, [["write", "a", "1"], ["ask"], ["write", "a", "2"]], id="r")
    return agent


def test_a_change_that_no_snapshot_has_yet_survives_a_rewind(kd: killick.Client, folder: Path, unrecorded: Any) -> None:
    kd.rewind("r", "1:after")
    assert told(folder) == STATES[1]


def test_a_change_that_no_snapshot_has_yet_survives_a_rewind_by_the_next_holder(
    kd: killick.Client, folder: Path, unrecorded: Any
) -> None:
    deliver(kd.runtime.engine, "r", COMMAND, {"command": "rewind", "to": "1:after", "because": None}, id="c", by="ann")
    with killick.open(kd.runtime.store.place) as other, pytest.raises(killick.RunWaiting):
        other.run(unrecorded, id="r")
    assert any(isinstance(each.event, e.RunRewound) for each in kd.events("r"))
    assert told(folder) == STATES[1]


def test_a_change_that_no_snapshot_has_yet_is_in_a_fork(kd: killick.Client, folder: Path, unrecorded: Any) -> None:
    kd.fork("r", "1:after", id="f")
    assert told(folder.with_name(f"{folder.name}-f")) == told(folder) == STATES[1]


def test_a_change_that_the_parent_makes_while_it_is_forked_is_in_the_fork(
    kd: killick.Client, folder: Path, unrecorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = next(each.seq for each in kd.events("r") if isinstance(each.event, e.AttemptEnded))
    looks, ledger = iter([ended - 1]), Log.ledger
    monkeypatch.setattr(Log, "ledger", lambda log, run, at=None: ledger(log, run, next(looks, at)))
    kd.fork("r", "1:after", id="f")
    assert told(folder.with_name(f"{folder.name}-f")) == STATES[1]


def test_a_change_that_no_snapshot_has_yet_is_undone(kd: killick.Client, folder: Path, unrecorded: Any) -> None:
    with killick.open(kd.runtime.store.place) as other:
        other.undo("r", "1")
    assert told(folder) == STATES[0]


@pytest.mark.parametrize("process", ["next", "same"])
def test_a_late_snapshot_of_a_change_counts_from_where_it_was_made(
    kd: killick.Client, folder: Path, unrecorded: Any, process: str
) -> None:
    kd.answer("r", "approve", by="ann")
    with killick.open(kd.runtime.store.place) as other:
        (other if process == "next" else kd).run(unrecorded, id="r")
    assert told(folder) == STATES[2]
    kd.rewind("r", "1:after")
    assert told(folder) == STATES[1]
    kd.undo("r", "1")
    assert told(folder) == STATES[0]


@pytest.mark.slow
def test_every_boundary_of_a_run_can_be_gone_back_to_in_any_order(kd: killick.Client, folder: Path) -> None:
    agent = editing(folder)
    kd.run(agent, ORDERS, id="r")
    for step in (3, 1, 5, 2, 4):
        kd.rewind("r", f"{step}:before")
        assert told(folder) == STATES[step - 1], step
        kd.run(agent, ORDERS, id="r")
        assert told(folder) == STATES[-1]
    kd.rewind("r", "2:after")
    assert told(folder) == STATES[2]


def test_going_back_twice_without_going_on_is_going_back_to_the_second_place(kd: killick.Client, folder: Path) -> None:
    agent = editing(folder)
    kd.run(agent, ORDERS, id="r")
    kd.rewind("r", "5:before")
    kd.rewind("r", "2:before")
    assert told(folder) == STATES[1]
    assert kd.run(agent, ORDERS, id="r") == ["c", "deep/b"]


def test_a_rewind_and_a_fork_close_the_vault_that_they_open(
    kd: killick.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Vault] = []
    monkeypatch.setattr(workspace_folders, "Vault", lambda *a, **k: opened.append(Vault(*a, **k)) or opened[-1])
    kd.run(editing(folder), ORDERS, id="r")
    assert [vault._closed for vault in opened] == [False], "a client keeps the vault of its runs"
    kd.rewind("r", "3:before")
    kd.fork("r", "1:after", id="f")
    assert [vault._closed for vault in opened[1:]] == [True, True]


def test_what_somebody_changed_by_hand_is_kept_when_the_run_goes_back(kd: killick.Client, folder: Path) -> None:
    kd.run(editing(folder), ORDERS, id="r")
    (folder / "c").write_text("by hand")
    (folder / "new").write_text("by hand too")
    kd.rewind("r", "3:before")
    assert told(folder) == STATES[2]
    [back] = [each.event for each in kd.events("r") if isinstance(each.event, e.WorkspaceRestored)]
    assert back.before is not None
    with Workspace(folder, vault=kd.runtime.log.ledger("r").facts.vault) as workspace:
        root = e.from_text(back.before)
        assert workspace.read(root, "c") == b"by hand"
        assert workspace.read(root, "new") == b"by hand too"


def test_a_run_that_waits_goes_back_with_its_files_and_asks_again(kd: killick.Client, folder: Path) -> None:
    orders = [["write", "a", "1"], ["ask"], ["write", "a", "2"]]
    agent = editing(folder)
    with pytest.raises(killick.RunWaiting):
        kd.run(agent, orders, id="r")
    kd.rewind("r", "1:before")
    assert told(folder) == {"kept": "kept"}
    with pytest.raises(killick.RunWaiting):
        kd.run(agent, orders, id="r")
    kd.answer("r", "approve")
    kd.run(agent, orders, id="r")
    assert told(folder) == {"kept": "kept", "a": "2"}


def test_files_that_cannot_go_back_at_once_go_back_when_the_run_goes_on(
    kd: killick.Client, folder: Path, tmp_path: Path
) -> None:
    agent = editing(folder)
    kd.run(agent, ORDERS, id="r")
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("in the way")
    assert "when it is resumed" in kd.rewind("r", "3:before")
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    assert kd.run(agent, ORDERS, id="r") == ["c", "deep/b"]
    assert [each.event.because for each in kd.events("r") if isinstance(each.event, e.WorkspaceRestored)] == ["rewound"]


def test_a_folder_that_is_gone_is_made_again_from_the_snapshot(
    kd: killick.Client, folder: Path, tmp_path: Path
) -> None:
    agent = editing(folder)
    kd.run(agent, ORDERS, id="r")
    folder.rename(tmp_path / "elsewhere")
    kd.rewind("r", "3:before")
    assert told(folder) == STATES[2]
    kd.run(agent, ORDERS, id="r")
    assert told(folder) == STATES[-1]


def test_a_rewind_to_after_an_undo_keeps_the_files_undone(
    kd: killick.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(editing(folder), [["write", "a", "1"], ["ask"]], id="r")
    with monkeypatch.context() as patch:  # its process dies before the snapshot of the undone files is on record
        patch.setattr(Files, "_record", lambda *given: None)
        kd.undo("r", "1")
    kd.rewind("r", "0.1:after")
    assert told(folder) == STATES[0]


def beside_a_question(folder: Path) -> Any:
    @killick.agent(workspace=folder)
    async def agent(run: killick.Run) -> None:
        async def writes() -> None:
            await run.call(write, "a", "1")
            await run.call(write, "a", "2")

        await run.gather(run.ask("Go on?"), writes())

    return agent


@pytest.mark.parametrize("goes", ["back", "apart"])
def test_a_step_that_is_kept_beside_an_open_question_keeps_its_files(
    kd: killick.Client, folder: Path, tmp_path: Path, goes: str
) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(beside_a_question(folder), id="r")
    if goes == "back":
        kd.rewind("r", "1.2.1:after")
    else:
        kd.fork("r", "1.2.1:after", id="f", workspace=tmp_path / "own")
    assert told(folder if goes == "back" else tmp_path / "own") == STATES[1]
    with pytest.raises(killick.RunWaiting):
        kd.run(beside_a_question(folder), id="r" if goes == "back" else "f")
    assert told(folder if goes == "back" else tmp_path / "own") == STATES[2]


@pytest.mark.parametrize("to", ["1:after", "2:after"])
def test_a_compensation_begins_with_the_files_that_a_rewind_left_to_be_restored(
    kd: killick.Client, folder: Path, tmp_path: Path, to: str
) -> None:
    agent = editing(folder)
    with pytest.raises(killick.RunWaiting):
        kd.run(agent, [["write", "a", "1"], ["write", "b", "1"], ["write", "a", "2"], ["ask"]], id="r")
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("in the way")
    assert "when it is resumed" in kd.rewind("r", to)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    kd.cancel("r", compensate=True)
    with pytest.raises(killick.errors.RunCancelled) as cancelled:
        kd.run(agent, id="r")
    assert not cancelled.value.not_undone
    assert told(folder) == STATES[0]


# fork ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fork_at_any_boundary_goes_on_in_its_own_folder_and_leaves_the_first_alone(
    kd: killick.Client, folder: Path, tmp_path: Path
) -> None:
    agent = editing(folder)
    kd.run(agent, ORDERS, id="r")
    for step in range(1, 6):
        own = tmp_path / f"fork_{step}"
        fork = kd.fork("r", f"{step}:before", workspace=own)
        assert told(own) == STATES[step - 1]
        kd.run(agent, ORDERS, id=fork.id)
        assert told(own) == STATES[-1]
    assert told(folder) == STATES[-1]


def test_a_fork_that_a_worker_was_quicker_with_keeps_what_it_wrote(
    kd: killick.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fills = time_travel._files_forked  # pyright: ignore[reportPrivateUsage]

    def late(engine: Any, fork: str) -> None:
        with killick.open(kd.runtime.store.place) as worker:
            worker.advance(fork)
        fills(engine, fork)

    kd.run(editing(folder), ORDERS, id="r")
    monkeypatch.setattr(time_travel, "_files_forked", late)
    kd.fork("r", "1:after", id="f")
    assert told(folder.with_name(f"{folder.name}-f")) == STATES[-1]


def test_a_fork_of_a_fork_has_the_files_of_where_it_parted(kd: killick.Client, folder: Path, tmp_path: Path) -> None:
    agent = editing(folder)
    kd.run(agent, ORDERS, id="r")
    one = kd.fork("r", "3:before", workspace=tmp_path / "one", input=[*ORDERS[:2], ["write", "z", "9"]])
    kd.run(agent, [*ORDERS[:2], ["write", "z", "9"]], id=one.id)
    assert told(tmp_path / "one") == STATES[2] | {"z": "9"}
    two = kd.fork(one.id, "3:before", workspace=tmp_path / "two")
    assert told(tmp_path / "two") == STATES[2]
    kd.run(agent, [*ORDERS[:2], ["write", "z", "9"]], id=two.id)
    assert told(tmp_path / "two") == told(tmp_path / "one")
    kd.rewind(one.id, "3:before")
    assert told(tmp_path / "one") == STATES[2]
    assert told(folder) == STATES[-1]


def test_a_fork_and_its_parent_can_be_undone_apart(kd: killick.Client, folder: Path, tmp_path: Path) -> None:
    agent = editing(folder)
    kd.run(agent, ORDERS[:3], id="r")
    fork = kd.fork("r", "3:before", workspace=tmp_path / "own")
    kd.run(agent, ORDERS[:3], id=fork.id)
    kd.undo(fork.id, "3")
    assert told(tmp_path / "own") == STATES[2]
    assert told(folder) == STATES[3]


def test_a_fork_with_the_folder_in_the_way_says_so_and_makes_nothing(kd: killick.Client, folder: Path) -> None:
    kd.run(editing(folder), ORDERS, id="r")
    for wrong in (folder, folder / "inside", folder / "c"):
        with pytest.raises(TimeRefused):
            kd.fork("r", "3:before", workspace=wrong)
    assert len(list(kd.list())) == 1
    assert told(folder) == STATES[-1]


# undo ---------------------------------------------------------------------------------------------


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("step", "then"),
    [
        ("5", {"a": "2", "deep/b": "3"}),
        ("4", {"kept": "kept", "c": "2", "deep/b": "3"}),
        ("3", {"c": "2"}),
    ],
)
def test_one_step_is_undone_and_what_others_did_stays(
    kd: killick.Client, folder: Path, step: str, then: dict[str, str]
) -> None:
    kd.run(editing(folder), ORDERS, id="r")
    kd.undo("r", step)
    assert told(folder) == then


@pytest.mark.gate(1)
@pytest.mark.parametrize(("step", "steps"), [("1", 2), ("1", 3), ("2", 5)])
def test_a_step_that_a_later_one_built_on_is_not_undone_by_itself(
    kd: killick.Client, folder: Path, step: str, steps: int
) -> None:
    kd.run(editing(folder), ORDERS[:steps], id="r")
    with pytest.raises(TimeRefused, match="a: changed since"):
        kd.undo("r", step)
    assert told(folder) == STATES[steps]


def test_undoing_says_how_files_are_undone(kd: killick.Client, folder: Path) -> None:
    kd.run(editing(folder), ORDERS, id="r")
    told = kd.undoing("r", "3")
    assert told.refuses is None
    assert told.compensated_by


def test_an_undone_step_is_on_record_and_is_not_undone_twice(kd: killick.Client, folder: Path) -> None:
    agent = editing(folder)
    kd.run(agent, ORDERS[:3], id="r")
    kd.undo("r", "3")
    with pytest.raises(TimeRefused):
        kd.undo("r", "3")
    kd.rewind("r", "3:before")
    kd.run(agent, ORDERS[:3], id="r")
    assert told(folder) == STATES[3]


def test_a_step_whose_files_a_rewind_brought_back_can_be_undone_again(kd: killick.Client, folder: Path) -> None:
    agent = editing(folder)
    with pytest.raises(killick.RunWaiting):
        kd.run(agent, [["write", "a", "1"], ["ask"]], id="r")
    kd.undo("r", "1")
    assert told(folder) == STATES[0]
    kd.rewind("r", "1:after")
    assert told(folder) == STATES[1]
    assert not any(step.undone for step in kd.state("r").fold.steps)
    kd.undo("r", "1")
    assert told(folder) == STATES[0]


def test_steps_are_undone_one_after_the_other_down_to_the_first(kd: killick.Client, folder: Path) -> None:
    kd.run(editing(folder), ORDERS, id="r")
    for step in (5, 4, 3, 2, 1):
        kd.undo("r", str(step))
        assert told(folder) == STATES[step - 1]


def test_a_run_that_fails_takes_its_files_back_where_its_agent_says_so(kd: killick.Client, folder: Path) -> None:
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(editing(folder, on_failure="compensate"), [*ORDERS, ["fail"]], id="r")
    assert told(folder) == STATES[0]
    assert not failed.value.not_undone


def test_what_a_person_changed_since_is_not_taken_back_by_itself(kd: killick.Client, folder: Path) -> None:
    orders = [["write", "a", "1"], ["write", "b", "1"], ["ask"], ["fail"]]
    agent = editing(folder, on_failure="compensate")
    with pytest.raises(killick.RunWaiting):
        kd.run(agent, orders, id="r")
    (folder / "a").write_text("by hand")
    kd.answer("r", "approve")
    with pytest.raises(killick.RunWaiting, match="a: changed since"):
        kd.run(agent, orders, id="r")
    assert told(folder) == {"kept": "kept", "a": "by hand"}
    kd.answer("r", "stop")
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, orders, id="r")
    assert failed.value.not_undone == ("write at step 1",)
    assert told(folder) == {"kept": "kept", "a": "by hand"}


def test_what_a_tool_did_that_failed_half_way_is_taken_back_too(kd: killick.Client, folder: Path) -> None:
    @killick.tool(effect="workspace")
    def half(folder: Path = killick.WORKSPACE) -> None:
        (folder / "kept").write_text("spoilt")
        raise LookupError("half way")

    @killick.agent(workspace=folder, on_failure="compensate")
    async def agent(run: killick.Run) -> None:
        await run.call(write, "a", "1")
        await run.call(half)

    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, id="r")
    assert told(folder) == STATES[0]
    assert not failed.value.not_undone


def test_a_tool_with_a_compensation_of_its_own_is_undone_by_that(kd: killick.Client, folder: Path) -> None:
    def by_hand(effect: killick.Effect) -> None:
        (folder / "compensated").write_text(str(effect.arguments["name"]))

    @killick.tool(effect="workspace", compensate=by_hand)
    def special(name: str, folder: Path = killick.WORKSPACE) -> None:
        (folder / name).write_text("x")

    @killick.agent(workspace=folder)
    async def agent(run: killick.Run) -> None:
        await run.call(special, "s")

    kd.run(agent, id="r")
    kd.undo("r", "1")
    assert told(folder) == {"kept": "kept", "s": "x", "compensated": "s"}


def test_modes_and_links_are_undone_too(kd: killick.Client, folder: Path) -> None:
    @killick.tool(effect="workspace")
    def tangle(folder: Path = killick.WORKSPACE) -> None:
        (folder / "kept").chmod(0o755)
        (folder / "link").symlink_to("kept")
        (folder / "empty").mkdir()

    @killick.agent(workspace=folder)
    async def agent(run: killick.Run) -> None:
        await run.call(tangle)

    (folder / "kept").chmod(0o640)
    kd.run(agent, id="r")
    kd.undo("r", "1")
    assert sorted(os.listdir(folder)) == ["kept"]
    assert (folder / "kept").stat().st_mode & 0o777 == 0o640


# what is on record of it -----------------------------------------------------------------------------


def test_that_a_step_was_undone_says_which_paths_went_back(kd: killick.Client, folder: Path) -> None:
    kd.run(editing(folder), [["write", "a", "1"], ["write", "b", "2"]], id="r")
    kd.undo("r", "1")
    [entry] = [each for each in kd.events("r") if isinstance(each.event, e.WorkspaceRestored)]
    assert entry.event.because == "undone"
    assert entry.event.step == "1"
    assert kd.runtime.log.data("r", entry.seq)["paths"] == ["a"]


def test_a_vault_on_record_is_used_whatever_is_declared_later(kd: killick.Client, folder: Path, tmp_path: Path) -> None:
    first, later = tmp_path / "first", tmp_path / "later"
    kd.run(editing(Workspace(folder, vault=first)), [["write", "a", "1"]], id="r")
    kd.rewind("r", "1:before")
    kd.run(editing(Workspace(folder, vault=later)), [["write", "a", "1"]], id="r")
    assert kd.runtime.log.ledger("r").facts.vault == str(first)
    assert not later.exists()


def test_a_vault_that_was_moved_with_its_store_is_found_beside_it(tmp_path: Path, folder: Path) -> None:
    (there := tmp_path / "there").mkdir()
    agent = editing(folder)
    with killick.open(tmp_path / "killick.db") as kd:
        kd.run(agent, ORDERS, id="r")
    for each in ("killick.db", "killick.files"):
        (tmp_path / each).rename(there / each)
    with killick.open(there / "killick.db") as kd:
        kd.rewind("r", "3:before")
        assert told(folder) == STATES[2]
        assert kd.run(agent, ORDERS, id="r") == ["c", "deep/b"]
    assert not (tmp_path / "killick.files").exists()
