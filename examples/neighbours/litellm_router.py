"""A model behind LiteLLM's router, in a Killick run. Run it twice: the second time no model is asked.

python examples/neighbours/litellm_router.py
killick show greeting-1
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # LiteLLM fetches prices on import otherwise

import litellm

import killick


class Scripted(litellm.CustomLLM):
    """Stands for a provider of models."""

    async def acompletion(self, *args: Any, **given: Any) -> Any:
        print("the model is asked")
        return litellm.completion(model="gpt-4o", messages=given["messages"], mock_response="Good morning, Ann.")


litellm.custom_provider_map = [{"provider": "scripted", "custom_handler": Scripted()}]
router = litellm.Router([{"model_name": "small", "litellm_params": {"model": "scripted/one", "api_key": "sk-…"}}])


@killick.agent
async def greeter(run: killick.Run, name: str) -> str:
    ask = [{"role": "user", "content": f"Greet {name}."}]
    reply = await run.model(router.acompletion, model="small", messages=ask)
    return str(reply.choices[0].message.content)


with killick.open("killick.db") as kd:
    print(kd.run(greeter, "Ann", id="greeting-1"))
