"""Plays a session under a strategy: each move sees the request first, and fetches what it needs and does not find.

What a strategy holds back is looked for in the request itself, literally. Whoever plays knows nothing of policies.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from bench.session.meter import Bill, Meter, encoded
from bench.session.script import Move, Need, Session

PAGE_CHARS_MIN: Final = 400
"""A result of fewer characters is no page to anybody."""

TRIES: Final = 4
_RECALL: Final = re.compile(r'recall\("(m\d+(?:\.\d+)?)"\)')


class Strategy(Protocol):
    """A way to make requests of a history."""

    name: str

    def fit(self, history: list[Any], tools: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The messages and the tools to send."""
        ...

    def answer(self, tool: str, arguments: dict[str, Any]) -> str | None:
        """What the strategy itself answers to a call."""
        ...


class Fault(msgspec.Struct, frozen=True):
    """Something needed that was not there."""

    move: int
    key: str
    how: str
    chars: int
    age: int
    """Moves since it was last there to be read."""


class Outcome(msgspec.Struct):
    """What a session came to."""

    strategy: str
    bill: Bill
    faults: list[Fault]
    evicted: int
    """Distinct results that were held back at least once."""
    lost: int
    """Needs that could not be met: a strategy's mistake."""

    @property
    def fault_rate(self) -> float:
        """Faults for each distinct page that left."""
        return len(self.faults) / max(1, self.evicted)


class _Copy(NamedTuple):
    """Where the outcome of a call stands in the history."""

    text: str
    call: str
    edits: int
    move: int


class Player:
    """One session under one strategy."""

    def __init__(self, session: Session, strategy: Strategy, budget: int | None = None) -> None:
        self.session = session
        self.strategy = strategy
        self.meter = Meter(budget)
        self.at = 0
        """The move that comes next."""
        self.history: list[Any] = [{"role": "system", "content": session.system}]
        self.keys: dict[int, str] = {}
        """Which call the message at a place answers."""
        self.moved: dict[int, int] = {}
        """And in which move it came."""
        self.faults: list[Fault] = []
        self._chance = random.Random(session.seed)
        self._copies: dict[str, list[_Copy]] = defaultdict(list)
        self._edits: dict[str, list[str]] = defaultdict(list)
        self._evicted: set[str] = set()
        self._lost = 0
        self._tombstones: dict[str, str] = {}

    def play(self) -> Outcome:
        """All moves."""
        for at, move in enumerate(self.session.moves):
            self.at = at
            if move.said is not None:
                self.history.append({"role": "user", "content": move.said})
            self._move(move)
        return Outcome(self.strategy.name, self.meter.bill, self.faults, len(self._evicted), self._lost)

    def _move(self, move: Move) -> None:
        tries = 0
        while True:
            contents, calls = self._request()
            missing = [need for need in move.needs if not self._is_there(need, contents, calls)]
            if missing and tries < TRIES * len(move.needs):
                tries += 1
                self._fetch(missing[0], calls)
                continue
            self._lost += len(missing)
            if move.tool is None:
                self._reply(move.words)
                return
            call = self._reply(move.words, move.tool, move.arguments)
            self._result(call, move.key, move.result)
            break
        self._remember(move.key, move.arguments.get("path"), move.result, call)
        if move.writes:
            self._edits[move.writes].append(call)

    def _request(self) -> tuple[set[str], set[str]]:
        """Send it; the contents in it, and the calls whose arguments are."""
        messages, tools = self.strategy.fit(self.history, self.session.tools)
        self.meter.request(tools, messages)
        contents: set[str] = set()
        calls: set[str] = set()
        self._tombstones = {}
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                contents.add(content)
                if message["role"] == "tool" and (found := _RECALL.search(content[:400])):
                    self._tombstones[message["tool_call_id"]] = found[1]
            for call in message.get("tool_calls") or ():
                calls.add(call["id"])
        for place in self.keys:
            text = self.history[place]["content"]
            if len(text) > PAGE_CHARS_MIN and text not in contents:
                self._evicted.add(text)
        return contents, calls

    def _is_there(self, need: Need, contents: set[str], calls: set[str]) -> bool:
        """Whether a copy of it is in the request, with every change that was made to it since."""
        path = need.arguments.get("path", "")
        edits = self._edits[path] if need.tool == "read_file" else []
        return any(
            copy.text in contents and all(edit in calls for edit in edits[copy.edits :])
            for copy in reversed(self._copies[need.key])
        )

    def _fetch(self, need: Need, calls: set[str]) -> None:
        """Get it back: by the handle that its tombstone names, where there is one and the copy is good; or anew."""
        copies = self._copies[need.key]
        edits = self._edits[need.arguments.get("path", "")] if need.tool == "read_file" else []
        handle = next(
            (
                self._tombstones[copy.call]
                for copy in reversed(copies)
                if copy.call in self._tombstones and all(edit in calls for edit in edits[copy.edits :])
            ),
            None,
        )
        about = need.arguments.get("path", need.arguments.get("pattern", ""))
        recalls = handle is not None and self._chance.random() < 0.5
        age = self.at - copies[-1].move if copies else -1
        self.faults.append(Fault(self.at, need.key, "recall" if recalls else "again", len(need.now), age))
        if recalls:
            call = self._reply(f"I need {about} again, which left.", "recall", {"handle": handle})
            text = self.strategy.answer("recall", {"handle": handle}) or ""
        else:
            call = self._reply(f"I need {about} before me again.", need.tool, need.arguments)
            text = self.strategy.answer(need.tool, need.arguments) or need.now
        self._result(call, need.key, text)
        text_of_old = next((copy for copy in reversed(copies) if copy.text == text), None)
        if recalls and text_of_old is not None:
            copies.append(_Copy(text, call, text_of_old.edits, self.at))
        else:
            self._remember(need.key, need.arguments.get("path"), text, call)

    def _reply(self, words: str, tool: str | None = None, arguments: dict[str, Any] | None = None) -> str:
        message: dict[str, Any] = {"role": "assistant", "content": words}
        call = f"call_{len(self.history)}"
        if tool is not None:
            function = {"name": tool, "arguments": encoded(arguments)}
            message["tool_calls"] = [{"id": call, "type": "function", "function": function}]
        self.meter.reply(message)
        self.history.append(message)
        return call

    def _result(self, call: str, key: str, text: str) -> None:
        self.keys[len(self.history)] = key
        self.moved[len(self.history)] = self.at
        self.history.append({"role": "tool", "tool_call_id": call, "content": text})

    def _remember(self, key: str, path: str | None, text: str, call: str) -> None:
        self._copies[key].append(_Copy(text, call, len(self._edits[path or ""]), self.at))
