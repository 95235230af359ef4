"""Identifies who asks: by a token, a session, the app that Killick is mounted in, or the key of the store's owner.

And whether it was them: a write that a browser sends for another site is refused, in the same way however the caller
is known. The keys are in `server_keys`.

Cookies know no ports: one of 127.0.0.1 is sent to every server of the machine. `killick serve` therefore gives browsers
a host name of its store, which only its owner is shown, and sets and takes no cookie at 127.0.0.1 or localhost.
"""

from __future__ import annotations

import asyncio
import getpass
import hmac
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from killick.browser_guard import LOCAL_NAMES, host_of, is_loopback, refusal
from killick.errors import AccessRefused
from killick.model.events import to_text
from killick.web.auth.server_keys import kept_key, session_key
from killick.web.problems import Problem
from killick.web.status_reader import StatusReader
from killick.workers.tokens import TOKENS, Person, Token, Tokens, checked

if TYPE_CHECKING:
    from killick.client.client import Client

CSRF_HEADER: Final = "x-killick-csrf"
SESSION_SECONDS: Final = 12 * 3_600

OWNER: Final = "owner"
"""The token id in the session of the store's owner. No token has an id as short."""

NAME_CHARS_MAX: Final = 200

_COOKIE: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_FRESH: Final = "killick.csrf"
_FORWARDED: Final = (
    "forwarded", "x-forwarded-", "x-real-ip", "x-client-ip", "x-original-", "true-client-ip", "cf-", "via",
)  # fmt: skip

Identity: TypeAlias = Person | tuple[str, Any] | str | None
Identify: TypeAlias = Callable[[Request], Identity | Awaitable[Identity]]
"""The result of an app's `identify`: a Person, a name and a scope, or an operator's name. None: not signed in."""


def derived(client: Client, purpose: str) -> bytes:
    """A key for one purpose that opens nothing by itself, the same in every server of the store."""
    return hmac.digest(client.runtime.store.secret_key, f"killick web {purpose} 1".encode(), sha256)


def bearer(request: Request) -> str | None:
    """The token in `Authorization: Bearer`; None where there is no such header."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None


class Access:
    """Identifies callers, in a way that each kind has for itself; and rejects writes that another site forged."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._csrf_key = derived(client, "csrf")
        names = derived(client, "names").hex()
        self.csrf_cookie, self.session_cookie = f"killick_csrf_{names[:8]}", f"killick_session_{names[:8]}"
        """Named by the store: browsers send the cookies of one dashboard to another on the same host."""
        self._own_host = f"k-{names[8:28]}.localhost"
        self.page_host: str | None = None
        """The host name for browsers, which they resolve to loopback; None: those of the app that serves."""

    login: str | None = None
    """The page where people sign in, if there is one."""

    @property
    def way_in(self) -> str:
        """How a caller who is not known gets in, in one line."""
        return "send Authorization: Bearer TOKEN; `killick token create` makes one"

    async def identify(self, request: Request) -> Person | None:
        request.state.killick_person = person = await self._identified(request)
        return person

    async def _identified(self, request: Request) -> Person | None:
        raise NotImplementedError

    def csrf(self, request: Request) -> str:
        """The CSRF token of a page's writes. It is bound to the browser's cookie and to its session."""
        cookie = self._cookie(request)
        if cookie is None:
            cookie = request.scope.setdefault(_FRESH, to_text(self.client.runtime.ids.key()))
        return self._proof(request, cookie)

    def _cookie(self, request: Request) -> str | None:
        cookie = request.cookies.get(self.csrf_cookie, "")
        return cookie if _COOKIE.fullmatch(cookie) else None

    def _proof(self, request: Request, cookie: str) -> str:
        bound = f"{cookie}\0{request.cookies.get(self.session_cookie, '')}"
        return to_text(hmac.digest(self._csrf_key, bound.encode(), sha256))

    def refuse_forged(self, request: Request, given: str | None = None) -> None:
        """Raise a Problem where a write may have been sent by a page that is not ours. `given` is a form's proof.

        With `Authorization: Bearer` it was not: no other site makes a browser send that.
        """
        if bearer(request) is not None:
            return
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site is not None:
            is_ours = site == "same-origin"
        else:
            is_ours = origin is None or urlsplit(origin).netloc == request.headers.get("host")
        if not is_ours:
            raise Problem(403, "another site sent this; open the dashboard and do it there", code="cross_site")
        cookie = self._cookie(request)
        proof = given if given is not None else request.headers.get(CSRF_HEADER, "")
        if cookie is None or not hmac.compare_digest(
            self._proof(request, cookie), proof.encode("ascii", "replace").decode()
        ):
            reason = "this write does not show that a page of this server sent it; load the page again, or send a token"
            raise Problem(403, f"{reason} (Authorization: Bearer)", code="csrf")

    def set_cookies(self, request: Request, response: Response) -> None:
        """Give a browser that has none the cookie that its writes are checked against."""
        if (fresh := request.scope.get(_FRESH)) is not None and not self.is_shared(request):
            set_cookie(request, response, self.csrf_cookie, fresh)

    def use_page_host(self) -> str:
        """Sets and takes cookies at a host name of the store, and no longer at the names of every server here."""
        self.page_host = self._own_host
        return self.page_host

    def is_shared(self, request: Request) -> bool:
        """Whether a cookie that is set here would reach other servers of this machine."""
        return self.page_host is not None and is_loopback(host_of(request.headers).strip("[]"))


