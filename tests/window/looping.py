"""A loop around a model as people write one, played by chance, with everything on record that a claim is made about.

Reads what was sent beside what was said, and says what stands in each place: an own reading, so that a window is not
judged by what it believes itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from killick.window import Answer, Decision, Page, Policy, Sent, Situation, Window, estimate
from window.histories import Session, name_of

# What may be given to a window --------------------------------------------------------------------


class Nothing:
    """Lets nothing go."""

    def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]:
        return []


class Everything:
    """Lets everything go that it is offered, the last first."""

    def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]:
        return list(reversed(pages))


class Chance(NamedTuple):
    """Lets anything go, at any time, for no reason; asked the same again, it says the same."""

    seed: int

    def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]:
        return [page for page in pages if crc32(f"{self.seed} {page.handle} {now.turn}".encode()) % 4 == 0]


POLICIES: dict[str, Callable[[int], Policy | None]] = {
    "default": lambda seed: None,
    "nothing": lambda seed: Nothing(),
    "everything": lambda seed: Everything(),
    "chance": Chance,
}
BUDGETS = (1, 300, 1500, 4000, 12_000, 10**6)
COUNTERS: tuple[Callable[[str], int] | None, ...] = (
    None,
    len,
    lambda text: len(text.split()),
    lambda text: len(text) // 3,
)

# One call after the other -------------------------------------------------------------------------


class Known(NamedTuple):
    """What a window says of a page."""

    handle: str
    message: int
    result: bool
    """Of a tool; else it is what somebody said."""
    error: bool
    resident: bool
    saves: int


class Moment(NamedTuple):
    """One call of the model: what its owner gave, what was sent, what had been decided since the call before."""

    given: list[Any]
    sent: Sent
    decisions: list[Decision]
    answered: int
    """So many of them were made before the window was asked for this call."""
    recalled: dict[str, Answer]
    """What recall would answer for each handle that can be read in what was sent, and in those answers."""
    again: Sent
    """The same, asked for once more."""
    more: int
    """How many decisions that made."""
    untouched: bool
    """Whether what was given stayed as it was."""
    edited: bool
    """Whether what was given goes on from what was given before."""
    pages: list[Known]


class Loop:
    """A session and a window, both settled by a seed."""

    def __init__(self, seed: int, shape: str, *, backwards: bool = False) -> None:
        rng = Random(f"loop {seed} {shape}")
        self.rng, self.backwards = rng, backwards
        self.session = Session(seed, shape, size=rng.choice((60, 400)))
        self.seed, self.policy = seed, rng.choice(sorted(POLICIES))
        self.budget = rng.choice(BUDGETS)
        self.tokens = rng.choice(COUNTERS)
        self.decisions = list[Decision]()
        self.window = self.fresh(self.chosen(), self.decisions.append)

    def chosen(self) -> Policy | None:
        return POLICIES[self.policy](self.seed)

    def fresh(self, policy: Policy | None, record: Callable[[Decision], None] | None = None) -> Window:
        shape: Any = self.session.form.shape
        return Window(self.budget, tokens=self.tokens, policy=policy, shape=shape, record=record)

    def __repr__(self) -> str:
        return f"{self.policy} policy, {self.budget} tokens, {len(self.session.tools)} tools"

    def moments(self, calls: int) -> Iterator[Moment]:
        edited = False
        for _ in range(calls):
            yield self._moment(edited)
            edited = self.backwards and self.rng.random() < 0.2
            if edited:
                self.session.back()
            else:
                self.session.turn(self._sent.messages, self._sent.tools, self._answer)
            if self.rng.random() < 0.1:
                self._pin()

    def _moment(self, edited: bool) -> Moment:
        session, window = self.session, self.window
        given = session.given()
        before = deepcopy((given, session.tools, session.system))
        answered = len(self.decisions)
        sent = self._sent = window.fit(given, session.tools, system=session.system)
        kept, decisions = deepcopy(sent), list(self.decisions)
        recalled = dict(self._recalled(sent))
        self.decisions.clear()
        again = deepcopy(window.fit(given, session.tools, system=session.system))
        more = len(self.decisions)
        pages = [self._known(page) for page in window.pages()]
        untouched = before == (given, session.tools, session.system)
        return Moment(before[0], kept, decisions, answered, recalled, again, more, untouched, edited, pages)

    def _known(self, page: Page) -> Known:
        tombstone = f'[left the window: {page.source}, {page.tokens:,} tokens; recall("{page.handle}") brings it back]'
        saves = page.tokens - (self.tokens or estimate)(tombstone)
        is_error, resident = page.error and not page.stale, self.window.resident(page.handle)
        return Known(page.handle, page.index, page.result, is_error, resident, saves)

    def _pin(self) -> None:
        pages = self.window.pages()
        if pages:
            self.window.pin(self.rng.choice(pages).handle, turns=self.rng.choice((None, 0, 3)))

    def _answer(self, name: str, arguments: Any) -> tuple[str, bool] | None:
        # Nobody writes in this world but the model, by a tool of that name.
        answer = self.window.answer(name, arguments)
        return (answer.text, answer.failed) if answer is not None else None

    def _recalled(self, sent: Sent) -> Iterator[tuple[str, Answer]]:
        recall = recall_of(sent, self.session.tools)
        waiting, seen = list(handles_in(json.dumps(sent.messages, ensure_ascii=False))), set[str]()
        while waiting:
            handle = waiting.pop()
            if handle not in seen:
                seen.add(handle)
                answer = self.window.answering(recall, {"handle": handle})
                assert answer is not None
                yield handle, answer
                # What stands for whole turns names what was in them.
                waiting += handles_in(answer.text) if "-" in handle else []


def handles_in(text: str) -> set[str]:
    return set(re.findall(r"\bm\d+(?:\.\d+)?(?:-m\d+)?\b", text))


def recall_of(sent: Sent, tools: Sequence[Any]) -> str:
    """The name that the window's own recall has beside these tools."""
    known = {name_of(tool) for tool in tools}
    return next(name for tool in sent.tools if "recall" in (name := name_of(tool)) and name not in known)


