"""Redacts a log: values become pseudonyms, derived digests are recomputed, and the hash chain is new.

Keeps the structure but not the content: kinds, steps, tools, ids, times, field names. Reads no store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import combinations, islice
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import msgspec

from killick.archive.pseudonyms import LEAVES, Pseudonyms
from killick.archive.rebuild import Written, chained
from killick.engine.waits.questions import identity_and_wording
from killick.errors import FieldUnknown
from killick.model import event_codec, page_events
from killick.model import events as e
from killick.model.chunks import Blob, Fetch, pack, unpack
from killick.model.codec import Erased, canonical, digest
from killick.store.records import Message, Row

_Path = tuple[str, ...]

_GIVEN_MAX: Final = 4096
"""How many combinations of arguments are tried to find the ones of a digest."""

_TOLD_APART: Final = 2
WORD_CHARS: Final = 3
"""The shortest value of a named field that is searched in the rest of the log: as a value of another field, and as a
word of a text."""

_OWN_WORDS: Final = frozenset({"agent", "model", "killick", "a person", "reconcile", "late result"})
_KEPT: Final = frozenset(
    {"reply", "verbs", "schema", "form", "builds", "unset", "contract", "under", "grants", "adopts", "since"}
)
"""Event values that say how to read others."""

_WIRE: Final = frozenset(
    {"type", "role", "model", "object", "id", "index", "stop_reason", "finish_reason", "tool_call_id", "tool_use_id",
     "reply", "tools"}
)  # fmt: skip
"""Structural fields of the model protocols."""

_ENVELOPES: Final = frozenset(
    {"args", "messages", "choices", "message", "delta", "content", "tool_calls", "function", "chunks", "chunk"}
)
"""Fields of those protocols that contain more of the protocol; all other fields contain user values."""

_CALLS: Final = frozenset({"tool_use", "server_tool_use", "function_call", "tool_call"})

_COMMAND: Final = frozenset({"kind", "command", "status", "digest", "compensate", "priority", "fork", "cut", "unset"})
_FAILURE: Final = frozenset({"kind", "type", "types"})
_DETAILS: Final = frozenset({"status", "left_out"})


class Redaction(msgspec.Struct, frozen=True):
    """The scope of a redaction: everything, or the fields with these names; and the key of the pseudonyms."""

    key: bytes
    fields: tuple[str, ...] = ()


class Part(NamedTuple):
    """The own rows of a run and its messages, as exported; and the hash before the first."""

    run: str
    base: int
    parent: str | None
    genesis: bytes
    rows: list[Row]
    messages: list[Message]


def redacted(
    parts: Sequence[Part], fetch: Fetch, redaction: Redaction, found: dict[bytes, Blob], secret_key: bytes
) -> list[Part]:
    """A run and its fork ancestors, eldest first, redacted; the chunks of their values are added to `found`."""
    logs = [_Log.of(part, fetch) for part in parts]
    redactor = _Redactor(redaction, logs, (part.run for part in parts), secret_key)
    made: list[Part] = []
    hashes: dict[int, bytes] = {}
    for part, log in zip(parts, logs, strict=True):
        redactor.begin(log)
        genesis = hashes.get(part.base, part.genesis)
        rows = chained([redactor.row(*each, found) for each in log.events], genesis)
        hashes |= {row.seq: row.hash for row in rows}
        messages = [redactor.message(message, body, found) for message, body in log.messages]
        made.append(part._replace(genesis=genesis, rows=rows, messages=messages))
    return made


class _Log(NamedTuple):
    """The rows and messages of a run, with decoded values."""

    events: list[tuple[int, e.Event, dict[str, Any] | None]]
    messages: list[tuple[Message, Any]]

    @staticmethod
    def of(part: Part, fetch: Fetch) -> _Log:
        def values(data: bytes | None) -> dict[str, Any] | None:
            return None if data is None else dict(unpack(data, fetch))

        events = [(row.seq, event_codec.decode(row.body), values(row.data)) for row in part.rows]
        return _Log(events, [(message, unpack(message.body, fetch)) for message in part.messages])

    def values(self) -> list[Any]:
        return [*(data for _, _, data in self.events), *({"body": body} for _, body in self.messages)]


class Secrets:
    """The values of the named fields: they are redacted wherever they occur, and keep their pseudonyms."""

    def __init__(self, fields: Sequence[str], nodes: Iterable[Any]) -> None:
        self._fields = [tuple(name.split(".")) for name in fields]
        self.known: dict[str, Any] = {}
        """By its text: each value that is long enough to be distinctive."""
        self.names: set[str] = set()
        found: set[_Path] = set()
        for path, leaf in _leaves(nodes if fields else ()):
            self.names.update(path)
            hits = [field for field in self._fields if _is_under(path, field)]
            found.update(hits)
            text = _written(leaf) if hits else ""
            if len(text) >= _TOLD_APART:
                self.known[text] = leaf
        self.missing = [".".join(field) for field in self._fields if field not in found]

    @cached_property
    def words(self) -> re.Pattern[str] | None:
        """The pattern that finds them as words of a text."""
        words = [re.escape(text) for text in sorted(self.known, key=len, reverse=True) if len(text) >= WORD_CHARS]
        return re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)") if words else None

    def is_named(self, path: _Path) -> bool:
        """Whether a value belongs to a named field, or is below one."""
        return any(_is_under(path, field) for field in self._fields)

    def occurs_in(self, node: Any) -> bool:
        """Whether any of these values occurs in a value."""
        return any(
            self.is_named(path)
            or _written(leaf) in self.known
            or (isinstance(leaf, str) and self.words is not None and self.words.search(leaf) is not None)
            for path, leaf in _leaves([node])
        )


class _Redactor:
    """Redacts the events of a file in order."""

    def __init__(self, redaction: Redaction, logs: Sequence[_Log], runs: Iterable[str], secret_key: bytes) -> None:
        self._secret_key = secret_key
        self._standins = Pseudonyms(redaction.key)
        self._fields = redaction.fields
        nodes = [node for each in logs for node in each.values()] if redaction.fields else []
        self._sought = Secrets(redaction.fields, nodes)
        for field in self._sought.missing:
            raise FieldUnknown(field, known=self._sought.names)
        self._tools = {event.name for each in logs for _, event, _ in each.events if isinstance(event, e.StepIntended)}
        known = self._sought.known.items()
        self._known = {text: str(self._standins.of(leaf)) for text, leaf in known if text not in self._tools}
        self._sorts: dict[e.StepId, e.Sort] = {}
        self._waits: dict[e.StepId, e.WaitFor] = {}
        self._digests: dict[e.StepId, tuple[e.Digest, e.Digest | None]] = {}
        self._arguments: dict[e.StepId, Mapping[str, Any]] = {}
        self._ahead: dict[int, Any] = {}
        """By the seq of a step's intention: its question, or the run that it spawned."""
        self._keys: dict[str, str] = {}
        self._runs = set(runs)

    def begin(self, log: _Log) -> None:
        """Starts the next run: a fork, which continues with its parent's steps."""
        self._ahead = {}
        latest: dict[e.StepId, Any] = {}
        for seq, event, data in reversed(log.events):
            match event:
                case e.WaitOpened():
                    latest[event.step] = data or {}
                case e.ChildSpawned():
                    latest[event.step] = event.run
                    self._runs.add(event.run)
                case e.RunStarted() if event.parent is not None:
                    self._runs.add(event.parent)
                case e.StepIntended():
                    self._ahead[seq] = latest.get(event.step)
                case _:
                    pass

    # values -----------------------------------------------------------------------------------

    def value(self, node: Any, path: _Path = (), kept: frozenset[str] = frozenset()) -> Any:
        """A value with its leaves redacted; values directly under a `kept` name stay."""
        if isinstance(node, dict):
            parts: dict[Any, Any] = node  # pyright: ignore[reportUnknownVariableType]
            return {
                self._name(name): part if name in kept and not self._fields else self.value(part, (*path, str(name)))
                for name, part in parts.items()
            }
        if isinstance(node, list | tuple | set | frozenset):
            return type(node)(self.value(part, path) for part in node)  # pyright: ignore
        return self._leaf(node, path)

    def _wire(self, node: Any, path: _Path) -> Any:
        """A model request or reply: values are redacted; protocol words and tool names stay."""
        if isinstance(node, list):
            return [self._wire(part, path) for part in node]  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(node, dict) or self._fields:
            return self.value(node, path)
        parts: dict[Any, Any] = node  # pyright: ignore[reportUnknownVariableType]
        is_call = path[-1] == "function" or parts.get("type") in _CALLS
        safe: dict[Any, Any] = {}
        for name, part in parts.items():
            below = (*path, str(name))
            if name in _WIRE or (name == "name" and is_call):
                safe[name] = part
            else:
                safe[name] = self._wire(part, below) if name in _ENVELOPES else self.value(part, below)
        return safe

    def _name(self, name: Any) -> Any:
        return self._replaced(name) if isinstance(name, str) else name

    def _leaf(self, leaf: Any, path: _Path) -> Any:
        if isinstance(leaf, str):
            if leaf in self._keys:
                return self._keys[leaf]
            if self._fields and leaf in self._tools:
                return leaf  # a model chose it, in a field that may have any name
            if leaf[:1] in ("{", "[") and (inner := _parsed(leaf)) is not None:
                compact = (",", ":") if '": ' not in leaf else None
                changed = self.value(inner, path)
                return leaf if changed == inner else json.dumps(changed, ensure_ascii=False, separators=compact)
        if not self._fields or self._sought.is_named(path):
            return self._standins.of(leaf)
        if isinstance(leaf, str):
            return self._replaced(leaf)
        return self._standins.of(leaf) if _written(leaf) in self._known else leaf

    def _replaced(self, text: str) -> str:
        if text in self._known:
            return self._known[text]
        words = self._sought.words
        return text if words is None else words.sub(lambda found: self._known.get(found[0], found[0]), text)

    def _person(self, by: str | None) -> str | None:
        if by is None or by in _OWN_WORDS or by in self._runs or by.startswith("killick"):
            return by
        return str(self._leaf(by, ("by",)))

    def _failure(self, node: Any, path: _Path) -> Any:
        if not isinstance(node, dict):
            return node
        safe: dict[str, Any] = {}
        parts: dict[str, Any] = node  # pyright: ignore[reportUnknownVariableType]
        for name, part in parts.items():
            if name in ("cause", "context"):
                safe[name] = self._failure(part, path)
            elif name == "members":
                safe[name] = [self._failure(each, path) for each in part]
            elif name == "frames":
                safe[name] = part if self._fields else [{**each, "file": PurePath(each["file"]).name} for each in part]
            else:
                safe[name] = part if name in _FAILURE else self.value(part, (*path, name), _DETAILS)
        return safe

    # events -----------------------------------------------------------------------------------

    def row(self, seq: int, event: Any, data: dict[str, Any] | None, found: dict[bytes, Blob]) -> Written:
        """One event, with recomputed digests."""
        raw: bytes | None = None
        safe: dict[str, Any] | None = None
        if data is not None:
            self._note(event)
            safe = {name: self._field(event, name, part) for name, part in data.items()}
            packed = pack(safe)
            raw = packed.raw
            found |= {piece.hash: piece for piece in packed.blobs}
        elif event.data is not None:
            event = msgspec.structs.replace(event, data=self._digest(event.data))
        return Written(seq, self._event(seq, event, data, safe), raw)

    def message(self, message: Message, body: Any, found: dict[bytes, Blob]) -> Message:
        """A message, redacted likewise; internal messages keep their form."""
        kept = _COMMAND if message.name.startswith("killick.") else frozenset[str]()
        packed = pack(self.value(body, ("body",), kept))
        found |= {piece.hash: piece for piece in packed.blobs}
        return msgspec.structs.replace(message, body=packed.raw, by=self._person(message.by))

    def _note(self, event: Any) -> None:
        match event:
            case e.StepIntended():
                self._sorts[event.step] = event.sort
            case e.WaitOpened():
                self._waits[event.step] = event.waits_for
            case _:
                pass

    def _field(self, event: Any, name: str, value: Any) -> Any:
        path = (name,)
        sort = self._sorts.get(getattr(event, "step", None) or "")
        if name in _KEPT or (isinstance(event, e.FactDrawn) and not self._fields):
            return value
        if isinstance(event, e.DecisionMade) and event.by == "model" and name in ("choice", "options"):
            return value  # tools, by their names
        if name == "failure":
            return self._failure(value, path)
        if name in ("arguments", "output", "recorded", "found") and sort == "model":
            return self._wire(value, path)
        if name == "arguments" and isinstance(event, e.StepIntended) and _is_sending(event, value):
            return {**value, "body": self.value(value["body"], (*path, "body"))}
        if name == "intention":
            return self.value(value, path, frozenset({"tool", "key"}))
        if name == "answer":
            waits_for = self._waits.get(str(getattr(event, "step", "")))
            safe = self.value(value, path, _COMMAND if waits_for != "event" else frozenset())
            return {**safe, "failure": self._failure(value["failure"], path)} if waits_for == "child" and safe else safe
        if name == "output" and isinstance(event, e.StepEnded) and _waits_of(value):
            waits = {**value["waits"], "default": self.value(value["waits"].get("default"), (*path, "default"))}
            return {**self.value(value, path), "waits": waits}
        if name == "body" and isinstance(event, e.MessageTaken) and event.name.startswith("killick."):
            return self.value(value, path, _COMMAND)
        return self.value(value, path)

    def _event(self, seq: int, event: Any, old: dict[str, Any] | None, new: dict[str, Any] | None) -> e.Event:
        """The event itself: people, tags, and every digest and key derived from values."""
        fields: set[str] = set(event.__struct_fields__)
        changes: dict[str, Any] = {}
        if "by" in fields:
            changes["by"] = self._person(event.by)
        for name in fields & {"to", "tags"}:
            changes[name] = tuple(self._label(name, each) for each in getattr(event, name))
        if "reason" in fields:
            changes["reason"] = self._leaf(event.reason, ("reason",))
        changes |= self._rehashed(seq, event, old, new) if isinstance(event, e.StepIntended) else {}
        if isinstance(event, e.RunStarted):
            changes["key"] = None  # redacted values are not encrypted
        elif isinstance(key := getattr(event, "key", None), str):
            changes["key"] = self._key(event.step, key)  # the digest in it is known by now
        if isinstance(event, e.StepEdited) and not self._fields:
            for name in ("digest", "identity"):
                changes[name] = None if (known := getattr(event, name)) is None else self._digest(known)
        elif isinstance(event, e.WaitOpened | e.StepDrifted) and event.digest and pack(old).raw != pack(new).raw:
            changes["digest"] = self._digest(event.digest)
        for name in fields & {"claims", "released"}:
            changes[name] = tuple(self._claim(str(getattr(event, "step", "")), claim) for claim in getattr(event, name))
        if isinstance(event, e.RunRepaired):
            doubts = (msgspec.structs.replace(each, key=self._key(each.step, each.key)) for each in event.doubts)
            changes["doubts"] = tuple(doubts)
        if isinstance(event, e.ValueErasedOnPurpose):
            changes["pieces"] = tuple(map(self._digest, event.pieces))
        if isinstance(event, page_events.PageEvicted):
            changes["marks"] = ()  # they are hashes of page contents
        if isinstance(event, e.WorkspaceEvent | e.RunForked | e.RunRewound):
            changes |= self._file_fields(event)
        changed: e.Event = msgspec.structs.replace(event, **changes)
        return changed

    def _file_fields(self, event: e.Event) -> dict[str, Any]:
        """Paths and references of files; their content is not in the export."""
        changes: dict[str, Any] = {}
        for name in ("path", "vault", "workspace"):
            if isinstance(place := getattr(event, name, None), str):
                changes[name] = str(self._leaf(place, (name,)))
        if isinstance(event, e.WorkspaceBound):
            changes["exclude"] = tuple(str(self._leaf(each, ("exclude",))) for each in event.exclude)
        for name in ("root", "before", "files"):
            if isinstance(root := getattr(event, name, None), str) and not self._fields:
                changes[name] = self._digest(root)
        return changes

    def _label(self, name: str, label: str) -> str:
        """A tag, or the people who are asked. The input tag of a run is a digest."""
        if label.startswith("input:"):
            return f"input:{self._standins.hash(label.encode()).hex()[:16]}"
        return str(self._leaf(label, (name,)))

    def _rehashed(self, seq: int, event: e.StepIntended, old: Any, new: Any) -> dict[str, Any]:
        """Recomputes the digests of an intention with redacted arguments, so that equal code still matches."""
        if event.digest is None:
            return {}
        before, after = _arguments(old), _arguments(new)
        ahead = self._ahead.get(seq)
        if event.sort == "wait":
            if event.name != "ask" or not ahead:
                return {}  # it is of a name or an id
            asked = {name: self._field(event, name, value) for name, value in ahead.items()}
            changed = e.to_text(digest(list(identity_and_wording(asked))))
            self._digests[event.step] = event.digest, changed
            return {"digest": changed}
        if event.sort == "child":
            # Its id is part of the digest only if the code gave one.
            weight = {"agent": event.name, "input": before.get("input"), "id": None}
            given = None if e.to_text(digest(weight, secret_key=self._secret_key)) == event.digest else ahead
            before, after = {**weight, "id": given}, {**weight, "input": after.get("input"), "id": given}
        self._arguments[event.step] = after
        found, identity = (self._again(each, before, after) for each in (event.digest, event.identity))
        self._digests[event.step] = event.digest, found
        return {"digest": found, "identity": identity}

    def _again(self, recorded: e.Digest | None, before: Mapping[str, Any], after: Mapping[str, Any]) -> e.Digest | None:
        """Recomputes a digest of unknown arguments: those given, or those that identify the action."""
        if recorded is None:
            return None
        names = list(before)
        choices = (chosen for left in range(len(names), -1, -1) for chosen in combinations(names, left))
        for chosen in islice(choices, _GIVEN_MAX):
            if e.to_text(digest({name: before[name] for name in chosen}, secret_key=self._secret_key)) == recorded:
                return e.to_text(digest({name: after[name] for name in chosen}))
        return self._digest(recorded)

    def _digest(self, digest: e.Digest) -> e.Digest:
        """The pseudonym of a digest."""
        return e.to_text(self._standins.hash(e.from_text(digest)))

    def _key(self, step: e.StepId | None, key: str) -> str:
        """A key with the digest of the redacted arguments."""
        if key in self._keys:
            return self._keys[key]
        if key.endswith(":undo"):
            return self._keys.setdefault(key, self._key(None, key.removesuffix(":undo")) + ":undo")
        form, _, digits = key.rpartition(":")
        was, now = self._digests.get(step or "", (None, None))
        is_of_step = was is not None and now is not None and e.from_text(was).hex()[:8] == digits
        found = e.from_text(now) if is_of_step and now is not None else self._standins.hash(key.encode())
        return self._keys.setdefault(key, f"{form}:{found.hex()[:8]}")

    def _claim(self, step: e.StepId, claim: str) -> str:
        """A claim, by its redacted value if that is an argument of the step."""
        space, _, was = claim.rpartition(":")
        arguments = self._arguments.get(step, {})
        if space in arguments:
            return f"{space}:{e.to_text(sha256(canonical(arguments[space])).digest())}"
        return f"{space}:{self._digest(was)}"


