"""Routes: one table for the API, the pages and the OpenAPI document. Decodes requests, calls handlers, sends documents.

A page is a template over the document of its twin in the API: what a person sees is what a program gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, get_args, get_origin
from urllib.parse import quote, unquote, urlencode

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as StarletteRoute

from killick.errors import RunUnknown
from killick.model.events import Scope as Scope
from killick.store.protocol import OWN_RUNS
from killick.type_init import ready
from killick.web.problems import Problem, problem_of
from killick.workers.tokens import Person as Person

if TYPE_CHECKING:
    from killick.client.client import Client
    from killick.web.app_context import AppContext

A = TypeVar("A", bound=msgspec.Struct)
B = TypeVar("B", bound=msgspec.Struct)

API: Final = "/api/v1"
Method = Literal["GET", "POST", "DELETE"]

SLASH: Final = "\x1f"
"""What stands for a slash inside a run's id while a path is matched."""


class Nothing(msgspec.Struct, frozen=True):
    """No parameters, or no body."""


class Call(Generic[A, B]):
    """A request as a handler has it."""

    __slots__ = ("asked", "body", "bridge", "key", "person", "request")

    def __init__(
        self, bridge: AppContext, request: Request, person: Person, asked: A, body: B, key: str | None
    ) -> None:
        self.bridge = bridge
        self.request = request
        self.person = person
        self.asked = asked
        self.body = body
        self.key = key

    @property
    def client(self) -> Client:
        return self.bridge.client

    @property
    def now_us(self) -> int:
        return self.bridge.client.clock.now_us()

    @property
    def written(self) -> bytes:
        """What is asked for, letter for letter: no two things are taken for the same."""
        scope = self.request.scope
        path = scope.get("raw_path") or scope["path"].encode()
        return b"%s %s?%s" % (scope["method"].encode(), path, scope["query_string"])

    def url(self, path: str, **parameters: Any) -> str:
        return address(self.request, path, **parameters)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be asked for. A `page` is the template over its document; `at` is where that page is."""

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
    """Whether it may say what is not to be seen; what is made of nobody's values does not."""

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


# addresses ----------------------------------------------------------------------------------------