@cache
def played(seed: int, shape: str, calls: int = 14, backwards: bool = False) -> tuple[Loop, list[Moment]]:
    """A whole loop, played once for all that is claimed of it."""
    loop = Loop(seed, shape, backwards=backwards)
    return loop, list(loop.moments(calls))


# What stands where --------------------------------------------------------------------------------


class Place(NamedTuple):
    """A piece of what was said, and what stands in its place."""

    handle: str
    said: Any
    sent: Any
    """None where it left with its whole turn."""
    note: str | None
    """What is told instead of it; None where it stands as it was said."""
    message: int


KEPT = ("thinking", "redacted_thinking", "tool_use", "server_tool_use", "web_search_tool_result", "refusal")
_FOLD = re.compile(r'"m(\d+)-m(\d+)"')


def places(shape: str, given: Sequence[Any], sent: Sequence[Any]) -> list[Place]:
    """Every place of what was said, in order. Fails where what was sent is more than the same with other content."""
    found, at = list[Place](), 0
    for message in sent:
        rest: Any = message
        while rest is not None:
            note, after = _note_first(rest, at)
            if note is not None:
                found += _gone(given, note)
                at, rest = _ends(note)[1] + 1, after
            else:
                piece, rest = _cut(shape, given[at], rest)
                found += _within(at, given[at], piece)
                at += 1
    assert at == len(given), f"{len(given) - at} messages from {at} on are missing"
    return found


def _ends(note: str) -> tuple[int, int]:
    match = _FOLD.search(note)
    assert match
    return int(match[1]), int(match[2])


def _note_first(message: Any, at: int) -> tuple[str | None, Any]:
    """The note on what stood at a place, where a message begins with one, and what comes after it."""
    content = message.get("content")
    if message.get("role") != "user" or not content:
        return None, None
    first = content if isinstance(content, str) else content[0].get("text")
    if not isinstance(first, str) or not _FOLD.search(first) or _ends(first)[0] != at:
        return None, None
    more = content[1:] if isinstance(content, list) else []
    return first, {**message, "content": more} if more else None


def _cut(shape: str, said: Any, message: Any) -> tuple[Any, Any]:
    """What a message has of the one that was said, and what comes after it: where users and models must take turns,
    one message holds a note on what followed, and what the user said next."""
    content = message.get("content")
    if shape != "anthropic" or said["role"] != "user" or not isinstance(content, list):
        return message, None
    count = len(said["content"]) if isinstance(said["content"], list) else 1
    piece = content[0].get("text") if isinstance(said["content"], str) else content[:count]
    more = content[count:]
    return {**message, "content": piece}, {**message, "content": more} if more else None


def _gone(given: Sequence[Any], note: str) -> Iterator[Place]:
    first, last = _ends(note)
    for at in range(first, last + 1):
        yield Place(f"m{at}", given[at], None, note, at)


def _within(at: int, said: Any, sent: Any) -> Iterator[Place]:
    if said == sent:
        yield Place(f"m{at}", said, sent, None, at)
        return
    holder = "output" if "output" in said else "content"
    assert {**said, holder: None} == {**sent, holder: None}, f"m{at}: more than its content is other"
    one, other = said[holder], sent[holder]
    if isinstance(other, str):
        yield Place(f"m{at}", one, other, other, at)
        return
    assert len(one) == len(other), f"m{at}: blocks were added or lost"
    for part, (before, after) in enumerate(zip(one, other, strict=True)):
        yield Place(f"m{at}.{part}", before, after, None if before == after else _told(before, after), at)


def _told(before: Any, after: Any) -> str:
    """What a block says instead."""
    assert before.get("type") not in KEPT, f"{before['type']} is other than it was"
    if before.get("type") == "tool_result":
        assert {**before, "content": None} == {**after, "content": None}, "more than a result's content is other"
        assert isinstance(after["content"], str)
        return after["content"]
    assert before.get("cache_control") == after.get("cache_control"), "another mark for the cache"
    return str(after["text"])


def said_at(given: Sequence[Any], handle: str) -> Any:
    """What was said at a place."""
    at, _, part = handle[1:].partition(".")
    message = given[int(at)] if int(at) < len(given) else {}
    content = message.get("output", message.get("content"))
    if not part or not isinstance(content, list):
        return content
    return content[int(part)] if int(part) < len(content) else None


_SEALED = ("thinking", "redacted_thinking", "reasoning", "web_search_tool_result")
"""What only the provider can read."""


def leaves(said: Any) -> Iterator[str]:
    """What must not be lost of a place: its texts, and the data of what is no text."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, list):
        for part in said:
            yield from leaves(part)
    elif isinstance(said, dict) and said.get("type") not in _SEALED:
        for name in ("content", "output", "text", "refusal", "data", "file_data", "url", "image_url", "source", "file"):
            yield from leaves(said.get(name))
