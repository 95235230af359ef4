"""A model chooses tools in a loop; every choice is on record as a decision, with the model's own words as its reason.

    python examples/tool_loop.py
    python examples/tool_loop.py --base-url http://localhost:11434/v1 --model qwen3

Without arguments the model is a script that makes two mistakes. With them it is any model behind an OpenAI-compatible
endpoint (the key, if it needs one, comes from OPENAI_API_KEY). The agent is the same, and so is what is on record.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import killick

RATES = {"EUR": 1.0, "NOK": 11.7, "DKK": 7.5}
WISH = "A ferry to Oslo for at most 2000 Norwegian kroner, please. Look up the rate, book, then say what you did."

# Two tools. What the model is told of them comes from their annotations and docstrings.


@killick.tool(effect="reads")
def exchange_rate(currency: str) -> float:
    """How many of a currency one euro buys.

    Args:
        currency: Three capital letters.
    """
    if currency not in RATES:
        raise LookupError(f"{currency!r} is no currency; there are {', '.join(RATES)}")
    return RATES[currency]


@killick.tool(effect="idempotent", identity=("to",), repeat="recorded")  # models repeat themselves: one ferry is enough
def book_ferry(to: str, euros: int, key: killick.Key = killick.KEY) -> dict[str, str]:
    """Book a ferry, at most for so many euros."""
    return {"to": to, "ticket": f"F-{euros}", "booked_under": key}


# The model. `chat` is what the agent calls; `main` may put a real client behind it.

CLIENT: Any = None
MODEL = ""
SCRIPT: list[tuple[str, str, dict[str, Any]]] = [
    ("First I need the rate of the krone.", "exchange_rate", {"currency": "krone"}),
    ("It wants three letters. Oslo means NOK.", "exchange_rate", {"currency": "NOK"}),
    ("2000 NOK are about 170 euros.", "book_ferry", {"to": "Oslo", "euros": "a lot"}),
    ("The price must be a whole number.", "book_ferry", {"to": "Oslo", "euros": 170}),
    ("Booked: the ferry to Oslo, for 170 euros.", "", {}),
]


def chat(*, messages: list[Any], tools: list[Any]) -> Any:
    if CLIENT is not None:
        return CLIENT.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    turn = sum(message["role"] == "assistant" for message in messages)
    text, name, arguments = SCRIPT[turn]
    call = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": text} | ({"tool_calls": [call]} if name else {})
    usage = {"prompt_tokens": 40 + 30 * turn, "completion_tokens": 12}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage}


@killick.agent
async def travel(run: killick.Run, wish: str) -> str:
    tools = killick.Toolset(exchange_rate, book_ferry)
    result = await killick.loop(run, chat, tools, messages=wish, system="You book trips. Use your tools.", turns_max=20)
    return result.text


def tell(kd: killick.Client) -> None:
    """What happened, from the record alone."""
    state = kd.state("trip")
    said = state.trace[-1].input["messages"]  # what the model was sent last: everything so far
    calls = [call["function"] for message in said for call in message.get("tool_calls") or ()]
    answers = [message["content"] for message in said if message["role"] == "tool"]
    for made, call, answer in zip(state.decisions, calls, answers, strict=True):
        print(f"step {made.step:<3} {call['name']}({call['arguments']})")
        print(f"  because  {made.because or 'it gave no reason'}")
        print(f"  answer   {answer.splitlines()[-1]}")
    print(f"\n{state.result}\n")


def main() -> None:
    global CLIENT, MODEL
    parser = argparse.ArgumentParser(description="A model with tools.")
    parser.add_argument("--base-url", help="an OpenAI-compatible endpoint; without it the model is a script")
    parser.add_argument("--model", default="gpt-5-mini")
    given = parser.parse_args()
    if given.base_url:
        import openai

        MODEL, CLIENT = (
            given.model,
            openai.OpenAI(base_url=given.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")),
        )
    with tempfile.TemporaryDirectory(prefix="killick-") as folder, killick.open(str(Path(folder) / "killick.db")) as kd:
        print(f"{WISH}\n")
        kd.run(travel, WISH, id="trip")
        tell(kd)
        spend = kd.log.ledger("trip").spend
        print(f"{spend.model_calls} model calls, {spend.tokens_in} tokens in, {spend.tokens_out} out")


if __name__ == "__main__":
    main()
