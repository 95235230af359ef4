"""Signing in and out: a token is given once, and a cookie that says which one stands for it from then on.

The token itself is in no cookie, address, log or page. A session ends after twelve hours, and at once when its token
is revoked or expires.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as StarletteRoute

from kedge.web.access import SESSION, SESSION_SECONDS, TokenAccess, set_cookie
from kedge.web.guard import VISIT, Buckets
from kedge.web.problems import Problem
from kedge.web.rendering import render
from kedge.web.routing import address

if TYPE_CHECKING:
    from kedge.web.bridge import Bridge

logger: Final = logging.getLogger("kedge.web")

FORM: Final = "application/x-www-form-urlencoded"
FAILURES_PER_MINUTE: Final = 10
"""How often an address may give a wrong token."""


def routes(bridge: Bridge) -> list[StarletteRoute]:
    """Where people sign in and out; nothing where they are known otherwise."""
    if not isinstance(bridge.access, TokenAccess):
        return []
    door = _SigningIn(bridge, bridge.access)
    return [
        StarletteRoute("/login", door.shown, methods=["GET"]),
        StarletteRoute("/login", door.given, methods=["POST"]),
        StarletteRoute("/logout", door.left, methods=["POST"]),
    ]


class _SigningIn:
    def __init__(self, bridge: Bridge, access: TokenAccess) -> None:
        self.bridge = bridge
        self.access = access
        self._failures = Buckets(bridge.client.clock, FAILURES_PER_MINUTE / 60, FAILURES_PER_MINUTE)

    async def shown(self, request: Request) -> Response:
        """The form; whoever is known already goes on."""
        wanted = _ours(request, request.query_params.get("next"))
        try:
            known = await self.access.identify(request)
        except Problem as problem:
            return self.bridge.problem_page(request, problem)
        return RedirectResponse(wanted, 303) if known is not None else self._form(request, wanted)

    async def given(self, request: Request) -> Response:
        """A token: right, and there is a session; wrong, and the form says so."""
        try:
            form = await _fields(request)
            self.access.refuse_forged(request, form.get("csrf", ""))
            address_ = request.client.host if request.client else ""
            wait = self._failures.wait_seconds(address_)
            if wait:
                told = f"too many wrong tokens from here; wait {wait:.0f} s"
                raise Problem(429, told, code="too_many_requests", headers={"Retry-After": str(int(wait) + 1)})
        except Problem as problem:
            return self.bridge.problem_page(request, problem)
        wanted = _ours(request, form.get("next"))
        now = self.bridge.client.clock.now_us()
        token = await run_in_threadpool(self.access.tokens.check, form.get("token", "").strip(), now)
        if token is None:
            logger.warning("a wrong token was given from %s", address_)
            return self._form(request, wanted, wrong=True)
        self._failures.forgive(address_)
        if (visit := request.scope.get(VISIT)) is not None:
            visit.person = token.person
        response = RedirectResponse(wanted, 303)
        set_cookie(request, response, SESSION, self.access.session(token.id), seconds=SESSION_SECONDS)
        return response

    async def left(self, request: Request) -> Response:
        """The end of a session in this browser. Revoking the token ends it everywhere."""
        try:
            form = await _fields(request)
            self.access.refuse_forged(request, form.get("csrf", ""))
        except Problem as problem:
            return self.bridge.problem_page(request, problem)
        response = RedirectResponse(address(request, "/login"), 303)
        set_cookie(request, response, SESSION, "", seconds=0)
        return response

    def _form(self, request: Request, wanted: str, *, wrong: bool = False) -> Response:
        return render(
            self.bridge,
            request,
            "login.html",
            person=None,
            status=401 if wrong else 200,
            doc={"next": wanted, "wrong": wrong},
            twin=None,
            asked=None,
            now_us=self.bridge.client.clock.now_us(),
        )


async def _fields(request: Request) -> dict[str, str]:
    """The fields of a form, the last of each name."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise Problem(415, f"a form is sent as {FORM}", code="not_a_form")
    try:
        given = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=10)
    except (UnicodeDecodeError, ValueError):
        raise Problem(400, "the form cannot be read", code="not_a_form") from None
    return {name: each[-1] for name, each in given.items()}


def _ours(request: Request, wanted: str | None) -> str:
    """Where somebody wanted to go, if that is a path of ours; else the first page."""
    base = str(request.scope.get("root_path", ""))
    is_path = wanted is not None and wanted.isascii() and wanted.isprintable() and "\\" not in wanted
    if wanted is not None and is_path and wanted.startswith(f"{base}/") and not wanted.startswith("//"):
        return wanted
    return f"{base}/"
