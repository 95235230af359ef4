"""Redacts values: of fields that rules name, in every document, and wherever else they occur in a run's texts.

Works on plain documents just before they become JSON or a page. The values of a run's fields are gathered from its log
once and kept up to date, so that a page reads only new events. Without rules it does nothing.

A hash of a value that is hidden would tell it to a reader who guesses. So every hash of ours is keyed too: the same for
the same hash, and of no use without the key.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args
from uuid import UUID

import msgspec

from killick.errors import KillickError
from killick.lru import Lru
from killick.model import event_codec
from killick.model import events as e
from killick.model.chunks import unpack
from killick.model.facts import Status
from killick.presenting.encoder import json_name, words_of
from killick.web.auth.access import derived

if TYPE_CHECKING:
    from killick.client.client import Client

HIDDEN: Final = "(redacted)"
_TOKEN: Final = re.compile(r"\w+|\W")

_RUNS: Final = frozenset(
    {"id", "run", "runs", "parent", "child", "children", "other", "root", "fork", "forks", "forked_from", "follows",
     "source"}
)  # fmt: skip
"""The names under which a document says which runs it is about."""

_HASH: Final = re.compile(r"[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]|[0-9a-f]{64}")
"""A SHA-256 as events and as the API write it."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_ACTION: Final = re.compile(r"(:step_\S+:)([0-9a-f]{8})(?![0-9A-Za-z])")
"""The end of an idempotency key: digits of the digest of its arguments."""
_VALUES: Final = frozenset(
    {"arguments", "effective_arguments", "input", "output", "result", "value", "context", "progress", "changes",
     "options", "schema", "because", "set"}
)  # fmt: skip
"""Under which names documents have values of agents and people: those may hold hashes of their own, and are sent back
as they were shown."""
_PUBLIC: Final = frozenset({"seal", "next", "cursor"})
"""Under which names there are hashes and texts of their form that no value can be guessed from."""

_RUNS_MAX: Final = 500
_KIN_MAX: Final = 100
"""How many more runs are looked into, because those that a document is about come from them or led to them."""
_RUNS_KEPT_MAX: Final = 1_000
_WORDS_KEPT_MAX: Final = 20
_ROWS_AT_ONCE: Final = 1_000
_TEXT_CHARS: Final = 2
"""How long a value is at the least to be hidden outside of its own field."""
_WORD_CHARS: Final = 3
"""How long it is at the least to be hidden as a word of a text."""
_NUMBER_CHARS: Final = 5
"""How long a number is at the least to be taken for a value, and not for a count or a place in a log."""


_OURS: Final = words_of(event_codec.KINDS.values()) | frozenset(get_args(Status)) | frozenset(
    {"arguments", "input", "output", "result", "failure", "prompt", "schema", "options", "verbs", "intention", "value",
     "comment", "choice", "question", "because", "progress", "changes", "body", "data", "event", "abandoned", "broken"}
)  # fmt: skip
"""Words that documents are made of. A value that is one of them is hidden in its own field, and nowhere else:
a document without them would be unreadable."""


class _Gathered(NamedTuple):
    """The values of a run's named fields, as texts, up to an event and a message."""

    seq: int = 0
    message: int = 0
    texts: frozenset[str] = frozenset()
    kin: frozenset[str] = frozenset()
    """Runs that it gave values to, or got them from."""


class _NamedFields:
    """Fields by their names, or by dotted paths of names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._fields = [tuple(name.split(".")) for name in names]

    def has(self, path: tuple[str, ...]) -> bool:
        """Whether a value belongs to one of them, or is below one."""
        return any(
            path[at : at + len(field)] == field for field in self._fields for at in range(len(path) - len(field) + 1)
        )

    def texts(self, values: Iterable[Any]) -> set[str]:
        """Their values, as code would write them into a text."""
        found = (leaf for path, leaf in _leaves(values) if isinstance(leaf, _WRITTEN) and self.has(path))
        return {text for leaf in found if leaf and len(text := str(leaf)) >= _TEXT_CHARS}


_WRITTEN: Final = (str, int, float, Decimal, UUID, date, time, timedelta)


def _leaves(values: Iterable[Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is no container and no flag, by its path; also those in JSON that a text holds."""
    stack: list[tuple[tuple[str, ...], Any]] = [((), value) for value in values]
    while stack:
        path, node = stack.pop()
        if isinstance(node, str) and node[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):
                node = json.loads(node)
        if isinstance(node, dict):
            parts: dict[Any, Any] = node  # pyright: ignore[reportUnknownVariableType]
            stack += [((*path, str(name)), part) for name, part in parts.items()]
        elif isinstance(node, list | tuple | set | frozenset):
            stack += [(path, part) for part in node]  # pyright: ignore[reportUnknownVariableType]
        elif not isinstance(node, bool):
            yield path, node


