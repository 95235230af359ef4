"""Matches a request to a conversation by digests of its history. Touches no store.

Clients do not send back exactly what they received: cache markers move, empty fields change, assistant messages are
rewritten. So messages are compared without these, and a history is identified by its start and its current position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from killick.model.events import to_text
from killick.proxy.wire import is_list, is_map, maps, text_in
from killick.window.messages import arguments_of, unmarked

LOOKS_MAX: Final = 32
"""How many positions of a history are looked up, from its end, before it counts as unknown."""

ROOT_TAG: Final = "killick:root:"
TIP_TAG: Final = "killick:tip:"
"""Tags of a run: its conversation's start, and its position."""

_encode: Final = msgspec.json.Encoder(order="deterministic").encode


class Digests(NamedTuple):
    """A request's history as it is looked up."""

    root: str | None
    asked: str
    tips: tuple[str, ...]
    """The digests of its last replies, the last one first."""
    chain: bytes


def digests_of(messages: Sequence[Any], shape: str, credentials_digest: bytes = b"") -> Digests:
    """Returns a request's digests. `whose` separates clients that start with the same words."""
    chain, root = sha256(shape.encode() + b"\x00" + credentials_digest).digest(), None
    places: list[tuple[bytes, bytes]] = []
    index = _after_system(messages)
    while index < len(messages):
        if _is_reply(messages[index]):
            end = index
            while end < len(messages) and _is_reply(messages[end]):
                end += 1
            said = print_of_messages(messages[index:end])
            places.append((chain, said))
            chain, index = sha256(chain + said).digest(), end
            continue
        chain = sha256(chain + _encode(unmarked(messages[index]))).digest()
        if root is None and is_map(messages[index]) and messages[index].get("role") == "user":
            root = _text(b"root", chain)
        index += 1
    return Digests(root, _text(b"asked", chain), tuple(tip_of(*at) for at in places[: -LOOKS_MAX - 1 : -1]), chain)


def tip_of(chain: bytes, said: bytes) -> str:
    """Returns the digest of a history with this reply."""
    return _text(b"tip", chain, said)


def print_of_messages(messages: Sequence[Any]) -> bytes:
    """Returns a reply's fingerprint in a history: its calls, in any order, else its text. Clients rewrite both with
    other white space and empty fields, and some omit text next to calls."""
    words, calls = _said(messages)
    return _digest(["calls", *calls] if calls else ["words", words])


def _said(messages: Sequence[Any]) -> tuple[str, list[list[Any]]]:
    words, calls = "", list[list[Any]]()
    for message in filter(is_map, messages):
        words += text_in(message.get("content"))
        calls += [[str(id or ""), str(name or ""), _same(arguments_of(given))] for id, name, given in _calls(message)]  # noqa: A001
    return "".join(words.split()), sorted(calls, key=_encode)


def _calls(message: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for call in maps(message.get("tool_calls")):
        function = call.get("function") or call.get("custom")
        if is_map(function):
            yield call.get("id"), function.get("name"), function.get("arguments", function.get("input"))
    for block in maps(message.get("content")):
        if block.get("type") == "tool_use":
            yield block.get("id"), block.get("name"), block.get("input")
    if message.get("type") == "function_call":
        yield message.get("call_id"), message.get("name"), message.get("arguments")


def _same(value: Any) -> Any:
    """Normalizes arguments: some clients rewrite numbers."""
    if is_map(value):
        return {name: _same(part) for name, part in value.items()}
    if is_list(value):
        return [_same(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(messages: list[Any]) -> bytes:
    return sha256(_encode(messages)).digest()


def _is_reply(message: Any) -> bool:
    if not is_map(message):
        return False
    role = message.get("role")
    return role == "assistant" or (role is None and message.get("type") in ("function_call", "reasoning"))


def _after_system(messages: Sequence[Any]) -> int:
    """Skips instructions, which may differ from call to call, for example by the time."""
    index = 0
    while index < len(messages) and is_map(messages[index]) and messages[index].get("role") in ("system", "developer"):
        index += 1
    return index


def _text(*parts: bytes) -> str:
    return to_text(sha256(b"\x00".join(parts)).digest())
