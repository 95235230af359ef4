"""The ASGI app: all routes, the static files, and the guard around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Final

from anyio.to_thread import current_default_thread_limiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from killick.audit.access_log import AccessLog
from killick.presenting.encoder import words_of
from killick.web import openapi, slack, streams
from killick.web import webhooks as receiving
from killick.web.addresses import API, Paths
from killick.web.app_context import AppContext
from killick.web.auth import sessions
from killick.web.auth.access import Access, Identify, access_for
from killick.web.endpoints import Endpoints
from killick.web.handlers import (
    answer_link,
    boundary,
    compare,
    graph,
    inbox,
    operations,
    overview,
    record,
    run_detail,
    run_list,
    search,
    start,
    status,
    step_detail,
    step_list,
    trace,
    triggers,
    window,
)
from killick.web.idempotency import IdempotencyKeys
from killick.web.middleware import Guard, Limits
from killick.web.problems import Problem
from killick.web.redaction import Redaction
from killick.web.render import problem_page
from killick.web.routes import routes_of
from killick.workers import answer_links, metrics

if TYPE_CHECKING:
    from killick.client.client import AsyncClient, Client

THREADS: Final = 4
"""In how many threads requests are answered, where the loop is the app's own."""

ROUTES: Final = routes_of(
    operations, compare, graph, search, streams, status, inbox, answer_link, boundary, receiving, overview, record,
    run_detail, run_list, start, step_detail, step_list, trace, triggers, window, openapi,
)  # fmt: skip
"""The routes of the app."""

_WORDS: Final = words_of(route.gives for route in ROUTES)
"""The values of Killick's own documents: no redaction rule applies to them."""


def asgi(
    client: Client | AsyncClient,
    identify: Identify | None = None,
    *,
    redact: Sequence[str] = (),
    webhooks: Mapping[str, str | Sequence[str]] | None = None,
    limits: Limits | None = None,
    access: Access | None = None,
    access_log: str | Path | None = None,
) -> Guard:
    """Returns the dashboard and the HTTP API over a client as an ASGI app, to be served or mounted.

    identify  a function from a request to a `Person`, or to None for an unknown caller. Without it, each caller
              needs a token made by `killick token create`
    redact    the names of fields whose values are never shown
    webhooks  the secrets of incoming webhooks, by the name of the event that each becomes
    limits    the limits of requests
    access    who may do what, in place of `identify`
    access_log  the file that gets a line for each request
    """
    client = client.as_sync()
    known = access or access_for(client, identify)
    context = AppContext(client, access=known, mask=Redaction(client, redact, spared=_WORDS), webhooks=webhooks)
    endpoints = Endpoints(context, once=IdempotencyKeys(client))
    receiving.check(context.webhooks)
    log = None if access_log is None else AccessLog(access_log, client.runtime.store, client.runtime.clock)
    if answer_links.is_configured():
        answer_links.settings()  # says at once what cannot work

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        # More threads would only wait for each other: documents are made by Python, one at a time.
        current_default_thread_limiter().total_tokens = THREADS
        yield
        await context.close()
        if log is not None:
            log.close()

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        details = {404: f"{request.url.path}: there is nothing here", 405: f"{request.method} is not done here"}
        detail = details.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_refused"}.get(error.status_code, "refused")
        problem = Problem(error.status_code, detail, code=code, headers=dict(error.headers or {}))
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        return problem.response() if path.startswith(API) else problem_page(context, request, problem)

    app = Starlette(
        routes=[
            StarletteRoute("/static/{version}/{name}", static),
            *sessions.routes(context),
            *slack.routes(context),
            *answer_link.routes(context),
            *endpoints.table(ROUTES),
        ],
        exception_handlers={HTTPException: missing},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.context, app.state.routes = context, ROUTES
    metrics.counting()
    return Guard(Paths(app), client.runtime.clock, limits, log)


@cache
def _static_files() -> Mapping[str, Traversable]:
    return {file.name: file for file in files("killick.web").joinpath("static").iterdir() if file.is_file()}


async def static(request: Request) -> Response:
    """A file of ours. Its address changes with it, so that it may be kept."""
    name = request.path_params["name"]
    file = _static_files().get(name)
    if file is None:
        raise HTTPException(404)
    sort = guess_type(name)[0] or "application/octet-stream"
    return Response(
        file.read_bytes(), headers={"Cache-Control": "public, max-age=31536000, immutable"}, media_type=sort
    )