class Redaction:
    """The redaction rules of an app. `fields` are names, or dotted paths of names."""

    def __init__(self, client: Client, fields: Sequence[str] = (), *, spared: Collection[str] = ()) -> None:
        self.fields = (fields,) if isinstance(fields, str) else tuple(fields)
        self._spared = _OURS | frozenset(spared)
        self._client = client
        self._named = _NamedFields(self.fields)
        self._key = derived(client, "hashes")
        self._gathered: Lru[str, _Gathered] = Lru(_RUNS_KEPT_MAX)
        self._words: Lru[frozenset[str], _Finder] = Lru(_WORDS_KEPT_MAX)

    def __bool__(self) -> bool:
        return bool(self.fields)

    def over(self, document: Any, *, run: str | Iterable[str] | None = None) -> Any:
        """A document with everything hidden that is to be. `run` names runs that it is about and does not mention."""
        if not self.fields:
            return document
        runs = {run} if isinstance(run, str) else set(run or ())
        # A text that names no run is redacted like any other.
        runs.update(each for each in set(_mentioned(document)) if self._client.runtime.store.head(each) is not None)
        return _Redactor(self._named, self._words_of(runs), runs, self.keyed).value(document, ())

    def keyed(self, text: str) -> str:
        """A keyed replacement of Killick's own hash, in the same form; in any other text, of the action keys in it."""
        if _HASH.fullmatch(text) is None:
            return _ACTION.sub(lambda found: found[1] + self._digest(found[2]).hex()[:8], text)
        digest = self._digest(text)
        return digest.hex() if len(text) == len(digest) * 2 else e.to_text(digest)

    def _digest(self, text: str) -> bytes:
        return hmac.digest(self._key, text.encode(), "sha256")

    # gathered values --------------------------------------------------------------------------

    def _words_of(self, runs: Iterable[str]) -> _Finder:
        """The texts to redact in a document about these runs."""
        texts = frozenset[str]().union(*(self._up_to_date(run).texts for run in self._linked(sorted(runs))))
        texts -= self._spared
        words = self._words.get(texts) or _Finder(texts)
        self._words.put(texts, words)
        return words

    def _linked(self, runs: Sequence[str]) -> list[str]:
        """Some runs, and those that values came from or went to: parents, children, predecessors and successors."""
        found = list(dict.fromkeys(runs[:_RUNS_MAX]))
        most = len(found) + _KIN_MAX
        for run in found:
            found += [each for each in sorted(self._up_to_date(run).kin) if each not in found][: most - len(found)]
        return found

    def _up_to_date(self, run: str) -> _Gathered:
        head = self._client.runtime.store.head(run)
        if head is None:
            return _Gathered()
        seq, message, texts, kin = self._gathered.get(run) or _Gathered()
        while seq < head.seq and (rows := self._client.runtime.log.read(run, after=seq, limit=_ROWS_AT_ONCE)):
            texts |= self._named.texts(self._values(each.row.data) for each in rows if each.row.data is not None)
            kin |= {name for each in rows for name in _linked_runs(each.event)}
            seq = rows[-1].seq
        if waiting := self._client.runtime.store.inbox(run, after=message):
            texts |= self._named.texts({"body": self._values(each.body)} for each in waiting)
            message = waiting[-1].number
        known = _Gathered(seq, message, texts, kin)
        self._gathered.put(run, known)
        return known

    def _values(self, packed: bytes) -> Any:
        try:
            return unpack(packed, self._client.runtime.store.pieces)
        except KillickError:
            return None  # an unreadable value cannot be shown either


