"""Finding people's code: by file, by module, by the app of [tool.killick]; without importing it where that will do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import killick
from claims import move_in
from killick.cli import apps
from killick.cli.context import Shell
from killick.cli.exit_codes import CommandFailed
from killick.cli.main import main

AGENT = "import killick\n\n\n@killick.agent\nasync def {name}(run: killick.Run) -> str:\n    return '{name}'\n"


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return move_in(tmp_path, monkeypatch)


def declare(file: Path, name: str, before: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(before + AGENT.format(name=name), encoding="utf-8")


def test_an_agent_is_found_by_its_file_and_its_module(office: Path) -> None:
    assert apps.load_agent("app.py:review").name == "review"
    assert apps.load_agent("app:review") is apps.load_agent("app.py:review")
    assert apps.load_agent(str(office / "app.py") + ":greet").name == "greet"


def test_a_file_with_one_agent_is_enough(office: Path) -> None:
    declare(office / "single_apps.py", "single_agent")
    assert apps.load_agent("single_apps.py").name == "single_agent"


def test_an_agent_is_found_by_the_name_it_was_given(office: Path) -> None:
    (office / "renamed_apps.py").write_text(
        "import killick\n@killick.agent(name='claims.review')\nasync def review(run: killick.Run) -> None: ...\n",
        encoding="utf-8",
    )
    assert apps.load_agent("renamed_apps.py:claims.review").fn.__name__ == "review"


def test_a_file_of_a_package_is_imported_as_what_it_is(office: Path) -> None:
    declare(office / "pack_apps" / "agents.py", "packed", "from . import tools\nfrom pack_apps.tools import ONE\n")
    (office / "pack_apps" / "__init__.py").write_text("", encoding="utf-8")
    (office / "pack_apps" / "tools.py").write_text("ONE = 1\n", encoding="utf-8")
    assert apps.load_agent("pack_apps/agents.py:packed").fn.__module__ == "pack_apps.agents"


def test_a_folder_beside_us_does_not_hide_a_module(office: Path) -> None:
    declare(office / "both_apps" / "__init__.py", "inside")
    assert apps.load_agent("both_apps:inside").name == "inside"


def test_a_file_named_like_a_module_of_python_takes_nothing_away(office: Path) -> None:
    import calendar

    declare(office / "calendar.py", "dated")
    assert apps.load_agent("calendar.py:dated").name == "dated"
    assert sys.modules["calendar"] is calendar


def test_an_app_may_import_the_modules_that_declare_its_agents(office: Path) -> None:
    declare(office / "inner_apps.py", "deep_agent")
    (office / "outer_apps.py").write_text("import inner_apps\n", encoding="utf-8")
    assert apps.load_agent("deep_agent", "outer_apps").name == "deep_agent"


def test_a_library_is_not_blamed_for_what_was_asked_of_it(office: Path) -> None:
    (office / "wrong_apps.py").write_text(
        "import killick\n\n@killick.tool(effect='whatever')\ndef f() -> None: ...\n", encoding="utf-8"
    )
    with pytest.raises(
        CommandFailed, match=r"wrong_apps.py: cannot be imported; wrong_apps.py:3: DeclarationRefused: f: effect="
    ):
        apps.load_module("wrong_apps.py")


def test_a_module_that_does_not_import_may_be_mended_and_tried_again(office: Path) -> None:
    (office / "mended_apps.py").write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(CommandFailed, match="ZeroDivisionError"):
        apps.load_module("mended_apps.py")
    declare(office / "mended_apps.py", "mended")
    assert apps.load_agent("mended_apps.py:mended").name == "mended"


# settings -----------------------------------------------------------------------------------------


def test_settings_are_those_of_the_nearest_pyproject_that_has_some(office: Path) -> None:
    inner = office / "a" / "b"
    inner.mkdir(parents=True)
    (office / "pyproject.toml").write_text('[tool.killick]\nstore = "runs.db"\n', encoding="utf-8")
    (office / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    assert apps.settings(inner) == {"store": "runs.db", "folder": office.resolve()}


def test_the_store_and_the_app_are_found_from_the_folder_of_the_settings(
    office: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (office / "pyproject.toml").write_text('[tool.killick]\nstore = "runs.db"\napp = "app"\n', encoding="utf-8")
    (office / "deeper").mkdir()
    monkeypatch.chdir(office / "deeper")
    shell = Shell()
    assert shell.url == str(office.resolve() / "runs.db")
    assert shell.agent("review").name == "review"
    assert Shell(store="x.db").url == "x.db"


def test_a_store_may_be_a_url(office: Path) -> None:
    (office / "pyproject.toml").write_text('[tool.killick]\nstore = "sqlite:////var/x.db"\n', encoding="utf-8")
    assert Shell().url == "sqlite:////var/x.db"


# without importing --------------------------------------------------------------------------------


def test_agents_are_found_without_running_anything(office: Path) -> None:
    (office / "danger.py").write_text(
        "import killick\nfrom killick import agent, machine\nraise SystemExit\n"
        "@agent\ndef plain(run): ...\n@killick.agent(name='x')\nasync def called(run): ...\n"
        "@machine\ndef state(run, state): ...\n@killick.tool\ndef tool(): ...\ndef nothing(): ...\n",
        encoding="utf-8",
    )
    (office / "torn.py").write_text("def (", encoding="utf-8")
    found = apps.declared_here()
    assert [target for target in found if target.startswith("danger")] == [
        "danger.py:plain",
        "danger.py:called",
        "danger.py:state",
    ]
    assert "app.py:review" in found


@pytest.mark.parametrize(
    "words",
    [
        ["ps"],
        ["show", "r"],
        ["inbox"],
        ["store", "verify"],
        ["store", "export", "r", "r.json"],
        ["contract", "show", "claims.toml"],
        ["contract", "show", "r"],
    ],
    ids=" ".join,
)
def test_a_command_that_only_reads_neither_imports_the_app_nor_puts_its_folder_on_the_path(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @killick.agent(name="apps_asks")
    async def asks(run: killick.Run) -> None:
        await run.ask("well?")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("pyproject.toml").write_text('[tool.killick]\napp = "hostile_app"\n')
    Path("hostile_app.py").write_text("open('imported', 'w')\n")
    Path("claims.toml").write_text('[[rules]]\nname = "few"\ntools = "pay"\nbudget.effects = 1\n')
    with killick.open("killick.db") as kd, pytest.raises(killick.RunWaiting):
        kd.run(asks, id="r")
    main(words)
    assert not Path("imported").exists()
    assert str(tmp_path) not in sys.path or words[-1] == "claims.toml"  # a contract may name functions next to it