def set_cookie(request: Request, response: Response, name: str, value: str, *, seconds: int | None = None) -> None:
    """A cookie that no script reads and no other site sends; only over TLS where the page came by it."""
    response.set_cookie(
        name, value, max_age=seconds, path=request.scope.get("root_path") or "/",
        secure=request.url.scheme == "https", httponly=True, samesite="strict",
    )  # fmt: skip


class Admitted(NamedTuple):
    """A person with valid credentials, and the id of their session."""

    id: str
    person: Person


class TokenAccess(Access):
    """People by their tokens: sent with each request, or once to the page where they sign in."""

    login = "/login"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.tokens = Tokens(client.runtime.engine)
        self._status = StatusReader(client.runtime.store, TOKENS)
        self._session_key = hmac.digest(session_key(client), b"killick web session 1", sha256)

    async def _identified(self, request: Request) -> Person | None:
        found = await self._status.read()
        seq = found.head.seq if found is not None else 0
        if self.tokens.seq < seq:
            await asyncio.to_thread(self.tokens.up_to, seq)
        return self._known(request, self.tokens.up_to(seq))

    def _known(self, request: Request, tokens: Mapping[str, Token]) -> Person | None:
        now = self.client.runtime.clock.now_us()
        given = bearer(request)
        if given is not None:
            token = checked(tokens, given, now)
        else:
            token = tokens.get(self._of_session(request) or "")
        return token.person if token is not None and token.holds(now) else None

    def link(self, url: str) -> str | None:
        """The single-use link that signs a browser in at a server's address; None if tokens are required."""
        return None

    def admit(self, text: str) -> Admitted | None:
        """Who comes with this text, typed on the page where people sign in."""
        token = self.tokens.check(text, self.client.runtime.clock.now_us())
        return None if token is None else Admitted(token.id, token.person)

    # sessions: `1.<token's id>.<until, in seconds>.<signature>`

    def session(self, id: str) -> str:  # noqa: A002
        """The session cookie that replaces the token."""
        until = self.client.runtime.clock.now_us() // 1_000_000 + SESSION_SECONDS
        payload = f"1.{id}.{until}"
        return f"{payload}.{self._signed(payload)}"

    def _of_session(self, request: Request) -> str | None:
        cookie = "" if self.is_shared(request) else request.cookies.get(self.session_cookie, "")
        return self._session(cookie, self.client.runtime.clock.now_us())

    def _session(self, cookie: str, now_us: int) -> str | None:
        """The id of the token that a session was opened with, while it lasts."""
        payload, _, signature = cookie.rpartition(".")
        if not cookie.isascii() or not hmac.compare_digest(self._signed(payload), signature):
            return None
        version, _, rest = payload.partition(".")
        id_, _, until = rest.partition(".")
        return id_ if version == "1" and until.isdigit() and now_us < int(until) * 1_000_000 else None

    def _signed(self, payload: str) -> str:
        return to_text(hmac.digest(self._session_key, payload.encode(), sha256))


