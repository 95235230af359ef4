"""Runs whose models were sent something worth a look: a scripted coding agent, with a window and without one."""

from __future__ import annotations

import random
from typing import Any

import killick
from killick.testing import call, scripted, turn
from killick.window.messages import as_json

MODELS = {"anthropic": "claude-sonnet-5", "openai": "gpt-5.4", "openai-responses": "gpt-5.4"}
FILES: dict[str, str] = {}
FIRST = {"openai": "m3", "openai-responses": "m2", "anthropic": "m2.0"}
"""Where the first thing that the model reads stands."""


def words(chance: random.Random, count: int) -> str:
    return " ".join(f"w{chance.randrange(10_000)}" for _ in range(count))


@killick.tool(effect="reads", name="session_read")
async def read(path: str) -> str:
    """Read a file of the repository."""
    return FILES.get(path) or words(random.Random(3), 300)


@killick.tool(effect="idempotent", name="session_edit")
async def edit(path: str, text: str) -> str:
    """Change a file."""
    FILES[path] += text
    return "done"


@killick.tool(effect="reads", name="session_test")
async def test(where: str) -> str:
    """Run the tests, and tell which of them failed."""
    return f"all passed in {where}"


@killick.tool(effect="at_most_once", name="session_deploy")
async def deploy(where: str, version: str) -> str:
    """Deploy a version, which cannot be undone; nobody ever asks for it."""
    return "deployed"


test.__test__ = False  # type: ignore[attr-defined]


def model(calls: int, seed: int, provider: Any) -> Any:
    """Reads, edits and tests; in the middle it wants the first thing back."""
    chance = random.Random(seed)

    def chosen(number: int) -> Any:
        path = chance.choice(sorted(FILES))
        if number in (0, calls // 2):
            return call("session_read", path="LICENSE") if not number else call("recall", handle=FIRST[provider])
        if (luck := chance.random()) < 0.6:
            return call("session_read", path=path)
        return call("session_edit", path=path, text=words(chance, 8)) if luck < 0.9 else call("session_test", where="x")

    def says(number: int) -> Any:
        def said(messages: list[Any], tools: Any = (), system: Any = "", instructions: Any = "") -> Any:
            return turn(chosen(number), usage=(len(as_json([messages, tools, system, instructions])) // 4, 20))

        return said

    return scripted(*map(says, range(calls - 1)), "Done.", provider=provider)


@killick.agent(name="session_coder")
async def coder(run: killick.Run, asked: dict[str, Any]) -> str:
    chance = random.Random(7)
    FILES.clear()
    FILES.update({f"src/{at}.py": words(chance, chance.choice((50, 200, 500))) for at in range(10)})
    provider, calls = asked["provider"], asked["calls"]
    done = await killick.loop(
        run, model(calls, asked.get("seed", 1), provider), [read, edit, test, deploy], messages="Mend the parser.",
        system="You are a careful programmer.", provider=provider, model=asked.get("model", MODELS[provider]),
        turns_max=calls, **({"budget": asked["budget"]} if asked.get("budget") else {}),
    )  # fmt: skip
    return done.text


@killick.agent(name="session_without_models")
async def without_models(run: killick.Run) -> str:
    return await run.call(test, "nowhere")