def _is_under(path: _Path, field: _Path) -> bool:
    return any(path[at : at + len(field)] == field for at in range(len(path) - len(field) + 1))


def _written(leaf: Any) -> str:
    """A value as code would write it into a text; None if it has no such form, or no pseudonym."""
    if isinstance(leaf, bool | bytes | bytearray | Erased) or not isinstance(leaf, LEAVES) or not leaf:
        return ""
    return str(leaf)


def _arguments(data: Mapping[str, Any] | None) -> dict[str, Any]:
    found: Any = (data or {}).get("arguments")
    return dict(found) if isinstance(found, Mapping) else {}  # pyright: ignore[reportUnknownArgumentType]


def _waits_of(output: Any) -> Any:
    """The waits of a state machine's transition: a name and a time, which are not values."""
    data: dict[str, Any] = output if isinstance(output, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    return data.get("waits")


def _is_sending(event: e.StepIntended, arguments: Any) -> bool:
    """Whether a step sends a message to another run: its receiver and name are not values."""
    return event.name == "send" and isinstance(arguments, dict) and set(arguments) == {"run", "name", "body"}  # pyright: ignore


def _parsed(text: str) -> Any:
    """The content of a text that is JSON itself, such as the arguments of a model's tool call."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _leaves(nodes: Iterable[Any]) -> Iterator[tuple[_Path, Any]]:
    """Every value that is not a container, by its path."""
    stack: list[tuple[_Path, Any]] = [((), node) for node in reversed(list(nodes))]
    while stack:
        path, node = stack.pop()
        if isinstance(node, str) and node[:1] in ("{", "[") and (inner := _parsed(node)) is not None:
            node = inner
        if isinstance(node, dict):
            parts: dict[Any, Any] = node  # pyright: ignore[reportUnknownVariableType]
            stack += [((*path, str(name)), part) for name, part in reversed(parts.items())]
        elif isinstance(node, list | tuple | set | frozenset):
            stack += [(path, part) for part in reversed(list(node))]  # pyright: ignore
        else:
            yield path, node