def _linked_runs(event: e.Event) -> Iterator[str]:
    match event:
        case e.RunStarted():
            yield from filter(None, (event.parent, event.follows))
        case e.RunForked():
            yield event.parent
        case e.ChildSpawned() | e.RunRenewed():
            yield event.run
        case _:
            pass


def _mentioned(document: Any) -> Iterator[str]:
    """The runs that a document says it is about."""
    stack: list[tuple[str, Any]] = [("", document)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, dict):
            parts: dict[Any, Any] = node  # pyright: ignore[reportUnknownVariableType]
            stack += [(str(below), part) for below, part in parts.items()]
        elif isinstance(node, list):
            stack += [(name, part) for part in node]  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(node, str) and name in _RUNS:
            yield node


class _Finder:
    """Finds texts as words of others: by how each begins, so that thousands of them cost no more than a few."""

    def __init__(self, texts: frozenset[str]) -> None:
        self.texts = texts
        self._beginning: dict[str, dict[int, set[str]]] = {}
        for text in texts:
            if len(text) >= _WORD_CHARS and (begins := _TOKEN.match(text)):
                self._beginning.setdefault(begins[0], {}).setdefault(len(text), set()).add(text)

    def hidden(self, text: str) -> str:
        """A text with all of them hidden."""
        if text in self.texts:
            return HIDDEN
        if not self._beginning:
            return text
        parts: list[str] = []
        done = 0
        for token in _TOKEN.finditer(text):
            lengths = self._beginning.get(token[0])
            at = token.start()
            if lengths is None or at < done or (at and _is_inside(text, at - 1) and not _is_inside(text, at)):
                continue
            for length in sorted(lengths, reverse=True):
                end = at + length
                if text[at:end] in lengths[length] and not _is_inside(text, end):
                    parts += (text[done:at], HIDDEN)
                    done = end
                    break
        return "".join((*parts, text[done:])) if parts else text


def _is_inside(text: str, at: int) -> bool:
    """Whether a match is part of a word."""
    return at < len(text) and (text[at].isalnum() or text[at] == "_")


def _is_time(text: str, path: tuple[str, ...]) -> bool:
    """Whether a text is a time of a document, and not a value that reads like one."""
    if _TIME.fullmatch(text) is None or not path or "data" in path or not _VALUES.isdisjoint(path):
        return False
    return json_name(f"{path[-1]}_us") == path[-1]


class _Redactor:
    """Goes through one document. The ids of runs stay as they are: they are how everything is found."""

    def __init__(self, named: _NamedFields, words: _Finder, runs: set[str], keyed: Callable[[str], str]) -> None:
        self._keyed = keyed
        self._named = named
        self._words = words
        self._runs = runs

    def value(self, node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            parts: dict[Any, Any] = node  # pyright: ignore[reportUnknownVariableType]
            hidden = self._words.hidden
            return {hidden(str(name)): self.value(part, (*path, str(name))) for name, part in parts.items()}
        if isinstance(node, list | tuple):
            return [self.value(part, path) for part in node]  # pyright: ignore[reportUnknownVariableType]
        if self._named.has(path):
            return HIDDEN
        if isinstance(node, str):
            is_ours = node in self._runs or _is_time(node, path)
            return node if is_ours else self._text(self._unguessable(node, path), path)
        return HIDDEN if self._is_known(node, path) else node

    def _unguessable(self, text: str, path: tuple[str, ...]) -> str:
        if not _VALUES.isdisjoint(path) or not _PUBLIC.isdisjoint(path):
            return text
        return self._keyed(text)

    def _text(self, text: str, path: tuple[str, ...]) -> str:
        """A text, which may be JSON itself, as the arguments of a model's tool call are."""
        if text[:1] in ("{", "["):
            try:
                inner = msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return self._words.hidden(text)
            shown = self.value(inner, path)
            return text if shown == inner else msgspec.json.encode(shown).decode()
        return self._words.hidden(text)

    def _is_known(self, number: Any, path: tuple[str, ...]) -> bool:
        if isinstance(number, bool) or not isinstance(number, int | float):
            return False
        written = str(number)
        return len(written) >= _NUMBER_CHARS and written in self._words.texts
