"""Labels for the context window of a run: contents, evictions and faults."""

from __future__ import annotations

from typing import Final

from killick.history.phrasing import counted
from killick.history.window_report import ModelCall

KINDS: Final = {
    "system": "system", "schemas": "tool schemas", "files": "file reads", "results": "other results",
    "documents": "documents", "user": "the user", "assistant": "the assistant", "left": "tombstones",
}  # fmt: skip
EVICTIONS: Final = {
    "pays": "it pays", "budget": "for the budget", "duplicate": "already elsewhere",
    "superseded": "superseded by a later read", "written": "written since",
}  # fmt: skip
NOT_HELD: Final = "no window was used; killick.loop(…, budget=…) or killick.Window keeps one"


def share(part: int, whole: int) -> str:
    """A part in percent; a part that rounds to zero is `<1 %`."""
    percent = 100 * part / whole if whole else 0
    return f"{'<1' if 0 < percent < 0.5 else round(percent)} %"


def happened(call: ModelCall) -> str:
    """The pages evicted before a call, and the faults of its reply."""
    evicted = [f"{counted(call.evicted, 'page')} evicted"] if call.evicted else []
    return ", ".join([*evicted, *([counted(call.faulted, "fault")] if call.faulted else [])])
