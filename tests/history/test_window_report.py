"""What a run's model calls were sent, from its record alone: in every provider's form, with a window and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import killick
from killick.history.window_report import Windows, grouped, windows
from killick.log import boundaries
from killick.testing import scripted
from killick.window import estimate
from killick.window.messages import as_json
from sessions import FILES, coder, edit, model, read, test, without_models

PROVIDERS = ("openai", "openai-responses", "anthropic")


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    with killick.open("memory:") as made:
        yield made


def seen(kd: killick.Client, run: str = "r", **options: Any) -> Windows:
    found = windows(kd.runtime.log, run, **options)
    assert found is not None
    return found


def fills(found: Windows) -> dict[str, int]:
    return {fill.kind: fill.tokens for fill in found.fills}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_run_without_a_window_is_told_as_well(kd: killick.Client, provider: str) -> None:
    kd.run(coder, {"provider": provider, "calls": 30}, id="r")
    found = seen(kd)
    assert (len(found.calls), found.budget) == (30, None)
    assert found.sent == found.without == sum(call.sent for call in found.calls)
    assert sum(fills(found).values()) == found.at.sent == found.largest.sent
    assert set(fills(found)) == {"system", "schemas", "files", "results", "user", "assistant"}
    assert (found.evictions, found.faults, found.pins, found.left) == ((), (), (), 0)


@pytest.mark.gate(1)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_left_and_came_back_is_told_with_what_it_saved(kd: killick.Client, provider: str) -> None:
    kd.run(coder, {"provider": provider, "calls": 60, "budget": 4_000}, id="r")
    found = seen(kd)
    assert found.budget == 4_000
    assert max(call.sent for call in found.calls) == found.largest.sent <= 4_000
    assert found.without > 1.5 * found.sent
    assert fills(found)["left"] > 0
    assert found.left > 5
    assert sum(call.evicted for call in found.calls) == sum(len(each.pages) for each in found.evictions)
    assert sum(call.faulted for call in found.calls) == len(found.faults)
    assert {"recalled"} <= {fault.how for fault in found.faults}
    first = found.evictions[0]
    assert first.pages[0].what
    assert found.calls[first.call - 1].step == first.step


@pytest.mark.parametrize("provider", PROVIDERS)
def test_without_is_what_the_whole_history_would_have_taken(kd: killick.Client, provider: str) -> None:
    sizes: list[int] = []

    @killick.agent(name=f"windows_truth_{provider}")
    async def truth(run: killick.Run) -> None:
        window = killick.Window(2_500)
        model = scripted(*["Once more."] * 24, provider=provider)
        said: list[Any] = []
        for number in range(24):
            said.append({"role": "user", "content": f"{number}: " + f"a word of {number} " * 40})
            sent = await run.fit(window, said, (), system=None)
            sizes.append(sent.without)
            await run.model(model, **{"input" if provider == "openai-responses" else "messages": sent.messages},
                            tools=sent.tools)  # fmt: skip
            said.append({"role": "assistant", "content": "Once more."})

    kd.run(truth, id="r")
    found = seen(kd)
    assert found.evictions
    assert [call.without for call in found.calls] == pytest.approx(sizes, rel=0.02, abs=40)


def test_each_place_in_its_history_has_its_window(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 20, "budget": 3_000}, id="r")
    whole = seen(kd)
    middle = whole.calls[11]
    found = seen(kd, place=boundaries.at(kd.runtime.log, "r", middle.step))
    assert found.calls[-1] == msgspec.structs.replace(middle, faulted=found.calls[-1].faulted)
    assert len(found.calls) == 12
    assert len(seen(kd, place=boundaries.at(kd.runtime.log, "r", f"{middle.step}:before")).calls) in (11, 12)


def test_what_was_rewound_is_not_told(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 20, "budget": 3_000}, id="r")
    whole = seen(kd)
    assert whole.evictions
    kd.rewind("r", f"{whole.calls[3].step}:after")
    found = seen(kd)
    assert [call.step for call in found.calls] == [call.step for call in whole.calls[:4]]
    assert len(found.evictions) < len(whole.evictions)
    kd.advance("r")
    assert seen(kd).at.number > 4


def test_a_fork_has_the_window_of_what_it_shares(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "anthropic", "calls": 16, "budget": 3_000}, id="r")
    whole = seen(kd)
    kd.fork("r", f"{whole.calls[8].step}:after", id="f")
    assert [call.sent for call in seen(kd, "f").calls] == [call.sent for call in whole.calls[:9]]


def test_conversations_of_branches_are_told_apart(kd: killick.Client) -> None:
    model = scripted("Yes.", forever=True, provider="openai")

    @killick.agent(name="windows_branches")
    async def branches(run: killick.Run) -> None:
        async def talk(topic: str) -> None:
            said: list[Any] = []
            for number in range(4):
                said += [{"role": "user", "content": f"{topic} {number} " * 50}]
                await run.model(model, messages=said)
                said += [{"role": "assistant", "content": "Yes."}]

        await run.gather(talk("apples"), talk("pears"))

    kd.run(branches, id="r")
    found = seen(kd)
    assert len(found.calls) == 8
    for branch in ("1.1.", "1.2."):
        sizes = [call.sent for call in found.calls if call.step.startswith(branch)]
        assert len(sizes) == 4
        assert sizes == sorted(sizes)


def test_what_left_a_branch_is_told_with_its_own_calls(kd: killick.Client) -> None:
    @killick.agent(name="windows_two")
    async def two(run: killick.Run) -> None:
        FILES.update({f"src/{at}.py": f"line {at} of this file\n" * 60 for at in range(10)})
        talks = (
            killick.loop(run, model(24, seed, "openai"), [read, edit, test], messages="Mend it.", system="Be careful.",
                       provider="openai", model="gpt-5.4", budget=2_000)
            for seed in (1, 2)
        )  # fmt: skip
        await run.gather(*talks)

    kd.run(two, id="r")
    found = seen(kd)
    assert len(found.calls) == 48
    assert {each.step.rpartition(".")[0] for each in found.evictions if each.step} == {"1.1", "1.2"}
    for each in found.evictions:
        assert found.calls[each.call - 1].step == each.step
    assert sum(call.evicted for call in found.calls) == sum(len(each.pages) for each in found.evictions)
    assert max(call.sent for call in found.calls) <= 2_000


def test_a_run_that_called_no_model_has_no_window(kd: killick.Client) -> None:
    kd.run(without_models, id="r")
    assert windows(kd.runtime.log, "r") is None


def test_calls_without_messages_are_passed_over(kd: killick.Client) -> None:
    @killick.agent(name="windows_embeds")
    async def embeds(run: killick.Run) -> None:
        await run.model(lambda text: [1.0], text="apples")
        await run.model(scripted("Yes.", provider="openai"), messages=[{"role": "user", "content": "Sure?"}])
        await run.model(lambda text: [2.0], text="pears")

    kd.run(embeds, id="r")
    assert [call.step for call in seen(kd).calls] == ["2"]


def test_erased_messages_are_not_told_and_spoil_nothing(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 6}, id="r")
    second = seen(kd).calls[1].step
    step = kd.runtime.log.state("r").fold.step(second)
    assert step is not None
    with_all = seen(kd)
    opened = kd.runtime.log.open("r")
    kd.runtime.log.erase(opened, at=1, reason="asked for", seqs=(step.intended,))
    found = seen(kd)
    assert [call.step for call in found.calls] == [call.step for call in with_all.calls if call.step != second]


def test_tokens_are_counted_as_asked(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 4}, id="r")
    letters = seen(kd, tokens=len)
    assert letters.at.sent == pytest.approx(4 * seen(kd).at.sent, rel=0.05)
    assert estimate(as_json([1])) == 1


def test_calls_are_put_into_groups_of_about_the_same_size(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 11}, id="r")
    calls = seen(kd).calls
    assert [len(group) for group in grouped(calls, 4)] == [3, 3, 2, 3]
    assert [call for group in grouped(calls, 4) for call in group] == list(calls)
    assert [len(group) for group in grouped(calls, 100)] == [1] * 11
