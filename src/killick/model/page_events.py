"""The events of the context window: pages evicted, faulted and pinned."""

from __future__ import annotations

from typing import Literal

from killick.model.events import Event, StepId

EvictedBecause = Literal["pays", "budget", "duplicate"]
FaultedHow = Literal["recalled", "reread"]
PinnedBecause = Literal["fault", "asked"]


class PageEvicted(Event, frozen=True, tag="page.evicted"):
    """Pages were evicted together from the model's window, from the call after `turn` others on. `tokens` is the saving
    a call. `marks` are hash prefixes of the page contents, because an edited history may hold another page at the same
    position. Data: `pages`, each with `page`, `kind`, `source`, `tokens`, `why`; `budget`; `window`, if several windows
    decide before the same step."""

    pages: tuple[str, ...]
    tokens: int
    because: EvictedBecause
    turn: int
    step: StepId | None = None
    marks: tuple[str, ...] = ()


class PageFaulted(Event, frozen=True, tag="page.faulted"):
    """An evicted page was needed again, and the way it returned: recalled by its handle, or read again
    and found unchanged. Data: `source`, `window`; `text` and `failed` of the answer to a recall."""

    page: str
    how: FaultedHow
    tokens: int
    turn: int
    step: StepId | None = None


class PagePinned(Event, frozen=True, tag="page.pinned"):
    """A page stays in the window until a turn. A past turn unpins it. Data: `source`, `window`."""

    page: str
    until: int
    because: PinnedBecause
    turn: int
    step: StepId | None = None


PageEvent = PageEvicted | PageFaulted | PagePinned
