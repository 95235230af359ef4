"""Paging for agents that know nothing of it: what upstream gets, what the client sees, and what is on record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import openai
import pytest

import killick
from killick.model import events as e
from killick.model import page_events
from processes import told
from proxy.agents import READ, Loop, text_of, tool
from proxy.provider import Desk, Fails, Says, desk
from window.published import faults

BUDGET = 4_000
FORMS = [("openai", False), ("openai", True), ("anthropic", False), ("anthropic", True)]
each_form = pytest.mark.parametrize(
    ("shape", "streams"), FORMS, ids=["chat", "chat-stream", "messages", "messages-stream"]
)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path, budget=BUDGET) as made:
        yield made


def handles(body: Any) -> list[str]:
    """What the tombstones in a request name."""
    return re.findall(r'recall\("([^"]+)"\)', re.sub(r"\\+", "", json.dumps(body["messages"])))


def results(body: Any) -> dict[str, str]:
    """The results in a request, by their calls."""
    found: dict[str, str] = {}
    for message in body["messages"]:
        if message["role"] == "tool":
            found[message["tool_call_id"]] = message["content"]
        elif message["role"] == "user" and isinstance(message["content"], list):
            found |= {
                block["tool_use_id"]: block["content"] for block in message["content"] if block["type"] == "tool_result"
            }
    return found


def calls(body: Any) -> list[str]:
    """The calls in a request, by name."""
    found: list[str] = []
    for message in body["messages"]:
        if message["role"] == "assistant":
            found += [call["function"]["name"] for call in message.get("tool_calls") or []]
            content = message["content"] if isinstance(message["content"], list) else []
            found += [block["name"] for block in content if block["type"] == "tool_use"]
    return found


def refused(here: Desk, shape: str, chosen: Callable[[Any], bool] = lambda body: True) -> list[str]:
    """What a provider would refuse of all that was sent."""
    return [
        fault
        for body in filter(chosen, here.provider.bodies)
        for fault in faults(shape, body["messages"], body.get("tools") or (), body.get("system"))
    ]


def only_run(kd: killick.Client) -> str:
    [row] = kd.list()
    return row.id


def reading(count: int) -> list[Says]:
    return [Says(f"Now {number}. ", [("read_file", {"path": f"f{number}.py"})]) for number in range(count)]


@pytest.mark.slow
@each_form
def test_over_many_turns_every_request_is_valid_and_within_the_budget(here: Desk, shape: str, streams: bool) -> None:
    here.provider.replies(*reading(30), Says("All read."))
    with here.proxied() as url, Loop(url, shape, streams=streams) as agent:
        assert agent.tell("Read everything.") == "All read."
    assert refused(here, shape) == []
    sizes = [len(request.raw) / 4 for request in here.provider.requests]
    assert len(sizes) == 31
    assert max(sizes) < BUDGET * 1.05, "whatever was read, a call takes about what was allowed and no more"
    assert handles(here.provider.bodies[-1])
    with here.record() as kd:
        run = only_run(kd)
        sent = [data["arguments"] for _, _, data in told(kd, run, e.StepIntended)]
        assert sent == here.provider.bodies, "on record is what really went out"
        assert told(kd, run, page_events.PageEvicted)
        assert not kd.store.verify(run).problems


@pytest.mark.slow
def test_many_agents_at_once_keep_their_own_conversations(here: Desk) -> None:
    def script(body: Any) -> Says:
        said = next(message["content"] for message in body["messages"] if message["role"] == "user")
        name = said if isinstance(said, str) else said[0]["text"]
        chance = Random(len(json.dumps(body)))
        left = [handle for handle in handles(body) if "-" not in handle]
        asks = [("recall", {"handle": chance.choice(left)})] if left and chance.random() < 0.4 else []
        reads = (
            [("read_file", {"path": f"{name}/{chance.randrange(9)}.py"})] if chance.random() < 0.7 or not asks else []
        )
        return Says(f"{name} goes on. ", [*asks, *reads])

    def work(url: str, number: int) -> list[Any]:
        with Loop(url, "anthropic" if number % 2 else "openai", streams=number % 3 > 0) as agent:
            agent.messages.append({"role": "user", "content": f"agent {number}"})
            for _ in range(12):
                wanted = agent.step()
                agent.answer(wanted) if wanted else agent.messages.append({"role": "user", "content": "And?"})
            return agent.messages

    here.provider.script = script
    with here.proxied() as url, ThreadPoolExecutor(6) as pool:
        held = [json.dumps(messages) for messages in pool.map(partial(work, url), range(6))]
    for number, messages in enumerate(held):
        assert "recall" not in messages
        assert set(re.findall(r"agent (\d)", messages)) == {str(number)}
    assert refused(here, "openai", lambda body: "max_tokens" not in body) == []
    assert refused(here, "anthropic", lambda body: "max_tokens" in body) == []
    with here.record() as kd:
        rows = kd.list()
        assert len(rows) == 6
        for row in rows:
            sent = json.dumps([data["arguments"]["messages"] for _, _, data in told(kd, row.id, e.StepIntended)])
            assert len(set(re.findall(r"agent (\d)", sent))) == 1
        assert not kd.store.verify().problems


def asks_back(*names: str) -> Any:
    """A script that reads ten files, recalls the first tombstone there is, and ends with these calls."""
    waiting: list[Any] = [*reading(10)]
    asked: list[str] = []

    def script(body: Any) -> Says:
        if waiting:
            return waiting.pop(0)
        if not asked:
            asked.append(next(handle for handle in handles(body) if "-" not in handle))
            more = [(name, {"path": "more.py"}) for name in names]
            return Says("Let me see. ", [("recall", {"handle": asked[0]}), *more], thinking="I had that.")
        return Says("There it is.")

    return script


@pytest.mark.gate(1)
@each_form
def test_what_the_window_is_asked_never_reaches_the_client(here: Desk, shape: str, streams: bool) -> None:
    here.provider.script = asks_back()
    with here.proxied() as url, Loop(url, shape, streams=streams) as agent:
        said = agent.tell("Read, and look again.")
        seen, last = json.dumps(agent.messages), agent.replies[-1]
        assert said == "Let me see. There it is.", "one reply, though the model was asked twice"
        assert "recall" not in seen
        [before, after] = here.provider.bodies[-2:]
        assert calls(after)[-1] == "recall"
        [(_, back)] = [pair for pair in results(after).items() if pair[0] not in results(before)]
        assert "says something of its own" in back
        agent.tell("Go on.")
    assert refused(here, shape) == []
    assert "recall" in calls(here.provider.bodies[-1]), (
        "what really was said is sent on, though the client never saw it"
    )
    if shape == "anthropic":
        assert (last.stop_reason, last.usage.output_tokens) == ("end_turn", 20)
        assert last.usage.input_tokens > len(json.dumps(before)) // 4, "both rounds count"
        assert [block.type for block in last.content] == ["thinking", "text", "text"]
    else:
        assert (last.choices[0].finish_reason, last.usage.completion_tokens) == ("stop", 20)
    with here.record() as kd:
        run = only_run(kd)
        assert [event.how for _, event, _ in told(kd, run, page_events.PageFaulted)] == ["recalled"]
        assert len(told(kd, run, e.StepIntended)) == 13


@pytest.mark.gate(1)
@each_form
def test_of_a_mixed_reply_the_client_gets_its_own_calls_and_upstream_all_results(
    here: Desk, shape: str, streams: bool
) -> None:
    here.provider.script = asks_back("read_file")
    with here.proxied() as url, Loop(url, shape, streams=streams) as agent:
        assert agent.tell("Read, and look again.") == "There it is."
        assert "recall" not in json.dumps(agent.messages)
        assert len(here.provider.requests) == 12, "it is not asked again before the client answered"
        assert len(agent.replies) == 12
        last = here.provider.bodies[-1]
        mixed = list(results(last).items())[-2:]
        assert [("says something" in text, "more.py" in text) for _, text in mixed] == [(True, False), (True, True)]
        assert calls(last)[-2:] == ["recall", "read_file"]
        first = agent.replies[-2]
        reason = first.stop_reason if shape == "anthropic" else first.choices[0].finish_reason
        assert reason in ("tool_use", "tool_calls")
    assert refused(here, shape) == []
    # After a restart the history is put together from the record.
    here.provider.replies(Says("Yes."))
    with here.proxied() as url, Loop(url, shape, streams=streams) as again:
        again.messages = agent.messages
        again.tell("And now?")
    assert here.provider.bodies[-1]["messages"][: len(last["messages"])] == last["messages"]
    with here.record() as kd:
        run = only_run(kd)
        assert [event.name for _, event, _ in told(kd, run, e.FactDrawn)] == ["exchange"]


@pytest.mark.gate(1)
@each_form
def test_a_model_that_asks_for_ever_is_stopped(here: Desk, shape: str, streams: bool) -> None:
    here.provider.script = lambda body: Says("Hm. ", [("recall", {"handle": "m1"})])
    with here.proxied() as url, Loop(url, shape, streams=streams) as agent:
        assert agent.tell("Read.") == "Hm. " * 8
        assert "recall" not in json.dumps(agent.messages)
        here.provider.replies(Says("Well."))
        assert agent.tell("And?") == "Well."
    assert refused(here, shape) == []


OPTIONS: dict[str, Any] = {
    f"option_{number}": {"type": "string", "description": "Some option. " * 8} for number in range(6)
}
MANY = [
    tool(f"tool_{number}", f"Does thing {number}. " + "It does so with care. " * 8, path="string", **OPTIONS)
    for number in range(12)
]


@pytest.mark.gate(1)
@each_form
def test_a_stub_that_is_called_is_answered_with_its_schema_and_then_run(here: Desk, shape: str, streams: bool) -> None:
    given = {"path": "x"} | {f"option_{each}": "y" for each in range(6)}
    here.provider.replies(
        Says("", [("tool_7", {})]), Says("", [("tool_7", given)]), Says("Done.", [("tool_7", given)]), Says("Over.")
    )
    ran: list[str] = []

    def run(name: str, arguments: dict[str, Any]) -> str:
        ran.append(name)
        return "ok"

    with here.proxied() as url, Loop(url, shape, streams=streams, tools=[*MANY, READ], run=run) as agent:
        assert agent.tell("Do it.") == "Over."
    assert ran == ["tool_7", "tool_7"], "not the first time, when it knew nothing of the tool but its name"
    first, second = here.provider.bodies[:2]
    assert len(json.dumps(first["tools"])) < len(json.dumps(MANY)) / 3
    assert "option_5" in next(iter(results(second).values()))
    assert len({json.dumps(body["tools"]) for body in here.provider.bodies}) == 1
    assert refused(here, shape) == []


@pytest.mark.gate(1)
@each_form
def test_what_a_provider_does_not_take_goes_out_again_as_it_came(here: Desk, shape: str, streams: bool) -> None:
    def script(body: Any) -> Any:
        if "recall" in json.dumps(body["tools"]):
            return Fails(400, {"error": {"message": "unknown tool", "type": "invalid_request_error"}})
        return Says("Fine.")

    here.provider.script = script
    with here.proxied() as url, Loop(url, shape, streams=streams) as agent:
        assert agent.tell("Hello.") == "Fine."
        assert agent.tell("Again.") == "Fine."
    assert len(here.provider.requests) == 3, "and it is not tried again with that conversation"
    with here.record() as kd:
        run = only_run(kd)
        assert [data["note"] for _, _, data in told(kd, run, e.NoteMade)] == [
            "not paged: 127.0.0.1 said 400 to what was sent"
        ]


@pytest.mark.gate(1)
@each_form
def test_a_second_round_that_a_provider_does_not_take_is_asked_as_it_came(
    here: Desk, shape: str, streams: bool
) -> None:
    def script(body: Any) -> Any:
        if "recall" in calls(body):
            return Fails(400, {"error": {"message": "no thoughts, please", "type": "invalid_request_error"}})
        if "recall" in json.dumps(body["tools"]):
            return Says("Let me see. ", [("recall", {"handle": "m0"})], thinking="Hm.")
        return Says("There.", [("read_file", {"path": "x"})]) if len(here.provider.requests) < 4 else Says("Done.")

    here.provider.script = script
    with here.proxied() as url, Loop(url, shape, streams=streams) as agent:
        assert agent.tell("Hello.") == "Done."
        assert "recall" not in json.dumps(agent.messages)
        first = agent.messages[1]["content"]
        seen = first if isinstance(first, str) else "".join(block.get("text", "") for block in first)
        assert seen == ("Let me see. There." if streams else "There.")
    assert refused(here, shape) == []
    with here.record() as kd:
        only_run(kd)


@pytest.mark.gate(1)
@each_form
def test_a_request_that_is_wrong_either_way_is_the_clients_to_mend(here: Desk, shape: str, streams: bool) -> None:
    wrong = {"error": {"message": "no such model", "type": "invalid_request_error"}}
    here.provider.replies(Fails(400, wrong), Fails(400, wrong), Says("Fine."))
    with here.proxied() as url, Loop(url, shape, streams=streams) as agent:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="no such model"):
            agent.tell("Hello.")
        assert agent.step() == []
    assert "recall" in json.dumps(here.provider.bodies[-1]["tools"]), "it is paged as before"


def test_a_failure_in_paging_breaks_no_agent(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("killick.window.Window.plan", broken)
    with here.proxied() as url, Loop(url, "openai") as agent:
        assert agent.tell("Hello.") == "hello"
    assert len(here.provider.bodies[0]["tools"]) == 1
    with here.record() as kd:
        [(_, _, data)] = told(kd, only_run(kd), e.NoteMade)
        assert data["note"] == "not paged: paging failed (RuntimeError: a bug)"


def test_requests_without_tools_are_sent_as_they_came(here: Desk) -> None:
    with here.proxied() as url, Loop(url, "anthropic", tools=[]) as agent:
        agent.tell("Hello. " + text_of("long", 1_000))
    assert "tools" not in here.provider.bodies[0]
    with here.record() as kd:
        [(_, _, data)] = told(kd, only_run(kd), e.NoteMade)
        assert data["note"].startswith("not paged: it has no tools")
