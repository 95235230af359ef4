"""A session of many turns that does all that a window has to do with: pages leave, are recalled, asked for again from
the record, and read again and found the same or changed.

The model is a function of what it is sent, so that it says the same whatever process asks it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import killick
from killick.engine.steps.model_reply import Provider
from killick.model import events as e
from killick.model import page_events
from playing import JSON, chat, message, response, response_call, response_text, text_block, use_block
from processes import told

BUDGET: Final = 3_600
PROVIDERS: Final[tuple[Provider, ...]] = ("openai", "openai-responses", "anthropic")


class Call(NamedTuple):
    """What the model wants called."""

    name: str
    arguments: JSON


def read(number: int) -> Call:
    return Call("paged_read", {"path": f"file_{number}.py"})


def recall(place: int) -> Call:
    return Call("recall", {"handle": f"turn {place}"})


SCRIPT: Final[tuple[tuple[Call, ...], ...]] = (
    *((read(number),) for number in range(7)),
    (read(0), Call("paged_now", {"what": "tide"})),
    (recall(1), read(2)),
    (Call("paged_ship_5", {"where": "Bremen"}),),
    (Call("paged_ship_5", {"where": "Bremen", "how": "slowly"}),),
    (Call("paged_write", {"path": "file_1.py", "text": "written"}),),
    (read(1), read(3)),
    (recall(3), recall(4), Call("paged_now", {"what": "tide"})),
    (Call("paged_ship_2", {"where": "Oslo"}), Call("recall", {"handle": "m999"})),
    (Call("paged_now", {"what": "moon"}), Call("nobody", {})),
    *((read(number),) for number in (4, 5, 6)),
    (recall(2), Call("paged_rule", {"number": 1})),
    *((read(number),) for number in (0, 2, 4)),
    (Call("paged_rule", {"number": 1}), Call("paged_read", {"road": "x"})),
)
"""The calls of each turn; then the model says that it is done."""

_WORDS: Final = ("anchor", "bilge", "capstan", "davit", "ensign", "fathom", "gunwale", "hawser", "jib", "keel", "mast")


def page(name: str, version: int = 0) -> str:
    """What a thing reads like: some hundred tokens, and nothing that stands in another."""
    return "\n".join(f"{name} v{version} line {line}: {_WORDS[line % len(_WORDS)]} {name}_{line}" for line in range(40))


def answer(request: JSON, provider: Provider, script: Sequence[Sequence[Call]] = SCRIPT) -> JSON:
    """What the model says: which turn it is, it knows from the last call that was answered."""
    sent: list[Any] = request["input" if provider == "openai-responses" else "messages"]
    known = re.findall(r"call_(\d+)_", json.dumps(sent[-1]))
    turn = int(known[-1]) + 1 if known else 0
    calls = [
        (f"call_{turn}_{number}", name, _placed(arguments, sent))
        for number, (name, arguments) in enumerate(script[turn] if turn < len(script) else ())
    ]
    text = f"Turn {turn}."
    match provider:
        case "openai":
            return chat(text, *((known_as, name, json.dumps(given)) for known_as, name, given in calls))
        case "openai-responses":
            asked = [response_call(known_as, name, json.dumps(given)) for known_as, name, given in calls]
            return response(response_text(text), *asked)
        case "anthropic":
            return message(text_block(text), *(use_block(*call) for call in calls))


def _placed(arguments: JSON, sent: Sequence[Any]) -> JSON:
    """`turn 3` stands for the handle that a tombstone gives; the first that there is, where none is of that turn."""
    wanted = re.fullmatch(r"turn (\d+)", str(arguments.get("handle", "")))
    if wanted is None:
        return arguments
    handles = re.findall(r'recall\(\\*"(m[\d.]+)\\*"\)', json.dumps(sent))
    return {"handle": handles[int(wanted[1]) % len(handles)] if handles else "m2"}


# tools --------------------------------------------------------------------------------------------


class Far:
    """What tools act on."""

    def __init__(self) -> None:
        self.looks: list[str] = []
        self.done: list[str] = []

    def look(self, what: str) -> None:
        self.looks.append(what)

    def do(self, what: str, key: str) -> None:
        self.done.append(what)

    def written(self, path: str) -> int:
        """How often a file was written."""
        return self.done.count(f"write {path}")


class _There:
    def __init__(self) -> None:
        self.far = Far()


THERE: Final = _There()
"""Where the far side is, for this process."""


@killick.tool(name="paged_read", effect="reads")
async def read_file(path: str) -> str:
    """Read a file of the workspace."""
    THERE.far.look(f"read {path}")
    return page(path, THERE.far.written(path))


@killick.tool(name="paged_rule", effect="reads")
async def rule(number: int) -> str:
    """Read a rule of the sea; they never change."""
    THERE.far.look(f"rule {number}")
    return page(f"rule_{number}")


@killick.tool(name="paged_now", effect="reads")
async def now(what: str) -> str:
    """Look at the tide or the moon."""
    THERE.far.look(f"see {what}")
    return page(what)


@killick.tool(name="paged_write", effect="idempotent")
async def write_file(path: str, text: str, key: killick.Key = killick.KEY) -> str:
    """Write a file of the workspace."""
    THERE.far.do(f"write {path}", key)
    return "written"


def _ship(number: int) -> Any:
    async def ship(where: str, how: str = "fast", key: killick.Key = killick.KEY) -> str:
        THERE.far.do(f"ship {number} {where} {how}", key)
        return f"ship {number} goes to {where}, {how}"

    ship.__doc__ = f"Send ship {number}."
    return killick.tool(name=f"paged_ship_{number}", effect="idempotent")(ship)


SHIPS: Final = tuple(_ship(number) for number in range(6))
TOOLS: Final = (read_file, rule, now, write_file, *SHIPS)


# what is on record --------------------------------------------------------------------------------


def asked(kd: killick.Client, run: str) -> list[JSON]:
    """The arguments of the run's model calls, as they are on record."""
    return [each.data["arguments"] for each in told(kd, run, e.StepIntended) if each.event.sort == "model"]


def paged(kd: killick.Client, run: str) -> list[str]:
    """What was decided of its window."""
    return [
        str(recorded.event.__struct_config__.tag)
        for recorded in kd.events(run)
        if isinstance(recorded.event, page_events.PageEvent)
    ]


def as_bytes(request: JSON) -> bytes:
    """A request as it goes over the wire: another order of keys is another request."""
    return json.dumps(request).encode()
