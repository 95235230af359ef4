"""Labels for the context window of a run: contents, waste, evictions and faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from killick.history.phrasing import counted, listed
from killick.history.window_report import ModelCall

KINDS: Final = {
    "system": "system", "schemas": "tool schemas", "files": "file reads", "results": "other results",
    "documents": "documents", "user": "the user", "assistant": "the assistant", "left": "tombstones",
}  # fmt: skip
WASTES: Final = {
    "unused": ("unused schemas", "of tools that were never called"),
    "stale": ("stale", "outdated by a later read or write"),
    "duplicate": ("duplicate", "already in the same request"),
}
EVICTIONS: Final = {
    "pays": "it pays", "budget": "for the budget", "duplicate": "already elsewhere", "unused": "not in use",
    "superseded": "superseded by a later read", "written": "written since",
}  # fmt: skip
NOT_HELD: Final = "no window was used; killick.loop(…, budget=…) or killick.Window keeps one"


def share(part: int, whole: int) -> str:
    """A part in percent; a part that rounds to zero is `<1 %`."""
    percent = 100 * part / whole if whole else 0
    return f"{'<1' if 0 < percent < 0.5 else round(percent)} %"


def dollars(micros: int) -> str:
    """An amount of millionths of a dollar."""
    return f"${micros / 1_000_000:,.4f}" if micros < 1_000_000 else f"${micros / 1_000_000:,.2f}"


def unpriced(names: Sequence[str]) -> str:
    """The models that have no price."""
    return listed([name or "a model without a name" for name in names])


def happened(call: ModelCall) -> str:
    """The pages evicted before a call, and the faults of its reply."""
    evicted = [f"{counted(call.evicted, 'page')} evicted"] if call.evicted else []
    return ", ".join([*evicted, *([counted(call.faulted, "fault")] if call.faulted else [])])
