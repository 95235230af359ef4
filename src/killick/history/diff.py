"""Differences between two states: by part, item and value. Changes nothing.

Items of a part are matched by step, elements of a list by content. Shared parts are never read, so that the diff of one
step of a long run costs only that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from difflib import SequenceMatcher
from itertools import groupby, takewhile
from typing import Any, Final, Literal, NamedTuple, TypeGuard

import msgspec

from killick.history.state_items import Item, items
from killick.history.workspace_files import FilesDiff
from killick.history.workspace_files import between as files_between
from killick.log.boundaries import RunMoment, narrowed
from killick.log.boundaries import at as place_at
from killick.log.log import Log
from killick.model.events import StepIntended
from killick.model.fold import Fold, goes_back
from killick.model.state import State

PARTS: Final = ("position", "outputs", "decisions", "retries", "failures", "context", "pending", "trace", "effects")
"""The parts of a state in display order; fields outside them are the part `run`."""

ALIGNED_MAX: Final = 4_000_000
"""Beyond this many element pairs, lists are compared by index."""

Op = Literal["add", "remove", "replace"]
_SCALARS: Final = ("run", "agent", "status", "seq", "generation", "priority", "tags", "parent", "forked_from")
_TIMES: Final = frozenset({"at", "since", "deadline", "next_at"})


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference. `pointer` is valid once all earlier changes are applied.

    `step` names its item, and `path` the position inside it, as users write it.
    """

    part: str
    op: Op
    pointer: str
    step: str | None = None
    path: str = ""
    before: Any = None
    after: Any = None

    def patch(self) -> dict[str, Any]:
        """Returns an RFC 6902 operation."""
        made = {"op": self.op, "path": self.pointer}
        return made if self.op == "remove" else made | {"value": self.after}


class Line(NamedTuple):
    """A change for display: its part, `+`, `-` or `~`, and its text."""

    part: str
    sign: str
    text: str


class Side(msgspec.Struct, frozen=True):
    """One of the two states: its run, event, and position name; `keep` as in a position."""

    run: str
    seq: int
    label: str
    keep: tuple[int, ...] = ()


class Diff(msgspec.Struct, frozen=True):
    """All differences between two states, in the order of their JSON form. False: nothing relevant.

    `files` are the workspace's differences, or None; then `no_files` says why, if there is a workspace.
    """

    before: Side
    after: Side
    changes: tuple[Change, ...]
    files: FilesDiff | None = None
    no_files: str | None = None

    def __bool__(self) -> bool:
        return bool(self.visible_changes()) or bool(self.files)

    def patch(self) -> list[dict[str, Any]]:
        """Returns an RFC 6902 patch from the first state's `to_json()` to the second's."""
        return [change.patch() for change in self.changes]

    def visible_changes(self) -> list[Change]:
        """Returns the changes for display: without run and event, which the user chose; for two runs, also without
        times and the order of concurrent steps."""
        found = [change for change in self.changes if not self._is_known(change)]
        return found if self.before.run == self.after.run else _without_moved(found)

    def lines(self, width: int = 100) -> list[Line]:
        """Returns them in lines of about that width; longer ones are cut."""
        return list(_lines(self.visible_changes(), width))

    def _is_known(self, change: Change) -> bool:
        if change.pointer in ("/seq", "/run"):
            return True
        if self.before.run == self.after.run or change.op != "replace" or change.step is None:
            return False
        if change.part == "effects" and change.path == "key":
            return str(change.before).removeprefix(self.before.run) == str(change.after).removeprefix(self.after.run)
        return change.path in _TIMES


# two places, two runs -----------------------------------------------------------------------------


def between(log: Log, run: str, *places: str, files: bool = True) -> Diff:
    """Returns the changes between two positions of a run, or of one position's step or event, or all since it."""
    if len(places) == 1:
        [text] = places
        if text[:1] == "@":
            places = (f"@{max(place_at(log, run, text).seq - 1, 0)}", text)
        elif text.replace(".", "").replace("~", "").isdecimal():
            places = (f"{text}:before", f"{text}:after")
        else:
            places = (text, "now")
    before, after = (place_at(log, run, text) for text in places)
    found = _compared(log, _side(run, before), _side(run, after))
    return _with_files(log, found) if files else found


