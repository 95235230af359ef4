"""LiteLLM as a model: its replies come back as its own types, live and from the record, and no key is kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before its import, which would fetch prices

import litellm
import pytest

import killick

KEY = "sk-of-nobody-but-us"
pytestmark = pytest.mark.filterwarnings("ignore")  # its own
HI: Any = [{"role": "user", "content": "hi"}]


@killick.agent
async def greeting(run: killick.Run) -> list[Any]:
    given = {"model": "openai/gpt-4o", "messages": HI, "api_key": KEY}
    reply = await run.model(litellm.acompletion, **given, mock_response="Hello.")
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
