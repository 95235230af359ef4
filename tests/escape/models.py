"""What a model alone tries: in a loop with tools, one call after the other, by chance."""

from __future__ import annotations

import json
from typing import Any

import killick
from escape import law, tricks, world
from escape.law import Tried
from escape.stage import Stage, followed, go
from killick.model import events as e

_ASSESS: world.Call = ("assess", {"claim": "17"})


def paths_that_lead_out(stage: Stage) -> Tried:
    """Paths of every make, one by one and in lists, to links that were there before."""
    calls = [tricks.path_call(stage.chance, stage.grounds) for _ in range(40)]
    with stage.client() as kd:
        _, found = followed(stage, kd, calls)
    law.lawful(stage.grounds)
    return found._replace(tries=len(calls))


def links_made_on_the_way(stage: Stage) -> Tried:
    """The model makes links of its own, and goes through them."""
    calls = [each for _ in range(8) for each in tricks.linking(stage.chance, stage.grounds)]
    with stage.client() as kd:
        _, found = followed(stage, kd, calls)
    law.lawful(stage.grounds)
    return found._replace(tries=len(calls))


def values_in_disguise(stage: Stage) -> Tried:
    """Amounts, people and currencies that are not what they seem, too many arguments and too few."""
    calls = [_ASSESS, *(tricks.pay_call(stage.chance) for _ in range(40))]
    with stage.client() as kd:
        _, found = followed(stage, kd, calls)
    law.lawful(stage.grounds)
    return found._replace(tries=len(calls))


def names_that_look_alike(stage: Stage) -> Tried:
    """Tools that are not there, or denied, under names that look like others."""
    calls = [_ASSESS, *(tricks.named_call(stage.chance) for _ in range(25))]
    with stage.client() as kd:
        told, found = followed(stage, kd, calls)
    assert len(told) == len(calls)
    assert stage.grounds.books.lines("pay", "delete", "close") == []
    return found._replace(tries=len(calls))


def large_and_deep_values(stage: Stage) -> Tried:
    """Megabytes, and hundreds of levels."""
    calls = [_ASSESS, *(tricks.heavy(stage.chance) for _ in range(2))]
    with stage.client() as kd:
        told, found = followed(stage, kd, calls)
    assert len(told) == len(calls)
    assert stage.grounds.books.lines("pay") == []
    return found._replace(tries=len(calls))


def amounts_in_pieces(stage: Stage) -> Tried:
    """What may not be paid at once, paid bit by bit, to the same and to several."""
    piece = stage.chance.choice((1, 7, 100, 250, 499, 500))
    calls: list[world.Call] = [
        (stage.chance.choice(("pay", "pay_strict")), {"to": stage.chance.choice(world.RECIPIENTS), "amount": piece})
        for _ in range(20)
    ]
    with stage.client() as kd:
        _, found = followed(stage, kd, [_ASSESS, *calls])
    law.lawful(stage.grounds)
    assert law.paid(stage.grounds), "nothing was paid, so nothing was tried"
    return found


def raw_json(stage: Stage) -> Tried:
    """Arguments as text that no encoder would write: doubled names, endless nesting, numbers like no other."""
    deep = stage.chance.choice((1_000, 10_000, 100_000))
    pieces = [
        '{"to":"ann","amount":50,"amount":5000}', '{"to":"ann","amount":NaN}', '{"to":"ann","amount":Infinity}',
        '{"to":"ann","amount":1e400}', '{"to":"ann","amount":-1e400}', '{"to":"ann","amount":1' + "0" * 5000 + "}",
        '{"to":"ann","amount":' + "[" * deep + "]" * deep + "}", '{"a":' * deep + "1" + "}" * deep, "[" * deep,
        '[{"to":"ann","amount":5000}]', '"{\\"to\\":\\"ann\\",\\"amount\\":5000}"', "null", "5", "", "{}", "{",
        '{"to":"ann","amount":5000}{"to":"ann","amount":1}', '{"to":"ann","amount":/*1*/5000}',
        '{"to":"ann","amount":"5000"}', '{"to":"ann","amount":5000.0}', '{"to":"ann","amount":5e3}',
        '{"to":"\\ud800","amount":5}', '{"to":"ann\\u0000","amount":5}', '{"t\\u006f":"ann","amo\\u0075nt":5000}',
        '{"__proto__":{"amount":1},"to":"ann","amount":5000}', '\ufeff{"to":"ann","amount":5000}',
        '{"to":"ann","amount":"{\\"$int\\":\\"1388\\"}"}', '{"to":"ann","amount":{"$int":"1388"}}',
    ]  # fmt: skip
    stage.chance.shuffle(pieces)

    def model(messages: list[Any], **request: Any) -> Any:
        number = sum(message["role"] == "tool" for message in messages)
        if number >= len(pieces):
            message: Any = {"role": "assistant", "content": "That is all."}
        else:
            function = {"name": stage.chance.choice(("pay", "pay_strict")), "arguments": pieces[number]}
            calls = [{"id": f"c{number}", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}

    async def body(run: killick.Run, given: None) -> list[str]:
        await run.call(world.assess, "17")
        tools = killick.Toolset(world.pay, world.pay_strict)
        done = await killick.loop(run, model, tools, messages="Go on.", provider="openai", turns_max=100)
        return world.told(done.messages)

    world.AGENTS["raw"] = killick.agent(name="raw", contract=world.contract(stage.grounds))(body)
    with stage.client() as kd:
        told = go(kd, "raw", None, "r")
        assert len(told) == len(pieces), told
        assert len(law.decisions(kd, "r")) == len(pieces)
        found = law.on_record(kd, "r")
    law.lawful(stage.grounds)
    assert law.paid(stage.grounds) == [], json.dumps(told)
    return found._replace(tries=len(pieces))


def the_same_again_and_again(stage: Stage) -> Tried:
    """A model that does not learn is stopped by the limit, and again after somebody let it go on."""
    limit = stage.chance.randint(1, 12)
    world.declare(stage.grounds, rejections=limit)
    world.HERE.scripts["r"] = [("pay", {"to": "ann", "amount": 5})] * 100
    tries = 0
    with stage.client() as kd:
        for times in (1, 2, 3):
            assert go(kd, "clerk", "openai", "r") == "waits"
            assert kd.info("r").status == "paused"
            stopped = [event for _, event, _ in kd.runtime.log.read("r") if isinstance(event, e.RunPaused)]
            assert [event.by for event in stopped] == ["contract"] * times
            tries = law.on_record(kd, "r").tries
            assert tries == times * limit, (tries, limit)
            kd.resume("r", by="mia")
    law.lawful(stage.grounds)
    return Tried(tries, tries)
