"""The pytest plugin: its fixtures, what it forgets after a test, and that it costs nothing where it is not used."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

APP = """
    import killick

    @killick.tool(effect="reads")
    async def look_up(name: str) -> str:
        raise NotImplementedError("the real one")

    @killick.agent
    async def greet(run: killick.Run, name: str) -> str:
        found = await run.call(look_up, name)
        await run.sleep("1h")
        return f"Hello {found}"
"""


def run_pytest(folder: Path, tests: str, *options: str, plugins: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run tests as somebody would who has the plugin installed, and of others only those that are named."""
    (folder / "app.py").write_text(textwrap.dedent(APP))
    (folder / "test_app.py").write_text(textwrap.dedent(tests))
    named = [part for plugin in ("killick.testing.plugin", *plugins) for part in ("-p", plugin)]
    command = [sys.executable, "-W", "error", "-m", "pytest", *named, "-p", "no:cacheprovider", "-q", *options]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(folder), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path, "COLUMNS": "200"}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module = importlib.import_module(project["entry-points"]["pytest11"]["killick"])
    assert hasattr(module, "killick_play")


def test_the_fixtures_work_in_plain_tests(tmp_path: Path) -> None:
    code, out = run_pytest(
        tmp_path,
        """
        import pytest
        import killick
        from app import greet, look_up

        def test_play(killick_play):
            t = killick_play(greet, "ann", fakes={look_up: "Ann"})
            t.until(look_up)
            other = killick_play(greet, "bob", fakes={look_up: "Bob"})
            assert other.result() == "Hello Bob"
            assert t.result() == "Hello Ann"

        def test_client(killick_client, killick_clock):
            @killick.agent
            async def naps(run: killick.Run) -> str:
                await run.sleep("24h")
                return (await run.ask("Well?", timeout="1h", default="reject")).kind

            before = killick_clock.now_us()
            with pytest.raises(killick.RunWaiting):
                killick_client.run(naps, id="n")
            assert killick_clock.now_us() - before == 24 * 3600 * 1_000_000
            killick_clock.advance(3600)
            assert killick_client.run(naps, id="n") == "reject"

        clients = []

        def test_client_again(killick_client):
            assert not killick_client.list()
            clients.append(killick_client)

        def test_client_was_closed():
            with pytest.raises(killick.KillickError):
                clients[0].list()
        """,
    )
    assert code == 0, out
    assert "4 passed" in out


def test_what_a_test_declares_is_forgotten_and_what_it_imports_stays(tmp_path: Path) -> None:
    code, out = run_pytest(
        tmp_path,
        """
        import pytest

        def test_declares_and_imports():
            import killick
            from app import greet

            @killick.agent(aliases=["old_mine"])
            async def mine(run: killick.Run) -> None: ...

            @killick.tool
            async def my_tool() -> None: ...

        def test_finds_only_what_was_imported():
            from app import greet, look_up
            from killick.errors import AgentUnknown
            from killick.definitions.agents import AGENTS
            from killick.definitions.tools import TOOLS

            for name in ("mine", "old_mine"):
                with pytest.raises(AgentUnknown):
                    AGENTS.get(name)
            assert AGENTS.get("greet") is greet
            assert (TOOLS["look_up"], TOOLS.get("my_tool")) == (look_up, None)

        def test_replaces_what_was_there():
            import killick

            @killick.agent(name="greet")
            async def another(run: killick.Run, name: str) -> str:
                return "replaced"

        def test_finds_what_was_there():
            from app import greet
            from killick.definitions.agents import AGENTS

            assert AGENTS.get("greet") is greet
        """,
    )
    assert code == 0, out
    assert "4 passed" in out


def test_it_costs_nothing_before_a_fixture_is_used(tmp_path: Path) -> None:
    code, out = run_pytest(
        tmp_path,
        """
        import sys

        def test_nothing():
            late = {"pydantic", "click", "rich", "killick.testing.player", "killick.check.checker"}
            assert not late & set(sys.modules)
        """,
    )
    assert code == 0, out


def test_it_prints_no_header_line(tmp_path: Path) -> None:
    code, out = run_pytest(tmp_path, "def test_nothing(): pass", "-v")
    assert code == 0, out
    header = out.partition("collected")[0].replace(str(tmp_path), "")
    assert "killick" not in header.lower(), out


def test_coroutines_are_tests_by_asyncio_run(tmp_path: Path) -> None:
    code, out = run_pytest(
        tmp_path,
        """
        import asyncio
        from app import greet, look_up
        from killick.testing import play

        def test_it():
            async def test():
                async with play(greet, "ann", fakes={look_up: "Ann"}) as t:
                    assert await t.result() == "Hello Ann"

            asyncio.run(test())
        """,
    )
    assert code == 0, out


ASYNC = """
    import pytest
    import killick
    from app import greet, look_up
    from killick.testing import play

    {mark}

    async def test_it():
        async with play(greet, "ann", fakes={{look_up: "Ann"}}) as t:
            await t.until(look_up)
            t.crash()
            assert await t.result() == "Hello Ann"

    async def test_in_the_middle():
        async with play(greet, "ann", fakes={{look_up: "Ann"}}) as t:
            await t.until_waiting()
            assert t.waits_for == {{"time"}}

    async def test_a_block_is_refused():
        with pytest.raises(killick.KillickError, match="async with"), play(greet, "ann"):
            pass
"""


ANYIO = 'pytestmark = pytest.mark.anyio\n    anyio_backend = pytest.fixture(lambda: "asyncio")'
SCOPE = "asyncio_default_fixture_loop_scope=function"


@pytest.mark.parametrize(
    ("plugin", "mark", "options"),
    [
        ("anyio.pytest_plugin", ANYIO, ()),
        ("pytest_asyncio.plugin", "pytestmark = pytest.mark.asyncio", ("-o", SCOPE)),
    ],
    ids=["anyio", "pytest-asyncio"],
)
def test_coroutines_are_tests_by_the_plugins_that_run_them(
    tmp_path: Path, plugin: str, mark: str, options: tuple[str, ...]
) -> None:
    code, out = run_pytest(tmp_path, ASYNC.format(mark=mark), *options, plugins=(plugin,))
    assert code == 0, out
    assert "3 passed" in out


def test_playing_needs_no_pytest(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    program = """
        import sys
        sys.modules["pytest"] = None
        from app import greet, look_up
        from killick.testing import call, interrupt_everywhere, play, scripted
        with play(greet, "ann", fakes={look_up: "Ann"}) as t:
            assert t.result() == "Hello Ann"
    """
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
