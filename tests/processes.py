"""Processes that come and go over one store: each is a client that shares nothing with the others but the record."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, cast

import killick
from killick.errors import StoreUnavailable
from killick.model import events as e
from killick.store import MemoryStore, Store


class Processes:
    """Makes clients of one store, and closes them all in the end. Time leaps, so that days pass in no time."""

    def __init__(self) -> None:
        self.clock = killick.clock.LeapingClock()
        self.store = MemoryStore(clock=self.clock)
        self._made: list[killick.Client] = []

    def new(self, *, store: Store | None = None, **options: Any) -> killick.Client:
        """A process that knows nothing of what the others have in memory."""
        view = store or cast("Store", View(self.store))
        made = killick.Client(view, clock=self.clock, behind=False, **options)
        self._made.append(made)
        return made

    def mortal(self) -> tuple[killick.Client, View]:
        """A process that dies when it is told to; its lease runs out some time afterwards."""
        view = View(self.store)
        return self.new(store=cast("Store", view), lease_seconds=30), view

    def mourn(self) -> None:
        """Let the leases of the dead run out."""
        self.clock.advance(31)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for made in self._made:
            made.close()
        self.store.close()


class View:
    """A store as one process sees it: once that is dead, nothing it does reaches the record. Closing it is local."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.dead = False

    def die(self) -> None:
        self.dead = True

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if self.dead and name != "place":
            raise StoreUnavailable(self._store.place, "its process is dead")
        return getattr(self._store, name)


class Told(NamedTuple):
    """An event with its values."""

    seq: int
    event: Any
    data: dict[str, Any]


def kinds(kd: killick.Client, run: str) -> list[str]:
    """What is on record, by kind, in order."""
    return [str(recorded.event.__struct_config__.tag) for recorded in kd.events(run)]


def told(kd: killick.Client, run: str, kind: type[e.Event]) -> list[Told]:
    """The events of a kind, in order."""
    found = [recorded for recorded in kd.events(run) if isinstance(recorded.event, kind)]
    return [Told(recorded.seq, recorded.event, dict(kd.runtime.log.data(run, recorded.seq))) for recorded in found]


def steps(kd: killick.Client, run: str) -> dict[str, str]:
    """The steps on record: number and name, in the order in which they were begun."""
    return {step.id: step.name for step in kd.state(run).fold.steps}


def record(kd: killick.Client, run: str) -> list[str]:
    """What is on record, but for who took the run and let it go again."""
    return [kind for kind in kinds(kd, run) if kind != "run.taken"]