def passed(log: Log, run: str, before: RunMoment, after: RunMoment) -> tuple[Diff, State]:
    """Returns the events from one position of a timeline to a later one, and the state there.

    Reads only those events and their steps, for a run of any length. So the changes are complete, but their pointers
    are not those of a whole state.
    """
    sides = _side(run, before), _side(run, after)
    events = [] if before.keep or after.keep else log.read(run, after=before.seq, limit=max(after.seq - before.seq, 0))
    if before.keep or after.keep or any(goes_back(event) for _, event, _ in events):
        return _compared(log, *sides), log.state(run, after.seq, keep=after.keep)
    state = log.state(run, before.seq)
    named = {str(step) for _, event, _ in events if (step := getattr(event, "step", None)) is not None}
    named |= {event.undoes for _, event, _ in events if isinstance(event, StepIntended) and event.undoes}
    named |= {step.undoes for name in named if (step := state.fold.step(name)) is not None and step.undoes}
    named |= set(state.fold.facts.pending)
    one = deepcopy(_narrowed(state, named, before.seq))
    for seq, event, _ in events:
        state.fold.apply(seq, event)
    two = _narrowed(state, named, before.seq)
    states = (State(fold, state) for fold in (one, two))
    return Diff(*sides, tuple(_changes(*states, shared=log.head(run).seq))), state


def _narrowed(state: State, steps: set[str], after: int) -> Fold:
    """Returns a fold of these steps alone, with the failures after an event."""
    fold = state.fold
    indexes = {index for step in steps if (index := fold.find(step)) is not None}
    failures = list(takewhile(lambda seq: seq > after, reversed(fold.failures)))[::-1]
    return narrowed(fold, indexes, failures)


def across(log: Log, run: str, other: str, at: str = "now", *, files: bool = True) -> Diff:
    """Returns the differences between two runs at the same position, such as a run and its fork."""
    found = _compared(log, _side(run, place_at(log, run, at)), _side(other, place_at(log, other, at)))
    return _with_files(log, found) if files else found


def _with_files(log: Log, found: Diff) -> Diff:
    one, two = ((side.run, RunMoment(side.seq, side.label, side.keep)) for side in (found.before, found.after))
    files = files_between(log, one, two)
    name = "no_files" if isinstance(files, str) else "files"
    return found if files is None else msgspec.structs.replace(found, **{name: files})


def diff(before: State, after: State) -> Diff:
    """Returns the differences between two states, of any runs and stores. Reads both completely."""
    one, two = (Side(state.run, state.seq, f"@{state.seq}") for state in (before, after))
    return Diff(one, two, tuple(_changes(before, after, shared=0)))


def _side(run: str, place: RunMoment) -> Side:
    return Side(run, place.seq, place.label, place.keep)


def _compared(log: Log, before: Side, after: Side) -> Diff:
    one, two = (log.state(side.run, side.seq, keep=side.keep) for side in (before, after))
    return Diff(before, after, tuple(_changes(one, two, shared=last_shared(log, before.run, after.run))))


def last_shared(log: Log, one: str, other: str) -> int:
    """Returns the last common event of two runs: of a run with itself all, of a fork with its parent up to the cut."""
    limits = {head.run: limit for head, limit in log.ancestry(one)}
    shared = [min(limit, limits[head.run]) for head, limit in log.ancestry(other) if head.run in limits]
    return max(shared, default=0)


# states -------------------------------------------------------------------------------------------


def _changes(before: State, after: State, *, shared: int) -> Iterator[Change]:
    one, two = before.as_written(), after.as_written()
    for name in _SCALARS:
        was, now = (_json(getattr(state.fold.facts, name)) for state in (one, two))
        yield from _values(was, now, _Place("run", f"/{name}", None, name))
    for part in PARTS:
        if part == "position" or (part == "context" and not _is_shared_context(one, two, shared)):
            yield from _values(_json(getattr(one, part)), _json(getattr(two, part)), _Place(part, f"/{part}"))
        elif part != "context":
            yield from _items_changed(part, items(one, part), items(two, part), shared)


def _is_shared_context(one: State, two: State, shared: int) -> bool:
    parts = one.fold.facts.context_parts
    return parts == two.fold.facts.context_parts and max(parts, default=0) <= shared


def _items_changed(part: str, ones: list[Item], twos: list[Item], shared: int) -> Iterator[Change]:
    for same, one, two in _aligned([item.key for item in ones], [item.key for item in twos]):
        if same:
            for place, was, now in zip(two, ones[one.start : one.stop], twos[two.start : two.stop], strict=True):
                if was.made_of != now.made_of or max(was.last, now.last) > shared:
                    yield from _values(_json(was.load()), _json(now.load()), _Place(part, f"/{part}/{place}", now.step))
            continue
        for was in ones[one.start : one.stop]:
            gone = _json(was.load())
            yield Change(part=part, op="remove", pointer=f"/{part}/{two.start}", step=was.step, before=gone)
        for place in two:
            come = _json(twos[place].load())
            yield Change(part=part, op="add", pointer=f"/{part}/{place}", step=twos[place].step, after=come)


