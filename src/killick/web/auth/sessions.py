"""Signing in and out: a token, or the owner's key, is exchanged once for a signed session cookie.

Neither is in a cookie, address, log or page; the key of a link opens one session and nothing after that. A session ends
after twelve hours, and at once when its token is revoked or expires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as StarletteRoute

from killick.logger import get_logger
from killick.web.addresses import address
from killick.web.auth.access import SESSION_SECONDS, Admitted, OwnerAccess, TokenAccess, set_cookie
from killick.web.middleware import Buckets, client_address
from killick.web.problems import Problem
from killick.web.render import problem_page, render

if TYPE_CHECKING:
    from killick.web.app_context import AppContext

logger: Final = get_logger("killick.web")

FORM: Final = "application/x-www-form-urlencoded"
FAILURES_PER_MINUTE: Final = 10
"""How often an address may give a wrong token."""


def routes(context: AppContext) -> list[StarletteRoute]:
    """Where people sign in and out; nothing where they are known otherwise."""
    if not isinstance(context.access, TokenAccess):
        return []
    door = _SigningIn(context, context.access)
    return [
        StarletteRoute("/login", door.shown, methods=["GET"]),
        StarletteRoute("/login", door.given, methods=["POST"]),
        StarletteRoute("/logout", door.left, methods=["POST"]),
    ]


class _SigningIn:
    def __init__(self, context: AppContext, access: TokenAccess) -> None:
        self.context = context
        self.access = access
        self._failures = Buckets(context.client.runtime.clock, FAILURES_PER_MINUTE / 60, FAILURES_PER_MINUTE)

    async def shown(self, request: Request) -> Response:
        """The form. A signed-in person is redirected, and so is one with a valid sign-in link."""
        wanted = _ours(request, request.query_params.get("next"))
        try:
            self._refuse_shared(request)
            known = await self.access.identify(request)
            key = request.query_params.get("key") if request.method == "GET" else None  # a HEAD uses no link up
            if known is None and key is not None and isinstance(self.access, OwnerAccess):
                self._refuse_often(request)
                admitted = await run_in_threadpool(self.access.redeem, key)
                if admitted is not None:
                    return self._admitted(request, wanted, admitted)
                reason = f"this link signs in once, and was used, or is of an earlier server; {self.access.way_in}"
                raise Problem(401, reason, code="link_used")
        except Problem as problem:
            return problem_page(self.context, request, problem)
        return RedirectResponse(wanted, 303) if known is not None else self._form(request, wanted)

    async def given(self, request: Request) -> Response:
        """A token: right, and there is a session; wrong, and the form says so."""
        try:
            self._refuse_shared(request)
            form = await _fields(request)
            self.access.refuse_forged(request, form.get("csrf", ""))
            if isinstance(self.access, OwnerAccess) and not self.access.has_tokens:
                self.access.refuse_stranger(request)
            self._refuse_often(request)
        except Problem as problem:
            return problem_page(self.context, request, problem)
        wanted = _ours(request, form.get("next"))
        admitted = await run_in_threadpool(self.access.admit, form.get("token", "").strip())
        if admitted is None:
            logger.warning("a wrong token was given from %s", client_address(request.scope))
            return self._form(request, wanted, wrong=True)
        return self._admitted(request, wanted, admitted)

    def _refuse_shared(self, request: Request) -> None:
        if self.access.is_shared(request):
            reason = "at this address a session would reach every server of this machine"
            way = "open the address for browsers that `killick serve` printed"
            raise Problem(421, f"{reason}; {way}", code="host_shared")

    def _refuse_often(self, request: Request) -> None:
        wait = self._failures.wait_seconds(client_address(request.scope))
        if wait:
            reason = f"too many wrong tokens from here; wait {wait:.0f} s"
            raise Problem(429, reason, code="too_many_requests", headers={"Retry-After": str(int(wait) + 1)})

    def _admitted(self, request: Request, wanted: str, admitted: Admitted) -> Response:
        self._failures.forgive(client_address(request.scope))
        request.state.killick_person = admitted.person
        response = RedirectResponse(wanted, 303)
        set_cookie(
            request, response, self.access.session_cookie, self.access.session(admitted.id), seconds=SESSION_SECONDS
        )
        return response

    async def left(self, request: Request) -> Response:
        """The end of a session in this browser. Revoking the token ends it everywhere."""
        try:
            form = await _fields(request)
            self.access.refuse_forged(request, form.get("csrf", ""))
        except Problem as problem:
            return problem_page(self.context, request, problem)
        response = RedirectResponse(address(request, "/login"), 303)
        set_cookie(request, response, self.access.session_cookie, "", seconds=0)
        return response

    def _form(self, request: Request, wanted: str, *, wrong: bool = False) -> Response:
        doc = {"next": wanted, "wrong": wrong, "key": self._key_name()}
        return render(
            self.context, request, "login.html", person=None, status=401 if wrong else 200, doc=doc, twin=None,
            asked=None,
        )  # fmt: skip

    def _key_name(self) -> str | None:
        """The file whose text signs in here, where that is not a token."""
        if not isinstance(self.access, OwnerAccess) or self.access.has_tokens:
            return None
        return self.access.key.place.name if self.access.key.place is not None else "its key"


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
    """The page to return to, if it is a path of this app; else the first page."""
    base = str(request.scope.get("root_path", ""))
    is_path = wanted is not None and wanted.isascii() and wanted.isprintable() and "\\" not in wanted
    if wanted is not None and is_path and wanted.startswith(f"{base}/") and not wanted.startswith("//"):
        return wanted
    return f"{base}/"
