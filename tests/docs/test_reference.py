"""The Python reference is what the source says, and has every public name with its parameters."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

import killick
import killick.store
import killick.testing
import python_reference as reference
from killick.client.maintenance import Maintenance
from killick.client.operations import Editor
from killick.workers.trigger_runner import TriggerControl
from pages import ROOT
from reference_topics import FRAMEWORKS, GUIDES, HIDDEN, TOPICS
from signatures import doc_of, module

FOLDER: Final = ROOT / reference.FOLDER
PLACES: Final[tuple[ModuleType, ...]] = (killick, killick.testing, killick.rules, killick.store)


def test_the_pages_are_what_the_source_says() -> None:
    written = {page.name: page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md")}
    wanted = reference.pages()
    stale = sorted(name for name in {*written, *wanted} if written.get(name) != wanted.get(name))
    if stale:
        told = "write them again with python tests/python_reference.py"
        pytest.fail(f"{reference.FOLDER}: {', '.join(stale)} stale; {told}", pytrace=False)


# every name ---------------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    """What is below each heading of the pages, by the heading without the word class."""
    found: dict[str, str] = {}
    for page in sorted({*FOLDER.glob("*.md")} - {FOLDER / "index.md"}):
        parts = re.split(r"^#{2,4} (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for heading, text in zip(parts[1::2], parts[2::2], strict=True):
            found[heading.removeprefix("class ")] = text
    return found


ENTRIES: Final = entries()


def takes(thing: Any) -> list[str]:
    """The names of the parameters that a caller gives."""
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]


def unnamed(thing: Any, text: str) -> list[str]:
    """The parameters without a row of their own."""
    return [name for name in takes(thing) if f"\n| `{name}` |" not in text.replace("`*", "`").replace("`*", "`")]


def test_every_public_name_has_an_entry() -> None:
    missing = []
    for place in PLACES:
        short = place.__name__.rpartition(".")[2]
        for name in place.__all__:
            called = f"{short}.{name}" if short in ("testing", "rules") else name
            if called not in ENTRIES and not inspect.ismodule(getattr(place, name)):
                missing.append(called)
    assert missing == []


def test_every_error_has_an_entry_with_its_codes() -> None:
    kinds = [
        name for name, kind in vars(killick.errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)
    ]
    assert [name for name in kinds if not re.search(r"Exit code \d+\. HTTP \d{3} `\w+`", ENTRIES.get(name, ""))] == []


def test_every_function_has_a_row_for_each_of_its_parameters() -> None:
    missing = {}
    for place in (*PLACES, killick.triggers):
        short = place.__name__.rpartition(".")[2]
        for name in getattr(place, "__all__", ("cron", "every", "when", "on_event")):
            called = f"{short}.{name}" if short in ("testing", "rules", "triggers") else name
            thing = getattr(place, name)
            if inspect.isfunction(thing) and (wrong := unnamed(thing, ENTRIES[called])) and wrong != ["options"]:
                missing[called] = wrong
    assert missing == {}


def methods(kind: type, called: str) -> Iterator[tuple[str, Any]]:
    hidden = HIDDEN.get(called, "").split()
    for name in dir(kind):
        if not name.startswith("_") and name not in hidden:
            yield name, inspect.getattr_static(kind, name)


@pytest.mark.parametrize(
    ("kind", "called", "among"),
    [
        (killick.Client, "Client", "Client"),
        (killick.AsyncClient, "Client", "Client"),
        (killick.Run, "Run", "Run"),
        (killick.SyncRun, "Run", "Run SyncRun"),
        (killick.Handle, "Handle", "Handle"),
        (Editor, "Client.edit", ""),
        (Maintenance, "Client.store", ""),
        (TriggerControl, "Client.triggers", ""),
        (killick.testing.Play, "Play", "testing.Play"),
        (killick.testing.ScriptedModel, "ScriptedModel", "testing.ScriptedModel"),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_every_method_has_an_entry_with_a_row_for_each_of_its_parameters(kind: type, called: str, among: str) -> None:
    missing = {}
    for name, static in methods(kind, called):
        value = getattr(kind, name, static)
        if isinstance(static, property) or not callable(value):
            is_there = any(f"\n| `{name}` |" in ENTRIES[each] for each in among.split())
            missing |= {} if is_there else {name: ["no row"]}
            continue
        text = next(
            (ENTRIES[f"{each}.{name}"] for each in (called, kind.__name__) if f"{each}.{name}" in ENTRIES), None
        )
        if text is None or (wrong := unnamed(value, text)):
            missing[name] = ["no entry"] if text is None else wrong
    assert missing == {}


def test_what_is_typed_daily_has_an_example() -> None:
    daily = [
        "tool",
        "agent",
        "open",
        "Run.call",
        "Run.ask",
        "Run.decided",
        "Client.start",
        "Client.run",
        "Client.answer",
        "Client.fork",
        "Client.rewind",
        "Retry",
        "Limit",
        "Contract",
        "loop",
        "triggers.cron",
        "triggers.every",
        "triggers.when",
        "triggers.on_event",
        "on",
        "webhook",
        "testing.play",
    ]
    assert [name for name in daily if ENTRIES[name].count("```python no-run") < 2] == []


def test_every_hidden_member_and_every_guide_is_there() -> None:
    assert [guide for guide in {*GUIDES.values()} if not (ROOT / "docs" / guide).exists()] == []
    named = {name.name for topic in TOPICS.values() for name in reference.names(topic)}
    assert {*HIDDEN} - named == set()
    assert {name.partition(".")[0] for name in GUIDES} - named == set()


def test_every_adapter_is_on_the_page_of_frameworks() -> None:
    """Those without an entry are parts of others."""
    parts = {
        "engines", "framework_state", "otel_conventions",
        "temporal_workflow", "tool_gate", "__init__",
    }  # fmt: skip
    folder = ROOT / "src" / "killick" / "adapters"
    found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - parts == {place.partition(".")[0] for place in FRAMEWORKS}
    for place, (_, names) in FRAMEWORKS.items():
        listed = {word.rstrip("!~") for word in names.split()}
        assert {*module(f"killick.adapters.{place}").all} <= listed


def test_every_variable_of_the_source_is_among_the_settings() -> None:
    page = (FOLDER / "settings.md").read_text(encoding="utf-8")
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = {found for text in texts for found in re.findall(r'"(KILLICK_[A-Z_]+)"', text)}
    internal = {"KILLICK_HOLDER"}
    assert sorted(name for name in named - internal if f"| `{name}` |" not in page) == []


# examples -----------------------------------------------------------------------------------------

TARGETS: Final[dict[str, Any]] = {
    "killick": killick, "kd": killick.Client, "run": killick.Run, "t": killick.testing.BlockingPlay,
    "killick.rules": killick.rules, "killick.triggers": killick.triggers, "killick.testing": killick.testing,
}  # fmt: skip


def documented() -> Iterator[str]:
    """The example of every docstring that is on the pages."""
    for name in (name for topic in TOPICS.values() for name in reference.names(topic)):
        node = name.found.node
        if isinstance(node, ast.ClassDef):
            found = reference.members(name)
            yield from found.doc.examples
            yield from (example for each in found.methods.values() for example in each.doc.examples)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from doc_of(ast.get_docstring(node)).examples


def test_the_examples_give_functions_the_arguments_that_they_take() -> None:
    calls = 0
    for example in documented():
        for call in (node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call)):
            owner, _, name = ast.unparse(call.func).rpartition(".")
            if owner in TARGETS:
                calls += 1
                own = [None] if inspect.isclass(TARGETS[owner]) else []
                try:
                    signed = inspect.signature(getattr(TARGETS[owner], name))
                    signed.bind(*own, *call.args, **{each.arg: None for each in call.keywords if each.arg})
                except (TypeError, AttributeError) as error:
                    pytest.fail(f"{error}:\n{example}", pytrace=False)
    assert calls > 20


# writing ------------------------------------------------------------------------------------------


def test_a_docstring_is_taken_apart() -> None:
    doc = doc_of(
        """Does it. Raises RunBusy if another worker
        holds it. And more.

        name, other  what both are,
                     and more of it
        last         the last

            killick.open("x")

            kd.run(a)

        The end.
        """
    )
    assert doc.prose == ("Does it. And more.", "The end.")
    assert doc.meanings == {"name": "what both are, and more of it", "other": "what both are, and more of it",
                            "last": "the last"}  # fmt: skip
    assert doc.raises == ("RunBusy if another worker holds it.",)
    assert doc.examples == ('killick.open("x")\n\nkd.run(a)',)


@pytest.mark.slow
def test_it_is_written_where_the_repository_is(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "python_reference.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "docs" / "reference" / "old.md").write_text("")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {page.name for page in (tmp_path / "docs" / "reference").iterdir()} == {*reference.pages()}
