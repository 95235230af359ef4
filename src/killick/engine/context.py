"""The agent's own document, as its code sees it: typed, versioned, and changed from outside only between steps.

The code gets a copy. A copy that it changed in place is found when it asks for its next step, and at its end.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

import msgspec

from killick.definitions.agents import AnyAgent
from killick.engine.replay import Change, Record
from killick.errors import ContextReadOnly, ValueRefused
from killick.model.chunks import through_codec
from killick.model.codec import canonical, plain
from killick.model.typed import convert

_encode: Final = msgspec.msgpack.Encoder(enc_hook=lambda value: plain(value, at="context")).encode


class Document(dict[str, Any]):
    """A context without a declared type: a dict whose entries are attributes too."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the context has no {name!r}; set it with run.update({name}=…)") from None

    def __setattr__(self, name: str, *value: Any) -> None:
        raise ContextReadOnly(name)

    __delattr__ = __setattr__


class Context:
    """The document and its version. Changes from outside wait here until a step returns."""

    def __init__(
        self, agent: AnyAgent, document: Mapping[str, Any] | None, version: int, form: int | None = None
    ) -> None:
        self._agent = agent
        self._form = form
        self._recorded = dict(document or {})
        """The document as it is recorded, and as people edit it."""
        self._document = self._migrated(self._recorded, form)
        self.version = version
        self._value = self._typed()
        self._shown: tuple[Any, bytes] | None = None
        """The copy that the code has, and its encoding as it was when the code got it."""
        self._outside: deque[Change] = deque()

    @property
    def value(self) -> Any:
        """A copy of the document, as its declared type. The code gets the same one until the context changes."""
        if self._shown is None:
            copy = deepcopy(self._original)
            self._shown = copy, _encoded(copy)
        return self._shown[0]

    def refuse_changed(self) -> None:
        """Raise where the code changed its copy in place; it gets a new one."""
        if self._shown is None:
            return
        copy, before = self._shown
        try:
            if _encoded(copy) == before:
                return
            found, kept = _entries(copy), _entries(self._original)
            changed = next((name for name in kept | found if kept.get(name) != found.get(name)), None)
        except (AttributeError, ValueRefused):  # a field was deleted, or has a value that cannot be stored
            changed = None
        self._shown = None
        raise ContextReadOnly(changed)

    @property
    def _original(self) -> Any:
        return Document(self._document) if self._agent.options.context is None else self._value

    def _migrated(self, document: dict[str, Any], form: int | None) -> dict[str, Any]:
        options = self._agent.options
        for migrate in options.migrations[(form or options.form) - 1 :]:
            document = migrate(document)
        return document

    def _typed(self) -> Any:
        """The document as its declared type, which refuses misfits; without a type nothing is refused."""
        kind = self._agent.options.context
        return None if kind is None else convert(self._document, kind, at="context")

    def _becomes(self, value: Any, version: int) -> None:
        self._value, self._shown, self.version = value, None, version

    def update(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Set some entries; they come back through the codec, like every value."""
        kept: dict[str, Any] = through_codec(dict(changes))
        before, self._document = self._document, {**self._document, **kept}
        try:
            value = self._typed()
            if value is not None and (lost := set(changes) - _entries(value).keys()):
                raise ValueRefused(f"context.{min(lost)}", f"is not a field of {type(value).__name__}")
        except ValueRefused:
            self._document = before
            raise
        self._becomes(value, self.version + 1)
        return kept

    def from_outside(self, change: Change) -> None:
        """Queue a person's change; the code sees it when its next step returns."""
        self._outside.append(change)

    def latest(self) -> Mapping[str, Any]:
        """The document with all recorded changes, also those that the code does not see yet."""
        if not self._outside:
            return self._document
        twin = Context(self._agent, self._recorded, self.version, self._form)
        twin._document, twin._outside = dict(self._document), deque(self._outside)
        return twin.saved() or {}

    def saved(self) -> dict[str, Any] | None:
        """The document as another run may begin with it; None where there is none."""
        self.see(sys.maxsize)
        return dict(self._document) or None

    def see(self, seq: int) -> None:
        """A step returned at a seq: outside changes before it are visible from now on."""
        while self._outside and self._outside[0].seq < seq:
            change = self._outside.popleft()
            if "document" in change.data:
                self._document = self._migrated(dict(change.data["document"] or {}), change.data.get("form"))
            else:
                self._edit(change.data.get("set", {}), set(change.data.get("unset", ())))
            self._becomes(self._typed(), change.version)

    def _edit(self, changes: Mapping[str, Any], gone: set[str]) -> None:
        """A person's edit, migrated to the current form of the context."""
        before = self._migrated(dict(self._recorded), self._form)
        self._recorded = {name: value for name, value in {**self._recorded, **changes}.items() if name not in gone}
        after = self._migrated(dict(self._recorded), self._form)
        edited = {name: value for name, value in after.items() if name not in before or before[name] != value}
        dropped = before.keys() - after.keys()
        if self._form in (None, self._agent.options.form):
            edited, dropped = dict(changes), gone
        self._document = {name: value for name, value in {**self._document, **edited}.items() if name not in dropped}


def _encoded(value: Any) -> bytes:
    """A document in bytes, to tell whether it changed: quickly, or by the codec where msgpack has no form for it."""
    try:
        return _encode(value)
    except Exception:
        return canonical(value, at="context")


def _entries(value: Any) -> dict[str, Any]:
    """The entries of a document as they are stored."""
    lowered = plain(value, at="context")
    return lowered if isinstance(lowered, dict) else {}


def initial_context(agent: AnyAgent) -> dict[str, Any] | None:
    """The context of the first event; None if the agent declares none."""
    if agent.options.context is None:
        return None
    value = agent.options.context()
    lowered = plain(value, at="context")
    if not isinstance(lowered, dict):
        raise ValueRefused("context", f"{type(value).__name__} cannot be stored as a document; use a class with fields")
    document: dict[str, Any] = through_codec(lowered)
    return document


def recorded_context(
    agent: AnyAgent, record: Record, base: tuple[Mapping[str, Any] | None, int, int | None]
) -> Context:
    """The context as it was where replay begins, with the changes from outside that are on record after that."""
    document, version, form = base
    context = Context(agent, document, version, form)
    for change in record.outside:
        context.from_outside(change)
    context.see(1)  # the changes with which a fork was created
    return context
