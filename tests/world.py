"""A world in which processes die: one store, and clients that can be cut off from it in the middle of anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

import killick
from killick.errors import StoreUnavailable
from killick.log import Entry
from killick.model import events as e
from killick.store import Store

E = TypeVar("E", bound=e.Event)


class Dead(Exception):
    """Stands for the end of a process: nothing that the tool or the runtime does after it reaches the store."""


class _Line:
    """The way from one process to the store. Cut, it lets nothing through; closing it leaves the store open."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_cut = False
        self.cut_at: tuple[int, str] | None = None
        """The process dies at its so-many-th commit: "before" it is made, or "after"."""
        self.appends: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._passing(name, found) if callable(found) else found

    def _passing(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def passed(*args: Any, **kwargs: Any) -> Any:
            if name == "close":
                return None
            if self.is_cut:
                raise StoreUnavailable(self._store.place, "this process is dead")
            if name != "append":
                return operation(*args, **kwargs)
            self.appends.append([_kind(row.body) for item in args[0] for row in item.rows])
            number, when = self.cut_at or (0, "")
            self.is_cut = len(self.appends) == number
            if self.is_cut and when == "before":
                raise StoreUnavailable(self._store.place, "this process is dead")
            done = operation(*args, **kwargs)
            if self.is_cut:
                raise StoreUnavailable(self._store.place, "this process is dead")
            return done

        return passed


def _kind(body: bytes) -> str:
    return body.split(b'"', 4)[3].decode()


class World:
    """One store, and the processes that come and go over it. `kd` is the one that lives."""

    def __init__(self, store: Store, clock: killick.clock.Clock) -> None:
        self.store = store
        self.clock = clock
        self.line = _Line(store)
        self._clients: list[killick.Client] = []
        self.kd = self.process()

    def process(self, **options: Any) -> killick.Client:
        """Another process: it knows nothing but the store."""
        self.line = _Line(self.store)
        options.setdefault("behind", False)
        self.kd = killick.Client(cast("Store", self.line), clock=self.clock, **options)
        self._clients.append(self.kd)
        return self.kd

    def beside(self) -> killick.Client:
        """Another process, while the one that lives goes on."""
        self._clients.append(killick.Client(cast("Store", _Line(self.store)), clock=self.clock, behind=False))
        return self._clients[-1]

    def die(self) -> None:
        """The living process dies here, in the middle of what it does."""
        self.line.is_cut = True
        raise Dead

    def killed(self, agent: Any, value: Any = None, *, run: str) -> killick.Client:
        """Run an agent whose tool dies, and give back the process that comes after it."""
        with pytest.raises(StoreUnavailable, match="dead"):
            self.kd.run(agent, value, id=run)
        return self.bury(run)

    def bury(self, run: str) -> killick.Client:
        """The process that comes after a dead one, whose lease is known to be free."""
        head = self.store.head(run)
        if head is not None:
            self.store.release(run, epoch=head.epoch)
        return self.process()

    def outlived(self, agent: Any, value: Any = None, *, run: str, lives: int = 6) -> Any:
        """Run an agent, in another process whenever one dies, to its end: what it returns, or raises."""
        for _ in range(lives):
            try:
                return self.kd.run(agent, value, id=run)
            except StoreUnavailable:
                self.bury(run)
        raise AssertionError(f"{run} did not end in {lives} lives: {self.kd.info(run)}")

    def rewind(self, run: str, cut: int, *, generation: int = 1) -> None:
        """Take a run back to an event, as a person would."""
        log = self.kd.runtime.log.open(run)
        log.append(Entry(e.RunRewound(at=self.clock.now_us(), cut=cut, generation=generation)))
        self.store.release(run, epoch=log.epoch)

    def rewind_to(self, run: str, step: str, *, generation: int = 1) -> None:
        """Take a run back to before a step."""
        found = self.kd.state(run).fold.step(step)
        assert found is not None
        self.rewind(run, found.intended - 1, generation=generation)

    def told(self, run: str, kind: type[E]) -> list[E]:
        """The events of one kind."""
        return [recorded.event for recorded in self.kd.events(run) if isinstance(recorded.event, kind)]

    def started(self, run: str) -> list[e.Started]:
        """The events that start attempts."""
        return [recorded.event for recorded in self.kd.events(run) if isinstance(recorded.event, e.Started)]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.store.close()
