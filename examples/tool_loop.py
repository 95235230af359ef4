"""A model chooses tools in a loop; each choice is on record as a decision, with the model's own words as its reason.

The model here is a script in the shape of a chat completion. With a real one, give `kedge.loop` the client's own
method, `client.chat.completions.create`, in its place: nothing else changes.
"""

import json
import logging
import os
import sys
from typing import Any

import kedge

RATES = {"EUR": 1.0, "NOK": 11.7, "DKK": 7.5}


def shade(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


# Two tools. Their schemas come from the annotations and the docstrings.


@kedge.tool(effect="reads")
def exchange_rate(currency: str) -> float:
    """How many of a currency one euro buys.

    Args:
        currency: Three capital letters.
    """
    if currency not in RATES:
        raise LookupError(f"{currency!r} is no currency; there are {', '.join(RATES)}")
    return RATES[currency]


@kedge.tool(effect="idempotent")
def book_ferry(to: str, euros: int, key: kedge.Key = kedge.KEY) -> dict[str, str]:
    """Book a ferry, at most for so many euros."""
    return {"to": to, "ticket": f"F-{euros}", "booked under": key}


# The model, as a script: what it says, and what it asks for.

SCRIPT: list[tuple[str, str, dict[str, Any]]] = [
    ("First I need the rate of the krone.", "exchange_rate", {"currency": "krone"}),
    ("It wants three letters. Oslo means NOK.", "exchange_rate", {"currency": "NOK"}),
    ("2000 NOK are about 171 euros.", "book_ferry", {"to": "Oslo", "euros": "a lot"}),
    ("The price must be a whole number.", "book_ferry", {"to": "Oslo", "euros": 171}),
    ("Booked: the ferry to Oslo, for 171 euros.", "", {}),
]


def model(*, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    turn = sum(message["role"] == "assistant" for message in messages)
    text, name, arguments = SCRIPT[turn]
    call = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": text} | ({"tool_calls": [call]} if name else {})
    usage = {"prompt_tokens": 40 + 30 * turn, "completion_tokens": 12}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage}


@kedge.agent
async def travel(run: kedge.Run, wish: str) -> str:
    result = await kedge.loop(run, model, [exchange_rate, book_ferry], messages=wish, system="You book trips.")
    return result.text


def tell(kd: kedge.Client, wish: str) -> None:
    """What happened, from the record alone: the decisions, and what the model was sent last."""
    state = kd.state("trip")
    heard = [message["content"] for message in state.trace[-1].input["messages"] if message["role"] == "tool"]
    asked = [message for message in state.trace[-1].input["messages"] if "tool_calls" in message]
    print(shade(wish, "1"))
    for made, message, answer in zip(state.decisions, asked, heard, strict=True):
        print(f"\n  step {made.step:2}  the {made.by} chooses {made.choice}, of {' or '.join(made.options)}")
        print(f"    because  {made.because}")
        print(f"    gives    {message['tool_calls'][0]['function']['arguments']}")
        print(shade(f"    gets     {answer.splitlines()[-1]}", "33" if answer.startswith("error") else "32"))
    print(shade(f"\n{state.result}", "1"))


def main() -> None:
    logging.basicConfig(format="  %(message)s", stream=sys.stdout)
    wish = "A ferry to Oslo for 2000 kroner, please."
    with kedge.open("memory:") as kd:
        first = kd.run(travel, wish, id="trip")
        tell(kd, wish)
        print("\nThe same run once more:")
        assert kd.run(travel, wish, id="trip") == first
        spend = kd.log.ledger("trip").spend
        print(f"  {spend.model_calls} model calls in all, {spend.tokens_in} tokens in, {spend.tokens_out} out")


if __name__ == "__main__":
    main()