# values -------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The position of a value: for a patch, and for display."""

    part: str
    pointer: str
    step: str | None = None
    path: str = ""

    def under(self, name: str) -> _Place:
        written = (
            name if name.replace("_", "").replace("-", "").isalnum() else f"[{msgspec.json.encode(name).decode()}]"
        )
        path = f"{self.path}{'.' if self.path and written[0] != '[' else ''}{written}"
        escaped = name.replace("~", "~0").replace("/", "~1")
        return self._replace(pointer=f"{self.pointer}/{escaped}", path=path)

    def at(self, place: int, shown: int) -> _Place:
        return self._replace(pointer=f"{self.pointer}/{place}", path=f"{self.path}[{shown}]")

    def change(self, op: Op, before: Any = None, after: Any = None) -> Change:
        return Change(
            part=self.part, op=op, pointer=self.pointer, step=self.step, path=self.path, before=before, after=after
        )


def _json(value: Any) -> Any:
    """Returns a value in a state's JSON form."""
    return msgspec.json.decode(msgspec.json.encode(value))


_canonical: Final = msgspec.json.Encoder(order="sorted").encode


def values(before: Any, after: Any) -> list[Change]:
    """Returns the differences between two JSON documents."""
    return list(_values(before, after, _Place("value", "")))


def _values(was: Any, now: Any, place: _Place) -> Iterator[Change]:
    if _is_object(was) and _is_object(now) and _tag(was) == _tag(now):
        for name in was.keys() - now.keys():
            yield place.under(name).change("remove", before=was[name])
        for name in now:
            if name in was:
                yield from _values(was[name], now[name], place.under(name))
            else:
                yield place.under(name).change("add", after=now[name])
    elif isinstance(was, list) and isinstance(now, list):
        yield from _elements(was, now, place)  # pyright: ignore[reportUnknownArgumentType]
    elif _canonical(was) != _canonical(now):
        yield place.change("replace", was, now)


def _elements(was: list[Any], now: list[Any], place: _Place) -> Iterator[Change]:
    """Matches equal elements at any index; compares those in between one by one."""
    for same, one, two in _aligned([_canonical(each) for each in was], [_canonical(each) for each in now]):
        if same:
            continue
        for index, shown in zip(two, one, strict=False):
            yield from _values(was[shown], now[index], place.at(index, index))
        for shown in one[len(two) :]:
            yield place.at(two.stop, shown).change("remove", before=was[shown])
        for index in two[len(one) :]:
            yield place.at(index, index).change("add", after=now[index])


def _shared_ends(was: Sequence[Any], now: Sequence[Any]) -> tuple[int, int]:
    """Returns how many elements two sequences share at the start, and then at the end."""
    least = min(len(was), len(now))
    head = next((place for place in range(least) if was[place] != now[place]), least)
    return head, next((place for place in range(least - head) if was[-1 - place] != now[-1 - place]), least - head)


def _aligned(was: Sequence[Any], now: Sequence[Any]) -> Iterator[tuple[bool, range, range]]:
    """Returns equal and unequal ranges of two sequences, from left to right."""
    head, tail = _shared_ends(was, now)
    yield True, range(head), range(head)
    inner, other = was[head : len(was) - tail], now[head : len(now) - tail]
    if inner and other and len(inner) * len(other) <= ALIGNED_MAX:
        for tag, a, b, c, d in SequenceMatcher(None, inner, other, autojunk=False).get_opcodes():
            yield tag == "equal", range(head + a, head + b), range(head + c, head + d)
    elif inner or other:
        yield False, range(head, head + len(inner)), range(head, head + len(other))
    yield True, range(len(was) - tail, len(was)), range(len(now) - tail, len(now))


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _tag(value: dict[str, Any]) -> str | None:
    """Returns the tag of a value without a JSON form; such a value is compared as a whole."""
    [name] = value if len(value) == 1 else [""]
    return name if name[:1] == "$" else None


# for people ---------------------------------------------------------------------------------------

_SIGNS: Final[dict[Op, str]] = {"add": "+", "remove": "-", "replace": "~"}


def _lines(changes: Sequence[Change], width: int) -> Iterator[Line]:
    """Returns one line a change; additions to and removals from one list of the position share one."""
    for (name, op), group in groupby(changes, key=_listed_in):
        if op is None:
            yield from (_line(change, width) for change in group)
        else:
            steps = ", ".join(str(change.before if op == "remove" else change.after) for change in group)
            yield Line("position", _SIGNS[op], f"{name}  {_folded(steps, width - len(name) - 2)}")


def _without_moved(changes: Sequence[Change]) -> list[Change]:
    """Drops unchanged items that only moved within a part."""
    gone, come = (Counter(_moved(each) for each in changes if each.op == op) for op in ("remove", "add"))
    moved = gone & come
    return [change for change in changes if change.op == "replace" or not moved[_moved(change)]]


def _moved(change: Change) -> tuple[str, str | None, str, bytes]:
    value = change.before if change.op == "remove" else change.after
    undated = {name: each for name, each in value.items() if name not in _TIMES} if _is_object(value) else value
    return change.part, change.step, change.path.partition("[")[0], _canonical(undated)


