"""LlamaIndex alone and on Killick, in real processes that are killed in the middle of a run."""

from __future__ import annotations

from pathlib import Path

from neighbours.killed import KILLED, World, ended
from neighbours.llamaindex.orders import alone, answered, on_killick
from neighbours.results import result


def test_a_kill_between_two_tools_pays_twice_with_the_framework_alone_and_once_on_killick(tmp_path: Path) -> None:
    for run in (alone, on_killick):
        assert ended(run, tmp_path / run.__name__, "while-thinking") == KILLED
        assert ended(run, tmp_path / run.__name__) == "all done"
    theirs, ours = World(tmp_path / "alone").done, World(tmp_path / "on_killick").done
    assert theirs == ["asked", "paid", "asked", "asked", "paid", "asked", "shipped", "asked"]
    assert ours == ["asked", "paid", "asked", "asked", "shipped", "asked"]


def test_a_kill_inside_a_tool_pays_twice_with_the_framework_alone_and_asks_a_person_on_killick(tmp_path: Path) -> None:
    for run in (alone, on_killick):
        assert ended(run, tmp_path / run.__name__, "after-paying") == KILLED
    assert ended(alone, tmp_path / "alone") == "all done"
    ours = tmp_path / "on_killick"
    assert "waits for settlement" in ended(on_killick, ours)
    assert World(ours).done == ["asked", "paid"]
    assert ended(answered, ours) == "answered"
    assert ended(on_killick, ours) == "all done"
    twice, once = World(tmp_path / "alone").done.count("paid"), World(ours).done.count("paid")
    assert (twice, once) == (2, 1)
    result(
        "llamaindex", killed="inside a payment", alone=f"{twice} payments", ours=f"{once} payment; a person is asked"
    )
