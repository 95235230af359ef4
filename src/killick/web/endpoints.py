"""Serves routes: identifies the caller, decodes the request, calls the handler, and sends its document or its page.

A page is a template over the document of its API route: a person and a program get the same data.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, Final, TypeVar, cast, get_args, get_origin

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as StarletteRoute

from killick.clock import timestamp
from killick.errors import RunUnknown
from killick.presenting.encoder import document
from killick.store.records import OWN_RUNS
from killick.type_init import ready
from killick.web.addresses import API, SLASH, address
from killick.web.app_context import AppContext
from killick.web.idempotency import IdempotencyKeys
from killick.web.middleware import ASKED
from killick.web.problems import Problem, problem_of
from killick.web.render import problem_page, render
from killick.web.response_cache import ResponseCache
from killick.web.routes import Call, Created, Nothing, Person, Route

A = TypeVar("A", bound=msgspec.Struct)
B = TypeVar("B", bound=msgspec.Struct)


class Endpoints:
    """Serves the routes of one app. With `once`, a write with an Idempotency-Key is carried out once."""

    def __init__(self, context: AppContext, *, once: IdempotencyKeys | None = None) -> None:
        self.context = context
        self.once = once
        self.answers = ResponseCache(context.client.runtime.clock)

    def table(self, routes: Sequence[Route]) -> list[StarletteRoute]:
        """The Starlette routes of a table; a fixed segment wins over a parameter."""
        made: list[StarletteRoute] = []
        for route in sorted(routes, key=_order):
            endpoint = _Endpoint(self, route)
            made += [StarletteRoute(at, endpoint.api, methods=[route.method]) for at in (API + route.path, *route.also)]
            made += [StarletteRoute(at, endpoint.page, methods=[route.method]) for at in route.pages]
        return sorted(made, key=lambda route: _order(route))


def _order(route: Route | StarletteRoute) -> list[tuple[bool, str]]:
    return [(part.startswith("{"), part) for part in route.path.split("/")]


class _Endpoint:
    """Serves one route: as an API, and as a page."""

    def __init__(self, app: Endpoints, route: Route) -> None:
        self.app = app
        self.context = app.context
        self.route = route

    async def api(self, request: Request) -> Response:
        try:
            call = await self._call(request)
            if self.route.writes:
                return await self._written(call)
            if self.route.gives is None:
                return await self._carried_out(call)
            asked = getattr(request.state, ASKED)
            answer = await self.app.answers.given(call, self._carried_out, personal=self.route.personal)
            asked |= getattr(answer, ASKED, {})
            known, version = request.headers.get("if-none-match"), answer.headers.get("etag")
            return answer if version is None or known != version else Response(None, 304, {"ETag": version})
        except Exception as error:
            return (await self._problem(request, error)).response()

    async def _written(self, call: Call[Any, Any]) -> Response:
        try:
            is_known = self.route.scope is not None  # without a scope, callers share no keys
            if is_known and call.key is not None and self.app.once is not None:
                return await self.app.once.around(call, self.route, self._answered)
            return await self._carried_out(call)
        finally:
            self.app.answers.forget()

    async def _answered(self, call: Call[Any, Any]) -> Response:
        """The response to a call. A refusal is a response too."""
        try:
            return await self._carried_out(call)
        except Exception as error:
            return (await self._problem(call.request, error)).response()

    async def page(self, request: Request) -> Response:
        call = None
        try:
            call = await self._call(request)
            return await self._finished(call, self._drawn)
        except Exception as error:
            problem = await self._problem(request, error)
            if problem.status == 401 and self.context.access.login is not None:
                wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(address(request, self.context.access.login, next=wanted), 303)
            if call is not None and self.route.blank is not None:
                return self._rendered(call, document(self.route.blank(call)), problem)
            return problem_page(self.context, request, problem)

    async def _problem(self, request: Request, error: Exception) -> Problem:
        """A problem, redacted: an error may quote values that the caller may not see."""
        problem = problem_of(error)
        if not self.context.mask:
            return problem
        given = [*request.path_params.items(), *request.query_params.multi_items()]
        named = [(name, str(value).replace(SLASH, "/")) for name, value in given if name in _NAMES_RUNS]
        runs = {value.rpartition(":")[0] if name == "wait" else value for name, value in named}
        fields = await run_in_threadpool(self.context.mask.over, {"detail": problem.detail, **problem.more}, run=runs)
        return Problem(problem.status, code=problem.code, headers=problem.headers, **fields)

    async def _call(self, request: Request) -> Call[Any, Any]:
        route = self.route
        named = [*request.path_params.items(), *request.query_params.multi_items()]
        parameters = {name: str(value)[:1_000].replace(SLASH, "/") for name, value in named if name in _NAMES_PARTS}
        setattr(request.state, ASKED, {"route": route.path, **parameters})
        person = await self._person(request)
        asked = _asked(route.asks, request)
        _refuse_own(person, asked)
        body: Any = Nothing()
        key = None
        if route.writes:
            if route.takes is not Nothing:
                body = _body(route.takes, request, await request.body())
            key = _key(request)
        return Call(self.context.of(person.grant), request, person, asked, body, key)

    async def _carried_out(self, call: Call[Any, Any]) -> Response:
        return await self._finished(call, self._sent)

    async def _finished(self, call: Call[Any, Any], finish: Callable[[Call[Any, Any], Any], Response]) -> Response:
        """The result of a call as a response. A worker thread reads, redacts and renders it in one go."""
        handler = self.route.handler
        if inspect.iscoroutinefunction(handler):
            found = await handler(call)
            if isinstance(found, Response) or self.route.scope is None:
                return finish(call, found)
            return await run_in_threadpool(finish, call, found)
        async with self.context.turn(call.person):
            return await run_in_threadpool(lambda: finish(call, handler(call)))

    def _sent(self, call: Call[Any, Any], found: Any) -> Response:
        if isinstance(found, Response):
            return found
        doc = self._redacted(found, call)
        body = msgspec.json.encode(doc)
        headers = {} if self.route.writes else {"ETag": f'"{sha256(body).hexdigest()[:32]}"'}
        if isinstance(found, Created):
            headers["Location"] = found.location
        response = Response(body, self.route.status, headers, media_type="application/json")
        setattr(response, ASKED, _runs_in(doc))
        return response

    def _drawn(self, call: Call[Any, Any], found: Any) -> Response:
        doc = self._redacted(found, call)
        getattr(call.request.state, ASKED).update(_runs_in(doc))
        return self._rendered(call, doc)

    async def _person(self, request: Request) -> Person:
        """The caller, where its scope allows the route. Raises a Problem otherwise."""
        route, access = self.route, self.context.access
        if route.scope is None:
            return Person("anybody")
        person = await access.identify(request)
        if person is None:
            headers = {"WWW-Authenticate": 'Bearer realm="killick"'}
            raise Problem(401, access.way_in, code="unauthenticated", headers=headers)
        if not person.may(route.scope):
            reason = f"{person.name} is {_a(person.scope)}, and this takes {_a(route.scope)}"
            raise Problem(403, reason, code="scope_too_small")
        if route.whole and person.grant is not None:
            reason = f"{person.name} reaches {person.grant} alone, and this is of the whole store"
            raise Problem(403, reason, code="grant_too_small")
        if route.writes:
            access.refuse_forged(request)
        return person

    def _redacted(self, found: Any, call: Call[Any, Any]) -> Any:
        """A handler's document as plain JSON, with the redacted fields hidden."""
        doc, mask = document(found), self.context.mask
        if not mask or not self.route.veils:
            return doc
        masked = mask.over(doc, run=getattr(call.asked, "run", None))
        # The caller's own values are returned unchanged: redacting them would confirm a right guess.
        sent = {name: getattr(call.asked, name) for name in call.asked.__struct_fields__ if name in doc}
        return masked | {name: value for name, value in sent.items() if isinstance(value, str) and doc[name] == value}

    def _rendered(self, call: Call[Any, Any], doc: Any, problem: Problem | None = None) -> Response:
        """The page of a document, with the address of its twin in the API; or of a form whose question was refused."""
        given: dict[str, Any] = {name: getattr(call.asked, name) for name in call.request.path_params}
        query = call.request.url.query
        twin = address(call.request, API + self.route.path, **given) + (f"?{query}" if query else "")
        return render(
            call.context, call.request, str(self.route.page), person=call.person, doc=doc, asked=call.asked,
            now=timestamp(call.now_us), twin=twin, questions=call.context.questions.badge, problem=problem,
            status=200 if problem is None else problem.status,
        )  # fmt: skip