def _listed_in(change: Change) -> tuple[str, Op | None]:
    name, bracket, _ = change.path.partition("[")
    return (name, change.op) if change.part == "position" and bracket and change.op != "replace" else ("", None)


def _line(change: Change, width: int) -> Line:
    label = " ".join(filter(None, (change.step, change.path)))
    room = max(width - len(label) - 2, 24)
    value = change.before if change.op == "remove" else change.after
    if change.op == "replace":
        if change.path in _TIMES or change.part in ("run", "position"):
            was, now = ("none" if each is None else _moment(change, each) for each in (change.before, change.after))
            text = f"{label}  {_folded(f'{was} → {now}', room)}"
        else:
            text = f"{label}  {_pair(*_around(change.before, change.after, room), room)}"
    else:
        is_item = change.step is not None and not change.path
        text = f"{label} {_item_shown(change.part, value, room)}" if is_item else f"{label}  {shown(value, room)}"
    return Line(change.part, _SIGNS[change.op], text)


def shown(value: Any, room: int) -> str:
    """Returns a value on one line; a longer one shows its first and last characters and its size."""
    if _is_object(value) and _tag(value) == "$erased":
        return "(erased)"
    written = msgspec.json.encode(value).decode()
    if len(written) <= room:
        return written
    if not isinstance(value, str):
        return _folded(written, room)
    keep = max(room - len(f'"…" ({len(value):,} characters)'), 8)
    cut = f"{value[: keep - keep // 3]}…{value[-(keep // 3) :]}"
    return f"{msgspec.json.encode(cut).decode()} ({len(value):,} characters)"


def _folded(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    size = f" ({len(text):,} characters)"
    keep = max(room - len(size) - 1, 8)
    return f"{text[: keep - keep // 3]}…{text[-(keep // 3) :]}{size}"


def _pair(one: Any, two: Any, room: int) -> str:
    """Returns two values in one line; either may use the other's spare room."""
    left = room - 3
    first, second = shown(one, left), shown(two, left)
    if len(first) + len(second) > left:
        first = shown(one, max(left // 2, left - len(second)))
        second = shown(two, left - len(first))
    return f"{first} → {second}"


def _around(was: Any, now: Any, room: int) -> tuple[Any, Any]:
    """Cuts two long texts around their difference; returns other values unchanged."""
    if not (isinstance(was, str) and isinstance(now, str)) or len(was) + len(now) <= room:
        return was, now
    head, tail = _shared_ends(was, now)
    around = max((room // 2 - min(len(was), len(now)) + head + tail) // 2 - 5, 2)
    front, back = max(head - around, 0), max(tail - around, 0)
    one, two = (f"{'…' * (front > 0)}{text[front : len(text) - back]}{'…' * (back > 0)}" for text in (was, now))
    return one, two


def _item_shown(part: str, item: Any, room: int) -> str:
    """Returns a whole item: its call and its outcome."""
    get = item.get
    name = str(get("name") or get("tool") or "")
    room -= len(name) + 2
    match part:
        case "outputs":
            return f"{name} → {shown(get('value'), room)}"
        case "decisions":
            because = f" because {shown(get('because'), room // 3)}" if get("because") else ""
            return _pair(get("question"), get("choice"), room - len(because)) + because
        case "retries":
            errors = get("errors") or [None]
            return f"{name}: {get('attempts')} attempts, the last: {_error(errors[-1], room - 24)}"
        case "failures":
            attempt = f" attempt {get('attempt')}" if get("attempt") else ""
            return f"{name}{attempt}: {_error(get('error'), room - len(attempt))}".removeprefix(": ")
        case "pending":
            asked = f" from {', '.join(get('to'))}" if get("to") else ""
            return f"{get('waits_for')}{asked}: {_folded(str(get('prompt') or get('name')), room - len(asked) - 8)}"
        case "trace":
            room -= len(get("sort"))
            if get("status") != "done":
                return f"{get('sort')} {name} {shown(get('input'), room - 9)} {get('status')}"
            return f"{get('sort')} {name} {_pair(get('input'), get('output'), room)}"
        case _:
            undone = ", undone" if get("undone") else ""
            return f"{name} ({get('effect')}): {get('status')}{undone}, key {get('key')}"


def _error(error: Any, room: int) -> str:
    if not _is_object(error) or "type" not in error:
        return shown(error, room)
    return _folded(f"{error['type']}: {error.get('message') or ''}", room)


def _moment(change: Change, value: Any) -> Any:
    is_time = change.path in _TIMES and isinstance(value, int)
    return datetime.fromtimestamp(value / 1_000_000, UTC).isoformat(timespec="milliseconds") if is_time else value
