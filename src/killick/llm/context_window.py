"""The window of a run: the messages of a model call are decided once, recorded, and the same on every replay.

It decides when to compute and when to follow the log. The window itself decides which pages are evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from msgspec.structs import replace

from killick.engine.execution import Branch, Execution
from killick.engine.replay import PAGES
from killick.engine.steps.model_reply import ToolCall
from killick.log.writer import Entry
from killick.model import page_events
from killick.window import Answer, Decision, Sent, Window

Line: TypeAlias = tuple[int, ...]

_PAGERS: Final[WeakKeyDictionary[Execution, dict[tuple[int, Line], Pager]]] = WeakKeyDictionary()
_IN_USE: Final[WeakSet[Window]] = WeakSet()


async def fit(
    ex: Execution, branch: Branch, window: Window, messages: Sequence[Any], tools: Sequence[Any], system: Any
) -> Sent:
    """The part of a history to send. On replay the recorded decision is used."""
    pager = _pager(ex, branch, window)
    own = pager.window
    recorded = [event for _, event in pager.taken(ex, branch, lambda event: True)]
    decided: list[Decision] = []
    if not ex.record.has_more(branch.path, branch.count):
        decided = _missing(recorded, own.plan(messages, tools, system=system))
        pager.put_on_record(ex, branch, decided)
    elif recorded:
        own.render(messages, tools, system=system)  # it must see a history before the decisions about it
    own.apply([*recorded, *decided])
    return own.render(messages, tools, system=system)


async def answer(ex: Execution, branch: Branch, window: Window, call: ToolCall) -> Answer | None:
    """The window's own answer to a tool call; None if the tool must be executed as the next step."""
    pager = _pager(ex, branch, window)
    found = pager.window.answering(call.name, call.arguments)
    if found is None:
        return None
    recorded = pager.taken(ex, branch, _is_recall)
    is_live = not ex.record.has_more(branch.path, branch.count)
    decided = _missing([event for _, event in recorded], found.decisions) if is_live else []
    if recorded:
        data = ex.record.data(recorded[0][0])
        found = Answer(text=data["text"], failed=data["failed"])
    pager.put_on_record(ex, branch, decided, text=found.text, failed=found.failed)
    pager.window.apply([*(event for _, event in recorded), *decided])
    return found


def tools_of(ex: Execution, window: Window) -> tuple[str, ...]:
    """The names of the window's own tools, as the model sees them."""
    return _pager(ex, ex.branch_here(), window).window.own


def _pager(ex: Execution, branch: Branch, window: Window) -> Pager:
    """The window of one branch of a run. A window that another branch used is reset: its content comes only from the
    log of this branch, although all runs of an agent may share the object."""
    known, line = _PAGERS.setdefault(ex, {}), _line(branch)
    found = known.get((id(window), line))
    if found is None:
        own = window.fresh() if window in _IN_USE else window
        _IN_USE.add(own)
        found = known[id(window), line] = Pager(window, own, sum(other == line for _, other in known))
    return found


def _line(branch: Branch) -> Line:
    """The position of a branch among concurrent ones: the same in the next gather."""
    scope = branch.scope
    return () if scope is None else (*_line(scope.branch), scope.branches.index(branch))


class Pager:
    """A window of one branch, and its decisions on record."""

    def __init__(self, given: Window, window: Window, number: int) -> None:
        self.given = given  # kept, so that no other window has its id
        self.window = window
        self._number = number
        """The number of this window: several may decide before the same step."""

    def put_on_record(self, ex: Execution, branch: Branch, decided: Sequence[Decision], **answered: Any) -> None:
        """Records everything in one append. The first entry has the answer to a tool call, if there was one."""
        at, step = ex.now_us(), branch.position
        which = {"window": self._number} if self._number else {}
        entries: list[Entry] = []
        for event, data in decided:
            more = {} if entries else answered
            if isinstance(event, page_events.PageEvicted):
                more = {"budget": self.window.budget}
            entries.append(Entry(replace(event, at=at, step=step), {**data, **more, **which}))
        if entries and not branch.may_be_stopped:
            ex.write_behind(*entries)

    def taken(
        self, ex: Execution, branch: Branch, begins: Callable[[page_events.PageEvent], bool]
    ) -> list[tuple[int, page_events.PageEvent]]:
        """The recorded part of a decision, with its pins; advances past it."""
        taken: list[tuple[int, page_events.PageEvent]] = []
        while (seq := ex.record.ahead(branch.position, PAGES)) is not None:
            event: page_events.PageEvent = ex.record.event(seq)
            if not begins(event) and not (taken and isinstance(event, page_events.PagePinned)):
                break
            if ex.record.data(seq).get("window", 0) != self._number:
                break
            ex.record.take(branch.position, PAGES)
            taken.append((seq, event))
        return taken


# the record ---------------------------------------------------------------------------------------


def _is_recall(event: page_events.PageEvent) -> bool:
    return isinstance(event, page_events.PageFaulted) and event.how == "recalled"


def _missing(recorded: Sequence[page_events.PageEvent], decided: Iterable[Decision]) -> list[Decision]:
    """The part of a decision that is not recorded. It is written at once, but a fork can cut it: then the rest is
    decided again. If the log differs, only the log counts."""
    found, known = list(decided), [replace(event, at=0, step=None, data=None) for event in recorded]
    return found[len(known) :] if [each.event for each in found[: len(known)]] == known else []
