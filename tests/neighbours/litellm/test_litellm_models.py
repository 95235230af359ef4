"""LiteLLM as a model: its replies come back as its own types, live and from the record, and no key is kept."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before its import, which would fetch prices

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # old versions read their data as Python 3.11 does not like
    import litellm

import killick
from neighbours.killed import KILLED, World, die, ended
from neighbours.trying import try_example, try_page

KEY = "sk-of-nobody-but-us"
pytestmark = pytest.mark.filterwarnings("ignore")  # its own
HI: Any = [{"role": "user", "content": "hi"}]
ONE: Any = {"model": "openai/gpt-4o", "messages": HI, "api_key": KEY}
ROUTES: Any = [{"model_name": "small", "litellm_params": {"model": ONE["model"], "api_key": KEY}}]


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


@killick.agent
async def greeting(run: killick.Run) -> list[Any]:
    reply = await run.model(litellm.acompletion, **ONE, mock_response="Hello.")
    await run.ask("Is that all?")
    return [type(reply) is litellm.ModelResponse, reply.choices[0].message.content, reply.usage.total_tokens]


def test_a_reply_is_of_its_own_type_also_in_another_process_and_no_key_is_kept(tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "x-team": "harbour"}

    with killick.open(tmp_path / "killick.db") as kd, pytest.raises(killick.RunWaiting):
        kd.run(greeting, id="r")
    with killick.open(tmp_path / "killick.db") as kd:
        kd.answer("r", "approve", by="ann")
        assert kd.run(greeting, id="r") == [True, "Hello.", 30]
        with kd.host("t") as host:
            host.model_sync(litellm.completion, model="gpt-4o", messages=HI, api_key=KEY, mock_response="Hello.",
                            extra_headers=headers)  # fmt: skip
        [step] = kd.state("t").trace
        assert step.input["extra_headers"] == {"x-team": "harbour"}
        assert step.usage.tokens_out == 20
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.iterdir())


@killick.agent
async def every_kind(run: killick.Run) -> list[str]:
    router = litellm.Router(ROUTES)
    routed = await run.model(router.acompletion, model="small", messages=HI, mock_response="routed")
    response = await run.model(litellm.aresponses, model=ONE["model"], input="hi", api_key=KEY, mock_response="resp")
    vector = await run.model(litellm.aembedding, model="openai/text-embedding-3-small", input=["hi"], api_key=KEY,
                             mock_response=[0.5])  # fmt: skip
    parts: list[Any] = []
    for call, given in ((litellm.acompletion, ONE), (router.acompletion, {"model": "small", "messages": HI})):
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "mock_response": "one two three"}
        whole = [part async for part in run.stream(call, **given, **options)]
        said = "".join(part.choices[0].delta.content or "" for part in whole if part.choices)
        parts += [type(whole[0]).__name__, said]
    await run.ask("Is that all?")
    found = (routed, response, vector)
    return [*(type(each).__name__ for each in found), routed.choices[0].message.content,
            response.output[0].content[0].text, str(vector.data[0]["embedding"]), *parts]  # fmt: skip


def test_routers_responses_embeddings_and_streams_come_back_as_they_were(tmp_path: Path) -> None:
    with killick.open(tmp_path / "killick.db") as kd, pytest.raises(killick.RunWaiting):
        kd.run(every_kind, id="r")
    with killick.open(tmp_path / "killick.db") as kd:
        kd.answer("r", "approve", by="ann")
        kinds = ["ModelResponse", "ResponsesAPIResponse", "EmbeddingResponse"]
        said = kd.run(every_kind, id="r")
        assert said[:4] == [*kinds, "routed"]
        assert said[5:] == ["[0.5]", "ModelResponseStream", "one two three", "ModelResponseStream", "one two three"]
        usages = [step.usage for step in kd.state("r").trace if step.usage]
        assert len(usages) >= 3
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.iterdir())


def test_credentials_of_every_provider_are_left_out(kd: killick.Client, tmp_path: Path) -> None:
    of_clouds = ("aws_secret_access_key", "aws_session_token", "azure_ad_token", "vertex_credentials", "hf_token")
    secret = dict.fromkeys(of_clouds, KEY)

    @killick.agent
    async def asking(run: killick.Run) -> str:
        return str(
            (await run.model(litellm.acompletion, **ONE, **secret, mock_response="ok")).choices[0].message.content
        )

    assert kd.run(asking, id="r") == "ok"
    assert kd.state("r").trace[0].input.keys() & {"api_key", *secret} == set()
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "prices", "micros"),
    [
        ("gpt-4o", None, 225),  # as Killick's table says
        ("deepseek/deepseek-chat", None, None),  # as LiteLLM says
        ("deepseek/deepseek-chat", {"deepseek-chat": {"input": 1.0, "output": 2.0}}, 50),  # as the contract says
    ],
)
def test_a_reply_costs_what_the_contract_says_or_else_what_litellm_says(
    kd: killick.Client, model: str, prices: Any, micros: int | None
) -> None:
    bill: list[float] = []

    @killick.agent(contract=killick.Contract("money", [], prices=prices) if prices else None)
    async def asking(run: killick.Run) -> None:
        async def ask(**given: Any) -> Any:
            reply = await litellm.acompletion(**given)
            bill.append(reply._hidden_params["response_cost"])
            return reply

        await run.model(ask, model=model, messages=HI, api_key=KEY, mock_response="ok")

    kd.run(asking, id="r")
    usage = kd.state("r").trace[0].usage
    assert (usage.tokens_in, usage.tokens_out) == (10, 20)
    assert 0 < usage.cost_micros == (micros or pytest.approx(bill[0] * 1e6, abs=1))


def test_its_errors_are_its_own_and_a_rate_limit_is_asked_again(kd: killick.Client) -> None:
    told: list[str] = []

    class Limited(litellm.CustomLLM):  # type: ignore[misc]
        async def acompletion(self, *args: Any, **given: Any) -> Any:
            told.append(given["model"])
            if len(told) == 1:
                raise litellm.RateLimitError("slow down", llm_provider="limited", model="one")
            return litellm.completion(model="gpt-4o", messages=HI, mock_response="Hello.")

    litellm.custom_provider_map = [{"provider": "limited", "custom_handler": Limited()}]

    @killick.agent
    async def asking(run: killick.Run) -> str:
        reply = await run.model(litellm.acompletion, model="limited/one", messages=HI, num_retries=0)
        return str(reply.choices[0].message.content)

    assert kd.run(asking, id="r") == "Hello."
    assert len(told) == 2


def test_the_tool_loop_takes_it_as_it_is(kd: killick.Client) -> None:
    paid: list[int] = []

    @killick.tool
    async def pay(amount: int) -> str:
        """Pay an amount."""
        paid.append(amount)
        return f"paid {amount}"

    wish = [{"id": "c1", "type": "function", "function": {"name": "pay", "arguments": '{"amount": 5}'}}]

    async def ask(**given: Any) -> Any:
        """Its reply to the nth turn; a mock is all that is not LiteLLM's."""
        done = any(message["role"] == "tool" for message in given["messages"])
        mock = {"mock_response": "done"} if done else {"mock_tool_calls": wish}
        return await litellm.acompletion(**given, **mock)

    @killick.agent
    async def paying(run: killick.Run) -> str:
        return str((await killick.loop(run, ask, [pay], messages="Pay 5.", model=ONE["model"], api_key=KEY)).text)

    assert kd.run(paying, id="r") == "done"
    assert paid == [5]


