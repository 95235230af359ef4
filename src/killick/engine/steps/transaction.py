"""A step that ends in a transaction: rows of an application and the record of its outcome, or neither.

Runs the tool in a thread of its own, which never waits for the loop: on SQLite it holds the lock that the loop may be
waiting for. If it raised, nothing happened; the pipeline decides about a retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Final

from killick.definitions.current import HERE
from killick.definitions.markers import TX, ToolStep, Tx
from killick.engine.signals import Cancelling, Interrupted
from killick.engine.steps import permits
from killick.engine.steps.attempt import Applied, LiveCall, Untouched, waited_for
from killick.engine.steps.intention import called, claim_text, restored
from killick.engine.steps.step_state import StepState
from killick.errors import KillickError, LeaseLost, LogError, NotDone, StoreError, TransactionEnded
from killick.log.append_groups import Hold
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.store.protocol import Store, Transaction
from killick.store.records import Append

_ABANDONED: Final = "this transaction was abandoned; nothing of it happened"


@dataclass(slots=True, eq=False)
class Transacting:
    """One attempt of a tool whose rows commit with its outcome."""

    _attempting: StepState
    _place: ToolStep
    _injected: dict[str, Any]
    _begins_live: Callable[[], LiveCall | None]
    _tx: Tx = TX
    _connection: Any = None
    _in_tool: bool = False
    _is_abandoned: bool = False
    _ended: tuple[int, Any] | None = None

    async def apply(self, timeout: float | None) -> Applied:
        """The attempt, when no other transaction of the run is open."""
        ex = self._attempting.ex
        try:
            await ex.transacting.acquire()
        except asyncio.CancelledError:
            return Applied(error=Untouched())
        try:
            if isinstance(ex.signal, Interrupted | Cancelling) or self._attempting.branch.stopped is not None:
                return Applied(error=Untouched())
            ex.check_lease()
            hold = self._attempting.hold = ex.log.hold()
            with ex.awaiting_commit(hold):
                try:
                    return await self._within(hold, timeout)
                finally:
                    ex.log.give_up(hold)
        finally:
            ex.transacting.release()

    async def _within(self, hold: Hold, timeout: float | None) -> Applied:
        ex = self._attempting.ex
        try:
            if await ex.log.caught_up(hold):
                return Applied(error=Untouched())
        except KillickError as error:
            raise ex.interrupted(error) from None
        context = copy_context()
        context.run(HERE.set, self._place)
        live = self._begins_live()
        work = ex.engine.threads.start(lambda: self._work(hold), context, live)
        ex.engine.live.remember(ex.run_id, self._place.id, work)
        applied = await waited_for(work, timeout)
        if not ex.log.give_up(hold):
            # It is committed, also if the run was cancelled meanwhile.
            return Applied(ended=self._ended)
        if applied.work is not None:
            self._abandon()
        if isinstance(applied.error, _CouldNot):
            raise ex.interrupted(applied.error.error)
        return applied

    def _abandon(self) -> None:
        """Abort the transaction. Its thread gets an error at its next statement; a running statement is interrupted."""
        self._is_abandoned = True
        connection = self._connection
        if self._tx is not TX:
            self._tx.end(_ABANDONED)
        if isinstance(connection, sqlite3.Connection):
            with contextlib.suppress(sqlite3.ProgrammingError):
                connection.interrupt()

    # in the thread ----------------------------------------------------------------------------

    def _work(self, hold: Hold) -> None:
        """Call the tool and commit. If it raises, nothing was committed."""
        try:
            self._commit(hold)
        except (StoreError, LogError) as error:
            if self._in_tool:
                raise
            raise _CouldNot(error) from error

    def _commit(self, hold: Hold) -> None:
        ex, store = self._attempting.ex, self._attempting.ex.engine.store
        item: Append | None = None
        with ExitStack() as until_committed:
            try:
                with store.transaction() as transaction:
                    entry, seen = self._called(transaction)
                    if not ex.is_ours:
                        raise LeaseLost(ex.run_id)
                    released = self._attempting.given_back(nothing_happened=False)
                    rights = permits.returned(ex.log, released, entry.event.at)
                    item = until_committed.enter_context(ex.log.ending(hold, entry, transaction, rights))
                    self._ended = item.last[0], seen
            except StoreError:
                # A commit whose answer is lost was made, or it was not: the head tells.
                head = None if item is None else store.head(ex.run_id)
                if item is None or head is None or (head.seq, head.hash) != item.last:
                    raise

    def _called(self, transaction: Transaction) -> tuple[Entry, Any]:
        """Call the tool; returns the event of its outcome, and the value as code sees it."""
        intent, place = self._attempting.intent, self._place
        self._in_tool = True
        self._connection = transaction.connection
        tx = self._tx = Tx(self._connection)
        if self._is_abandoned:
            raise NotDone(_ABANDONED)
        injected = {name: tx if marker is TX else self._injected[name] for name, marker in intent.injected.items()}
        try:
            value = called(intent, injected)
        except BaseException as error:
            if not transaction.is_open:
                raise TransactionEnded(intent.name) from error
            raise
        if not transaction.is_open:
            raise TransactionEnded(intent.name)
        if inspect.isawaitable(value):
            raise TypeError(f"{intent.name}: gave something to await, but its transaction ends when it returns")
        tx.end("the tool has returned, and its transaction is over")
        seen = restored(intent, through_codec(value), None, place.id)
        at = self._attempting.ex.now_us()
        released = tuple(map(claim_text, self._attempting.given_back(nothing_happened=False)))
        event = e.AttemptEnded(at=at, step=place.id, attempt=place.attempt, outcome="returned", released=released)
        self._in_tool = False
        return Entry(event, {"output": value}), seen


def joining(store: Store, tx: Any) -> Transaction:
    """The transaction that is open on a caller's own connection, or that a tool was given."""
    return store.join(tx.connection if isinstance(tx, Tx) else tx)


class _CouldNot(Exception):
    """The store could not begin or commit: no failure of the tool."""

    def __init__(self, error: KillickError) -> None:
        super().__init__(str(error))
        self.error = error
