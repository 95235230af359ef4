"""Routes: one table for the API, the pages and the OpenAPI document, and the call that a handler gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
from starlette.requests import Request

from killick.model.system_events import Scope as Scope
from killick.web.addresses import address
from killick.web.app_context import AppContext
from killick.workers.tokens import Person as Person

if TYPE_CHECKING:
    from killick.client.client import Client

A = TypeVar("A", bound=msgspec.Struct)
B = TypeVar("B", bound=msgspec.Struct)

Method = Literal["GET", "POST", "DELETE"]


class Nothing(msgspec.Struct, frozen=True):
    """No parameters, or no body."""


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
    def now_us(self) -> int:
        return self.context.client.runtime.clock.now_us()

    @property
    def written(self) -> bytes:
        """The request line, byte for byte: two different requests never compare equal."""
        scope = self.request.scope
        path = scope.get("raw_path") or scope["path"].encode()
        return b"%s %s?%s" % (scope["method"].encode(), path, scope["query_string"])

    def url(self, path: str, **parameters: Any) -> str:
        return address(self.request, path, **parameters)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One route of the API. A `page` is the template over its document; `at` is where that page is."""

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
    is_natural: bool = False
    """Whether doing it twice with the same key does it once by itself."""
    keeps: bool = True
    """Whether its answer may be kept for its key; not where it tells a secret."""
    veils: bool = True
    """Whether its response may contain redacted values; one that is made of no run's values does not."""

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.handler) or "").partition("\n")[0]

    @property
    def writes(self) -> bool:
        return self.method != "GET"


def get(
    path: str,
    handler: Callable[[Call[Any, Any]], Any],
    *,
    asks: type[msgspec.Struct] = Nothing,
    gives: Any = None,
    scope: Scope | None = "viewer",
    page: str | None = None,
    at: str | Sequence[str] | None = None,
    veils: bool = True,
) -> Route:
    """A document, and its page where there is one: at the same path, unless it says where."""
    places = (path,) if at is None else (at,) if isinstance(at, str) else tuple(at)
    return Route(
        method="GET", path=path, handler=handler, asks=asks, gives=gives, scope=scope, page=page,
        at=places if page else (), veils=veils,
    )  # fmt: skip


def post(
    path: str,
    handler: Callable[[Call[Any, Any]], Any],
    *,
    asks: type[msgspec.Struct] = Nothing,
    takes: type[msgspec.Struct] = Nothing,
    gives: Any = None,
    scope: Scope | None = "operator",
    status: int = 200,
    natural: bool = False,
    keeps: bool = True,
) -> Route:
    """A write."""
    return Route(
        method="POST", path=path, handler=handler, asks=asks, takes=takes, gives=gives, scope=scope, status=status,
        is_natural=natural, keeps=keeps,
    )  # fmt: skip


def delete(
    path: str,
    handler: Callable[[Call[Any, Any]], Any],
    *,
    asks: type[msgspec.Struct] = Nothing,
    gives: Any = None,
    scope: Scope | None = "admin",
    status: int = 204,
) -> Route:
    """A write that takes something away."""
    return Route(
        method="DELETE", path=path, handler=handler, asks=asks, gives=gives, scope=scope, status=status,
        is_natural=True,
    )  # fmt: skip


def raw(
    path: str,
    handler: Callable[[Call[Any, Any]], Any],
    *,
    asks: type[msgspec.Struct] = Nothing,
    scope: Scope | None = "viewer",
    media: str,
    method: Method = "GET",
) -> Route:
    """Something that is no document: a stream, a drawing, a file. Its handler returns the response itself."""
    return Route(method=method, path=path, handler=handler, asks=asks, scope=scope, media=media)


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was created; documents derive from it, and `location` says where it is."""

    location: str
