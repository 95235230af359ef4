"""Real traces as sessions: conversations of an airline's agent and runs of a coding agent, strung together.

Single ones are short, so several follow one another, as they do for an agent that is never restarted. What a move needs
is read from what it says: a name, an id, a number of six characters or more that it quotes, which stands in the result
of an earlier call of the same conversation and in nothing that anybody said since. Between conversations there are no
references: they were held apart, and what they share (a date, a city) was not looked up in the other. The results are
those on record.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.session.script import Move, Need, Session
from bench.session.workshop import CHECKOUT

TOGETHER: Final = 20
"""So many conversations make a session."""

_QUOTED: Final = re.compile(r"[A-Za-z0-9_#][A-Za-z0-9_#@./-]{4,}[A-Za-z0-9_#]")


def folder() -> Path:
    """Where the traces are, if they are anywhere."""
    return Path(os.environ.get("KILLICK_DATA") or CHECKOUT.parent / "shared" / "data")


def airline() -> list[Session]:
    """A policy, fourteen tools, and twenty customers one after the other."""
    rows = list(_rows("airline.jsonl.gz"))
    tools = _tools(message for row in rows for message in row["messages"])
    made: list[Session] = []
    for first in range(0, len(rows) - TOGETHER + 1, TOGETHER):
        moves: list[Move] = []
        system = rows[first]["messages"][0]["content"]
        for row in rows[first : first + TOGETHER]:
            moves += _needing(list(_moves(row["messages"])), system)
        made.append(Session(f"airline {first // TOGETHER + 1}", first, system, tools, moves))
    return made


def coding() -> list[Session]:
    """All the coding runs, one after the other; their commands as calls of one tool."""
    rows = [row for row in _rows("coding.jsonl.gz") if row["trajectory"]]
    moves: list[Move] = []
    system = _text(rows[0]["messages"][0]["content"]) if rows else ""
    for row in rows:
        opening: list[str] = []
        for message in row["messages"][1:]:
            if message["role"] != "user":
                break
            opening.append(_text(message["content"]))
        steps = [_step(step, None if number else "\n\n".join(opening)) for number, step in enumerate(row["trajectory"])]
        moves += _needing(steps, system)
    told = "Runs a command in the shell of the machine and gives what it printed."
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    tools = [{"type": "function", "function": {"name": "bash", "description": told, "parameters": parameters}}]
    return [Session("coding traces", 1, system, tools, moves)] if moves else []


def _rows(name: str) -> Iterator[dict[str, Any]]:
    path = folder() / name
    if path.exists():
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def _step(step: dict[str, Any], said: str | None) -> Move:
    words = _text(step.get("thought") or step.get("response") or "")
    return Move(words, "bash", {"command": step["action"]}, step["observation"] or "done", said=said)


def _moves(messages: list[dict[str, Any]]) -> Iterator[Move]:
    said: list[str] = []
    results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    for message in messages:
        if message["role"] == "user":
            said.append(message["content"])
        elif message["role"] == "assistant":
            before, said = "\n\n".join(said) or None, []
            words = message.get("content") or ""
            calls = message.get("tool_calls") or ()
            if not calls:
                yield Move(words, said=before)
            for call in calls:
                function = call["function"]
                result = results.get(call["id"], "done")
                yield Move(words, function["name"], json.loads(function["arguments"]), result, said=before)
                words, before = "", None


def _needing(moves: list[Move], system: str) -> list[Move]:
    """The same moves, with what they quote."""
    known = set(_QUOTED.findall(system))
    held: dict[str, int | None] = {}
    """Where a name stands: in the result of a move, or (None) in what somebody said since."""
    made: list[Move] = []
    for at, move in enumerate(moves):
        for word in _telling(move.said or ""):
            held[word] = None
        spoken = list(_telling(f"{move.words} {' '.join(map(str, _values(move.arguments)))}"))
        places = dict.fromkeys(place for word in spoken if (place := held.get(word)) is not None and word not in known)
        needs = [Need(moves[place].tool or "", moves[place].arguments, moves[place].result) for place in places]
        made.append(Move(move.words, move.tool, move.arguments, move.result, tuple(needs), move.said))
        for word in spoken:
            held[word] = None
        for word in _telling(move.result):
            held[word] = at
    return made


def _telling(text: str) -> Iterator[str]:
    """The names in it: what no plain sentence has."""
    return (word for word in _QUOTED.findall(text) if not word.isalpha())


def _values(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, dict):
        for value in arguments.values():
            yield from _values(value)
    elif isinstance(arguments, list):
        for value in arguments:
            yield from _values(value)
    else:
        yield arguments


def _text(content: Any) -> str:
    """The text of a content that may come in blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(block.get("text", "") for block in content or () if isinstance(block, dict))


def _tools(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Schemas of the tools that were called, by the arguments that they were given."""
    kinds = {str: "string", int: "integer", float: "number", list: "array", bool: "boolean", dict: "object"}
    found: dict[str, dict[str, Any]] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            properties = found.setdefault(call["function"]["name"], {})
            for name, value in json.loads(call["function"]["arguments"]).items():
                properties[name] = {"type": kinds[type(value)], "description": f"The {name.replace('_', ' ')}."}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{name.replace('_', ' ').capitalize()}, as the policy says.",
                "parameters": {"type": "object", "properties": properties, "required": sorted(properties)},
            },
        }
        for name, properties in sorted(found.items())
    ]