class OwnerAccess(TokenAccess):
    """The store's owner, by a key that only they can read, as long as the store has no token; then tokens alone.

    The address alone identifies no user: every process of the machine reaches it. A page of another site could point a
    name of its own here: so only names of this machine are answered to.
    """

    def __init__(self, client: Client, *, host_names: Iterable[str] = ()) -> None:
        super().__init__(client)
        self._names = LOCAL_NAMES | {name.lower() for name in host_names}
        self._person = Person(_user(), "admin")
        self.key = kept_key(client, "owner")
        self._link_key = to_text(client.runtime.ids.key())
        self.on_link_used: Callable[[], None] = lambda: None
        """Called when a link was used, and there is another."""
        self._mutex = threading.Lock()

    @property
    def has_tokens(self) -> bool:
        """Whether the store ever had a token: then the owner's key opens nothing."""
        return bool(self.tokens.all())

    @property
    def way_in(self) -> str:
        if self.has_tokens:
            return super().way_in
        way = "open the link that `killick serve` printed last"
        at = self.key.place
        return way if at is None else f"{way}; a program sends Authorization: Bearer and {at.name}'s text"

    def link(self, url: str) -> str | None:
        return None if self.has_tokens else f"{url}login?key={self._link_key}"

    def use_page_host(self) -> str:
        self._names |= {self._own_host}
        return super().use_page_host()

    def redeem(self, key: str) -> Admitted | None:
        """Who comes by a link with this key. The first use of a key ends it, and makes another."""
        with self._mutex:
            if self.has_tokens or not _same(key, self._link_key):
                return None
            self._link_key = to_text(self.client.runtime.ids.key())
        self.on_link_used()
        return Admitted(OWNER, self._person)

    def admit(self, text: str) -> Admitted | None:
        if self.has_tokens:
            return super().admit(text)
        return Admitted(OWNER, self._person) if _same(text, self.key.text) else None

    def _known(self, request: Request, tokens: Mapping[str, Token]) -> Person | None:
        if tokens:
            return super()._known(request, tokens)
        self.refuse_stranger(request)
        given = bearer(request)
        if given is not None:
            known = _same(given, self.key.text)
        else:
            known = self._of_session(request) == OWNER
        return self._person if known else None

    def refuse_stranger(self, request: Request) -> None:
        """Raise a Problem where a request cannot be the owner's, with or without credentials."""
        if (found := refusal(request.headers, self._names)) is not None:
            raise Problem(found.status, found.text, code=found.code)
        if any(name.startswith(_FORWARDED) for name in request.headers):
            reason = "this came through a proxy, and its client is unknown; `killick token create` makes tokens"
            raise Problem(403, reason, code="forwarded")


class Identified(Access):
    """People as the app that Killick is mounted in knows them."""

    def __init__(self, client: Client, identify: Identify) -> None:
        super().__init__(client)
        self._identify = identify
        self._is_async = inspect.iscoroutinefunction(identify)

    async def _identified(self, request: Request) -> Person | None:
        identity: Any = self._identify(request) if self._is_async else await asyncio.to_thread(self._identify, request)
        if inspect.isawaitable(identity):
            identity = await identity
        return person_of(identity)


def person_of(identity: Identity) -> Person | None:
    """The person from an app's `identify`. A name alone is an operator's, who may act on runs and not issue tokens."""
    match identity:
        case None:
            return None
        case str(name):
            person = Person(name, "operator")
        case (str(name), "viewer" | "operator" | "admin" as scope):
            person = Person(name, scope)
        case Person(name=str(), scope="viewer" | "operator" | "admin"):
            person = identity
        case _:
            raise AccessRefused("identify", "returned none of: a Person, a name with a scope, a name, None")
    if not person.name.strip() or not person.name.isprintable() or len(person.name) > NAME_CHARS_MAX:
        raise AccessRefused("identify", f"returned no valid name; give up to {NAME_CHARS_MAX} visible characters")
    return person


def access_for(client: Client, identify: Identify | None = None) -> TokenAccess | Identified:
    """How an app identifies people: by its own function, or by their tokens."""
    return TokenAccess(client) if identify is None else Identified(client, identify)


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "local"
