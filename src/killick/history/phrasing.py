"""English phrases for recorded values, times, durations and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from killick.model import events as e
from killick.model import page_events
from killick.model.codec import Erased, plain
from killick.model.crash_loop import Crashes
from killick.model.failure import Failure
from killick.text import size_text

YEAR_10_000_US: Final = 253_402_300_800_000_000
"""Beyond the range of datetime."""
_UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))

SIGNS: Final = {
    "intended": "·", "running": "▸", "delayed": "↻", "waiting": "…", "in_doubt": "?", "done": "✓", "failed": "✗",
    "cancelled": "⊘",
}  # fmt: skip
"""The sign of a step by its status."""


def listed(words: Iterable[str], last: str = "and") -> str:
    """a, b and c."""
    *some, end = words or ("",)
    return f"{', '.join(some)} {last} {end}" if some else end


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """1 branch, 3,000 branches."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def crash_summary(crashes: Crashes, last: e.LeaseLapsed | None) -> str:
    """Describes consecutive crashes and the last one's place: one line for every surface."""
    state = "quarantined" if crashes.quarantined else "crash-looping" if crashes.is_suspect else "crashed"
    times = "once" if crashes.deaths == 1 else f"{crashes.deaths} times in a row"
    where = "" if last is None else f"; the last was {lapse_text(last)}"
    return f"{state}: its process died {times}{where}"


def lapse_text(event: e.LeaseLapsed) -> str:
    """Describes a crashed process, its step and its build."""
    at = f"at {'steps' if len(event.steps) > 1 else 'step'} {listed(event.steps)}" if event.steps else "between steps"
    build = build_text(event.build)
    return f"{process(event.holder)} {at}{', alone' if event.alone else ''}{f', build {build}' if build else ''}"


def build_text(build: e.Build) -> str:
    """A build by its version and the beginning of its commit."""
    return " ".join(filter(None, (build.version, build.commit[:7])))


def process(holder: str) -> str:
    """A holder by the id of its process, where its name begins with one."""
    pid = holder.partition("-")[0]
    return f"process {pid}" if pid.isdigit() else holder


def scope_words(name: str, given: Any) -> str:
    """Returns the content of a scope: branches, or calls of external code."""
    if name in ("hosted", "guests"):
        return "calls of a framework" if name == "hosted" else "calls from outside"
    count = given.get("branches", "") if isinstance(given, Mapping) else ""  # pyright: ignore
    return f"{count} branches"


CAME_BACK: Final = {
    "recalled": "recalled by its handle", "reread": "read again, and the same",
}  # fmt: skip
"""How an evicted page came back."""


def page_text(event: page_events.PageEvent) -> str:
    """Describes a window's page event."""
    match event:
        case page_events.PageEvicted():
            pages = counted(len(event.pages), "page")
            return f"{pages} left the window ({event.because}), {event.tokens:,} tokens less a call"
        case page_events.PageFaulted():
            return f"{event.page} came back to the window: {CAME_BACK[event.how]}"
        case page_events.PagePinned():
            return f"{event.page} stays in the window until turn {event.until:,}"


def snapshot(root: e.Digest | None) -> str:
    """Returns a snapshot's id prefix, as users type it."""
    return f"snapshot {e.from_text(root).hex()[:12]}" if root else "no snapshot"


_WENT_BACK: Final[Mapping[e.RestoredBecause, str]] = {
    "in doubt": "step {step} is tried again", "rewound": "the run was taken back", "forked": "the fork has its own",
    "gone": "the folder was gone", "undone": "step {step} was undone", "asked": "asked for{by}",
}  # fmt: skip


