"""The inbox: the open waits of all runs that need a person, the most urgent first.

A page is chosen from the index, and reads the logs of those runs alone that it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from killick.engine import inbox
from killick.engine.views import Wait
from killick.errors import KillickError, ValueRefused
from killick.history.run_info import waits_of
from killick.log import Log
from killick.store import Store
from killick.store.protocol import ASKS, RunQuery, RunRow

_ROWS: Final = 10_000
_LOOK: Final = 100
"""How many runs one page looks into at the most, where few of them ask those who are meant."""

_NEVER: Final = 1 << 62

Place = tuple[int, int, int, int]
"""Where a run stands in the inbox: when it is due, its priority, its last change, its number."""

Asking = tuple[Place, RunRow]


class Page(NamedTuple):
    """Some of what waits for people, and where the rest begins. The questions of one run stay together."""

    waits: list[Wait]
    next: str | None


def urgency(wait: Wait, priority: int = 0, now_us: int = 0) -> tuple[bool, bool, int, int, int]:
    """What is due first comes first, then what matters most, then what waits longest; last that whose time is up."""
    due = wait.deadline_us
    return due is not None and due <= now_us, due is None, due or 0, -priority, wait.since_us


def whom(to: Sequence[str], may: Sequence[str] | None) -> str:
    """Of whom it is asked, with their names where those are known: managers (max, mia)."""
    if not to:
        return "anybody"
    names = f" ({', '.join(may)})" if may and set(may) != set(to) else ""
    return f"{', '.join(to)}{names}"


def agreement(need: int, voters: Sequence[str]) -> str:
    """How many agreed of those who have to: 1 of 2 agreed (mia)."""
    named = f" ({', '.join(voters)})" if voters else ""
    return f"{len(voters)} of {need} agreed{named}" if need > 1 else ""


def lacking(wait: Wait, voters: Sequence[str]) -> str:
    """Who has to agree yet. What others said waits in the run's inbox, or is on its record."""
    count = wait.need - len(voters)
    *others, last = [name for name in wait.may or () if name not in voters] or [""]
    who = f" of {', '.join(others)}{' or ' if others else ''}{last}" if last else ""
    return f"{count} more{who} {'has' if count == 1 else 'have'} to agree; what is there is kept until then"


def everything(
    log: Log, chosen: Callable[[Wait], bool], *, now_us: int, answered: bool = False, limit: int
) -> list[Wait]:
    """What waits for people, of all runs, the most urgent first; or what was answered and is yet to be taken."""
    found: list[Wait] = []
    rows = asking(log.store, now_us)
    after: str | None = None
    while len(found) < limit:
        waiting, after = page(
            log, chosen, rows, now_us=now_us, answered=answered, limit=limit - len(found), after=after
        )
        found += waiting
        if after is None:
            break
    return found[:limit]


def page(
    log: Log,
    chosen: Callable[[Wait], bool],
    rows: Sequence[Asking],
    *,
    now_us: int,
    answered: bool = False,
    limit: int,
    after: str | None = None,
) -> Page:
    """The next of what waits for people, of the runs that ask, as `asking` gives them.

    Or with `answered`, what was answered and no run has taken: such runs got something and are due, so that no others
    are looked at.
    """
    begin = None if after is None else _parsed(after)
    found: list[tuple[Wait, int]] = []
    looked = 0
    last: str | None = None
    for place, row in rows:
        if begin is not None and place <= begin:
            continue
        if answered and place[0]:
            continue
        if len(found) >= limit or looked >= _LOOK:
            return Page(_sorted(found, now_us), last)
        found += [(wait, row.priority) for wait in _readable(log, row, answered) if chosen(wait)]
        looked, last = looked + 1, ".".join(map(str, place))
    return Page(_sorted(found, now_us), None)


def _sorted(found: list[tuple[Wait, int]], now_us: int) -> list[Wait]:
    return [wait for wait, _ in sorted(found, key=lambda each: urgency(each[0], each[1], now_us))]


def asking(store: Store, now_us: int) -> list[Asking]:
    """The runs that may ask somebody: first those of which only a look can tell, because they are being run or got
    something to take; then by when their time comes; last those whose time has come, and which go on without us."""
    found: list[RunRow] = []
    before: int | None = None
    while rows := store.runs(RunQuery(tag=ASKS, status=("waiting", "running")), before=before, limit=_ROWS):
        found += rows
        before = rows[-1].number
        if len(rows) < _ROWS:
            break
    return sorted((_place(row, now_us), row) for row in found)


def _place(row: RunRow, now_us: int) -> Place:
    when = _NEVER if row.wake_at_us is None else row.wake_at_us
    if when <= now_us:
        when = 0 if row.delivered else _NEVER + 1
    return 0 if row.status == "running" else when, -row.priority, row.changed_at_us, row.number


def _parsed(cursor: str) -> Place:
    try:
        when, priority, changed, number = map(int, cursor.split("."))
    except ValueError:
        raise ValueRefused("cursor", "is none of an inbox; begin without one") from None
    return when, priority, changed, number


def _readable(log: Log, row: RunRow, answered: bool) -> list[Wait]:
    """What a run asks of people. One whose record cannot be read says so in its place, and hides no other."""
    try:
        return list(_of(log, row, answered))
    except KillickError as error:
        told = f"cannot be read: {error}"
        return [
            Wait(
                id=row.run, run=row.run, step="", waits_for="answer", name="", prompt=told, to=(), deadline_us=None,
                since_us=row.changed_at_us, verbs=(),
            )
        ]  # fmt: skip


def _of(log: Log, row: RunRow, answered: bool) -> Iterator[Wait]:
    """What a run asks of people, and nobody has answered; or what was answered and it has yet to take."""
    state = log.state(row.run)
    opened = state.fold.facts.waits
    there = {message.id for message in log.store.inbox(row.run, name=inbox.ANSWER)}
    for wait in waits_of(log.store, state):
        is_there = inbox.answer_id(row.run, wait.step, opened[wait.step].opened) in there or wait.is_agreed
        if wait.waits_for in ("answer", "settlement") and is_there == answered:
            yield wait
