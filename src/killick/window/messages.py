"""Reads the messages of three providers in one form, and writes them back with replaced content.

Knows which call belongs to which result, and which content may be replaced; makes no decisions. Objects of the official
clients are read as the plain messages that they represent. Inputs are never mutated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeGuard, cast

import msgspec

Shape: TypeAlias = Literal["openai", "openai-responses", "anthropic"]
"""The wire format of messages and tools: chat completions, the Responses API, or Anthropic's messages."""

Role: TypeAlias = Literal["system", "user", "assistant", "result", "other"]


class Call(NamedTuple):
    """A tool call of the model."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


class Part(NamedTuple):
    """A part of a message with replaceable content: the whole content, or the block at `at`."""

    at: int | None
    is_result: bool
    text: str
    call: str = ""
    error: bool = False
    media: bool = False
    """Whether it contains more than text: an image, a document."""


class Message(NamedTuple):
    """One message, independent of the wire format."""

    role: Role
    parts: tuple[Part, ...] = ()
    calls: tuple[Call, ...] = ()


def is_map(thing: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(thing, Mapping)


def is_list(thing: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(thing, list | tuple)


def of(thing: Any, name: str) -> Any:
    """Returns a field of a dict or of an object, or None."""
    return thing.get(name) if is_map(thing) else getattr(thing, name, None)


def plain(thing: Any) -> Any:
    """Returns an official client's object as the dict that it sends; anything else unchanged."""
    dump = getattr(thing, "model_dump", None)
    return dump(mode="json", by_alias=True, exclude_unset=True) if callable(dump) else thing


_encode: Final = msgspec.json.Encoder(enc_hook=lambda thing: _lowered(thing)).encode


def _lowered(thing: Any) -> Any:
    lowered = plain(thing)
    return lowered if lowered is not thing else str(thing)


def as_json(thing: Any) -> str:
    """Returns the sent JSON of a message or a tool."""
    try:
        return _encode(thing).decode()
    except (TypeError, ValueError):  # Text that no encoding can carry, or a key that is no text.
        return json.dumps(thing, default=_lowered, skipkeys=True)


def text_of(content: Any) -> str:
    """Returns content as text: the texts of blocks concatenated, other blocks as JSON."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not is_list(content):
        return as_json(content)
    return "\n".join(
        text if isinstance(text := of(block, "text"), str) else as_json(_bare(plain(block))) for block in content
    )


# Reading ------------------------------------------------------------------------------------------

_OWN_ITEMS: Final = frozenset({"function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
                               "reasoning", "item_reference"})  # fmt: skip
_BLOCKS: Final = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use"})


def shape_of(messages: Iterable[Any], tools: Iterable[Any] = ()) -> Shape | None:
    """Detects the wire format; None while undetermined."""
    for tool in tools:
        if of(tool, "input_schema") is not None:
            return "anthropic"
        if of(tool, "function") is not None:
            return "openai"
        if of(tool, "type") == "function":
            return "openai-responses"
    for message in messages:
        if of(message, "type") in _OWN_ITEMS:
            return "openai-responses"
        if of(message, "role") == "tool" or of(message, "tool_calls"):
            return "openai"
        content = of(message, "content")
        if is_list(content):
            kinds = {of(block, "type") for block in content}
            if kinds & _BLOCKS:
                return "anthropic"
            if kinds & {"input_text", "output_text"}:
                return "openai-responses"
    return None


def read(message: Any, shape: Shape) -> Message:
    """Parses a message."""
    return _READERS[shape](message)


def _chat(message: Any) -> Message:
    role, content = of(message, "role"), of(message, "content")
    if role in ("tool", "function"):
        return Message("result", (_result(None, content, of(message, "tool_call_id")),))
    calls = tuple(
        Call(str(of(call, "id") or ""), str(of(function, "name") or ""), arguments_of(of(function, "arguments")))
        for call in of(message, "tool_calls") or ()
        if (function := of(call, "function") or of(call, "custom")) is not None
    )
    return Message(_role(role), _texts(content), calls)


def _anthropic(message: Any) -> Message:
    role, content = _role(of(message, "role")), of(message, "content")
    if not is_list(content):
        return Message(role, _texts(content))
    parts, calls = list[Part](), list[Call]()
    for at, block in enumerate(content):
        match of(block, "type"):
            case "tool_result":
                part = _result(at, of(block, "content"), of(block, "tool_use_id"))
                parts.append(part._replace(error=True) if of(block, "is_error") else part)
            case "tool_use":
                calls.append(Call(str(of(block, "id")), str(of(block, "name")), arguments_of(of(block, "input"))))
            case "text":
                # A text means the same whether or not a client wrapped it in a block for a cache marker.
                parts.append(Part(None if len(content) == 1 else at, False, str(of(block, "text") or "")))
            case "image" | "document" | "search_result" if role == "user":
                parts.append(Part(at, False, text_of([block]), media=True))
            case _:
                pass
    if role == "user" and parts and all(part.is_result for part in parts) and len(parts) == len(content):
        role = "result"
    return Message(role, tuple(parts), tuple(calls))


def _responses(item: Any) -> Message:
    match of(item, "type"):
        case "function_call_output" | "custom_tool_call_output":
            return Message("result", (_result(None, of(item, "output"), of(item, "call_id")),))
        case "function_call" | "custom_tool_call":
            arguments = of(item, "arguments") if of(item, "type") == "function_call" else of(item, "input")
            call = Call(str(of(item, "call_id") or ""), str(of(item, "name") or ""), arguments_of(arguments))
            return Message("assistant", (), (call,))
        case "message" | None:
            role = _role(of(item, "role"))
            return Message(role, _texts(of(item, "content")))
        case kind if kind == "reasoning" or str(kind).endswith("_call"):
            # Tools that the provider itself runs are part of its reply.
            return Message("assistant")
        case _:
            return Message("other")


_READERS: Final[dict[Shape, Callable[[Any], Message]]] = {
    "openai": _chat,
    "openai-responses": _responses,
    "anthropic": _anthropic,
}


def _role(role: Any) -> Role:
    match role:
        case "system" | "developer":
            return "system"
        case "user" | "assistant":
            return cast(Role, role)
        case _:
            return "other"


def _result(at: int | None, content: Any, call: Any) -> Part:
    text = text_of(content)
    media = is_list(content) and any(not isinstance(of(block, "text"), str) for block in content)
    return Part(at, True, text, str(call or ""), says_error(text), media)


def _texts(content: Any) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (Part(None, False, content),) if content else ()
    if not is_list(content):
        return ()
    return tuple(
        Part(None if len(content) == 1 and is_text else at, False, text_of([block]), media=not is_text)
        for at, block in enumerate(content)
        if of(block, "type") != "refusal"
        for is_text in (isinstance(of(block, "text"), str),)
    )


def arguments_of(given: Any) -> Mapping[str, Any] | str:
    """Returns a call's arguments as a dict, or as text if they are not a JSON object."""
    if isinstance(given, str):
        try:
            read: Any = json.loads(given.strip() or "{}")
        except (ValueError, RecursionError):
            return given
        return cast("dict[str, Any]", read) if isinstance(read, dict) else given
    lowered = plain(given)
    return lowered if is_map(lowered) else {}


