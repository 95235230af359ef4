"""The open conversations: finds the one that a request continues, and releases idle ones.

A conversation serves one request at a time: a concurrent request that would continue it is recorded separately.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from killick.engine.waits.waits import refuse_own
from killick.errors import AccessRefused, KillickError, LogError
from killick.logger import get_logger
from killick.proxy.conversation import Conversation
from killick.proxy.conversation_match import ROOT_TAG, TIP_TAG, Digests
from killick.proxy.openai_chat import Chat
from killick.proxy.wire import Wire
from killick.store.protocol import is_held
from killick.store.records import RunQuery, RunRow

if TYPE_CHECKING:
    from killick.client.client import Client

logger: Final = get_logger("killick.proxy")

OPEN_MAX: Final = 256
"""The maximum number of conversations in memory; beyond it, the longest idle are released."""

REST_SECONDS: Final = 600.0
"""How long a client may be idle before its run counts as completed. It reopens when the client returns."""

LOOK_SECONDS: Final = 15.0
PATIENCE_SECONDS: Final = 1.0
"""How long a request waits for an earlier one whose client disconnected."""

NAME_CHARS_MAX: Final = 200
_FORKS_MAX: Final = 1_000


class Conversations:
    """All conversations of one proxy. Belongs to one loop."""

    def __init__(self, client: Client, *, agent: str) -> None:
        self.client = client
        self.agent = agent
        self._open: OrderedDict[str, Conversation] = OrderedDict()
        self._tips: dict[str, list[Conversation]] = {}
        """Conversations at the same position, the latest last: many start with the same words."""
        self._finding = asyncio.Lock()

    @asynccontextmanager
    async def conversation_for(
        self, wire: Wire, hashes: Digests, *, name: str | None, origin: Mapping[str, Any]
    ) -> AsyncGenerator[Conversation]:
        """Returns the conversation that a request continues, or a new one, for the duration of the request."""
        claiming = asyncio.ensure_future(self._claimed(wire, hashes, name, origin))
        try:
            conversation = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # A reply still being read for a disconnected client frees the conversation at its end.
            claiming.add_done_callback(self._unclaimed)
            raise
        try:
            yield conversation
        finally:
            self._free(conversation)

    async def _claimed(self, wire: Wire, hashes: Digests, name: str | None, origin: Mapping[str, Any]) -> Conversation:
        await self._await_identical(hashes)
        while True:
            async with self._finding:
                found, left = await self._found(wire, hashes, name)
                conversation = found or self._begun(wire, hashes, name, left, origin)
                if conversation.at is None:
                    conversation.at = hashes.asked
                    conversation.freed.clear()
                    return conversation
            await conversation.freed.wait()

    def _unclaimed(self, claiming: asyncio.Future[Conversation]) -> None:
        if claiming.exception() is None:
            self._free(claiming.result())

    def _free(self, conversation: Conversation) -> None:
        conversation.at = None
        self._settle(conversation)
        conversation.freed.set()

    async def _await_identical(self, hashes: Digests) -> None:
        """Waits for an identical earlier request: its client has most likely just disconnected.

        The first requests of conversations do not wait: many start with the same words.
        """
        async with self._finding:
            pass  # it may be looking for its conversation still
        same = [known for known in self._open.values() if known.at == hashes.asked]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                for known in same:
                    if known.tip != hashes.asked or known in self._tips.get(hashes.asked, ()):
                        await known.freed.wait()

    def _settle(self, conversation: Conversation) -> None:
        """Updates its lookup keys; drops one that cannot be written to, so that it is read again."""
        self._forget(conversation)
        conversation.used = self.client.runtime.clock.monotonic()
        if conversation.is_sound:
            self._tips.setdefault(conversation.tip, []).append(conversation)
        elif self._open.pop(conversation.run, None) is not None:
            with contextlib.suppress(KillickError):
                self.client.runtime.store.release(
                    conversation.run, epoch=conversation.log.epoch, holder=self.client.runtime.engine.holder
                )

    def _forget(self, conversation: Conversation) -> None:
        for tip in [tip for tip, held in self._tips.items() if conversation in held]:
            self._tips[tip].remove(conversation)
            if not self._tips[tip]:
                del self._tips[tip]

    # finding ------------------------------------------------------------------------------------

    async def _found(self, wire: Wire, hashes: Digests, name: str | None) -> tuple[Conversation | None, str | None]:
        """Returns the free conversation, if any; else the run from which this one branches, if any."""
        if name is not None:
            return await self._named(wire, hashes, name)
        left: str | None = None
        for tip in _tips(hashes):
            held = self._tips.get(tip, [])
            for known in reversed(held):
                if known.at is None and known.is_sound:
                    self._open.move_to_end(known.run)
                    return known, None
            left = left or (held[-1].run if held and tip != hashes.asked else None)
        for tip in _tips(hashes) if left is None else ():
            found = await asyncio.to_thread(self._look, wire, tip)
            if found is not None:
                return self._keep(found), None
        if left is None and hashes.root is not None and hashes.tips:
            left = await asyncio.to_thread(self._run_by_root, hashes.root)
        return None, left

    def _look(self, wire: Wire, tip: str) -> Conversation | None:
        """Returns a recorded conversation at this position that no worker holds."""
        for row in self.client.runtime.store.runs(RunQuery(agent=self.agent, tag=f"{TIP_TAG}{tip}"), limit=4):
            head = self.client.runtime.store.head(row.run)
            # A fork inherits its parent's tags, but belongs to the person who made it.
            if row.run not in self._open and head is not None and head.parent is None:
                with contextlib.suppress(LogError):
                    return Conversation.opened(self.client, row.run, wire)
        return None

    def _is_ours(self, row: RunRow) -> bool:
        """Returns whether a run is a conversation, not one of an agent with the same name, or a person's fork."""
        head = self.client.runtime.store.head(row.run)
        return any(tag.startswith(TIP_TAG) for tag in row.tags) and head is not None and head.parent is None

    def _run_by_root(self, root: str) -> str | None:
        rows = self.client.runtime.store.runs(RunQuery(agent=self.agent, tag=f"{ROOT_TAG}{root}"), limit=1)
        return rows[0].run if rows else None

    async def _named(self, wire: Wire, hashes: Digests, name: str) -> tuple[Conversation | None, str | None]:
        """Returns the run of that name; if its history differs, the last one made for it."""
        refuse_own(name)
        if not name or len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise AccessRefused("X-Killick-Run", f"is not a valid run id; give up to {NAME_CHARS_MAX} plain characters")
        last: str | None = None
        for run in _names(name):
            row = await asyncio.to_thread(self.client.runtime.store.index, run)
            if row is None and run not in self._open:
                break
            if row is not None and (row.agent != self.agent or not self._is_ours(row)):
                raise AccessRefused(run, f"is a run of {row.agent} that no proxy made; give X-Killick-Run another name")
            last = run
        if last is None:
            return None, None
        conversation = self._open.get(last)
        if conversation is None:
            opened = await asyncio.to_thread(Conversation.opened, self.client, last, wire)
            conversation = self._keep(opened)
        if conversation.at is not None:
            return conversation, None  # its current request may move it to this one's position
        if conversation.wire is wire and conversation.tip in (hashes.asked, *hashes.tips):
            return conversation, None
        return None, last

    def _begun(
        self, wire: Wire, hashes: Digests, name: str | None, left: str | None, origin: Mapping[str, Any]
    ) -> Conversation:
        run = name or self.client.runtime.ids.new(self.agent)
        if name is not None and left is not None:
            run = next(
                each for each in _names(name) if each not in self._open and not self.client.runtime.store.head(each)
            )
        return self._keep(
            Conversation.begun(
                self.client, run, self.agent, wire, root=hashes.root, tip=hashes.asked, left=left, origin=origin
            )
        )

    def _keep(self, conversation: Conversation) -> Conversation:
        self._open[conversation.run] = conversation
        self._open.move_to_end(conversation.run)
        return conversation

    # resting ------------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Releases idle conversations, forever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(KillickError):
                await self.look()

    async def look(self) -> None:
        """Releases idle conversations, and those of dead proxies."""
        before = self.client.runtime.clock.monotonic() - REST_SECONDS
        free = [each for each in self._open.values() if each.at is None]
        spare = max(len(self._open) - OPEN_MAX, 0)
        for number, each in enumerate(free):
            if number < spare or each.used < before:
                await self._let_go(each)
        for row in await asyncio.to_thread(self._left):
            async with self._finding:
                if row not in self._open:
                    with contextlib.suppress(LogError):
                        left = await asyncio.to_thread(Conversation.opened, self.client, row, Chat())
                        await asyncio.to_thread(left.let_go)

    def _left(self) -> list[str]:
        """Returns the runs of dead proxies."""
        store = self.client.runtime.store
        rows = store.runs(RunQuery(agent=self.agent, status=("running",)), limit=1_000)
        standings = store.statuses([row.run for row in rows if row.run not in self._open and self._is_ours(row)])
        return [run for run, found in standings.items() if not is_held(store, found.head)]

    async def _let_go(self, conversation: Conversation) -> None:
        async with self._finding:
            if conversation.at is not None:
                return
            self._open.pop(conversation.run, None)
            self._forget(conversation)
            try:
                await asyncio.to_thread(conversation.let_go)
            except KillickError as error:
                logger.warning("%s: could not be released: %s", conversation.run, error)

    async def close(self) -> None:
        """Releases everything."""
        for conversation in list(self._open.values()):
            await self._let_go(conversation)


def _tips(hashes: Digests) -> Iterator[str]:
    yield hashes.asked
    yield from hashes.tips


def _names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}.{number}" for number in range(2, _FORKS_MAX))
