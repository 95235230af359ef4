"""Routes, declared at their handlers: for the API, the pages and the OpenAPI document; and a handler's call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, TypeVar, get_args, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from killick.errors import DurationRefused
from killick.model.retry import seconds
from killick.model.system_events import Scope as Scope
from killick.web.addresses import address
from killick.web.app_context import AppContext
from killick.web.problems import Problem
from killick.workers.tokens import Person as Person

if TYPE_CHECKING:
    from killick.client.client import Client
    from killick.log.log import Log
    from killick.web.redaction import Redaction

A = TypeVar("A", bound=msgspec.Struct)
B = TypeVar("B", bound=msgspec.Struct)

Method = Literal["GET", "POST"]


class Nothing(msgspec.Struct, frozen=True):
    """No parameters, or no body."""


RunId = Annotated[str, msgspec.Meta(min_length=1, max_length=1000, description="A run, by its id.")]


class RunAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    run: RunId


class Call(Generic[A, B]):
    """A request as a handler has it."""

    __slots__ = ("asked", "body", "context", "key", "person", "request")

    def __init__(
        self, context: AppContext, request: Request, person: Person, asked: A, body: B, key: str | None
    ) -> None:
        self.context = context
        self.request = request
        self.person = person
        self.asked = asked
        self.body = body
        self.key = key

    @property
    def client(self) -> Client:
        return self.context.client

    @property
    def log(self) -> Log:
        """The logs as the caller may see them."""
        return self.context.log

    @property
    def mask(self) -> Redaction:
        """The redaction rules; False where there are none."""
        return self.context.mask

    @property
    def now_us(self) -> int:
        return self.context.client.runtime.clock.now_us()

    def since_us(self, text: str) -> int | None:
        """The time that a duration of a request goes back to. Raises a Problem for no duration."""
        try:
            return max(self.now_us - round(seconds(text) * 1_000_000), 0) if text else None
        except DurationRefused as error:
            raise Problem(400, f"since: {error}", code="parameter_refused") from None

    @property
    def written(self) -> bytes:
        """The request line, byte for byte: two different requests never compare equal."""
        scope = self.request.scope
        path = scope.get("raw_path") or scope["path"].encode()
        return b"%s %s?%s" % (scope["method"].encode(), path, scope["query_string"])

    def url(self, path: str, **parameters: Any) -> str:
        return address(self.request, path, **parameters)


class Route(msgspec.Struct, frozen=True):
    """One route of the API. A `page` is the template over its document; `at` is where that page is, if elsewhere."""

    method: Method
    path: str
    handler: Callable[[Call[Any, Any]], Any]
    asks: type[msgspec.Struct] = Nothing
    takes: type[msgspec.Struct] = Nothing
    gives: Any = None
    scope: Scope | None = "viewer"
    status: int = 200
    media: str = "application/json"
    page: str | None = None
    at: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    """Where it is outside of the API too."""
    whole: bool = False
    """Whether it is of the whole store, so that no token bound to agents or tags may use it."""
    natural: bool = False
    """Whether doing it twice with the same key does it once by itself."""
    veils: bool = True
    """Whether its response may contain redacted values; one that is made of no run's values does not."""
    personal: bool = True
    """Whether its document depends on the caller, beyond their scope. A handler of any other reads no `person.name`."""
    blank: Callable[[Call[Any, Any]], Any] | None = None
    """Makes the document of the page that has the form again, where a question was refused."""

    @property
    def pages(self) -> tuple[str, ...]:
        """The paths of its page."""
        return () if self.page is None else self.at or (self.path,)

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.handler) or "").partition("\n")[0]

    @property
    def writes(self) -> bool:
        return self.method != "GET"


Handler = TypeVar("Handler", bound=Callable[[Call[Any, Any]], Any])

_DECLARED: Final[list[Route]] = []


def routes_of(*modules: ModuleType) -> tuple[Route, ...]:
    """The routes that the handlers of these modules declare."""
    names = {module.__name__ for module in modules}
    return tuple(route for route in _DECLARED if route.handler.__module__ in names)


def get(path: str, *, scope: Scope | None = "viewer", **options: Any) -> Callable[[Handler], Handler]:
    """Declares the handler of a document, and of its page where there is one; or of a stream, a drawing or a file, as
    which the handler returns a Response. `options` are fields of Route."""
    return partial(_declare, "GET", path, scope=scope, **options)


def post(path: str, *, scope: Scope | None = "operator", **options: Any) -> Callable[[Handler], Handler]:
    """Declares the handler of a write."""
    return partial(_declare, "POST", path, scope=scope, **options)


def _declare(method: Method, path: str, handler: Handler, **options: Any) -> Handler:
    """Declares a route. The annotations of the handler are what it asks, takes and gives."""
    hints = get_type_hints(handler)
    gives = hints.pop("return")
    asks, takes = (Nothing if kind is Any else kind for kind in get_args(hints["call"]))
    given: dict[str, Any] = {"asks": asks, "takes": takes, "gives": None if gives is Response else gives}
    _DECLARED.append(Route(method, path, handler, **given | options))
    return handler


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was created; documents derive from it, and `location` says where it is."""

    location: str