_ERRORS: Final = ("error", "traceback (most recent call last)", '{"error"')


def says_error(text: str) -> bool:
    """Returns whether a result is marked as an error."""
    return text[:64].lstrip().lower().startswith(_ERRORS)


# Writing ------------------------------------------------------------------------------------------


def replaced(message: Any, texts: Mapping[int | None, str]) -> Any:
    """Returns the message with its whole content, or some blocks, replaced."""
    message = dict(plain(message) if not is_map(message) else message)
    whole = texts.get(None)
    if whole is not None:
        name = "output" if "output" in message else "content"
        content = message[name]
        is_block = is_list(content) and len(content) == 1 and isinstance(of(content[0], "text"), str)
        message[name] = [_block(plain(content[0]), whole)] if is_block else whole
        return message
    content = list(cast("Sequence[Any]", message["content"]))
    for at, text in texts.items():
        if at is not None:
            content[at] = _block(plain(content[at]), text)
    message["content"] = content
    return message


def _block(block: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Returns a block with other content and the same cache marker."""
    kind = block.get("type")
    if kind == "tool_result":
        return {**block, "content": text}
    kept = {"cache_control": block["cache_control"]} if block.get("cache_control") else {}
    said = kind if kind in ("input_text", "output_text") else "input_text" if str(kind).startswith("input_") else "text"
    return {"type": said, "text": text, **kept}


def noted(messages: Sequence[Any], text: str, shape: Shape) -> list[Any]:
    """Appends a note to messages that end before a model reply: as its own message, or, where roles must alternate, as
    a block of the last message."""
    if shape != "anthropic" or not messages or not is_user(messages[-1]):
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], joined(messages[-1], {"role": "user", "content": text})]


def is_user(message: Any) -> bool:
    return bool(of(message, "role") == "user")


def joined(first: Any, second: Any) -> dict[str, Any]:
    """Merges two messages of the same role."""
    message = dict(first if is_map(first) else plain(first))
    message["content"] = [*_blocks(message["content"]), *_blocks(of(second, "content"))]
    return message


def _blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


MEDIA_TOKENS: Final = 1_500
"""The approximate size of an image, independent of its bytes."""

_MEDIA: Final = re.compile(r'"(?:data|url|image_url|file_data)":"(?:data:[^",]{0,99},)?[A-Za-z0-9+/=_-]{1000,}"')


def size_of(thing: Any, tokens: Callable[[str], int]) -> int:
    """Returns a message's tokens, without cache markers. Encoded media counts as an image."""
    return sized(as_json(unmarked(thing)), tokens)


def sized(text: str, tokens: Callable[[str], int]) -> int:
    """The same for already encoded text."""
    if len(text) < 1000 or not _MEDIA.search(text):
        return tokens(text)
    rest, count = _MEDIA.subn('""', text)
    return tokens(rest) + count * MEDIA_TOKENS


_MARKS: Final = ("cache_control",)


def same(old: Any, new: Any) -> bool:
    """Returns whether two messages are equal apart from cache markers. System messages always are: clients put the time
    there."""
    return old is new or old == new or (is_system(old) and is_system(new)) or unmarked(old) == unmarked(new)


def is_system(message: Any) -> bool:
    return of(message, "role") in ("system", "developer")


def _bare(block: Any) -> Any:
    if not is_map(block):
        return block
    return {name: part for name, part in block.items() if name not in _MARKS and part is not None}


def unmarked(message: Any) -> Any:
    """Returns a message without cache markers."""
    message = plain(message)
    if not is_map(message):
        return message
    content = message.get("content")
    # Clients represent absent fields in several ways.
    kept = {name: part for name, part in _bare(message).items() if part != []}
    if is_list(content):
        kept["content"] = [_bare(block) for block in map(plain, content)]
        if len(content) == 1 and is_map(kept["content"][0]) and set(kept["content"][0]) == {"type", "text"}:
            # To set a cache marker, clients wrap a text in a block.
            kept["content"] = kept["content"][0]["text"]
    return kept
