"""A new release is the module executed again: fakes keep their place in it, whatever they are keyed by."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from killick.check.checker import Case, check

HEAD = """
import openai
import killick
from killick.testing import call, scripted

client = openai.AsyncOpenAI(api_key="none")

@killick.tool(effect="reads", name="released_find")
async def find(order: str) -> str:
    return order
"""

SCRIPT = 'scripted(call("released_find", order="1"), call("released_find", order="2"), "done")'


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def write(body: str) -> Any:
        made.append(f"released_{len(made)}_{abs(hash(body))}")
        (tmp_path / f"{made[-1]}.py").write_text(HEAD + textwrap.dedent(body))
        return importlib.import_module(made[-1])

    yield write
    for name in made:
        sys.modules.pop(name, None)


def sound(case: Case) -> None:
    report = check(case)
    assert report.left_alone == "completed"
    assert report.ways["redeploy"] >= 5
    assert not report.findings, str(report)


LOOP = """
    @killick.agent(name="released_loop")
    async def loops(run: killick.Run, question: str) -> str:
        return (await killick.loop(run, {model}, [find], messages=question, model="m")).text
"""


def test_a_fake_keyed_by_a_method_of_a_client_in_the_agents_module_matches(module: Callable[[str], Any]) -> None:
    made = module(LOOP.format(model="client.chat.completions.create") + f"\n    script = {SCRIPT}\n")
    sound(Case(agent=made.loops, fakes={made.client.chat.completions.create: made.script}))


@pytest.mark.slow
def test_a_client_that_an_object_holds_is_found_again(module: Callable[[str], Any]) -> None:
    holder = """
    class Office:
        def __init__(self) -> None:
            self.client = openai.AsyncOpenAI(api_key="none")

    office = Office()
    """
    made = module(holder + LOOP.format(model="office.client.responses.create") + f"\n    script = {SCRIPT}\n")
    sound(Case(agent=made.loops, fakes={made.office.client.responses.create: made.script}))


@pytest.mark.slow
def test_two_clients_of_one_module_are_told_apart(module: Callable[[str], Any]) -> None:
    made = module("""
    other = openai.AsyncOpenAI(api_key="none")

    @killick.agent(name="released_two")
    async def two(run: killick.Run, question: str) -> str:
        said = ""
        for each in (client, other, client, other, other):
            reply = await run.model(each.chat.completions.create, messages=[], model="m")
            said += reply.choices[0].message.content
        return await run.call(find, said)

    mine, theirs = scripted("a", "b"), scripted("c", "d", "e")
    """)
    fakes = {made.client.chat.completions.create: made.mine, made.other.chat.completions.create: made.theirs}
    sound(Case(agent=made.two, fakes={**fakes, "released_find": lambda order: order}))


@pytest.mark.slow
def test_a_scripted_model_of_the_module_goes_on_where_it_was(module: Callable[[str], Any]) -> None:
    made = module(f"model = {SCRIPT}\n" + textwrap.dedent(LOOP.format(model="model")))
    sound(Case(agent=made.loops))


@pytest.mark.slow
def test_a_model_that_a_factory_makes_is_found_by_its_name(module: Callable[[str], Any]) -> None:
    made = module("""
    def made_by(provider):
        async def ask(prompt: str) -> str:
            raise AssertionError
        return ask

    ask = made_by("one")

    @killick.agent(name="released_made")
    async def asks(run: killick.Run, question: str) -> str:
        for number in range(5):
            question = await run.model(ask, question)
        return question
    """)
    sound(Case(agent=made.asks, fakes={made.ask: lambda prompt: prompt + "!"}))
