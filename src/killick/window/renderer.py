"""Renders the messages to send: unchanged, with tombstones, or omitted with their turn.

Caches its output: between two decisions a call costs only the new messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from killick.window import tombstones
from killick.window.messages import Shape, is_user, joined, noted, replaced, size_of
from killick.window.pages import History, Page, Tokens
from killick.window.state import WindowState

UNSETTLED: Final = 8
"""The number of last messages that are always rendered again: clients move cache markers in place."""


class Renderer:
    """A history's rendering under the decisions so far."""

    def __init__(self, history: History, decided: WindowState, tokens: Tokens, shape: Shape, recall: str) -> None:
        self._history = history
        self._decided = decided
        self._tokens = tokens
        self._shape: Shape = shape
        self._recall = recall
        self._flat: list[Any] = []
        self._starts: list[int] = []
        self._offsets: list[int] = [0]
        self._resident: list[Page] = []
        self._paged = 0
        self._memo: dict[int, tuple[tuple[str, ...], Any, int]] = {}

    @property
    def tokens(self) -> int:
        self._extend()
        return self._offsets[-1]

    def offsets(self) -> list[int]:
        """The tokens before each message, and after the last."""
        self._extend()
        return self._offsets

    def size(self, index: int) -> int:
        """Returns a message's sent tokens."""
        return self._offsets[index + 1] - self._offsets[index]

    def resident(self) -> list[Page]:
        """Returns the resident pages, in order."""
        for pages in self._history.at[self._paged :]:
            self._resident += [page for page in pages if not self._decided.is_out(page)]
        self._paged = len(self._history.at)
        return self._resident

    def forget(self, index: int = 0) -> None:
        """Invalidates the rendering from a message on."""
        # A fold's note is part of the previous message.
        index = min(max(0, index - 1), len(self._starts))
        while index and (self._decided.is_folded(index) or self._decided.is_folded(index - 1)):
            index -= 1
        if index < len(self._starts):
            del self._flat[self._starts[index] :]
            del self._starts[index:]
            del self._offsets[index + 1 :]
        self._resident = [page for page in self._resident if page.index < index and not self._decided.is_out(page)]
        self._paged = min(self._paged, index)

    def render(self) -> list[Any]:
        self._extend()
        unsettled = max(0, len(self._starts) - UNSETTLED)
        again = [at for at in range(unsettled, len(self._starts)) if self._memo.pop(at, None) is not None]
        if again:
            self.forget(again[0])
            self._extend()
        return list(self._flat)

    def _extend(self) -> None:
        history, index = self._history, len(self._starts)
        folds = dict(self._decided.folds)
        while index < len(history.messages):
            last = folds.get(index)
            if last is not None and last < len(history.messages):
                self._fold(index, last)
                index = last + 1
                continue
            message, size = self._message(index)
            self._starts.append(len(self._flat))
            if self._shape == "anthropic" and index and self._decided.is_folded(index - 1) and is_user(message):
                # Everything between two user messages was evicted, so they are merged.
                before = self._flat[-1]
                self._flat[-1] = joined(before, message)
                size = self._count(self._flat[-1]) - self._count(before)
            else:
                self._flat.append(message)
            self._offsets.append(self._offsets[-1] + size)
            index += 1

    def _fold(self, first: int, last: int) -> None:
        """Replaces whole turns by one note. If it joins the previous message, recounts that one."""
        text = tombstones.for_page(*self._history.summary(first, last), f"m{first}-m{last}", self._recall)
        before = self._flat[-1:]
        after = noted(before, text, self._shape)
        added = sum(map(self._count, after)) - sum(map(self._count, before))
        self._flat[-1:] = after[: len(before)]
        self._starts.append(len(self._flat))
        self._flat += after[len(before) :]
        self._starts += [len(self._flat)] * (last - first)
        self._offsets += [self._offsets[-1] + added] * (last - first + 1)

    def _count(self, message: Any) -> int:
        return size_of(message, self._tokens)

    def _message(self, index: int) -> tuple[Any, int]:
        texts = dict(self._stubs(index)) if self._history.at[index] else None
        if not texts:
            return self._history.messages[index], self._history.sizes[index]
        key = tuple(texts.values())
        known = self._memo.get(index)
        if known is None or known[0] != key:
            message = replaced(self._history.messages[index], texts)
            known = self._memo[index] = key, message, self._count(message)
        return known[1], known[2]

    def _stubs(self, index: int) -> Iterator[tuple[int | None, str]]:
        for page in self._history.at[index]:
            why = self._decided.out.get(page.handle)
            if why == "duplicate":
                yield page.part, tombstones.unchanged(self.original(page), self._recall)
            elif why is not None:
                yield page.part, tombstones.for_page(page.source, page.tokens, page.handle, self._recall)

    def original(self, page: Page) -> str:
        """Returns the last earlier position at which the content was sent whole."""
        return next(
            (
                other.handle
                for other in reversed(self._history.alike(page))
                if (other.index, other.part or 0) < (page.index, page.part or 0)
                and self._decided.out.get(other.handle) != "duplicate"
            ),
            page.handle,
        )
