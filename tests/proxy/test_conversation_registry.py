"""Which run a request goes on with: found again by its history, after restarts too; never mixed with another."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import killick
from killick.model import events as e
from killick.proxy import conversation_registry
from killick.store import SqliteStore
from processes import kinds, told
from proxy.agents import KEY, Loop
from proxy.provider import Desk, Says, desk, hanging_up

BOTH = pytest.mark.parametrize("shape", ["openai", "anthropic"])


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        made.provider.script = lambda body: Says(f"reply to {len(body['messages'])}")
        yield made


def asked(kd: killick.Client, run: str) -> list[int]:
    """How many messages each call of a run had."""
    return [len(data["arguments"]["messages"]) for _, _, data in told(kd, run, e.StepIntended)]


def started(kd: killick.Client) -> dict[str, str | None]:
    """The runs, oldest first, and which one each left."""
    rows = reversed(kd.list())
    return {row.id: told(kd, row.id, e.RunStarted)[0].event.follows for row in rows}


@pytest.mark.gate(1)
@BOTH
def test_a_conversation_is_one_run_and_goes_on_after_a_restart(here: Desk, shape: str) -> None:
    with here.proxied() as url, Loop(url, shape) as one, Loop(url, shape) as other:
        for turn in range(3):
            one.tell(f"one {turn}")
            other.tell(f"other {turn}")
    with here.proxied() as url, Loop(url, shape) as again:
        again.messages = one.messages
        again.tell("and on")
    with here.record() as kd:
        first, second = started(kd)
        plus = 1 if shape == "openai" else 0
        assert asked(kd, first) == [1 + plus, 3 + plus, 5 + plus, 7 + plus]
        assert asked(kd, second) == [1 + plus, 3 + plus, 5 + plus]
        assert kinds(kd, first).count("run.resumed") == 1
        assert kinds(kd, first)[-1] == "run.completed"
        assert not kd.store.verify().problems


def test_a_history_that_was_edited_starts_a_run_that_names_the_one_it_left(here: Desk) -> None:
    with here.proxied() as url, Loop(url, "openai") as agent:
        for turn in range(3):
            agent.tell(f"turn {turn}")
        agent.messages[2]["content"] = "something else"
        agent.tell("after the edit")
        agent.messages = [agent.messages[0], {"role": "assistant", "content": "a summary"}]
        agent.tell("after a compaction")
    with here.record() as kd:
        [first, second, third] = started(kd).items()
        assert first[1] is None
        assert second[1] == first[0]
        assert third[1] == second[0]
        assert asked(kd, second[0]) == [8]


@BOTH
def test_the_same_question_twice_is_two_conversations_that_stay_apart(here: Desk, shape: str) -> None:
    count = iter(range(100))
    here.provider.script = lambda body: Says(f"answer {next(count)}")
    with here.proxied() as url, Loop(url, shape) as one, Loop(url, shape) as other:
        one.tell("hello")
        other.tell("hello")
        one.tell("go on")
        other.tell("go on")
        one.tell("end")
    with here.record() as kd:
        assert sorted(len(asked(kd, run)) for run in started(kd)) == [2, 3]


@pytest.mark.slow
def test_requests_of_one_conversation_at_once_are_never_mixed(here: Desk) -> None:
    inside: list[int] = []

    async def slow() -> bool:
        inside.append(1)
        while len(inside) < 5:
            await asyncio.sleep(0.01)
        return True

    async def fan(url: str, messages: list[Any]) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            branches = [[*messages, {"role": "user", "content": f"branch {n}"}] for n in range(5)]
            await asyncio.gather(*(client.chat.completions.create(model="m", messages=each) for each in branches))

    with here.proxied() as url, Loop(url, "openai", tools=[]) as agent:
        agent.tell("hello")
        here.provider.before = slow
        asyncio.run(fan(url, [{"role": "system", "content": agent.system}, *agent.messages]))
    with here.record() as kd:
        runs = started(kd)
        first = next(iter(runs))
        assert len(runs) == 5, "one of them goes on with the run, the others leave it"
        assert set(list(runs.values())[1:]) == {first}
        branches = [told(kd, run, e.StepIntended)[-1].data["arguments"]["messages"][-1]["content"] for run in runs]
        assert sorted(branches) == [f"branch {n}" for n in range(5)]
        for run in runs:
            assert kinds(kd, run).count("step.started") == kinds(kd, run).count("attempt.ended")


def test_what_clients_write_anew_makes_no_other_conversation(here: Desk) -> None:
    with here.proxied() as url, anthropic.Anthropic(base_url=url, api_key=KEY) as client:
        messages: list[Any] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"turn {turn}"})
            marked = copy.deepcopy(messages)
            marked[-1]["content"] = [
                {"type": "text", "text": messages[-1]["content"], "cache_control": {"type": "ephemeral"}}
            ]
            reply = client.messages.create(
                model="m", max_tokens=9, messages=marked, system=f"It is {turn} o'clock.", tools=[]
            )
            messages.append({"role": "assistant", "content": f"  {reply.content[0].text}\n"})  # type: ignore[union-attr]
    with here.proxied() as url, openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as chat:
        said: list[Any] = [{"role": "system", "content": "a"}]
        for turn in range(3):
            said += [{"role": "user", "content": f"turn {turn}", "name": None}]
            answer = chat.chat.completions.create(model="m", messages=said).choices[0].message
            said[0] = {"role": "system", "content": f"It is {turn} o'clock."}
            said[-1].pop("name")
            said.append(answer.model_dump())
    with here.record() as kd:
        assert [len(asked(kd, run)) for run in started(kd)] == [4, 3]


def test_a_run_may_be_named_by_its_client(here: Desk) -> None:
    headers = {"X-Killick-Run": "mend-17"}
    with here.proxied() as url, Loop(url, "openai", headers=headers) as agent:
        agent.tell("hello")
        agent.tell("go on")
    with here.proxied() as url, Loop(url, "openai", headers=headers) as again:
        again.messages = agent.messages
        again.tell("and on")
        again.messages = []
        again.tell("anew")
        again.tell("anew, and on")
    with here.record() as kd:
        assert started(kd) == {"mend-17": None, "mend-17.2": "mend-17"}
        assert [len(asked(kd, run)) for run in ("mend-17", "mend-17.2")] == [3, 2]


@pytest.mark.parametrize(
    ("name", "says"),
    [("other", "is a run of somebody"), ("killick:x", "choose another"), ("x" * 201, "not a valid run id")],
)
def test_a_name_that_is_somebody_elses_is_refused_in_one_line(here: Desk, name: str, says: str) -> None:
    with here.record() as kd:
        kd.runtime.log.create(e.RunStarted(at=1, run="other", agent="somebody"), {"input": None})
    headers = {"X-Killick-Run": name}
    with (
        here.proxied() as url,
        Loop(url, "anthropic", headers=headers) as agent,
        pytest.raises(anthropic.BadRequestError, match=says),
    ):
        agent.tell("hello")
    assert here.provider.requests == []


def test_a_named_run_is_asked_one_thing_at_a_time(here: Desk) -> None:
    async def ask(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            asks = [
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hello"}], extra_headers={"X-Killick-Run": "one"}
                )
                for _ in range(4)
            ]
            await asyncio.gather(*asks)

    with here.proxied() as url:
        asyncio.run(ask(url))
    with here.record() as kd:
        assert sorted(started(kd)) == ["one", "one.2", "one.3", "one.4"]
        assert all(len(asked(kd, run)) == 1 for run in started(kd))


def test_a_client_that_leaves_while_its_run_is_looked_for_takes_nothing_with_it(
    here: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with here.proxied() as url, Loop(url, "openai") as agent:
        agent.tell("hello")
    opening, go_on = threading.Event(), threading.Event()
    real = conversation_registry.Conversation.opened

    def slowly(*args: Any) -> Any:
        opening.set()
        assert go_on.wait(300)
        return real(*args)

    monkeypatch.setattr(conversation_registry.Conversation, "opened", slowly)
    monkeypatch.setattr(conversation_registry, "PATIENCE_SECONDS", 300)
    with here.proxied() as url:
        messages = [{"role": "system", "content": agent.system}, *agent.messages, {"role": "user", "content": "and on"}]
        with hanging_up(url, "/v1/chat/completions", {"model": "m", "messages": messages}, KEY):
            assert opening.wait(300)
        go_on.set()
        with Loop(url, "openai") as again:
            again.messages = [*agent.messages]
            assert again.tell("and on") == "reply to 4"
    with here.record() as kd:
        [run] = started(kd)
        assert asked(kd, run) == [2, 4]


def test_a_fork_is_not_taken_for_the_conversation(here: Desk) -> None:
    with here.proxied() as url, Loop(url, "openai") as agent:
        agent.tell("hello")
    with here.record() as kd:
        [run] = started(kd)
        kd.fork(run, at="1:after")
    with here.proxied() as url, Loop(url, "openai") as again:
        again.messages = agent.messages
        again.tell("and on")
    with here.record() as kd:
        assert asked(kd, run) == [2, 4]


@pytest.mark.slow
def test_finding_a_conversation_reads_no_other(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    with here.proxied() as url:
        for number in range(20):
            with Loop(url, "openai") as agent:
                agent.tell(f"conversation {number}")
    read: list[str] = []
    for name in ("opening", "read", "row"):
        real = getattr(SqliteStore, name)

        def counted(self: Any, run: str, *args: Any, real: Any = real, **options: Any) -> Any:
            read.append(run)
            return real(self, run, *args, **options)

        monkeypatch.setattr(SqliteStore, name, counted)
    with here.proxied() as url, Loop(url, "openai") as again:
        again.messages = agent.messages
        again.tell("and on")
    assert len(set(read)) == 1


def test_a_client_that_stays_away_ends_its_run_until_it_comes_back(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_registry, "REST_SECONDS", 0.05)
    monkeypatch.setattr(conversation_registry, "LOOK_SECONDS", 0.02)
    with here.proxied() as url, here.record() as kd, Loop(url, "openai") as agent:
        agent.tell("hello")
        [row] = kd.list()
        until = time.monotonic() + 300
        while kd.list()[0].status != "completed" and time.monotonic() < until:
            time.sleep(0.02)
        assert (kd.list()[0].status, kd.info(row.id).holder) == ("completed", None)
        agent.tell("back again")
        assert [row.id for row in kd.list()] == [row.id]
        assert len(asked(kd, row.id)) == 2


def test_runs_of_a_proxy_that_died_are_ended_by_the_next(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_registry, "LOOK_SECONDS", 0.02)
    with here.record() as kd:
        log = kd.runtime.log.create(
            e.RunStarted(at=1, run="left", agent="proxy", tags=("killick:tip:x",)), {"input": None}, holder="1-dead"
        )
        now = kd.runtime.clock.now_us()
        intended = e.StepIntended(at=now, step="1", sort="model", name="messages")
        begun = e.AttemptStarted(at=now, step="1", attempt=1, key="k", epoch=1)
        log.append(
            *(
                killick.log.writer.Entry(event)
                for event in (e.RunTaken(at=now, epoch=1, holder="1-dead"), intended, begun)
            )
        )
    with here.proxied() as url:
        httpx.get(f"{url}/v1/models")
        with here.record() as kd:
            until = time.monotonic() + 300
            while kd.info("left").status != "completed" and time.monotonic() < until:
                time.sleep(0.02)
            assert kd.info("left").status == "completed"
            [(_, ended, data)] = told(kd, "left", e.AttemptEnded)
            assert (ended.outcome, data["failure"]["kind"]) == ("unknown", "died")


def test_a_run_of_a_real_agent_of_the_same_name_is_none_of_a_proxys_business(here: Desk) -> None:
    with here.record() as kd:
        kd.runtime.log.create(e.RunStarted(at=1, run="left", agent="proxy"), {"input": None}, holder="1-dead")
    with here.proxied() as url:
        httpx.get(f"{url}/v1/models")
        with Loop(url, "openai") as agent:
            agent.tell("hello")
        asking = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        refused = httpx.post(f"{url}/v1/chat/completions", json=asking, headers={"X-Killick-Run": "left"})
        assert (refused.status_code, "no proxy made" in refused.text) == (400, True)
    with here.record() as kd:
        assert kd.info("left").status != "completed"


def test_who_begins_with_the_same_words_under_another_key_has_a_run_of_their_own(here: Desk) -> None:
    asking = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with here.proxied() as url:
        for key in ("sk-alice-000000", "sk-bob-0000000"):
            httpx.post(f"{url}/v1/chat/completions", json=asking, headers={"authorization": f"Bearer {key}"})
    with here.record() as kd:
        assert len(started(kd)) == 2
