"""The inbox: the open waits of all runs that need a person, the most urgent first.

A page is selected from the index, and reads only the logs of the runs that it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from killick.engine.control import inbox
from killick.engine.views import Wait
from killick.errors import KillickError, ValueRefused
from killick.history.run_info import waits_of
from killick.log import Log
from killick.store.records import RunRow, Urgency, urgency_of

_LOOK: Final = 100
"""How many runs one page reads at most, if few of them ask the selected people."""


class Page(NamedTuple):
    """One page of the inbox, and the cursor of the next. The questions of one run stay together."""

    waits: list[Wait]
    next: str | None


def addressed(to: str | None) -> Callable[[Wait], bool]:
    """Selects the waits that ask a person or a role; all of them for None."""
    return lambda wait: to is None or to in wait.to or to in (wait.may or ())


def urgency(wait: Wait, priority: int = 0, now_us: int = 0) -> tuple[bool, bool, int, int, int]:
    """Sorts by deadline, then by priority, then by age; expired waits come last."""
    due = wait.deadline_us
    return due is not None and due <= now_us, due is None, due or 0, -priority, wait.since_us


def addressees(to: Sequence[str], may: Sequence[str] | None) -> str:
    """The people who are asked, with the names of a role if known: managers (max, mia)."""
    if not to:
        return "anyone"
    names = f" ({', '.join(may)})" if may and set(may) != set(to) else ""
    return f"{', '.join(to)}{names}"


def agreement(need: int, voters: Sequence[str]) -> str:
    """Counts the approvals: 1 of 2 approved (mia). Empty if one suffices."""
    named = f" ({', '.join(voters)})" if voters else ""
    return f"{len(voters)} of {need} approved{named}" if need > 1 else ""


def missing_approvals(wait: Wait, voters: Sequence[str]) -> str:
    """The approvers who have not agreed yet. Votes are in the run's inbox or in its log."""
    count = wait.need - len(voters)
    *others, last = [name for name in wait.may or () if name not in voters] or [""]
    who = f" of {', '.join(others)}{' or ' if others else ''}{last}" if last else ""
    return f"{count} more{who} {'has' if count == 1 else 'have'} to agree; the votes are kept until then"


def everything(
    log: Log, chosen: Callable[[Wait], bool], *, now_us: int, answered: bool = False, limit: int
) -> list[Wait]:
    """The open waits of all runs, the most urgent first; or the answered ones that are not consumed yet."""
    found: list[Wait] = []
    after: str | None = None
    while len(found) < limit:
        waiting, after = page(log, chosen, now_us=now_us, answered=answered, limit=limit - len(found), after=after)
        found += waiting
        if after is None:
            break
    return found[:limit]


def page(
    log: Log,
    chosen: Callable[[Wait], bool],
    *,
    now_us: int,
    answered: bool = False,
    limit: int,
    after: str | None = None,
) -> Page:
    """The next page of the inbox.

    With `answered`: the answered waits that no run has consumed. Such runs have a message and are due, so only those
    are read.
    """
    found: list[tuple[Wait, int]] = []
    last: str | None = None
    begin = None if after is None else _parsed(after)
    for looked, row in enumerate(log.store.asking(now_us, after=begin, limit=_LOOK + 1)):
        place = urgency_of(row, now_us)
        if answered and place[0]:
            break
        if len(found) >= limit or looked >= _LOOK:
            return Page(_sorted(found, now_us), last)
        found += [(wait, row.priority) for wait in readable(log, row, answered=answered) if chosen(wait)]
        last = ".".join(map(str, place))
    return Page(_sorted(found, now_us), None)


def _sorted(found: list[tuple[Wait, int]], now_us: int) -> list[Wait]:
    return [wait for wait, _ in sorted(found, key=lambda each: urgency(each[0], each[1], now_us))]


def _parsed(cursor: str) -> Urgency:
    try:
        when, priority, changed, number = map(int, cursor.split("."))
    except ValueError:
        raise ValueRefused("cursor", "is not an inbox cursor; start without one") from None
    return when, priority, changed, number


def readable(log: Log, row: RunRow, *, answered: bool) -> list[Wait]:
    """The questions of a run. A run with an unreadable log is listed with that error, and hides no other."""
    try:
        return list(_of(log, row, answered))
    except KillickError as error:
        reason = f"cannot be read: {error}"
        return [
            Wait(
                id=row.run, run=row.run, step="", waits_for="answer", name="", prompt=reason, to=(), deadline_us=None,
                since_us=row.changed_at_us, verbs=(),
            )
        ]  # fmt: skip


def _of(log: Log, row: RunRow, answered: bool) -> Iterator[Wait]:
    """The unanswered questions of a run; or the answered ones that it has not consumed."""
    state = log.state(row.run)
    answers = {message.id for message in log.store.inbox(row.run, name=inbox.ANSWER)}
    for wait in waits_of(log.store, state):
        is_answered = inbox.answer_id(row.run, wait.step, wait.opened) in answers or wait.is_agreed
        if wait.waits_for in ("answer", "settlement") and is_answered == answered:
            yield wait
