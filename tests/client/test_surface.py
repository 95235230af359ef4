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
        print(verdict)  # noqa: T201


killick.tool(effect="perhaps")  # refused
"""
"""What a checker must refuse: the marked lines, and nothing else."""


def checked(checker: str, file: Path, tmp_path: Path) -> dict[int, str]:
    """What a checker finds in a file, by line."""
    if checker == "mypy":
        command = ["mypy", "--strict", "--cache-dir", str(tmp_path), "--no-error-summary", "--no-pretty", str(file)]
        pattern = re.compile(rf"{re.escape(file.name)}:(\d+): error: (.*)")
        output = run(command)
        return {int(found[1]): found[2] for found in map(pattern.search, output.splitlines()) if found}
    # Pyright looks only below its settings, so it gets a copy.
    shutil.copy(file, tmp_path / file.name)
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(json.dumps({"include": [file.name], "typeCheckingMode": "strict", "pythonVersion": "3.11"}))
    output = run(["pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(settings)])
    told: list[dict[str, Any]] = json.loads(output)["generalDiagnostics"]
    assert json.loads(output)["summary"]["filesAnalyzed"] == 1, output
    return {each["range"]["start"]["line"] + 1: each["message"] for each in told if each["severity"] == "error"}


def run(command: list[str]) -> str:
    pytest.importorskip(command[0])
    outcome = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert outcome.returncode in (0, 1), outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_the_examples_of_section_13_pass_a_strict_checker(checker: str, tmp_path: Path) -> None:
    found = checked(checker, SURFACE, tmp_path)
    assert not found, "\n".join(f"{SURFACE.name}:{line}: {told}" for line, told in sorted(found.items()))


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_what_cannot_work_is_refused_by_a_strict_checker(checker: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong" / "refused.py"
    wrong.parent.mkdir()
    wrong.write_text(REFUSED)
    marked = {n for n, line in enumerate(REFUSED.splitlines(), 1) if line.endswith("# refused")}
    found = checked(checker, wrong, tmp_path)
    assert set(found) == marked, found


def test_the_examples_of_section_13_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(TYPED), *sys.path])
    assert importlib.import_module("section13").review.name == "review"


RUN = """
    call model stream dispatch decided plan at ask wait sleep sleep_until update note spawn send gather first now uuid
    random patched id input context replaying parent
"""
CLIENT = "run start info state events list inbox answer send say pause resume cancel set verify"


@pytest.mark.parametrize("kind", [killick.Run, killick.SyncRun])
def test_a_run_has_what_section_13_names(kind: type[Any]) -> None:
    assert [name for name in RUN.split() if not hasattr(kind, name)] == []


def test_both_clients_have_what_section_13_names_and_one_is_awaited() -> None:
    with killick.open("memory:") as kd:
        for name in CLIENT.split():
            assert not inspect.iscoroutinefunction(getattr(kd, name))
            assert inspect.iscoroutinefunction(getattr(kd.as_async(), name))
            assert inspect.iscoroutinefunction(getattr(killick.AsyncClient, name))


def test_a_client_shows_what_people_call_and_one_door_for_hosts() -> None:
    with killick.open("memory:") as kd:
        for client in (kd, kd.as_async()):
            offered = {name for name in dir(client) if not name.startswith("_")}
            assert {name for name in offered if not callable(getattr(client, name))} == {"find", "runtime"}


def test_methods_have_their_own_signatures_at_run_time() -> None:
    with killick.open("memory:") as kd:
        for client in (kd, kd.as_async()):
            assert list(inspect.signature(client.run).parameters)[:3] == ["agent", "input", "id"]
            assert list(inspect.signature(client.info).parameters) == ["run"]


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
        seen += map(repr, (kd, kd.as_async(), kd.start(looking, id="r"), looking, looks))
    assert [*seen, repr(kd)] == [
        "<killick.Run r of agent looking>",
        "<killick.Client of memory:>",
        "<killick.AsyncClient of memory:>",
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
