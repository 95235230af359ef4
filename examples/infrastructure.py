"""A model changes servers; rules and people keep it within bounds. What it proposes is judged before it is done.

The model is a script that errs as models do: it writes outside its folder, reaches for too many hosts, wants to go on.
Every rejection goes back to it in words that it can act on. Two operators have to agree to what is left; nobody
answers, so the leads are asked: one makes it smaller, the other agrees. On a weekend nothing is changed.
"""

import contextlib
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import killick
from killick import rules

SERVERS = {"web": 0}  # how many hosts run the new version

# The contract.


def freeze(intention: rules.Intention, state: rules.PolicyInput) -> str | None:
    """A rule of our own: a pure function of what is intended and of what is known."""
    day = datetime.fromtimestamp(state.now_us / 1e6, UTC).weekday()
    return "nothing is changed on a weekend; try again on Monday" if day >= 5 else None


TWO = killick.Approval("operators", need=2, timeout="1h", escalate=[("leads", "8h")])

change = killick.Contract(
    "change",
    [
        rules.allow("plan", "apply", "notify"),
        rules.paths(["plan", "apply"], file="plans"),
        rules.after("apply", "plan"),
        rules.check(freeze, tools="apply", code="frozen"),
        rules.arguments("apply", hosts={"min": 1, "max": 20}, name="blast radius"),
        rules.once("apply", message="one change at a time; let people look at this one first"),
        rules.deny("apply", name="two people", message="servers are about to change", ask=TWO),
        rules.budget(calls=30, time="7d"),
    ],
    people={"operators": ["ann", "bob", "cyd"], "leads": ["lea", "leo"]},
)

# The tools.


def rollback(effect: killick.Effect) -> None:
    SERVERS["web"] -= effect.arguments["hosts"]


@killick.tool(effect="idempotent")
def plan(service: str, version: str, file: str) -> str:
    """Write down what is to be changed."""
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(json.dumps({"service": service, "version": version}))
    return f"planned {service} {version}"


@killick.tool(effect="at_most_once", compensate=rollback)
def apply(file: str, hosts: int) -> str:
    """Carry a plan out on so many hosts."""
    SERVERS["web"] += hosts
    return f"{hosts} hosts changed"


@killick.tool(effect="at_most_once")
def notify(channel: str, text: str) -> None:
    """Tell people."""


# The model: what it proposes, turn by turn.

SCRIPT: list[tuple[str, str, dict[str, Any]]] = [
    ("First a plan.", "plan", {"service": "web", "version": "2.1", "file": "/etc/web.json"}),
    ("In my own folder, then.", "plan", {"service": "web", "version": "2.1", "file": "web.json"}),
    ("All hosts at once.", "apply", {"file": "web.json", "hosts": 400}),
    ("As many as I may.", "apply", {"file": "web.json", "hosts": 20}),
    ("And now the others.", "apply", {"file": "web.json", "hosts": 20}),
    ("I may not. I will say so.", "notify", {"channel": "#web", "text": "web 2.1 runs on its first hosts"}),
    ("web 2.1 is on its way; the rest waits for people.", "", {}),
]


def chat(*, messages: list[Any], tools: list[Any]) -> Any:
    turn = sum(message["role"] == "assistant" for message in messages)
    text, name, arguments = SCRIPT[turn]
    if "Monday" in str(messages[-1]):
        text, name = "I will come back on Monday.", ""
    call = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": text} | ({"tool_calls": [call]} if name else {})
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}


@killick.agent(contract=change)
async def rollout(run: killick.Run, wish: str) -> str:
    result = await killick.loop(run, chat, killick.Toolset(plan, apply, notify), messages=wish, turns_max=20)
    return result.text


def tell(kd: killick.Client, run: str) -> None:
    """What the model said and was told, from the record alone."""
    print(f"\n{run}: {kd.state(run).result}")
    for message in kd.state(run).trace[-1].input["messages"][1:]:
        print(f"  {message['role']:<9}  {message['content'].replace(chr(10), ' ')}")


def main() -> None:
    clock = killick.clock.LeapingClock()  # it begins on a Sunday; in a real program, leave the clock out
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here), killick.open("killick.db", clock=clock) as kd:
        kd.run(rollout, "Bring web to 2.1.", id="on_sunday")
        tell(kd, "on_sunday")
        clock.advance(24 * 3600)
        kd.start(rollout, "Bring web to 2.1.", id="on_monday")
        for _ in range(2):
            kd.advance_due()
            print(f"\n{kd.inbox()[0]}")
            clock.advance(3600)  # the operators are at lunch
        kd.answer("on_monday", "edit", value={"hosts": 5}, by="lea", comment="begin with five")
        kd.advance_due()
        kd.answer("on_monday", "approve", by="leo")
        kd.advance_due()
        tell(kd, "on_monday")
        assert SERVERS == {"web": 5}
        assert kd.store.verify().holds


if __name__ == "__main__":
    main()