def address(request: Request, path: str, **parameters: Any) -> str:
    """Where something is, from wherever the app is mounted: `{name}` is filled in, the rest becomes the query."""
    for name in [name for name in parameters if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", quote(str(parameters.pop(name)), safe=""))
    given = {name: value for name, value in parameters.items() if value not in (None, "", (), [])}
    query = f"?{urlencode(given, doseq=True)}" if given else ""
    return f"{request.scope.get('root_path', '')}{path}{query}"


class Paths:
    """ASGI middleware that matches paths as they were written: a slash inside a run's id is no separator."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and b"%" in (written := scope.get("raw_path") or b""):
            parts = written.partition(b"?")[0].decode("latin-1").split("/")
            scope = dict(scope, path="/".join(_unquoted(part) for part in parts))
        await self.app(scope, receive, send)


def _unquoted(part: str) -> str:
    # What stands for a slash stands for nothing else.
    return unquote(part).replace(SLASH, "\N{REPLACEMENT CHARACTER}").replace("/", SLASH)


# serving ------------------------------------------------------------------------------------------


def starlette_routes(bridge: AppContext, routes: Sequence[Route]) -> list[StarletteRoute]:
    """The table as Starlette has it; a fixed word wins over a parameter."""
    made: list[StarletteRoute] = []
    for route in sorted(routes, key=_order):
        made.append(StarletteRoute(API + route.path, _Endpoint(bridge, route).api, methods=[route.method]))
        made += [StarletteRoute(at, _Endpoint(bridge, route).page, methods=["GET"]) for at in route.at]
    return sorted(made, key=lambda route: _order(route))


def as_api(bridge: AppContext, route: Route, path: str) -> StarletteRoute:
    """The same as in the API, at an address of its own."""
    return StarletteRoute(path, _Endpoint(bridge, route).api, methods=[route.method])


def _order(route: Route | StarletteRoute) -> list[tuple[bool, str]]:
    return [(part.startswith("{"), part) for part in route.path.split("/")]


class _Endpoint:
    """Serves one route: as an API, and as a page."""

    def __init__(self, bridge: AppContext, route: Route) -> None:
        self.bridge = bridge
        self.route = route

    async def api(self, request: Request) -> Response:
        try:
            call = await self._call(request)
            if self.route.writes:
                return await self._written(call)
            if self.route.gives is None:
                return await self._carried_out(call)
            return await self.bridge.answers.given(call, self._carried_out)
        except Exception as error:
            return (await self._problem(request, error)).response()

    async def _written(self, call: Call[Any, Any]) -> Response:
        try:
            keeps = self.route.keeps and self.route.scope is not None  # nobody's key is anybody's
            if keeps and call.key is not None and self.bridge.once is not None:
                return await self.bridge.once.around(call, self.route, self._answered)
            return await self._carried_out(call)
        finally:
            self.bridge.answers.forget()

    async def _answered(self, call: Call[Any, Any]) -> Response:
        """What came of a call, a refusal included: that is an answer too."""
        try:
            return await self._carried_out(call)
        except Exception as error:
            return (await self._problem(call.request, error)).response()

    async def page(self, request: Request) -> Response:
        try:
            return await self._finished(await self._call(request), self._drawn)
        except Exception as error:
            problem = await self._problem(request, error)
            if problem.status == 401 and self.bridge.access.login is not None:
                wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(address(request, self.bridge.access.login, next=wanted), 303)
            return self.bridge.problem_page(request, problem)

    async def _problem(self, request: Request, error: Exception) -> Problem:
        """An error may quote what is not to be seen."""
        problem = problem_of(error)
        veil = self.bridge.veil
        if veil is None or not veil.fields:
            return problem
        given = [*request.path_params.items(), *request.query_params.multi_items()]
        named = [(name, str(value).replace(SLASH, "/")) for name, value in given if name in _NAMES_RUNS]
        runs = {value.rpartition(":")[0] if name == "wait" else value for name, value in named}
        told = await run_in_threadpool(veil.over, {"detail": problem.detail, **problem.more}, run=runs)
        return Problem(problem.status, code=problem.code, headers=problem.headers, **told)

    async def _call(self, request: Request) -> Call[Any, Any]:
        route = self.route
        person = await self.bridge.person(request, route)
        asked = _asked(route.asks, request)
        _refuse_own(person, asked)
        body: Any = Nothing()
        key = None
        if route.writes:
            if route.takes is not Nothing:
                body = _body(route.takes, request, await request.body())
            key = _key(request)
        return Call(self.bridge, request, person, asked, body, key)

    async def _carried_out(self, call: Call[Any, Any]) -> Response:
        return await self._finished(call, self._sent)

    async def _finished(self, call: Call[Any, Any], finish: Callable[[Call[Any, Any], Any], Response]) -> Response:
        """What came of a call as a response. Reading, hiding and drawing are all done off the loop, in one go."""
        handler = self.route.handler
        if inspect.iscoroutinefunction(handler):
            found = await handler(call)
            if isinstance(found, Response) or self.route.scope is None:
                return finish(call, found)
            return await run_in_threadpool(finish, call, found)
        async with self.bridge.turn(call.person):
            return await run_in_threadpool(lambda: finish(call, handler(call)))

    def _sent(self, call: Call[Any, Any], found: Any) -> Response:
        if isinstance(found, Response):
            return found
        if self.route.status == 204:
            return Response(status_code=204)
        doc = self.bridge.veiled(found, call, self.route)
        headers = {"Location": found.location} if isinstance(found, Made) else None
        return Response(msgspec.json.encode(doc), self.route.status, headers, media_type="application/json")

    def _drawn(self, call: Call[Any, Any], found: Any) -> Response:
        return self.bridge.rendered(self.route, call, self.bridge.veiled(found, call, self.route))


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was created; documents derive from it, and `location` says where it is."""

    location: str


Handled = Callable[[Call[Any, Any]], Awaitable[Response]]


# decoding -----------------------------------------------------------------------------------------


def _asked(kind: type[A], request: Request) -> A:
    given: dict[str, Any] = {}
    lists, known = _parameters(kind)
    for name in request.query_params:
        if name not in known:
            told = f"; it takes {', '.join(sorted(known))}" if known else ""
            raise Problem(400, f"{name}: no such parameter{told}", code="parameter_unknown")
        found = request.query_params.getlist(name)
        if name in lists:
            given[name] = found
        elif len(found) > 1:
            raise Problem(400, f"{name}: is given more than once", code="parameter_refused")
        else:
            given[name] = found[0]
    given |= {name: str(value).replace(SLASH, "/") for name, value in request.path_params.items()}
    try:
        return msgspec.convert(given, ready(kind), strict=False)
    except msgspec.ValidationError as error:
        raise Problem(400, f"a parameter does not fit: {error}", code="parameter_refused") from None


@cache
def _parameters(kind: type[msgspec.Struct]) -> tuple[frozenset[str], frozenset[str]]:
    """The parameters that are lists, and all of them."""
    fields = msgspec.structs.fields(kind)
    lists = frozenset(each.encode_name for each in fields if _is_list(each.type))
    return lists, frozenset(each.encode_name for each in fields)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple) or any(_is_list(each) for each in get_args(kind))


_NAMES_RUNS: Final = ("run", "a", "b", "against", "wait")


def _refuse_own(person: Person, asked: msgspec.Struct) -> None:
    """What Killick keeps for itself, its tokens among it, is for admins."""
    if person.may("admin"):
        return
    for name in _NAMES_RUNS:
        given = getattr(asked, name, None)
        for run in (given,) if isinstance(given, str) else tuple(given or ()):
            if run.startswith(OWN_RUNS):
                raise RunUnknown(run)


def _body(kind: type[B], request: Request, body: bytes) -> B:
    sort = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sort != "application/json":
        raise Problem(415, "the body has to be JSON; say so with Content-Type: application/json", code="not_json")
    try:
        return msgspec.json.decode(body, type=ready(kind))
    except msgspec.ValidationError as error:
        raise Problem(422, f"the body does not fit: {error}", code="body_refused") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is no JSON: {error}", code="not_json") from None


def _key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= 200 and key.isascii() and key.isprintable()):
        raise Problem(400, "Idempotency-Key takes 1 to 200 visible ASCII characters", code="key_refused")
    return key
