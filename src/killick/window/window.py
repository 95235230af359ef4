"""The window: selects the messages to send from a full history. Evicted content keeps a name and is one call away.

The output depends only on the history and the applied decisions: equal inputs give equal bytes. Planning changes
nothing; a decision counts when applied, so that a caller can record it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec

from killick.errors import WindowRefused
from killick.model.page_events import PageEvent, PageEvicted, PagePinned
from killick.window import tombstones
from killick.window.messages import Shape, as_json, of, shape_of
from killick.window.pages import History, Page, Reads, Tokens, estimate
from killick.window.planner import PIN_TURNS, RECENT_TURNS, Decision, View, faulted, planned
from killick.window.policy import Policy, Rates, WorkingSet
from killick.window.renderer import Renderer
from killick.window.schemas import Schemas
from killick.window.state import WindowState, places

PAGE_CHARS_MIN: Final = 400
"""A shorter part is no page: its tombstone would be as long."""

_FOR_GOOD: Final = 1 << 40


class Sent(msgspec.Struct, frozen=True):
    """The request to send.

    messages  the messages
    tools     the schemas of the tools
    tokens    the size of the request
    turn      the number of the turn
    """

    messages: list[Any]
    tools: list[Any]
    tokens: int
    without: int
    """The size of the full history."""
    over: int
    """The excess over the budget, because nothing more may be evicted."""
    turn: int


class Answer(msgspec.Struct, frozen=True):
    """The window's own answer to a model's call."""

    text: str
    failed: bool = False
    decisions: tuple[Decision, ...] = ()


class Window:
    """Keeps the requests to a model within a token budget. Evicted content keeps a name and returns when the model
    asks."""

    def __init__(
        self,
        budget: int,
        *,
        tokens: Tokens | None = None,
        policy: Policy | None = None,
        rates: Rates | None = None,
        shape: Shape | None = None,
        reads: Reads | None = None,
        record: Callable[[Decision], None] | None = None,
    ) -> None:
        """Options.

        budget   the maximum tokens of a call, tools and system included
        tokens   counts the tokens of a text; default: an estimate
        policy   chooses evictions
        rates    the relative prices of cached and written tokens
        shape    the wire format, if the messages do not show it
        reads    whether a tool call only reads; default: by its name
        record   receives every decision of `fit`, `answer` and `pin`
        """
        if not isinstance(budget, int) or budget <= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WindowRefused(f"a budget of {budget!r} tokens is too small; give the tokens that a call may use")
        if shape not in (None, *get_args(Shape)):
            raise WindowRefused(f"shape={shape!r} is not one of {', '.join(get_args(Shape))}")
        if isinstance(policy, type):
            raise WindowRefused(f"{policy.__name__} is a class; give an instance: {policy.__name__}()")
        self.budget = budget
        self.rates = rates or Rates()
        self._options: Any = {
            "tokens": tokens, "policy": policy, "rates": rates, "shape": shape, "reads": reads, "record": record,
        }  # fmt: skip
        self._tokens: Tokens = tokens or estimate
        self._policy: Policy = policy or WorkingSet()
        self._shape: Shape | None = shape
        self._reads = reads
        self._record = record
        self._decided = WindowState()
        self._schemas: Schemas | None = None
        self._history: History | None = None
        self._rendering: Renderer | None = None
        self._system: tuple[Any, int] = (None, 0)
        self._planned: Sequence[Any] | None = None

    def fresh(self) -> Window:
        """Returns a new window with the same options."""
        return Window(self.budget, **self._options)

    @property
    def own(self) -> tuple[str, ...]:
        """The names of the window's own tools, once the caller's are known."""
        return () if self._schemas is None else (self._schemas.recall_name,)

    # use in any loop ------------------------------------------------------------------------------

    def fit(self, messages: Iterable[Any], tools: Iterable[Any] | None = (), *, system: Any = None) -> Sent:
        """Returns the request for the next reply to a full history.

        messages  the full history, in the provider's form
        tools     the schemas of the tools
        system    the system prompt
        """
        messages, tools = _listed(messages), _listed(tools or ())
        self._decide(self.plan(messages, tools, system=system))
        return self.render(messages, tools, system=system)

    def answer(self, name: str, arguments: Mapping[str, Any] | str) -> Answer | None:
        """Returns the window's own answer to a model's call; None if the tool must run.

        name       the name of the tool
        arguments  the arguments of the call
        """
        answer = self.answering(name, arguments)
        if answer is not None:
            self._decide(answer.decisions)
        return answer

    def pin(self, handle: str, *, turns: int | None = None) -> None:
        """Pins a page; an evicted page returns to its position. Raises WindowRefused if no page has the handle.

        handle  the name of the page, as tombstones and `pages` give it
        turns   for how many turns; by default permanently
        """
        page = self.page(handle)
        if page is None:
            raise WindowRefused(f"no page has the handle {handle!r}; take handles from tombstones or pages()")
        turn = self._turn
        until = _FOR_GOOD if turns is None else turn + turns
        event = PagePinned(at=0, page=handle, until=until, because="asked", turn=turn)
        self._decide([Decision(event, {"source": page.source})])

    def unpin(self, handle: str) -> None:
        """Unpins a page."""
        self.pin(handle, turns=0)

    def _decide(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if self._record is not None:
                self._record(decision)
            self.apply([decision])

    # use by callers that record decisions -----------------------------------------------------------

    def plan(self, messages: Sequence[Any], tools: Sequence[Any] | None = (), *, system: Any = None) -> list[Decision]:
        """Returns the decisions before the next call. Nothing changes until `apply`."""
        view = self._view(messages, tools or (), system)
        self._planned = messages
        return planned(view)

    def answering(self, name: str, arguments: Mapping[str, Any] | str) -> Answer | None:
        """Returns the answer to a call, and its decisions."""
        if self._history is None or self._rendering is None or self._schemas is None:
            return None
        if name != self._schemas.recall_name:
            return None
        return self._recalled(_given(arguments), self._viewed(self._history, self._rendering, self._schemas))

    def apply(self, decisions: Iterable[Decision | PageEvent]) -> None:
        """Applies decisions, in order."""
        for decision in decisions:
            event = decision.event if isinstance(decision, Decision) else decision
            self._decided.apply(event)
            if self._rendering is None:
                continue
            if isinstance(event, PageEvicted):
                changed = [covered[0] for each in event.pages if (covered := places(each))]
                self._rendering.forget(min(changed, default=0))
            elif isinstance(event, PagePinned) and event.because == "asked":
                self._rendering.forget()

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = (), *, system: Any = None) -> Sent:
        """Renders this history under the decisions so far."""
        view = self._view(messages, tools or (), system)
        rendered = view.rendering.render()
        tokens = view.fixed + view.rendering.tokens
        without = view.system_tokens + view.schemas.tokens_given + view.history.said_tokens
        return Sent(
            rendered, list(view.schemas.sent), tokens, without, max(0, tokens - self.budget), view.history.turn
        )  # fmt: skip

    def page(self, handle: str) -> Page | None:
        """Returns the page of a handle, resident or not."""
        return self._history.pages.get(handle) if self._history is not None else None

    def pages(self) -> list[Page]:
        """Returns all pages of the last history, in order."""
        return list(self._history.pages.values()) if self._history is not None else []

    def resident(self, handle: str) -> bool:
        """Returns whether a page is resident."""
        page = self.page(handle)
        return page is not None and not self._decided.is_out(page)

    # seen requests ----------------------------------------------------------------------------------

    @property
    def _turn(self) -> int:
        return self._history.turn if self._history is not None else 0

    def _seen(self, messages: Sequence[Any], tools: Sequence[Any], system: Any) -> tuple[History, Renderer]:
        if system is not self._system[0]:
            self._system = (system, 0 if system is None else self._tokens(_text(system)))
        schemas = self._schemas_of(tools, messages)
        history, rendering = self._history, self._rendering
        # A history that was just planned for need not be compared again.
        is_known = messages is self._planned and history is not None and len(messages) == len(history.messages)
        self._planned = None
        if history is not None and rendering is not None and not is_known:
            common, remarked = history.common(messages)
            for at in remarked:
                rendering.forget(at)
            if common < len(history.messages):
                # The current last turns must be whole.
                turns = [turn.start for turn in history.turns if turn.start < common]
                self._decided.drop_from(common, min([common, *turns[-RECENT_TURNS:]]), len(turns))
                history = None
        if history is None or rendering is None:
            shape: Shape = self._shape or "openai"
            history = History(shape, self._tokens, self._reads, smallest=PAGE_CHARS_MIN, recall=schemas.recall_name)
            rendering = Renderer(history, self._decided, self._tokens, shape, schemas.recall_name)
            self._history, self._rendering = history, rendering
        history.extend(messages[len(history.messages) :])
        if (first := self._decided.look(history)) is not None:
            rendering.forget(first)
        return history, rendering

    def _schemas_of(self, tools: Sequence[Any], messages: Sequence[Any] = ()) -> Schemas:
        schemas = self._schemas
        if schemas is not None and schemas.same(tools):
            return schemas
        shape = self._shape or shape_of(messages, tools)
        if shape is not None and self._shape is None:
            self._shape, self._history = shape, None
        self._schemas = Schemas(tools, self._shape or "openai", self._tokens)
        return self._schemas

    def _view(self, messages: Sequence[Any], tools: Sequence[Any], system: Any) -> View:
        history, rendering = self._seen(messages, tools, system)
        return self._viewed(history, rendering, self._schemas_of(tools))

    def _viewed(self, history: History, rendering: Renderer, schemas: Schemas) -> View:
        return View(
            history, self._decided, rendering, schemas, self._tokens, self._policy, self.rates, self.budget,
            self._system[1],
        )  # fmt: skip

    # answers of the window's tools --------------------------------------------------------------------

    def _recalled(self, given: str, view: View) -> Answer:
        handles = tombstones.named(given)
        if not handles:
            shown = tombstones.shortened(given) or "nothing"
            return Answer(f"error: {shown} is not a handle; take one from a tombstone, such as m12", failed=True)
        answers = [self._page_recalled(handle, view) for handle in handles]
        if len(answers) == 1:
            return answers[0]
        text = "\n\n".join(f"{handle}:\n{each.text}" for handle, each in zip(handles, answers, strict=True))
        decisions = tuple(decision for each in answers for decision in each.decisions)
        return Answer(text, all(each.failed for each in answers), decisions)

    def _page_recalled(self, handle: str, view: View) -> Answer:
        history = view.history
        page = history.pages.get(handle)
        if page is None:
            covered = places(handle)
            if covered is None or covered[1] >= len(history.messages) or covered[0] > covered[1]:
                return Answer(f"error: no page is called {handle}; take a handle from a tombstone", failed=True)
            outline = history.outline(*covered)
            return Answer(outline or f"error: {handle} is still in the window", failed=not outline)
        decisions: list[Decision] = []
        if not view.holds(page) and not self._decided.has_faulted(handle, history.turn):
            decisions = faulted(page, "recalled", view)
        if not page.media:
            return Answer(history.text(page), decisions=tuple(decisions))
        if decisions:
            pin = PagePinned(at=0, page=handle, until=history.turn + PIN_TURNS, because="asked", turn=history.turn)
            decisions[-1] = Decision(pin, {"source": page.source})
        return Answer(f"{handle} is back in its place: {page.source}", decisions=tuple(decisions))


def _listed(things: Iterable[Any]) -> Sequence[Any]:
    return things if isinstance(things, list) else list(things)


def _text(system: Any) -> str:
    return system if isinstance(system, str) else as_json(system)


def _given(arguments: Mapping[str, Any] | str) -> str:
    """Returns a model's value for the single argument of the window's own tool, whatever its name."""
    if isinstance(arguments, str):
        return arguments
    given = of(arguments, "handle") or next(iter(arguments.values()), "")
    return given if isinstance(given, str) else as_json(given)
