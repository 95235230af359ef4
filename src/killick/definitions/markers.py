"""Injected parameters: markers that a tool declares as defaults, and the values that each attempt receives instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from killick.definitions.current import HERE
from killick.errors import NotDone

T = TypeVar("T")


class Key(str):
    """The idempotency key of the action that a tool performs: equal for all attempts of the action."""

    __slots__ = ()


KEY: Final = Key()
"""The default of a parameter that receives the idempotency key; callers leave it out."""


class RestingCall(Protocol):
    """A call that may touch the world, except while it rests."""

    def mark_idle(self) -> None: ...
    def mark_running(self) -> None: ...


class InnerSteps(msgspec.Struct, eq=False):
    """The steps of the same run that the code of one attempt takes; the attempt waits for a step in progress.

    Holds the counts; the execution changes them.
    """

    step: str
    effect: str | None
    guest: str | None
    outer: InnerSteps | None
    """The inner steps of the attempt that took this attempt's own step."""
    inflight: tuple[str, str] | None = None
    """The action of this attempt, if the same action elsewhere waits for it."""
    hosted: Any = None
    """The external session in which they are taken, also while the run is being released."""
    live: RestingCall | None = None
    """The attempt among the calls that may touch the world. It is idle while it awaits these steps."""
    running: int = 0
    is_open: bool = True
    is_refused: bool = False
    """Whether its code got the error that closed the run's handle."""
    waits: set[str] = msgspec.field(default_factory=set)  # pyright: ignore[reportUnknownVariableType]
    """The waiting steps of which its code was notified."""
    nth: dict[str, int] = msgspec.field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    """How often each call without a key was made since the attempt began."""

    def named(self, name: str) -> str:
        """The key of the nth call of a name since the attempt began: each attempt runs the code from its top."""
        self.nth[name] = nth = self.nth.get(name, 0) + 1
        return f"{self.guest}/{name}#{nth}"

    def around(self) -> Iterator[InnerSteps]:
        """This attempt's inner steps, then those of each enclosing attempt."""
        found: InnerSteps | None = self
        while found is not None:
            yield found
            found = found.outer


class ToolStep(msgspec.Struct, eq=False):
    """The attempt that a tool executes, and how the tool records its progress.

    run, id  the run, and the number of the step
    attempt  the number of the attempt, from 1
    key      the idempotency key of the action
    """

    in_agent = replaying = False  # not fields: equal for all
    run: str
    id: str
    attempt: int
    key: Key
    progress: Callable[[Any], None]
    """Records progress, any value, so that an interrupted call can be undone or resumed."""
    workspace: Path | None = None
    """The folder of the run, if its agent declares one."""
    inner: InnerSteps | None = None

    @staticmethod
    def here() -> ToolStep | None:
        """Returns the attempt of the calling code, for tools without a parameter for it; None outside an attempt."""
        place = HERE.get()
        return place if isinstance(place, ToolStep) else None

    def tell(self) -> tuple[str, str | None, int | None]:
        return self.run, self.id, self.attempt


STEP: Final = ToolStep("", "", 0, KEY, lambda _: None)
"""The default of a parameter that receives the tool's step; callers leave it out."""

WORKSPACE: Final = Path()
"""The default of a parameter that receives the run's folder; callers leave it out."""


class Tx:
    """The transaction of a tool with `effect="transaction"`. Its rows and the record of its outcome commit together
    when the tool returns. If the tool raises, nothing happened."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._over = ""

    @property
    def connection(self) -> Any:
        """The `sqlite3.Connection` or `psycopg.Connection`. Do not commit or roll back. Raises NotDone after it."""
        if self._over or self._connection is None:
            raise NotDone(self._over or "no transaction is open here; use it in a tool with effect='transaction'")
        return self._connection

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """Executes a statement and returns the database's own cursor."""
        return self.connection.execute(sql, params)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Any:
        """Executes a statement once for each row of parameters, and returns the cursor."""
        cursor = self.connection.cursor()
        cursor.executemany(sql, rows)
        return cursor

    def end(self, because: str) -> None:
        """Refuses the connection from now on: the transaction has ended, or was abandoned."""
        self._over = because


TX: Final = Tx(None)
"""The default of a parameter that receives the transaction; callers leave it out."""


def is_marker(default: object) -> bool:
    """Whether a default is replaced in each attempt."""
    return default is KEY or default is STEP or default is TX or default is WORKSPACE


class Resource(Generic[T]):
    """A pool or a client that tools share: opened on first use, closed with the client.

    open   a function, plain or async, that opens it
    close  a function, plain or async, that closes it
    name   the name in errors; by default the name of `open`

        crm = killick.Resource(open_crm)

        @killick.tool
        async def look_up(name: str, crm: Crm = crm.inject()) -> Person: ...
    """

    def __init__(
        self,
        open: Callable[[], T] | Callable[[], Awaitable[T]],  # noqa: A002
        close: Callable[[T], object] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.open = open
        self.close = close
        self.name = name or getattr(open, "__name__", "resource")

    def inject(self) -> T:
        """Returns the default of a tool's parameter that receives the open resource."""
        return Injected(self)  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


class Injected:
    """The default of a parameter that receives an open resource."""

    def __init__(self, resource: Resource[Any]) -> None:
        self.resource = resource
