"""Reads a model's reply from any client, stores it, and rebuilds it as the class of that client.

Goes by shape: objects of the official clients, of clients that imitate them, and plain dicts are read alike. No
client is imported unless a stored reply must be rebuilt, and nothing here sends a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from math import ceil
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary

import msgspec

from killick.errors import ValueRefused
from killick.model.events import Usage

Provider: TypeAlias = Literal["openai", "openai-responses", "anthropic"]
"""Whose form messages, tool schemas and answers have."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool that the model wants called. Arguments that are no JSON object stay the text that they are."""

    id: str
    name: str
    arguments: dict[str, Any] | str


def _is_map(thing: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(thing, Mapping)


def _is_list(thing: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(thing, list | tuple)


def _of(thing: Any, name: str) -> Any:
    """A field of an object or of a dict; None where there is none."""
    return thing.get(name) if _is_map(thing) else getattr(thing, name, None)


def _all(thing: Any, name: str) -> Sequence[Any]:
    """A field that is a list; empty where it is none."""
    return found if _is_list(found := _of(thing, name)) else ()


# The content of a reply ---------------------------------------------------------------------------


def provider_of(thing: Any) -> Provider:
    """The provider of a reply's form, or of an official client's method; "openai" if unknown."""
    if callable(thing):
        return _provider_behind(thing)
    if _of(thing, "object") == "response" or _all(thing, "output"):
        return "openai-responses"
    return "anthropic" if _of(thing, "type") == "message" or _all(thing, "content") else "openai"


def _provider_behind(fn: Callable[..., Any]) -> Provider:
    if isinstance(fn, partial):
        return _provider_behind(fn.func)
    owner: Any = getattr(fn, "__self__", None)
    homes = [cls.__module__ for cls in owner.__class__.__mro__]
    if any(home.startswith("anthropic.") for home in homes):
        return "anthropic"
    return "openai-responses" if any(".resources.responses" in home for home in homes) else "openai"


class _Refusal(str):
    """A model's refusal."""


class _Reasoning(str):
    """A model's reasoning."""


def _parts(reply: Any) -> Iterator[str | ToolCall]:
    """The parts of a reply, in order."""
    if isinstance(reply, str):
        yield reply
        return
    read = {"anthropic": _parts_of_anthropic, "openai-responses": _parts_of_responses, "openai": _parts_of_openai}
    yield from (part for part in read[provider_of(reply)](reply) if part is not None and part != "")


def _parts_of_anthropic(reply: Any) -> Iterator[str | ToolCall | None]:
    for block in _all(reply, "content"):
        match _of(block, "type"):
            case "text":
                yield _of(block, "text")
            case "thinking":
                yield _Reasoning(_of(block, "thinking") or "")
            case "tool_use":
                yield _tool_call(_of(block, "id"), block, "input")
            case _:
                pass


def _parts_of_responses(reply: Any) -> Iterator[str | ToolCall | None]:
    for item in _all(reply, "output"):
        match _of(item, "type"):
            case "message":
                for part in _all(item, "content"):
                    yield _of(part, "text") or _Refusal(_of(part, "refusal") or "")
            case "reasoning":
                for part in _all(item, "summary") or _all(item, "content"):
                    yield _Reasoning(_of(part, "text") or "")
            case "function_call":
                yield _tool_call(_of(item, "call_id"), item, "arguments")
            case _:
                pass


def _parts_of_openai(reply: Any) -> Iterator[str | ToolCall | None]:
    for choice in _all(reply, "choices")[:1]:
        message = _of(choice, "message") or _of(choice, "delta")
        for name in ("reasoning_content", "reasoning"):
            if isinstance(thought := _of(message, name), str) and thought:
                yield _Reasoning(thought)
                break
        if isinstance(content := _of(message, "content"), str):
            yield content
        yield from (_of(part, "text") for part in _all(message, "content"))
        yield _Refusal(_of(message, "refusal") or "")
        for call in _all(message, "tool_calls"):
            if function := _of(call, "function"):
                yield _tool_call(_of(call, "id"), function, "arguments")


def _tool_call(id: Any, call: Any, name: str) -> ToolCall:  # noqa: A002
    arguments = _of(call, name)
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments.strip() or "{}")
        except (ValueError, RecursionError):
            read = None
        arguments = dict(read) if _is_map(read) else arguments
    return ToolCall(str(id or ""), str(_of(call, "name") or ""), arguments or {})


def text_of(reply: Any) -> str:
    """The text of a reply, without reasoning; the refusal, if there is no other text."""
    parts = [part for part in _parts(reply) if isinstance(part, str) and not isinstance(part, _Reasoning)]
    return "".join([part for part in parts if not isinstance(part, _Refusal)] or parts)


def reasoning_of(reply: Any) -> str | None:
    """The reasoning of a reply, as far as its provider shows it."""
    return "\n\n".join(part for part in _parts(reply) if isinstance(part, _Reasoning)) or None


def tool_calls_of(reply: Any) -> list[ToolCall]:
    """The tools that the model wants called, in order."""
    return [part for part in _parts(reply) if isinstance(part, ToolCall)]


def is_paused(reply: Any) -> bool:
    """Whether the model only paused: Anthropic does in a long turn, and continues when its reply is sent back."""
    return bool(_of(reply, "stop_reason") == "pause_turn")


def assistant_messages(reply: Any) -> list[dict[str, Any]]:
    """The messages to append to the history for a reply."""
    if isinstance(reply, str):
        return [{"role": "assistant", "content": reply}]
    match provider_of(reply):
        case "openai-responses":
            return [wire(item) for item in _all(reply, "output")]
        case "anthropic":
            # A message without content is refused when it is sent back.
            content = [wire(block) for block in _all(reply, "content")]
            return [{"role": "assistant", "content": content}] if content else []
        case "openai":
            return [_chat_message(choice) for choice in _all(reply, "choices")[:1]]


def _chat_message(choice: Any) -> dict[str, Any]:
    said: dict[str, Any] = wire(_of(choice, "message") or _of(choice, "delta") or {})
    message = {"role": "assistant", "content": None} | {name: part for name, part in said.items() if part is not None}
    if audio := message.get("audio"):
        message["audio"] = {"id": _of(audio, "id")}
    if message["content"] is None and not message.get("tool_calls"):
        message["content"] = ""
    return message


_COUNTS: Final = (
    "prompt_tokens", "completion_tokens",
    "input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens",
)  # fmt: skip


def usage_of(reply: Any) -> Usage | None:
    """The usage of a call, if the reply has it. The chunks of a stream, as a list, are read together."""
    model, counts = "", dict[str, int]()
    for part in reply if _is_list(reply) else [reply]:
        # A stream's events wrap the fields of a reply.
        for holder in (part, _of(part, "message"), _of(part, "response")):
            named, usage = _of(holder, "model"), _of(holder, "usage")
            model = model or (named if isinstance(named, str) else "")
            details = _of(usage, "prompt_tokens_details") or _of(usage, "input_tokens_details")
            found = {name: _of(usage, name) for name in _COUNTS} | {"cached": _of(details, "cached_tokens")}
            counts |= {name: count for name, count in found.items() if isinstance(count, int)}
    if not counts:
        return None
    # Anthropic counts cache reads and writes separately; the others include them.
    apart = counts.get("cache_read_input_tokens", 0)
    written = apart + counts.get("cache_creation_input_tokens", 0)
    billed = _of(_of(reply, "_hidden_params"), "response_cost")  # LiteLLM has prices of more models than we have
    return Usage(
        model=model,
        tokens_in=counts.get("prompt_tokens", counts.get("input_tokens", 0)) + written,
        tokens_out=counts.get("completion_tokens", counts.get("output_tokens", 0)),
        tokens_cached=counts.get("cached", 0) + apart,
        cost_micros=ceil(billed * 1e6) if isinstance(billed, float) else 0,
    )


# How a reply is stored and comes back -------------------------------------------------------------


class _Parser(NamedTuple):
    """How a client turns a plain reply into a parsed one, given the format that the call asked for."""

    of: str
    module: str
    function: str
    format: str
    reply: str


_KINDS: Final = {
    "openai.chat": ("openai.types.chat", "ChatCompletion"),
    "openai.chat.chunk": ("openai.types.chat", "ChatCompletionChunk"),
    "openai.chat.parsed": ("openai.types.chat", "ParsedChatCompletion"),
    "openai.embeddings": ("openai.types", "CreateEmbeddingResponse"),
    "openai.response": ("openai.types.responses", "Response"),
    "openai.response.event": ("openai.types.responses", "ResponseStreamEvent"),
    "openai.response.parsed": ("openai.types.responses", "ParsedResponse"),
    "litellm.chat": ("litellm", "ModelResponse"),
    "litellm.chat.chunk": ("litellm", "ModelResponseStream"),
    "litellm.embeddings": ("litellm", "EmbeddingResponse"),
    "litellm.response": ("litellm", "ResponsesAPIResponse"),
    "anthropic.message": ("anthropic.types", "Message"),
    "anthropic.message.event": ("anthropic.types", "RawMessageStreamEvent"),
    "anthropic.message.parsed": ("anthropic.types.parsed_message", "ParsedMessage"),
    "anthropic.beta.message": ("anthropic.types.beta", "BetaMessage"),
    "anthropic.beta.message.event": ("anthropic.types.beta", "BetaRawMessageStreamEvent"),
    "anthropic.beta.message.parsed": ("anthropic.types.beta.parsed_beta_message", "ParsedBetaMessage"),
}
"""Stored names, and where the client of today has the class."""

_PARSERS: Final = {
    f"{of}.parsed": _Parser(of, *more)
    for of, *more in (
        ("openai.chat", "openai.lib._parsing._completions", "parse_chat_completion", "response_format",
         "chat_completion"),
        ("openai.response", "openai.lib._parsing._responses", "parse_response", "text_format", "response"),
        ("anthropic.message", "anthropic.lib._parse._response", "parse_response", "output_format", "response"),
        ("anthropic.beta.message", "anthropic.lib._parse._response", "parse_beta_response", "output_format",
         "response"),
    )
}  # fmt: skip

_NAMED: Final = {(module.partition(".")[0], name): kind for kind, (module, name) in _KINDS.items()}
_EVENTS: Final = (
    ("openai.types.responses.", "openai.response.event"),
    ("anthropic.types.raw_", "anthropic.message.event"),
    ("anthropic.types.beta.beta_raw_", "anthropic.beta.message.event"),
)
_HEADERS: Final = ("_request_id", "_workspace_id")
"""Attributes in which official clients keep headers of a response."""

_DERIVED: Final = frozenset({"parsed", "parsed_arguments", "parsed_output"})
"""The fields that a client's parser adds."""


def reply_kind(reply: Any) -> str | None:
    """The stored name for the class of a reply, where it is one that an official client gives."""
    for cls in type(reply).__mro__:
        if found := _NAMED.get((_package(cls), cls.__name__)):
            return found
        for home, kind in _EVENTS:
            if cls.__module__.startswith(home) and cls.__name__.endswith("Event"):
                return kind
    return None


def reply_type(kind: str) -> Any:
    """The class, or union of classes, behind a stored name; None where its package is missing or has it no more."""
    return _found(*_KINDS[kind]) if kind in _KINDS else None


def _found(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def wire(value: Any) -> Any:
    """A reply, or a part of one, as its provider sent it: by the provider's names, without fields that were never sent.

    This is the form to store. A model's fields at their defaults are left out: sent back as null, they are refused.
    """
    if _is_map(value):
        return {name: wire(part) for name, part in value.items()}
    if _is_list(value):
        return [wire(part) for part in value]
    cls = value.__class__
    if not hasattr(cls, "model_fields") or not hasattr(value, "model_fields_set"):
        return value
    hidden = _DERIVED if cls.__name__.startswith("Parsed") else frozenset[str]()
    held: dict[str, Any] = value.__dict__
    shown = held.keys() & value.model_fields_set - hidden  # LiteLLM deletes fields that were not sent
    sent: dict[str, Any] = {
        field.alias or name: wire(held[name]) for name, field in cls.model_fields.items() if name in shown
    }
    sent |= wire(value.model_extra or {})
    return sent | {name: held[name] for name in _HEADERS if held.get(name) is not None}


def rebuild(kind: str, value: Any, arguments: Mapping[str, Any] | None = None) -> Any:
    """Rebuilds a reply from the output of `wire`; returns the plain value if its package is missing.

    `arguments` are those of the call: only they name the type that a reply is parsed into.
    """
    parser = _PARSERS.get(kind)
    parse = _found(parser.module, parser.function) if parser else None
    cls = reply_type(parser.of if parser and parse else kind)
    if cls is None or not _is_map(value):
        return value
    package = import_module(kind.partition(".")[0])
    body = {name: part for name, part in value.items() if name not in _HEADERS}
    construct = _found(f"{package.__name__}._models", "construct_type")
    reply = cls(**body) if construct is None else construct(value=body, type_=cls)
    if parser and parse:
        reply = _parsed(parser, parse, reply, arguments or {}, package.NOT_GIVEN)
    for name in value.keys() & {*_HEADERS}:
        object.__setattr__(reply, name, value[name])
    return reply


def _parsed(parser: _Parser, parse: Callable[..., Any], reply: Any, given: Mapping[str, Any], absent: object) -> Any:
    asked: dict[str, Any] = {parser.format: given.get(parser.format) or absent, parser.reply: reply}
    if parser.of.startswith("openai."):
        asked["input_tools"] = given.get("tools") or absent
    try:
        return parse(**asked)
    except ValueError as error:
        reason = "; ".join(str(error).splitlines())
        raise ValueRefused("reply", f"does not fit {asked[parser.format]!r} any more: {reason}") from None


def recordable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model call as they can be stored: replies in them as they were sent, a type by its name and
    schema, settings of the client as they print, and without credentials and what only says that nothing was given."""
    try:
        return {name: _recordable(wire(_public(value))) for name, value in _public(arguments).items()}
    except RecursionError:
        raise ValueRefused("model arguments", "refer to themselves, or are nested too deeply; pass less") from None


_CREDENTIAL: Final = re.compile(r"(?i).*(api|access)[-_]key|(.*[-_])?(token|secret|password|credentials|authorization)")


def _public(named: Any) -> Any:
    """Arguments or headers without credentials, by their names, which no record may hold, and without absent ones."""
    if not _is_map(named):
        return named
    return {name: each for name, each in named.items() if not (_CREDENTIAL.fullmatch(str(name)) or _is_absent(each))}


def _is_absent(value: Any) -> bool:
    return value.__class__.__name__ in ("NotGiven", "Omit") and _package(value.__class__) in _CLIENTS


def _recordable(value: Any) -> Any:
    if isinstance(value, type):
        schema: Any = getattr(value, "model_json_schema", None)
        return {"type": value.__qualname__} | ({"schema": schema()} if schema else {})
    return repr(value) if _package(value.__class__) in _CLIENTS else value


_CLIENTS: Final = frozenset({"anthropic", "httpx", "httpx2", "openai"})


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


# Streams ------------------------------------------------------------------------------------------


def join_chunks(chunks: list[Any]) -> list[Any]:
    """A recorded stream on replay: texts and chat chunks joined into one, anything else as it came."""
    for text in ("", b""):
        if chunks and all(isinstance(chunk, type(text)) for chunk in chunks):
            return [text.join(chunks)]
    if not chunks or any(_of(chunk, "object") != "chat.completion.chunk" for chunk in chunks):
        return chunks
    parts: list[dict[str, Any]] = [_two({}, chunk) for chunk in map(wire, chunks)]
    # Neighbours in pairs, again and again: one after the other, a long text would be copied for each of its pieces.
    while len(parts) > 1:
        parts = [_two(parts[at], parts[at + 1]) if at + 1 < len(parts) else parts[at] for at in range(0, len(parts), 2)]
    kind = reply_kind(chunks[0])
    return [rebuild(kind, parts[0]) if kind else parts[0]]


def _two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    choices = _joined_lists(first.get("choices") or [], second.get("choices") or [])
    return first | {name: part for name, part in second.items() if part is not None} | {"choices": choices}


_WHOLE: Final = frozenset({"role", "type", "id", "name", "finish_reason"})
"""Texts that come in one piece, and with some providers again and again."""


def _joined(old: Any, new: Any) -> Any:
    if old is None or new is None:
        return old if new is None else new
    if _is_map(old) and _is_map(new):
        grown = dict(old)
        for name, part in new.items():
            grown[name] = (part or grown.get(name)) if name in _WHOLE else _joined(grown.get(name), part)
        return grown
    if _is_list(old) and _is_list(new):
        return _joined_lists(old, new)
    return old + new if isinstance(old, str) and isinstance(new, str) else new


def _joined_lists(old: Iterable[Any], new: Iterable[Any]) -> list[Any]:
    """Items that name their index grow in their place; others follow one another."""
    joined = list(old)
    for item in new:
        index = _of(item, "index")
        place = None if index is None else next((n for n, old in enumerate(joined) if _of(old, "index") == index), None)
        if place is None:
            joined.append(item)
        else:
            joined[place] = _joined(joined[place], item)
    return joined


# Clients ------------------------------------------------------------------------------------------

_unretried: Final[WeakKeyDictionary[Any, tuple[Any, Any]]] = WeakKeyDictionary()
"""For each client its copy without retries, and the original."""


def without_sdk_retries(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same method of an official client on a copy that does not retry by itself: each try is to be on record.

    Anything else is returned as it is; so are methods of the module `openai` itself, whose client is its module.
    """
    if isinstance(fn, partial):
        return partial(without_sdk_retries(fn.func), *fn.args, **fn.keywords)
    resource: Any = getattr(fn, "__self__", None)
    if not any(cls.__name__ in ("SyncAPIResource", "AsyncAPIResource") for cls in resource.__class__.__mro__):
        return fn
    client: Any = resource._client
    if not client.__dict__.get("max_retries"):
        return fn
    # People may give their client a new key or address while it is in use.
    facts = [getattr(client, name, None) for name in ("api_key", "auth_token", "base_url", "timeout")]
    seen, copy = _unretried.get(client, (None, None))
    if seen != facts:
        copy = client.with_options(max_retries=0)
        _unretried[client] = facts, copy
    method: Callable[..., Any] = getattr(resource.__class__(copy), fn.__name__)
    return method
