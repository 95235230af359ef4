"""Extracts search terms from events. Pure: knows events and stored values, neither stores nor clocks.

A term is the hash of a few words: `call`, `tool send_email`, `argument to ada@x.org`, at the event that a query finds.
False positives are allowed, false negatives are not: a query reads the event and checks it. So a value that is too
long, in a separate chunk, or one of too many, gets an *open* term.

Stores keep these hashes: change them only together with a migration that empties `marks` and `marked`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from killick.errors import ValueErased
from killick.model import events as e
from killick.model.codec import plain
from killick.model.ledger import Effect, Ledger
from killick.store.records import TermRow

LEAVES_MAX: Final = 32
"""The maximum number of scalars of one event with own terms."""

TEXT_CHARS_MAX: Final = 200
"""A longer text gets an open term: no query contains its whole text."""

PEOPLE: Final = ("answer", "settlement")
"""The waits that a person ends."""

_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


# Hashed, not in clear: a row of fixed size for any words, and an index that holds no value to redact.
def term(*words: str) -> int:
    """Returns the hash of some words."""
    return int.from_bytes(sha256(_encode(words)).digest()[:8], "big", signed=True)


_often: Final = lru_cache(4096)(term)


def folded(text: object) -> str:
    """Normalizes case and white space for comparison."""
    return " ".join(str(text).casefold().split())


def mapping(value: Any) -> Mapping[str, Any]:
    """Returns a value that is an object with string keys; else an empty one."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


# scalars and their paths --------------------------------------------------------------------------


class Leaf(NamedTuple):
    """A scalar inside a value: its dotted path, through lists, and its text. None: unknown."""

    path: str
    text: str | None
    is_number: bool = False


_TEXTS: Final = frozenset({"$uuid", "$date", "$time", "$datetime"})
_LISTS: Final = frozenset({"$tuple", "$set", "$frozenset"})
_SILENT: Final = frozenset({"$secret", "$erased", "$bytes", "$bytearray", "$float"})
_NUMBER: Final = re.compile(r"[+-]?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,2})?")


def leaves(node: Any) -> list[Leaf]:
    """Returns the scalars of a value in its stored form (see `codec`); those in other chunks are open."""
    found: list[Leaf] = []
    _gather(node, "", found)
    return found


def _gather(node: Any, path: str, found: list[Leaf]) -> None:
    kind = node.__class__
    if kind is str:
        found.append(Leaf(path, node))
    elif kind is bool:
        found.append(Leaf(path, "true" if node else "false"))
    elif kind is int or kind is float:
        found.append(Leaf(path, number_text(node), True))
    elif kind is list:
        for item in node:
            _gather(item, path, found)
    elif kind is dict:
        if len(node) == 1 and (tag := next(iter(node)))[:1] == "$":
            _gather_tagged(tag, node[tag], path, found)
            return
        for name, item in node.items():
            _gather(item, f"{path}.{name}" if path else name, found)


def _gather_tagged(tag: str, payload: Any, path: str, found: list[Leaf]) -> None:
    if tag in _TEXTS:
        found.append(Leaf(path, payload))
    elif tag == "$decimal":
        found.append(Leaf(path, number_text(Decimal(payload)), True))
    elif tag == "$int":
        found.append(Leaf(path, str(int(payload, 16)), True))
    elif tag in _LISTS and isinstance(payload, list):
        _gather(payload, path, found)
    elif tag not in _SILENT:
        found.append(Leaf(path, None))


def number_text(number: float | Decimal) -> str:
    """Returns a number's text, equal for equal numbers."""
    if isinstance(number, int):
        return str(number)
    exact = number if isinstance(number, Decimal) else Decimal(repr(number))
    if not exact.is_finite() or abs(exact.adjusted()) > TEXT_CHARS_MAX:
        return str(exact)
    return format(exact.normalize() + 0, "f")


class TermQuery:
    """A scalar to find, as users write it: 17 matches the number and the text "17"."""

    def __init__(self, value: object) -> None:
        self.is_nothing = value is None
        self.text = value if isinstance(value, str) else ""
        self.number: str | None = None
        if isinstance(value, str):
            self.number = number_text(Decimal(value)) if _NUMBER.fullmatch(value) else None
        elif value is not None:
            found = next(iter(leaves(plain(value))), Leaf("", None))
            self.text, self.number = found.text or "", found.text if found.is_number else None

    @property
    def texts(self) -> set[str]:
        return {self.text} if self.number is None else {self.text, self.number}

    def fits(self, leaf: Leaf) -> bool:
        """Returns whether a scalar matches."""
        return leaf.text is not None and leaf.text == (self.number if leaf.is_number else self.text)

    def fits_at(self, path: str, found: Collection[Leaf]) -> bool:
        """Returns whether it is at a path. None: the path is absent."""
        if self.is_nothing:
            return not any(leaf.path == path or leaf.path.startswith(f"{path}.") for leaf in found)
        return any(leaf.path == path and self.fits(leaf) for leaf in found)


# the terms of an event ----------------------------------------------------------------------------


