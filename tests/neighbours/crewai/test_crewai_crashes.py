"""CrewAI alone and on Killick, in real processes that are killed in the middle of a flow."""

from __future__ import annotations

from pathlib import Path

from neighbours.crewai.shop import alone, answered, on_killick
from neighbours.killed import KILLED, World, ended
from neighbours.results import result


def test_a_kill_between_two_methods_pays_twice_with_crewai_alone_and_once_on_killick(tmp_path: Path) -> None:
    for run in (alone, on_killick):
        assert ended(run, tmp_path / run.__name__, "before-shipping") == KILLED
        assert ended(run, tmp_path / run.__name__) == "on its way"
    theirs, ours = World(tmp_path / "alone").done, World(tmp_path / "on_killick").done
    twice, once = theirs.count("paid"), ours.count("paid")
    print(f"killed between two methods: CrewAI alone paid {twice} times, on Killick {once}")
    assert theirs == ["paid", "paid", "shipped"]
    assert ours == ["paid", "shipped"]


def test_a_kill_inside_a_tool_pays_twice_with_crewai_alone_and_asks_a_person_on_killick(tmp_path: Path) -> None:
    for run in (alone, on_killick):
        assert ended(run, tmp_path / run.__name__, "after-paying") == KILLED
    assert ended(alone, tmp_path / "alone") == "on its way"
    ours = tmp_path / "on_killick"
    assert "waits for settlement" in ended(on_killick, ours)
    assert World(ours).done == ["paid"]
    assert ended(answered, ours) == "answered"
    assert ended(on_killick, ours) == "on its way"
    twice, once = World(tmp_path / "alone").done.count("paid"), World(ours).done.count("paid")
    result("crewai", killed="inside a payment", alone=f"{twice} payments", ours=f"{once} payment")
    assert (twice, once) == (2, 1)
