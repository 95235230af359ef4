"""A loop with a window: what its model is sent is decided once, on record, and the same whenever it is replayed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import killick
from killick.check.checker import interrupt_everywhere
from killick.engine.steps.model_reply import Provider, assistant_messages
from killick.errors import StoreUnavailable
from killick.model import event_codec, page_events
from killick.model import events as e
from killick.store.records import Append
from killick.window import Page, Situation, WorkingSet
from llm.paged_session import (
    BUDGET,
    PROVIDERS,
    SCRIPT,
    THERE,
    TOOLS,
    Call,
    Far,
    answer,
    as_bytes,
    asked,
    page,
    paged,
    read,
)
from playing import JSON
from processes import Processes, told

every_provider = pytest.mark.parametrize("provider", PROVIDERS)


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    made = Far()
    monkeypatch.setattr(THERE, "far", made)
    return made


class Asker:
    """A model that remembers what it was sent, and does something before a turn if it is told to."""

    def __init__(self, provider: Provider = "anthropic", script: Sequence[Sequence[Call]] = SCRIPT) -> None:
        self.provider: Provider = provider
        self.script = script
        self.requests: list[JSON] = []
        self.before: Callable[[int], object] = lambda turn: None

    async def ask(self, **request: Any) -> JSON:
        self.before(len(self.requests))
        self.requests.append(json.loads(as_bytes(request)))
        return answer(request, self.provider, self.script)

    def agent(self, tools: Sequence[Any] = TOOLS, **options: Any) -> killick.Agent[str, str]:
        """One that loops with it, to be run in a world where nothing was done yet."""
        THERE.far.done.clear()
        options = {"budget": BUDGET, "system": "You sail.", "model": "m"} | options
        ask = self.ask

        async def paged_asker(run: killick.Run, question: str) -> str:
            result = await killick.loop(run, ask, tools, messages=question, provider=self.provider, **options)
            return result.text

        return killick.agent(name="paged_asker")(paged_asker)


def sent(request: JSON) -> list[Any]:
    found: list[Any] = request["input"] if "input" in request else request["messages"]
    return found


# what is on record --------------------------------------------------------------------------------


@pytest.mark.gate(1)
@every_provider
def test_a_run_shows_what_the_model_saw_at_every_call(provider: Provider, processes: Processes, far: Far) -> None:
    asker, kd = Asker(provider), processes.new()
    assert kd.run(asker.agent(), "Go.", id="r") == f"Turn {len(SCRIPT)}."
    assert [as_bytes(each) for each in asked(kd, "r")] == [as_bytes(each) for each in asker.requests]
    hows = {each.event.how for each in told(kd, "r", page_events.PageFaulted)}
    assert hows == {"recalled", "reread"}
    because = {each.event.because for each in told(kd, "r", page_events.PageEvicted)}
    assert "budget" in because
    assert not kd.store.verify().problems


def test_what_is_decided_of_a_window_stands_before_the_step_that_follows_it(processes: Processes, far: Far) -> None:
    asker, kd = Asker(), processes.new()
    kd.run(asker.agent(), "Go.", id="r")
    numbers = [step.id for step in kd.state("r").fold.steps]
    intended = {step.id: step.intended for step in kd.state("r").fold.steps}
    decided = [
        each
        for kind in (page_events.PageEvicted, page_events.PageFaulted, page_events.PagePinned)
        for each in told(kd, "r", kind)
    ]
    for each in decided:
        assert each.event.step in numbers
        assert each.seq < intended[each.event.step]
        assert each.event.at > 0


def test_what_one_call_decides_is_appended_at_once(processes: Processes, far: Far) -> None:
    appended: list[list[str]] = []
    append = processes.store.append

    def noted(items: Sequence[Append]) -> Any:
        appended.extend([event_codec.KINDS[_kind(row.body)].__name__ for row in item.rows] for item in items)
        return append(items)

    processes.store.append = noted  # type: ignore[method-assign]
    processes.new().run(Asker().agent(), "Go.", id="r")
    whole = [each for each in appended if any(kind.startswith("Page") for kind in each)]
    assert ["PageFaulted", "PagePinned"] in whole
    assert ["PageFaulted", "PagePinned", "PageEvicted"] in whole
    assert not any(each[0] == "PagePinned" for each in whole)


def _kind(body: bytes) -> str:
    return body.split(b'"', 4)[3].decode()


def test_the_choice_of_a_tool_is_one_of_the_windows_own_too(processes: Processes, far: Far) -> None:
    kd = processes.new()
    kd.run(Asker().agent(), "Go.", id="r")
    decisions = kd.state("r").decisions
    assert all({"recall", "paged_read"} <= set(decision.options or ()) for decision in decisions)
    assert "recall" in [decision.choice for decision in decisions]


def test_without_a_budget_nothing_is_different(processes: Processes, far: Far) -> None:
    script = [(read(0),), (read(1), read(0)), (Call("recall", {"handle": "m2"}),)]
    asker, kd = Asker(script=script), processes.new()
    kd.run(asker.agent(budget=None), "Go.", id="r")
    assert not paged(kd, "r")
    assert [tool["name"] for tool in asker.requests[0]["tools"]] == [tool.name for tool in TOOLS]
    assert far.looks == ["read file_0.py", "read file_1.py", "read file_0.py"]
    last = sent(asker.requests[-1])
    assert [len(sent(request)) for request in asker.requests] == [1, 3, 5, 7]
    assert last[-1]["content"][0]["content"].startswith("error: no tool is called recall")


def test_the_result_has_the_whole_history_whatever_was_sent(processes: Processes, far: Far) -> None:
    asker, kept = Asker(), list[Any]()

    @killick.agent(name="paged_keeper")
    async def keeper(run: killick.Run) -> int:
        result = await killick.loop(run, asker.ask, TOOLS, messages="Go.", provider="anthropic", budget=BUDGET)
        kept.extend(result.messages)
        return result.turns

    assert processes.new().run(keeper, id="r") == len(SCRIPT) + 1
    assert [message["role"] for message in kept] == ["user", *["assistant", "user"] * len(SCRIPT), "assistant"]
    assert kept[2]["content"][0]["content"] == page("file_0.py")
    assert "left the window" not in json.dumps(kept)
    assert "left the window" in json.dumps(asker.requests[-1])


# replaying ----------------------------------------------------------------------------------------


def stopped_at(processes: Processes, asker: Asker, turn: int, *, run: str = "r", **options: Any) -> None:
    """A run whose process dies while its model is asked for the so-many-th time."""
    kd, view = processes.mortal()

    def dies(number: int) -> None:
        if number == turn:
            view.die()

    asker.before = dies
    with pytest.raises(StoreUnavailable):
        kd.run(asker.agent(**options), "Go.", id=run)
    asker.before = lambda turn: None
    processes.mourn()


@pytest.mark.gate(1)
@every_provider
def test_a_replay_sends_the_same_bytes_and_asks_nobody(provider: Provider, processes: Processes, far: Far) -> None:
    whole = Asker(provider)
    processes.new().run(whole.agent(), "Go.", id="whole")
    asker, looks = Asker(provider), list(far.looks)
    stopped_at(processes, asker, 17)
    before, kd = len(asker.requests), processes.new()
    kd.run(asker.agent(), "Go.", id="r")
    assert as_bytes(asker.requests[before - 1]) == as_bytes(asker.requests[before]), "what was cut off is asked again"
    del asker.requests[before]
    assert [as_bytes(each) for each in asker.requests] == [as_bytes(each) for each in whole.requests]
    assert [as_bytes(each) for each in asked(kd, "r")] == [as_bytes(each) for each in whole.requests]
    assert not told(kd, "r", e.StepDrifted)
    assert far.looks == looks * 2
    assert paged(kd, "r") == paged(kd, "whole")


def test_another_budget_counts_from_where_the_record_ends(processes: Processes, far: Far) -> None:
    asker = Asker()
    stopped_at(processes, asker, 14)
    kd = processes.new()
    before = asked(kd, "r")
    kd.run(asker.agent(budget=100_000), "Go.", id="r")
    after = asked(kd, "r")
    assert [as_bytes(each) for each in after[: len(before)]] == [as_bytes(each) for each in before]
    drifted = {each.event.step for each in told(kd, "r", e.StepDrifted)}
    assert not drifted, "what is replayed is what was decided then"
    forced = [each.event.turn for each in told(kd, "r", page_events.PageEvicted) if each.event.because == "budget"]
    assert 7 <= max(forced) <= 14


def test_a_replay_asks_no_policy(processes: Processes, far: Far) -> None:
    class Once(WorkingSet):
        def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]:
            chosen.append(now.turn)
            return super().choose(pages, now)

    chosen: list[int] = []
    asker, window = Asker(), killick.Window(BUDGET, policy=Once(), shape="anthropic")
    stopped_at(processes, asker, 14, budget=None, window=window)
    live = list(chosen)
    processes.new().run(asker.agent(budget=None, window=window), "Go.", id="r")
    assert (min(live), max(live)) == (0, 14)
    assert sorted(set(chosen[len(live) :])) == list(range(15, len(SCRIPT) + 1)), "the last was decided and recorded"


def test_a_run_that_had_no_window_goes_on_with_one(processes: Processes, far: Far) -> None:
    asker = Asker(script=SCRIPT[:9])
    stopped_at(processes, asker, 8, budget=None)
    kd = processes.new()
    assert kd.run(asker.agent(), "Go.", id="r") == "Turn 9."
    assert "left the window" in json.dumps(asker.requests[-1])
    assert "left the window" not in json.dumps(asked(kd, "r")[7])


def test_a_replay_in_isolation_follows_the_record_of_the_window(processes: Processes, far: Far) -> None:
    asker, kd = Asker(), processes.new()
    agent = asker.agent()
    kd.run(agent, "Go.", id="r")
    requests, looks, record = len(asker.requests), len(far.looks), paged(kd, "r")
    replayed = kd.replay("r", agent)
    assert (replayed.status, replayed.result) == ("completed", f"Turn {len(SCRIPT)}.")
    assert not replayed.drifts
    assert not replayed.strays
    half = kd.replay("r", agent, to="40")
    assert half.stopped is not None
    assert not half.drifts
    assert (len(asker.requests), len(far.looks), paged(kd, "r")) == (requests, looks, record)


def test_a_fork_in_the_middle_keeps_what_was_decided_before_it(processes: Processes, far: Far) -> None:
    asker, kd = Asker(), processes.new()
    agent = asker.agent()
    kd.run(agent, "Go.", id="r")
    models = [step for step in kd.state("r").fold.steps if step.sort == "model"]
    for index in (6, 9, 14):
        start = len(asker.requests)
        fork = kd.fork("r", f"{models[index].id}:before", effects="live", id=f"fork_{index}")
        kd.run(agent, "Go.", id=fork.id)
        told_now, told_then = asker.requests[start], asker.requests[index]
        assert as_bytes(told_now) == as_bytes(told_then)


@pytest.mark.slow
def test_what_a_cut_within_a_decision_left_out_is_decided_again(processes: Processes, far: Far) -> None:
    asker, kd = Asker(), processes.new()
    agent = asker.agent()
    kd.run(agent, "Go.", id="r")
    cuts = [each for kind in (page_events.PageFaulted, page_events.PagePinned) for each in told(kd, "r", kind)]
    models = {step.id: number for number, step in enumerate(s for s in kd.state("r").fold.steps if s.sort == "model")}
    checked = 0
    for each in cuts:
        turn = models.get(each.event.step)
        if turn is None or turn > 16:
            continue
        start = len(asker.requests)
        fork = kd.fork("r", f"@{each.seq}", effects="live", id=f"cut_{each.seq}")
        kd.run(agent, "Go.", id=fork.id)
        assert as_bytes(asker.requests[start]) == as_bytes(asker.requests[turn]), each
        checked += 1
    assert checked > 4


def test_a_rewind_to_before_an_eviction_brings_the_pages_back(processes: Processes, far: Far) -> None:
    asker, kd = Asker(script=SCRIPT[:8]), processes.new()
    agent = asker.agent()
    kd.run(agent, "Go.", id="r")
    evicted = next(each for each in told(kd, "r", page_events.PageEvicted) if each.event.because == "budget")
    assert "left the window" in json.dumps(asker.requests[evicted.event.turn])
    models = [step for step in kd.state("r").fold.steps if step.sort == "model"]
    start = len(asker.requests)
    kd.rewind("r", f"{models[evicted.event.turn - 2].id}:before")
    kd.run(agent, "Go.", id="r")
    assert [as_bytes(each) for each in asker.requests[start:]] == [
        as_bytes(each) for each in asker.requests[evicted.event.turn - 2 : start]
    ]


# what a tool reads --------------------------------------------------------------------------------

LONG = [(read(number),) for number in range(8)]
WRITE = (Call("paged_write", {"path": "file_9.py", "text": "x"}),)


def test_a_read_of_what_left_runs_again_and_is_a_fault_where_it_is_the_same(processes: Processes, far: Far) -> None:
    asker, kd = Asker(script=[*LONG, (read(0),)]), processes.new()
    kd.run(asker.agent(), "Go.", id="r")
    assert far.looks[len(LONG) :] == ["read file_0.py"]
    [fault] = told(kd, "r", page_events.PageFaulted)
    assert (fault.event.how, fault.event.page) == ("reread", "m2.0")


def test_a_read_that_ran_again_and_found_something_else_is_no_fault(processes: Processes, far: Far) -> None:
    written = Call("paged_write", {"path": "file_0.py", "text": "x"})
    asker, kd = Asker(script=[*LONG, (written,), (read(0),)]), processes.new()
    kd.run(asker.agent(), "Go.", id="r")
    assert not told(kd, "r", page_events.PageFaulted)
    assert page("file_0.py", 1) in json.dumps(asker.requests[-1]).replace("\\n", "\n")


# recalls ------------------------------------------------------------------------------------------


def test_a_handle_that_nobody_knows_is_an_answer_and_the_same_on_replay(processes: Processes, far: Far) -> None:
    asker = Asker(script=[(Call("recall", {"handle": "m999"}), Call("recall", {}))])
    stopped_at(processes, asker, 1)
    kd = processes.new()
    kd.run(asker.agent(), "Go.", id="r")
    assert as_bytes(asker.requests[1]) == as_bytes(asker.requests[2])
    assert [block.get("is_error") for block in sent(asker.requests[1])[-1]["content"]] == [True, True]


def test_tools_of_the_provider_are_sent_as_they_are(processes: Processes, far: Far) -> None:
    theirs = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    asker = Asker(script=[(read(0),)])

    @killick.agent(name="paged_searcher")
    async def searcher(run: killick.Run) -> str:
        result = await killick.loop(
            run, asker.ask, TOOLS, messages="Go.", provider="anthropic", budget=BUDGET, tools=[theirs]
        )
        return result.text

    processes.new().run(searcher, id="r")
    tools = {tool["name"]: tool for tool in asker.requests[-1]["tools"]}
    assert tools["web_search"] == theirs
    assert asker.requests[0]["tools"] == asker.requests[-1]["tools"]


# windows ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_window_that_many_runs_share_holds_for_each_its_own(processes: Processes, far: Far) -> None:
    shared = killick.Window(BUDGET, shape="anthropic")
    first, second = Asker(), Asker()
    kd = processes.new()
    kd.run(first.agent(budget=None, window=shared), "Go.", id="a")
    kd.run(second.agent(budget=None, window=shared), "Go.", id="b")
    assert [as_bytes(each) for each in first.requests] == [as_bytes(each) for each in second.requests]
    stopped_at(processes, second, len(second.requests) + 11, budget=None, window=shared)
    start = len(second.requests)
    processes.new().run(second.agent(budget=None, window=shared), "Go.", id="r")
    assert [as_bytes(each) for each in second.requests[start:]] == [as_bytes(each) for each in first.requests[11:]]


def test_a_second_loop_goes_on_with_the_window_of_the_first(processes: Processes, far: Far) -> None:
    asker = Asker(script=LONG)

    @killick.agent(name="paged_talker")
    async def talker(run: killick.Run) -> int:
        window = killick.Window(BUDGET, shape="anthropic")
        first = await killick.loop(run, asker.ask, TOOLS, messages="Go.", provider="anthropic", window=window)
        asker.script = ()
        more = [*first.messages, {"role": "user", "content": "And now?"}]
        await killick.loop(run, asker.ask, TOOLS, messages=more, provider="anthropic", window=window)
        return len(more)

    kd = processes.new()
    kd.run(talker, id="r")
    before, after = sent(asker.requests[-2]), sent(asker.requests[-1])
    assert [as_bytes(each) for each in after[: len(before)]] == [as_bytes(each) for each in before]


def test_a_budget_and_a_window_are_one_too_many(processes: Processes, far: Far) -> None:
    with pytest.raises(killick.RunFailed, match="budget= or window="):
        processes.new().run(Asker().agent(window=killick.Window(BUDGET)), "Go.", id="r")


@pytest.mark.gate(1)
@every_provider
def test_a_loop_of_ones_own_pages_as_durably(provider: Provider, processes: Processes, far: Far) -> None:
    whole = Asker(provider)
    processes.new().run(whole.agent(system=None), "Go.", id="whole")
    asker, place = Asker(provider), "input" if provider == "openai-responses" else "messages"
    tools = killick.Toolset(*TOOLS)

    @killick.agent(name="paged_own_loop")
    async def own(run: killick.Run) -> int:
        window = killick.Window(BUDGET, shape=provider, reads=tools.reads)
        said: list[Any] = [{"role": "user", "content": "Go."}]
        while True:
            fitted = await run.fit(window, said, tools.schemas(provider))
            more = {"max_tokens": 4096} if provider == "anthropic" else {}
            request = {"model": "m", "tools": fitted.tools, **more, place: fitted.messages}
            reply = await run.model(asker.ask, **request)
            answers = await run.dispatch(tools, reply, window=window)
            if not answers:
                return fitted.tokens
            said += [*assistant_messages(reply), *answers]

    far.done.clear()
    processes.new().run(own, id="r")
    assert [sent(each) for each in asker.requests] == [sent(each) for each in whole.requests]


@pytest.mark.slow
def test_a_blocking_run_pages_the_same_way(processes: Processes, far: Far) -> None:
    whole, asker = Asker(), Asker()
    processes.new().run(whole.agent(), "Go.", id="whole")

    def model(**request: Any) -> JSON:
        asker.before(len(asker.requests))
        asker.requests.append(json.loads(as_bytes(request)))
        return answer(request, "anthropic")

    @killick.agent(name="paged_blocking")
    def blocking(run: killick.SyncRun) -> str:
        return killick.loop_sync(
            run, model, TOOLS, messages="Go.", provider="anthropic", budget=BUDGET, system="You sail.", model="m"
        ).text

    kd, view = processes.mortal()
    far.done.clear()
    asker.before = lambda turn: view.die() if turn == 12 else None
    with pytest.raises(StoreUnavailable):
        kd.run(blocking, id="r")
    processes.mourn()
    asker.before = lambda turn: None
    kd = processes.new()
    kd.run(blocking, id="r")
    assert [as_bytes(each) for each in asked(kd, "r")] == [as_bytes(each) for each in whole.requests]
    assert paged(kd, "r") == paged(kd, "whole")


def test_branches_side_by_side_have_windows_of_their_own(processes: Processes, far: Far) -> None:
    whole = Asker(script=SCRIPT[:9])
    processes.new().run(whole.agent(), "Go.", id="whole")
    askers = [Asker(script=SCRIPT[:9]) for _ in range(3)]

    @killick.agent(name="paged_crew")
    async def crew(run: killick.Run) -> list[str]:
        async def one(asker: Asker) -> str:
            options: Any = {"provider": "anthropic", "budget": BUDGET, "system": "You sail.", "model": "m"}
            return (await killick.loop(run, asker.ask, TOOLS, messages="Go.", **options)).text

        return list(await run.gather(*map(one, askers)))

    kd, view = processes.mortal()
    askers[1].before = lambda turn: view.die() if turn == 8 else None
    with pytest.raises(StoreUnavailable):
        kd.run(crew, id="r")
    processes.mourn()
    askers[1].before = lambda turn: None
    kd = processes.new()
    assert kd.run(crew, id="r") == ["Turn 9."] * 3
    for asker in askers:
        assert {as_bytes(each) for each in asker.requests} == {as_bytes(each) for each in whole.requests}
    assert not told(kd, "r", e.StepDrifted)


def test_branches_that_share_a_window_see_each_its_own_history(processes: Processes, far: Far) -> None:
    whole = {name: Asker(script=SCRIPT[:9]) for name in ("Go.", "Go on.")}
    for name, asker in whole.items():
        processes.new().run(asker.agent(), name, id=name)
    window, askers = killick.Window(BUDGET, shape="anthropic"), {name: Asker(script=SCRIPT[:9]) for name in whole}

    @killick.agent(name="paged_sharers")
    async def sharers(run: killick.Run) -> None:
        async def one(name: str, messages: list[Any]) -> list[Any]:
            async def ask(**request: Any) -> JSON:
                await asyncio.sleep(0)
                return await askers[name].ask(**request)

            options: Any = {"provider": "anthropic", "window": window, "system": "You sail.", "model": "m"}
            return (await killick.loop(run, ask, TOOLS, messages=messages, **options)).messages

        said = await run.gather(*(one(name, [{"role": "user", "content": name}]) for name in askers))
        again = [[*messages, {"role": "user", "content": "And?"}] for messages in said]
        await run.gather(*map(one, askers, again))

    processes.new().run(sharers, id="r")
    for name, asker in askers.items():
        requests, expected = (
            [as_bytes(each) for each in asker.requests],
            [as_bytes(each) for each in whole[name].requests],
        )
        assert requests[: len(expected)] == expected
        last = expected[-1]
        assert requests[len(expected)].startswith(last[: last.rindex(b"]")]), "the next round goes on with its window"


def test_windows_that_decide_before_the_same_step_are_told_apart(processes: Processes, far: Far) -> None:
    fitted: list[list[bytes]] = []
    pages = {name: [page(f"{name}_{number}") for number in range(9)] for name in ("red", "blue")}

    @killick.agent(name="paged_pair")
    async def pair(run: killick.Run) -> int:
        said: dict[str, list[Any]] = {name: [{"role": "user", "content": name}] for name in pages}
        windows = {name: killick.Window(1_500, shape="anthropic") for name in pages}
        fitted.append([])
        for number in range(9):
            for name, texts in pages.items():
                call, place = {"type": "tool_use", "id": f"c{number}", "name": "see"}, {"number": number}
                result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": texts[number]}
                if name == "red" or number % 2:
                    said[name] += [{"role": "assistant", "content": [{**call, "input": place}]}]
                    said[name] += [{"role": "user", "content": [result]}]
                sent_now = await run.fit(windows[name], said[name])
                fitted[-1].append(as_bytes({"messages": sent_now.messages}))
            await run.decided("Go on?", True)
        return sum(b"left the window" in each for each in fitted[-1])

    kd = processes.new()
    assert kd.run(pair, id="r") > 4
    assert kd.replay("r", pair).status == "completed"
    assert fitted[0] == fitted[1]
    cut = [each for each in told(kd, "r", page_events.PageEvicted) if each.data.get("window") == 1][-1]
    kd.run(pair, id=kd.fork("r", f"@{cut.seq - 1}").id)
    assert fitted[2] == fitted[0]


def test_what_people_say_meanwhile_reaches_the_model(processes: Processes, far: Far) -> None:
    asker, kd = Asker(script=SCRIPT[:10]), processes.new()
    asker.before = lambda turn: kd.say("r", "Mind the tide.") if turn == 8 else None
    kd.run(asker.agent(), "Go.", id="r")
    assert "Mind the tide." not in json.dumps(asker.requests[8])
    assert "Mind the tide." in json.dumps(asker.requests[9])


def test_a_renewed_run_begins_with_an_empty_window(processes: Processes, far: Far) -> None:
    asker = Asker(script=LONG)

    @killick.agent(name="paged_renewed")
    async def renewed(run: killick.Run, again: bool) -> str:
        result = await killick.loop(run, asker.ask, TOOLS, messages="Go.", provider="anthropic", budget=BUDGET)
        if again:
            await run.renew(False)
        return result.text

    processes.new().run(renewed, True, id="r")
    half = len(asker.requests) // 2
    assert [as_bytes(each) for each in asker.requests[:half]] == [as_bytes(each) for each in asker.requests[half:]]


@pytest.mark.slow
def test_check_finds_nothing_wrong_with_a_loop_that_pages(far: Far) -> None:
    asker = Asker(script=[*LONG[:4], (Call("recall", {"handle": "m2"}), read(0)), WRITE])
    agent = asker.agent(tools=TOOLS[:4], budget=1_500)
    report = interrupt_everywhere(agent, input="Go.", fakes={asker.ask: asker.ask}, real=["*"], stories_max=120)
    assert report.holds
    assert "left the window" in json.dumps(asker.requests)


# declaring ----------------------------------------------------------------------------------------


def test_a_tool_reads_or_not_by_its_arguments() -> None:
    def effect(command: str) -> str:
        return "reads" if command == "status" else "idempotent"

    @killick.tool(effect=effect)  # type: ignore[arg-type]
    def paged_git(command: str) -> str:
        return command

    tools = killick.Toolset(paged_git)
    assert tools.reads("paged_git", {"command": "status"})
    assert not tools.reads("paged_git", {"command": "push"})
    assert not tools.reads("paged_git", {"comand": "status"})
    assert not tools.reads("nobody", {})