def _a(scope: str | None) -> str:
    return f"an {scope}" if scope in ("operator", "admin") else f"a {scope}"


# decoding -----------------------------------------------------------------------------------------


def _asked(kind: type[A], request: Request) -> A:
    given: dict[str, Any] = {}
    lists, known = _parameters(kind)
    for name in request.query_params:
        if name not in known:
            names = f"; it takes {', '.join(sorted(known))}" if known else ""
            raise Problem(400, f"{name}: no such parameter{names}", code="parameter_unknown")
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
        raise Problem(400, f"a parameter does not fit: {_misfit(kind, error)}", code="parameter_refused") from None


@cache
def _parameters(kind: type[msgspec.Struct]) -> tuple[frozenset[str], frozenset[str]]:
    """The parameters that are lists, and all of them."""
    fields = msgspec.structs.fields(kind)
    lists = frozenset(each.encode_name for each in fields if _is_list(each.type))
    return lists, frozenset(each.encode_name for each in fields)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple) or any(_is_list(each) for each in get_args(kind))


_NAMES_RUNS: Final = ("run", "a", "b", "against", "wait")
_NAMES_PARTS: Final = (*_NAMES_RUNS, "step", "seq", "name")
"""The parameters that are in the access log."""


def _named_run(entry: Any) -> str | None:
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    run = fields.get("run", fields.get("id"))
    return run if isinstance(run, str) else None


def _runs_in(doc: Any) -> dict[str, Any]:
    """The runs that a list or a result is of, for the access log."""
    values = list(cast("dict[str, Any]", doc).values()) if isinstance(doc, dict) else []
    entries = [entry for value in values if isinstance(value, list) for entry in cast("list[Any]", value)]  # type: ignore[redundant-cast]
    named = (_named_run(entry) for entry in entries)
    runs = dict.fromkeys(run for run in named if run is not None)
    return {"runs": [*runs]} if runs else {}


def _refuse_own(person: Person, asked: msgspec.Struct) -> None:
    """Killick's internal logs, such as its tokens, are for admins."""
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
        raise Problem(422, f"the body does not fit: {_misfit(kind, error)}", code="body_refused") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is no JSON: {error}", code="not_json") from None


def _misfit(kind: type[msgspec.Struct], error: msgspec.ValidationError) -> str:
    """An error, with the values that a field takes where another one was given."""
    named = re.fullmatch(r"Invalid enum value .* - at `\$\.(\w+)`", str(error))
    types = [each.type for each in msgspec.structs.fields(kind) if named is not None and each.encode_name == named[1]]
    allowed = [value for each in types for value in get_args(each) if isinstance(value, str)]
    return f"{error}; it is one of {', '.join(allowed)}" if allowed else str(error)


def _key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= 200 and key.isascii() and key.isprintable()):
        raise Problem(400, "Idempotency-Key takes 1 to 200 visible ASCII characters", code="key_refused")
    return key