def values_terms(word: str, value: Any) -> set[int]:
    """Returns the terms of a stored value's scalars, each with a prefix and its path."""
    found: set[int] = set()
    for count, leaf in enumerate(leaves(value)):
        if count == LEAVES_MAX:
            return found | {_often(word, "open", "")}
        if leaf.text is None or len(leaf.text) > TEXT_CHARS_MAX:
            found.add(_often(word, "open", leaf.path))
        else:
            found.add(term(word, "is", leaf.path, leaf.text))
    return found


def value_wanted(word: str, path: str, wanted: TermQuery) -> set[int] | None:
    """Returns terms of which an event with this value has at least one; None if every event might match."""
    if wanted.is_nothing:
        return None
    parts = path.split(".") if path else []
    above = {".".join(parts[:count]) for count in range(len(parts) + 1)}
    short = {text for text in wanted.texts if len(text) <= TEXT_CHARS_MAX}
    return {term(word, "is", path, text) for text in short} | {term(word, "open", each) for each in above}


def failure_names(failure: Mapping[str, Any]) -> set[str]:
    """Returns a failure's names (as in `Failure.is_a`) and its kind, in lower case."""
    names = {str(failure.get("kind", ""))}
    for name in (failure.get("type"), *(_types(failure) or ())):
        if isinstance(name, str):
            last = name.rpartition(".")[2]
            names |= {name, last, f"{name.partition('.')[0]}.{last}"}
    return {folded(name) for name in names if name}


def _types(failure: Any) -> Collection[Any] | None:
    """Returns a failure's types; None if they are in another chunk."""
    fields = mapping(failure)
    found: Any = fields.get("types", ()) if "type" in fields else None
    found = mapping(found).get("$tuple", found)
    return found if isinstance(found, list | tuple) else None  # pyright: ignore


class Before(Protocol):
    """Supplies earlier events to the extractor."""

    def name(self, step: e.StepId) -> str: ...

    def opened(self, step: e.StepId) -> e.WaitOpened | None: ...

    def event(self, seq: int) -> e.Event: ...

    def data(self, seq: int) -> Mapping[str, Any]: ...

    def owner(self, seq: int) -> str: ...


