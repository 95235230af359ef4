"""A process that is killed: the SDK alone does things twice, with Killick it does them once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import killick
from killick.adapters.openai_agents import KillickSession
from neighbours.results import result

Clerk = Callable[[str, Path, str], int]


@pytest.fixture(scope="module")
def clerk() -> Iterator[Clerk]:
    program = [sys.executable, str(Path(__file__).with_name("killed_openai_agents.py"))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None

        def serve(way: str, folder: Path, dies: str = "-") -> int:
            serving.stdin.write(f"{way} {folder} {dies}\n")
            serving.stdin.flush()
            return int(serving.stdout.readline())

        yield serve
        serving.stdin.close()


def killed_and_again(clerk: Clerk, way: str, folder: Path, dies: str) -> list[str]:
    folder.mkdir()
    assert clerk(way, folder, dies) == -signal.SIGKILL
    assert clerk(way, folder, "-") == 0
    assert (folder / "said.txt").read_text() == "done"
    return [line.split()[0] for line in (folder / "ledger.txt").read_text().splitlines()]


@pytest.mark.parametrize("dies", ["pay", "mail"])
def test_a_killed_clerk_pays_twice_alone_and_once_with_killick(clerk: Clerk, tmp_path: Path, dies: str) -> None:
    alone = killed_and_again(clerk, "alone", tmp_path / "alone", dies)
    ours = killed_and_again(clerk, "killick", tmp_path / "killick", dies)
    assert alone.count("pay") == 2
    assert ours == ["pay", "mail"]
    if dies == "pay":
        again, once = (f"{ledger.count('pay')} payment{'s' * (ledger.count('pay') > 1)}" for ledger in (alone, ours))
        result("openai_agents", killed="inside a payment", alone=again, ours=once)


def test_a_killed_clerk_asks_no_model_again_and_its_conversation_reads_as_if_nothing_had_been(
    clerk: Clerk, tmp_path: Path
) -> None:
    killed_and_again(clerk, "killick", tmp_path / "killick", "mail")
    assert len((tmp_path / "killick" / "asked.txt").read_text().splitlines()) == 3
    with killick.open(tmp_path / "killick" / "killick.db") as kd:
        items = asyncio.run(KillickSession("thread-1", kd).get_items())
    kinds = [item.get("type", item.get("role")) for item in items]
    assert kinds == ["user", *["function_call", "function_call_output"] * 2, "message"]


def test_when_a_turn_has_ended_the_same_words_are_the_next_one(clerk: Clerk, tmp_path: Path) -> None:
    killed_and_again(clerk, "killick", tmp_path / "killick", "pay")
    assert clerk("killick", tmp_path / "killick", "-") == 0
    assert (tmp_path / "killick" / "ledger.txt").read_text().count("pay ") == 2
