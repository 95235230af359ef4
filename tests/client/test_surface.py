"""The surface of section 13 is typed: what people write passes strict checkers, and what is wrong does not."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import killick

TYPED = Path(__file__).parent.parent / "typed"
SURFACE = TYPED / "section13.py"


REFUSED = """
from __future__ import annotations

import killick


@killick.tool(effect="reads")
async def count(text: str) -> int:
    return len(text)


@killick.agent
async def counts(run: killick.Run, text: str) -> int:
    await run.call(count, 17)  # refused
    await run.call(count)  # refused
    await run.call(count, "a", colour="red")  # refused
    wrong: str = await run.call(count, "a")  # refused
    await run.spawn(counts, 17)  # refused
    return len(wrong)


def main() -> None:
    with killick.open("memory:") as kd:
        kd.run(counts, 17)  # refused
        verdict: str = kd.run(counts, "a")  # refused
        kd.answer("r", "perhaps")  # refused
        kd.start(counts, 17)  # refused
        kd.edit.skip("r")  # refused
        kd.store.prune(older="90d")  # refused
        print(verdict)  # noqa: T201


killick.tool(effect="perhaps")  # refused
"""
"""What a checker must refuse: the marked lines, and nothing else."""


def checked(checker: str, folder: Path) -> dict[tuple[str, int], str]:
    """What a checker finds in the files of a folder, by file and line."""
    if checker == "mypy":
        options = ["--strict", "--cache-dir", str(folder / "cache"), "--no-error-summary", "--no-pretty"]
        pattern = re.compile(r"(\w+\.py):(\d+): error: (.*)")
        output = run(["mypy", *options, *map(str, folder.glob("*.py"))])
        return {(found[1], int(found[2])): found[3] for found in map(pattern.search, output.splitlines()) if found}
    settings = folder / "pyrightconfig.json"
    settings.write_text(json.dumps({"include": ["."], "typeCheckingMode": "strict", "pythonVersion": "3.11"}))
    output = run(["pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(settings)])
    told: list[dict[str, Any]] = json.loads(output)["generalDiagnostics"]
    assert json.loads(output)["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py"))), output
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in told
        if each["severity"] == "error"
    }


def run(command: list[str]) -> str:
    outcome = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert outcome.returncode in (0, 1), outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_strict_checker_passes_the_examples_of_section_13_and_refuses_what_cannot_work(
    checker: str, tmp_path: Path
) -> None:
    shutil.copy(SURFACE, tmp_path)  # pyright looks only below its settings
    (tmp_path / "refused.py").write_text(REFUSED)
    marked = {("refused.py", n) for n, line in enumerate(REFUSED.splitlines(), 1) if line.endswith("# refused")}
    found = checked(checker, tmp_path)
    assert found.keys() == marked, "\n".join(f"{file}:{line}: {told}" for (file, line), told in sorted(found.items()))


def test_the_examples_of_section_13_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(TYPED), *sys.path])
    assert importlib.import_module("section13").review.name == "review"


RUN = """
    call model stream dispatch decided plan at ask wait sleep sleep_until update note spawn send gather first now uuid
    random patched id input context replaying parent
"""
CLIENT = "run start info state events list inbox answer send say pause resume cancel"
GROUPS = {
    "edit": "set override skip retry note prioritize",
    "store": "verify export prune erase seal prove rotate_keys",
    "triggers": "list fire publish",
    "find": "answers calls catch_up decisions effects failures",
}


@pytest.mark.parametrize("kind", [killick.Run, killick.SyncRun])
def test_a_run_has_what_section_13_names(kind: type[Any]) -> None:
    assert [name for name in RUN.split() if not hasattr(kind, name)] == []


def test_both_clients_have_what_section_13_names_and_one_is_awaited() -> None:
    with killick.open("memory:") as kd:
        for name in CLIENT.split():
            assert not inspect.iscoroutinefunction(getattr(kd, name))
            assert inspect.iscoroutinefunction(getattr(kd.as_async(), name))
            assert inspect.iscoroutinefunction(getattr(killick.AsyncClient, name))


def offered(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_a_client_shows_what_people_call_and_one_door_for_hosts() -> None:
    with killick.open("memory:") as kd:
        for client in (kd, kd.as_async()):
            assert len(offered(client)) <= 36
            values = {name for name in offered(client) if not callable(getattr(client, name))}
            assert values == {*GROUPS, "log", "runtime"}


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_the_same_methods_on_both_clients_and_one_is_awaited(group: str) -> None:
    with killick.open("memory:") as kd:
        blocking, awaited = getattr(kd, group), getattr(kd.as_async(), group)
        assert offered(blocking) == offered(awaited) == {*GROUPS[group].split()}
        for name in offered(blocking):
            assert not inspect.iscoroutinefunction(getattr(blocking, name))
            assert inspect.iscoroutinefunction(getattr(awaited, name))
            assert inspect.signature(getattr(blocking, name)) == inspect.signature(getattr(awaited, name))
            assert inspect.getdoc(getattr(blocking, name))


def test_methods_have_their_own_signatures_at_run_time() -> None:
    with killick.open("memory:") as kd:
        for client in (kd, kd.as_async()):
            assert list(inspect.signature(client.run).parameters)[:3] == ["agent", "input", "id"]
            assert list(inspect.signature(client.info).parameters) == ["run"]
            assert list(inspect.signature(client.edit.skip).parameters) == ["run", "step", "by", "because"]
            assert list(inspect.signature(client.store.erase).parameters) == ["subject", "by"]
            assert list(inspect.signature(client.triggers.fire).parameters) == ["trigger", "by", "input"]


@pytest.mark.parametrize("declare", [killick.tool, killick.agent, killick.machine])
def test_decorators_show_their_options_at_run_time(declare: Any) -> None:
    parameters = inspect.signature(declare).parameters.values()
    assert {"name"} < {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters)


def test_whatever_is_a_run_has_its_id_as_id() -> None:
    @killick.agent
    async def identified(run: killick.Run) -> str:
        return run.id

    with killick.open("memory:") as kd:
        handle = kd.start(identified)
        assert {kd.run(identified, id=handle.id), handle.info().id, kd.list()[0].id} == {handle.id}


def test_what_people_print_says_what_it_is() -> None:
    seen: list[str] = []

    @killick.tool(effect="reads")
    async def looks() -> int:
        return 1

    @killick.agent
    async def looking(run: killick.Run) -> None:
        seen.append(repr(run))

    with killick.open("memory:") as kd:
        kd.run(looking, id="r")
        seen += map(repr, (kd, kd.as_async(), kd.store, kd.start(looking, id="r"), looking, looks))
    assert [*seen, repr(kd)] == [
        "<killick.Run r of agent looking>",
        "<killick.Client of memory:>",
        "<killick.AsyncClient of memory:>",
        "<Maintenance of <killick.Client of memory:>>",
        "<killick.Handle of run r>",
        "<killick.Agent looking>",
        "<killick.Tool looks, reads>",
        "<killick.Client of memory:, closed>",
    ]


def test_what_is_public_says_what_it_is_for() -> None:
    offered = [killick.Run, killick.SyncRun, killick.Client, killick.AsyncClient, killick.Handle, killick.AsyncHandle]
    silent = [
        f"{kind.__name__}.{name}"
        for kind in offered
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and not inspect.getdoc(member)
    ]
    assert silent == []