def workspace_text(event: e.WorkspaceEvent, data: Mapping[str, Any], when: str = "") -> str:
    """Describes a workspace event; snapshots may be recorded late, so `when` is included."""
    match event:
        case e.WorkspaceBound():
            return f"works in {event.path}, whose files are kept in {event.vault}"
        case e.WorkspaceCaptured():
            held = f"{counted(event.files, 'file')}, {size_text(event.size_bytes)}"
            text = f"files{when}: {f'{event.changed:,} changed' if event.changed else held} ({snapshot(event.root)})"
            alive = (
                f"{counted(event.processes, 'process', 'processes')} {'was' if event.processes == 1 else 'were'} alive"
            )
            if event.processes:
                text += f"; files only, {alive}"
            return text + (f"; {counted(left, 'path')} left out" if (left := _count(data.get("left_out"))) else "")
        case e.WorkspaceRestored():
            by = f" by {event.by}" if event.by else ""
            why = _WENT_BACK[event.because].format(step=event.step or "?", by=by)
            of = f"{counted(paths, 'path')} of the files" if (paths := _count(data.get("paths"))) else "files"
            text = f"{of} went back to {snapshot(event.root)} ({why})"
            ended = _count(data.get("ended"))
            text += f"; {counted(ended, 'process', 'processes')} ended" if ended else ""
            text += f"; {counted(left, 'path')} left as they were" if (left := _count(data.get("left"))) else ""
            return text + (f"; before: {snapshot(event.before).partition(' ')[2]}" if event.before else "")


NOT_RETRIED: Final[Mapping[e.NotRetried, str]] = {
    "no_attempts_left": "no attempt was left",
    "named_in_never": "Retry(never=…) names the error",
    "not_named_in_on": "Retry(on=…) does not name the error",
    "programming_error": "it is a programming error, and Retry(on=…) does not name it",
    "lasting_error": "without retry=, only errors that pass by themselves are retried",
    "may_have_happened": "it may have happened, and nothing_happened=… does not name the error",
    "patience_over": "the rate limit asked for more time than patience=… allows",
}
"""Why no retry followed a failed attempt."""


def _count(value: Any) -> int:
    """Returns a count that is given as a number or as a list."""
    return value if isinstance(value, int) else len(value) if isinstance(value, list | tuple) else 0  # pyright: ignore


def span(us: float | None) -> str:
    """The same in short: 350 µs, 12 ms, 4.2 s, 3m 5s, 2d 4h."""
    if us is None:
        return ""
    if us < 1_000:
        return f"{max(us, 0):.0f} µs"  # the clock may have been set back meanwhile
    if us < 999_500:
        return f"{us / 1_000:.0f} ms"
    total = us / 1_000_000
    if total < 59.95:
        return f"{total:.1f} s"
    parts: list[str] = []
    left = round(total)
    for size, unit in _UNITS[:-1]:
        if left >= size:
            parts.append(f"{left // size}{unit[0]}")
            left %= size
    return " ".join([*parts, *([f"{left}s"] if left and total < 3_600 else [])][:2])


def who(by: str | None) -> str:
    """Returns a person's recorded name."""
    known = {
        "agent": "the agent's code", "model": "the model", "killick": "Killick", "reconcile": "the tool's own check",
        "contract": "its contract", "a person": "a person",
    }  # fmt: skip
    return "a person" if by is None else known.get(by, by)


def entries_of(value: Any) -> Mapping[str, Any]:
    """Returns an object's entries; none for another value."""
    return value if isinstance(value, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]


def chain(failure: Failure) -> Iterator[Failure]:
    """Returns an error and its causes."""
    below: Failure | None = failure
    while below is not None:
        yield below
        below = below.cause or below.context


# values -------------------------------------------------------------------------------------------


def inline(value: Any) -> str:
    """A value as one line of JSON, with spaces between its parts."""
    if isinstance(value, Erased):
        return str(value)
    return msgspec.json.format(msgspec.json.encode(plain(value)), indent=0).decode()


def cut(text: str, chars: int) -> str:
    """A text on one line, cut with … where it is longer than `chars`."""
    line = " ".join(text[: chars * 8].split())
    return line if len(line) <= chars else f"{line[: max(chars - 1, 1)]}…"


def brief(value: Any, chars: int = 60) -> str:
    """A value on one line: text as it is, anything else as JSON; cut where it is longer."""
    return cut(value if isinstance(value, str) else inline(value), chars)


def arguments(given: Any, chars: int = 60) -> str:
    """The arguments of a call as code has them: to="ada", amount=5."""
    if not isinstance(given, Mapping):
        return brief(given, chars)
    return cut(", ".join(f"{name}={inline(each)}" for name, each in entries_of(given).items()), chars)


def short(failure: Failure) -> str:
    """An error on one line: its type without its module, and the first line of its message."""
    return f"{failure.type.rpartition('.')[2]}: {failure.message.strip().partition(chr(10))[0]}".removesuffix(": ")
