"""The context of every handler: the client, the access rules, the redaction, and the hub of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import msgspec

from killick.history.listing import Listing
from killick.model.chunks import unpack
from killick.model.codec import plain
from killick.presenting.needs import Questions
from killick.store.grants import Grant, granted
from killick.web.auth.access import Access
from killick.web.hub import Hub
from killick.web.redaction import Redaction
from killick.web.tallies import Tallies
from killick.workers.tokens import Person

if TYPE_CHECKING:
    from killick.client.client import Client

FOLDS_KEPT: Final = 64
"""How many runs' folds are cached: a page reads many parts of one run, and people return to the same runs."""

TURNS: Final = 3
"""How many requests of one person are served at once; the others wait."""


class AppContext:
    """One app over one client."""

    def __init__(
        self,
        client: Client,
        *,
        access: Access,
        mask: Redaction | None = None,
        webhooks: Mapping[str, Any] | None = None,
    ) -> None:
        self.client = client
        self.whole = self
        """The context of callers who reach the whole store."""
        self._granted: dict[Grant, AppContext] = {}
        client.runtime.log.keep_folds(FOLDS_KEPT)
        self.access = access
        self.mask = Redaction(client) if mask is None else mask
        self.webhooks = dict(webhooks or {})
        self.hub = Hub(client, mask=self.mask)
        self.questions = Questions(client)
        self.log = client.runtime.log.redacted(self._seen) if self.mask else client.runtime.log
        self.listing = Listing(self.log, whole=True)
        self.tallies = Tallies(self.log, client.runtime.clock)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, grant: Grant | None) -> AppContext:
        """The context of callers with a grant: everything of it reads and writes through a store of their runs."""
        if grant is None:
            return self
        if (known := self._granted.get(grant)) is None:
            whole = self.client.runtime
            client = type(self.client)(
                granted(whole.store, grant),
                clock=whole.clock,
                ids=whole.ids,
                roles=whole.engine.roles,
                build=whole.engine.build,
                behind=False,
            )
            known = AppContext(client, access=self.access, mask=self.mask, webhooks=self.webhooks)
            known.whole = self
            self._granted[grant] = known
        return known

    async def close(self) -> None:
        """End every stream."""
        await self.hub.close()
        for context in self._granted.values():
            await context.close()
            context.client.close()

    def _seen(self, run: str, value: Any) -> Any:
        """A value of a run with all hidden that is to be."""
        written = msgspec.json.encode(self.mask.over(plain(value), run=run))
        return unpack(written, self.client.runtime.store.pieces)

    def turn(self, person: Person) -> asyncio.Semaphore:
        """Limits how many requests of one person are served at once, so that the others get a turn."""
        turn = self._turns.get(person.name)
        if turn is None:
            turn = self._turns[person.name] = asyncio.Semaphore(TURNS)
        return turn