# in processes that are killed ---------------------------------------------------------------------


def _plans(folder: Path, dies: str) -> tuple[Any, Any]:
    world = World(folder)

    async def ask(**given: Any) -> Any:
        world.do("asked")
        return await litellm.acompletion(**given, mock_response="tea at four")

    async def save(plan: str) -> str:
        world.do("saved")
        if dies:
            die()
        return plan

    return ask, save


def alone(folder: Path, dies: str = "") -> str:
    ask, save = _plans(folder, dies)

    async def plan() -> str:
        return str(await save((await ask(**ONE)).choices[0].message.content))

    return asyncio.run(plan())


def on_killick(folder: Path, dies: str = "") -> str:
    ask, save = _plans(folder, dies)
    kept = killick.tool(save)

    @killick.agent
    async def planner(run: killick.Run) -> str:
        reply = await run.model(ask, **ONE)
        return str(await run.call(kept, reply.choices[0].message.content))

    with killick.open(folder / "killick.db") as kd:
        return str(kd.run(planner, id="r"))


def answered(folder: Path) -> str:
    with killick.open(folder / "killick.db") as kd:
        kd.answer("r", "happened", value="tea at four", by="ann")
    return "answered"


def test_a_kill_in_a_tool_pays_for_the_reply_twice_alone_and_once_on_killick(tmp_path: Path) -> None:
    for run in (alone, on_killick):
        assert ended(run, tmp_path / run.__name__, "dies") == KILLED
    assert ended(alone, tmp_path / "alone") == "tea at four"
    assert "waits for settlement" in ended(on_killick, tmp_path / "on_killick")
    assert ended(answered, tmp_path / "on_killick") == "answered"
    assert ended(on_killick, tmp_path / "on_killick") == "tea at four"
    assert World(tmp_path / "alone").done == ["asked", "saved"] * 2
    assert World(tmp_path / "on_killick").done == ["asked", "saved"]


def test_the_page_shows_it(tmp_path: Path) -> None:
    try_page("litellm", tmp_path)


def test_the_example_asks_once_however_often_it_runs(tmp_path: Path) -> None:
    assert [try_example("litellm_router", tmp_path).count("the model is asked") for _ in range(2)] == [1, 0]