class Marker:
    """Extracts the terms of one run's own events, in order, and advances `ledger` with them."""

    def __init__(
        self, run: str, agent: str, base: int, ledger: Ledger, before: Before, *, hides_values: bool = False
    ) -> None:
        self._hides_values = hides_values
        self.run, self.base, self.ledger, self.before = run, base, ledger, before
        self.marks: list[TermRow] = []
        self.links: set[int] = set()
        """Internal terms that link one event to another."""
        self._agent = term("in", agent)
        self._names: dict[e.StepId, str] = {}
        self._opened: dict[e.StepId, e.WaitOpened] = {}
        self._at: dict[int, int] = {}

    def take(self, seq: int, event: e.Event, data: bytes | None) -> None:
        """Processes the next event, with its stored values."""
        kind = type(event)
        undoing = self._undoing(event) if kind is e.AttemptEnded or kind is e.AttemptSettled else None
        self.ledger.apply(seq, event)
        if undoing is not None and undoing.status == "happened":
            self._undone(undoing.undoes)
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, seq, event, data)

    def finish(self) -> None:
        """Called after the last event: adds the open unknown outcomes. A later event may resolve them."""
        for effect in self.ledger.in_doubt():
            if effect.intended > self.base and not effect.undoes:
                self._mark(effect.intended, self._time(effect.intended), {_often("in doubt")})

    def drain(self) -> tuple[TermRow, ...]:
        """Returns the terms since the last call."""
        made, self.marks = tuple(self.marks), []
        return made

    def _mark(self, seq: int, at: int, terms: Collection[int]) -> None:
        self.marks += [TermRow(each, at, seq) for each in terms]

    def _time(self, seq: int) -> int:
        return self._at[seq] if seq in self._at else self.before.event(seq).at

    def _name(self, step: e.StepId) -> str:
        return self._names[step] if step in self._names else self.before.name(step)

    def _values_terms(self, word: str, value: Any) -> set[int]:
        """Returns the terms of a value. In an encrypted store none is of its content: a hash would confirm a guess."""
        return {_often(word, "open", "")} if self._hides_values else values_terms(word, value)

    # effects ----------------------------------------------------------------------------------

    def _undoing(self, event: Any) -> Effect | None:
        """Returns the effect that an attempt's end completes, if it compensates another."""
        facts = self.ledger.facts
        index = facts.open.get(event.key or facts.keys.get(event.step) or "")
        effect = None if index is None else self.ledger.effects[index]
        return effect if effect is not None and effect.undoes else None

    def _undone(self, started: int) -> None:
        """Marks an effect as compensated. For a parent's effect, the fork's terms name it too."""
        effects = self.ledger.effects
        index = bisect_left(effects, started, key=lambda effect: effect.started)
        if index == len(effects) or effects[index].started != started:
            return
        seq = effects[index].intended
        at, terms = self._time(seq), {_often("undone")}
        if seq <= self.base:
            link = term("undone", self.before.owner(seq), str(seq))
            self.links.add(link)
            with suppress(ValueErased):
                terms |= self._values_terms("argument", plain(self.before.data(seq).get("arguments")))
            terms |= {link, _often("effect"), self._agent, _often("tool", effects[index].tool)}
        self._mark(seq, at, terms)

    # events -----------------------------------------------------------------------------------

    def intended(self, seq: int, event: e.StepIntended, data: bytes | None) -> None:
        self._names[event.step] = event.name
        if event.sort != "tool":
            return
        self._called(seq, event, event.name, data)
        if event.verdict is not None and event.verdict.ruling == "reject":
            self.failed(seq, event, data)

    def edited(self, seq: int, event: e.StepEdited, data: bytes | None) -> None:
        """Indexes the edited arguments."""
        if event.verdict is None or event.verdict.ruling != "reject":
            self._called(seq, event, self._name(event.step), data)

    def _called(self, seq: int, event: e.StepIntended | e.StepEdited, tool: str, data: bytes | None) -> None:
        terms = {_often("call"), self._agent, _often("tool", tool)}
        if event.effect not in (None, "reads"):
            terms.add(_often("effect"))
            self._at[seq] = event.at
        self._mark(seq, event.at, terms | self._values_terms("argument", _stored(data).get("arguments")))

    def repaired(self, seq: int, event: e.RunRepaired, data: bytes | None) -> None:
        self._at[seq] = event.at
        if event.doubts:
            tools = {_often("tool", doubt.tool) for doubt in event.doubts}
            self._mark(seq, event.at, {_often("effect"), self._agent, *tools})

    def decided(self, seq: int, event: e.DecisionMade, data: bytes | None) -> None:
        stored = _stored(data)
        terms = {_often("decision"), self._agent, _often("by", folded(event.by))}
        question = stored.get("question")
        is_text = isinstance(question, str) and not self._hides_values
        terms.add(_often("question", "is", folded(question)) if is_text else _often("question", "open"))
        choice = [leaf.text and folded(leaf.text) for leaf in leaves(stored.get("choice"))]
        self._mark(seq, event.at, terms | self._values_terms("choice", [each or {"$ref": ""} for each in choice]))

    def failed(
        self, seq: int, event: e.AttemptEnded | e.StepEnded | e.StepIntended | e.RunFailed, data: bytes | None
    ) -> None:
        if isinstance(event, e.AttemptEnded | e.StepEnded) and event.outcome == "returned":
            return
        stored = _stored(data)
        if "failure" not in stored:
            return
        failure: Any = stored["failure"]
        if _types(failure) is None:
            with suppress(ValueErased):
                failure = self.before.data(seq).get("failure")
        terms = {_often("failure"), self._agent}
        terms |= {_often("is", name) for name in failure_names(mapping(failure))}
        if not isinstance(event, e.RunFailed):
            terms.add(_often("tool", self._name(event.step)))
        self._mark(seq, event.at, terms)

    def opened(self, seq: int, event: e.WaitOpened, data: bytes | None) -> None:
        self._opened[event.step] = event

    def answered(self, seq: int, event: e.WaitVoted | e.WaitClosed, data: bytes | None) -> None:
        if isinstance(event, e.WaitClosed) and event.how != "answered":
            return
        opened = self._opened.get(event.step) or self.before.opened(event.step)
        if opened is None or opened.waits_for not in PEOPLE:
            return
        terms = {_often("answer"), self._agent, _often("verb", verb_of(_stored(data).get("answer")))}
        terms |= {_often("to", folded(who)) for who in opened.to}
        if event.by is not None:
            terms.add(_often("by", folded(event.by)))
        self._mark(seq, event.at, terms)

    def rewound(self, seq: int, event: e.RunRewound, data: bytes | None) -> None:
        link = _often("rewound", self.run)
        self.links.add(link)
        self._mark(seq, event.at, {link})


def verb_of(answer: Any) -> str:
    """Returns an answer in one word: approve, reject, edit, respond, happened, not, stop."""
    kind = mapping(answer).get("kind", answer)
    return folded(kind) if isinstance(kind, str) else ""


def _stored(data: bytes | None) -> Mapping[str, Any]:
    """Returns an event's values as stored; none if erased or unreadable."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return mapping(_decode(data)) if data is not None else {}
    return {}


_HANDLERS: Final[dict[type[e.Event], Callable[[Marker, int, Any, bytes | None], None]]] = {
    e.StepIntended: Marker.intended,
    e.StepStarted: Marker.intended,
    e.StepEdited: Marker.edited,
    e.RunRepaired: Marker.repaired,
    e.DecisionMade: Marker.decided,
    e.AttemptEnded: Marker.failed,
    e.StepEnded: Marker.failed,
    e.RunFailed: Marker.failed,
    e.WaitOpened: Marker.opened,
    e.WaitVoted: Marker.answered,
    e.WaitClosed: Marker.answered,
    e.RunRewound: Marker.rewound,
}
