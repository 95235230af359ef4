"""The bridge: what every handler stands on: the client, who asks, what may be seen, and how pages are drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response

from killick.web.documents import document
from killick.web.hub import Hub
from killick.web.problems import Problem
from killick.web.render import render
from killick.web.response_cache import Answers
from killick.web.routes import API, Call, Handled, Person, Route, address

if TYPE_CHECKING:
    from killick.client.client import Client


FOLDS_KEPT: Final = 64
"""Of how many runs is kept what they add up to: people look at the same ones again, and pages at many parts of one."""


TURNS: Final = 3
"""How many answers are made for one person at once; more of theirs wait for these."""


class Access(Protocol):
    """Who asks, and whether it was them."""

    @property
    def login(self) -> str | None:
        """The page where people sign in, if there is one."""
        ...

    @property
    def way_in(self) -> str:
        """How a caller who is not known gets in, in one line."""
        ...

    async def identify(self, request: Request) -> Person | None: ...

    def refuse_forged(self, request: Request) -> None:
        """Raise a Problem where a write may have been sent by a page that is not ours."""
        ...

    def csrf(self, request: Request) -> str:
        """What a page of ours proves itself with when it writes."""
        ...

    def dress(self, request: Request, response: Response) -> None:
        """Give a page's response the cookies that it needs."""
        ...


class Redactions(Protocol):
    """Hides what is not to be seen."""

    def over(self, document: Any, *, run: str | Iterable[str] | None = None) -> Any: ...

    def redaction(self, run: str) -> tuple[str, ...] | bool: ...

    def keyed(self, text: str) -> str:
        """What is shown for a hash."""
        ...

    @property
    def fields(self) -> tuple[str, ...]: ...


class Once(Protocol):
    """Carries a write out once for its key, and says again what came of it."""

    async def around(self, call: Call[Any, Any], route: Route, carry_out: Handled) -> Response: ...


class AppContext:
    """One app over one client."""

    def __init__(
        self,
        client: Client,
        *,
        access: Access,
        veil: Redactions | None = None,
        once: Once | None = None,
        webhooks: Mapping[str, Any] | None = None,
    ) -> None:
        self.client = client
        client.log.keep_folds(FOLDS_KEPT)
        self.access = access
        self.veil = veil
        self.once = once
        self.webhooks = dict(webhooks or {})
        self.hub = Hub(client, veil=veil)
        self.answers = Answers(client.clock, client.store)
        self.routes: tuple[Route, ...] = ()
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def person(self, request: Request, route: Route) -> Person:
        """Who asks for this, if they may; else the Problem that says why not."""
        if route.scope is None:
            return Person("anybody")
        person = await self.access.identify(request)
        if person is None:
            headers = {"WWW-Authenticate": 'Bearer realm="killick"'}
            raise Problem(401, self.access.way_in, code="unauthenticated", headers=headers)
        request.scope["killick.person"] = person
        if not person.may(route.scope):
            told = f"{person.name} is {_a(person.scope)}, and this takes {_a(route.scope)}"
            raise Problem(403, told, code="scope_too_small")
        if route.writes:
            self.access.refuse_forged(request)
        return person

    def turn(self, person: Person) -> asyncio.Semaphore:
        """What one person takes up at once, so that nobody keeps all others waiting."""
        turn = self._turns.get(person.name)
        if turn is None:
            turn = self._turns[person.name] = asyncio.Semaphore(TURNS)
        return turn

    def veiled(self, found: Any, call: Call[Any, Any], route: Route) -> Any:
        """A handler's document as plain JSON, less what is not to be seen."""
        doc = document(found)
        if self.veil is None or not self.veil.fields or not route.veils:
            return doc
        veiled = self.veil.over(doc, run=getattr(call.asked, "run", None))
        # What somebody asked is said back as it is: hiding it would tell that it was guessed right.
        said = {name: getattr(call.asked, name) for name in call.asked.__struct_fields__ if name in doc}
        return veiled | {name: value for name, value in said.items() if isinstance(value, str) and doc[name] == value}

    def rendered(self, route: Route, call: Call[Any, Any], doc: Any) -> Response:
        """A page, which names its twin: the same document as JSON."""
        given: dict[str, Any] = {name: getattr(call.asked, name) for name in call.request.path_params}
        query = call.request.url.query
        twin = address(call.request, API + route.path, **given) + (f"?{query}" if query else "")
        return render(
            self, call.request, str(route.page), person=call.person, doc=doc, asked=call.asked, now_us=call.now_us,
            twin=twin,
        )  # fmt: skip

    def problem_page(self, request: Request, problem: Problem) -> Response:
        """A page that says what is wrong."""
        return render(
            self, request, "problem.html", person=request.scope.get("killick.person"), status=problem.status,
            headers=problem.headers, doc=problem.document(), asked=None, now_us=self.client.clock.now_us(),
            twin=None,
        )  # fmt: skip


def _a(scope: str | None) -> str:
    return f"an {scope}" if scope in ("operator", "admin") else f"a {scope}"
