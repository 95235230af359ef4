"""Who gets in: every route for nobody, for each scope, for tokens that are over; sessions, forgeries, host names."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http.server
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.testclient import TestClient

import killick
from killick.errors import AccessRefused
from killick.http_server import HttpServer, bind, url_of
from killick.model.events import to_text
from killick.store import MemoryStore
from killick.web import server
from killick.web.app import ROUTES, asgi
from killick.web.auth import server_keys
from killick.web.auth.access import SESSION_SECONDS, Identified, OwnerAccess, TokenAccess
from killick.web.middleware import CSP
from killick.web.routes import Route
from killick.workers.tokens import Person, issue, revoke
from web.cookies import browser_with_jar
from web.desk import ask, begun

SCOPES: Final = ("viewer", "operator", "admin")
CSRF: Final = "killick_csrf_"
SESSION: Final = "killick_session_"
NOBODY: Final = ("none", "wrong", "revoked", "expired")
WRITES: Final = [route for route in ROUTES if route.writes and route.scope is not None]


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


@pytest.fixture
def clock() -> killick.clock.ManualClock:
    return killick.clock.ManualClock()


@pytest.fixture
def kd(clock: killick.clock.ManualClock) -> Iterator[killick.Client]:
    with killick.Client(MemoryStore(clock=clock), clock=clock, behind=False) as client:
        yield client


@pytest.fixture
def cards(kd: killick.Client, clock: killick.clock.ManualClock) -> dict[str, str | None]:
    """What somebody may come with, by what it is."""
    found: dict[str, str | None] = {scope: issue(kd.runtime.engine, scope, scope)[1] for scope in SCOPES}
    found["revoked"] = issue(kd.runtime.engine, "gone", "admin")[1]
    revoke(kd.runtime.engine, "gone")
    found["expired"] = issue(kd.runtime.engine, "late", "admin", expires_seconds=1)[1]
    clock.advance(2)
    return found | {"none": None, "wrong": "killick_00000000_" + "A" * 43}


# every route --------------------------------------------------------------------------------------


def code_of(body: bytes) -> str | None:
    try:
        return str(msgspec.json.decode(body).get("code"))
    except (msgspec.DecodeError, AttributeError):
        return None


@pytest.mark.parametrize("route", ROUTES, ids=named)
def test_a_route_of_the_api_lets_in_whom_its_scope_says_and_nobody_else(
    route: Route, kd: killick.Client, cards: dict[str, str | None]
) -> None:
    app = asgi(kd)
    for card, token in cards.items():
        status, headers, body = ask(app, route.method, f"/api/v1{route.path}", token)
        if route.scope is None:
            assert code_of(body) not in ("unauthenticated", "scope_too_small", "csrf"), card
        elif card in NOBODY:
            assert (status, code_of(body)) == (401, "unauthenticated"), card
            assert headers["www-authenticate"].startswith("Bearer")
        elif SCOPES.index(card) < SCOPES.index(route.scope):
            assert (status, code_of(body)) == (403, "scope_too_small"), card
        else:
            assert status != 401, card
            assert code_of(body) not in ("scope_too_small", "csrf"), card
            assert status < 500, body
        assert headers["content-security-policy"] == CSP


@pytest.mark.parametrize("route", [route for route in ROUTES if route.pages], ids=named)
def test_a_page_lets_in_whom_its_scope_says_and_sends_others_to_sign_in(
    route: Route, kd: killick.Client, cards: dict[str, str | None]
) -> None:
    app = asgi(kd)
    for at in route.pages:
        for card, token in cards.items():
            status, headers, _ = ask(app, "GET", at, token)
            if route.scope is None:
                assert status not in (401, 403), card
            elif card in NOBODY:
                assert status == 303, card
                assert headers["location"].startswith("/login?next=%2F"), card
            elif SCOPES.index(card) < SCOPES.index(route.scope):
                assert status == 403, card
            else:
                assert status not in (303, 401, 403), card
                assert status < 500, (card, at)


@pytest.mark.parametrize("route", WRITES, ids=named)
def test_a_write_by_a_session_is_refused_without_its_proof_and_from_another_site(
    route: Route, kd: killick.Client, cards: dict[str, str | None]
) -> None:
    app = asgi(kd)
    with TestClient(app, base_url="http://localhost") as web:
        proof = signed_in(web, cards["admin"])
        path = "/api/v1" + re.sub(r"\{[^}]+\}", "x1", route.path)

        def write(**headers: str) -> str | None:
            given = {"Content-Type": "application/json", **headers}
            return code_of(web.request(route.method, path, content=b"{}", headers=given).content)

        assert write() == "csrf"
        assert write(**{"X-Killick-CSRF": proof.swapcase()}) == "csrf"
        assert write(**{"X-Killick-CSRF": ""}) == "csrf"
        assert write(**{"X-Killick-CSRF": proof, "Origin": "http://evil.example"}) == "cross_site"
        assert write(**{"X-Killick-CSRF": proof, "Origin": "null"}) == "cross_site"
        assert write(**{"X-Killick-CSRF": proof, "Sec-Fetch-Site": "cross-site"}) == "cross_site"
        assert write(**{"X-Killick-CSRF": proof, "Sec-Fetch-Site": "same-site"}) == "cross_site"
        assert write(**{"X-Killick-CSRF": proof, "Origin": "http://localhost"}) not in ("csrf", "cross_site")
        assert write(**{"X-Killick-CSRF": proof, "Sec-Fetch-Site": "same-origin"}) not in ("csrf", "cross_site")


# sessions -----------------------------------------------------------------------------------------


def proof_in(page: str) -> str:
    found = re.search(r'name="killick-csrf" content="([^"]+)"', page)
    assert found is not None
    return found[1]


def sessions_of(web: TestClient) -> dict[str, str]:
    return {name: value for name, value in web.cookies.items() if name.startswith(SESSION)}


def sign_in(web: TestClient, token: str | None, **more: str) -> Any:
    proof = proof_in(web.get("/login").text)
    return post(web, "/login", {"csrf": proof, "token": token or "", **more})


def post(web: TestClient, path: str, fields: dict[str, str], **headers: str) -> Any:
    given = {"Content-Type": "application/x-www-form-urlencoded", **headers}
    return web.post(path, content=urlencode(fields), headers=given, follow_redirects=False)


def signed_in(web: TestClient, token: str | None) -> str:
    """Sign in; returns what pages prove themselves with from then on."""
    assert sign_in(web, token).status_code == 303
    return proof_in(web.get("/health").text)


@pytest.fixture
def web(kd: killick.Client, cards: dict[str, str | None]) -> Iterator[TestClient]:
    with TestClient(asgi(kd), base_url="http://localhost") as client:
        yield client


def test_whoever_gives_a_token_once_is_known_by_a_cookie_that_is_none(web: TestClient, cards: dict[str, Any]) -> None:
    assert web.get("/health", follow_redirects=False).headers["location"] == "/login?next=%2Fhealth"
    answer = sign_in(web, cards["viewer"], next="/health")
    assert (answer.status_code, answer.headers["location"]) == (303, "/health")
    [cookie] = [each for each in answer.headers.get_list("set-cookie") if each.startswith(SESSION)]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/" in cookie
    assert "Secure" not in cookie
    assert cards["viewer"] not in cookie
    assert cards["viewer"].split("_", 2)[2] not in cookie
    page = web.get("/health")
    assert page.status_code == 200
    assert "viewer" in page.text
    assert web.get("/login", follow_redirects=False).status_code == 303, "who is known goes on"


def test_over_tls_cookies_are_for_tls_alone(kd: killick.Client, cards: dict[str, Any]) -> None:
    with TestClient(asgi(kd), base_url="https://killick.example") as web:
        answer = sign_in(web, cards["viewer"])
        assert all("Secure" in each for each in answer.headers.get_list("set-cookie"))


def test_a_session_ends_at_once_when_its_token_is_revoked(web: TestClient, kd: killick.Client, cards: Any) -> None:
    signed_in(web, cards["viewer"])
    revoke(kd.runtime.engine, "viewer")
    assert web.get("/health", follow_redirects=False).status_code == 303


def test_a_session_ends_after_its_time(
    web: TestClient, clock: killick.clock.ManualClock, cards: dict[str, Any]
) -> None:
    signed_in(web, cards["viewer"])
    [(name, kept)] = sessions_of(web).items()
    clock.advance(SESSION_SECONDS - 60)
    assert web.get("/health", follow_redirects=False).status_code == 200
    clock.advance(61)
    web.cookies.set(name, kept, domain="localhost.local", path="/")
    assert web.get("/health", headers={"Cookie": f"{name}={kept}"}, follow_redirects=False).status_code == 303


def test_a_session_that_somebody_changed_opens_nothing(
    web: TestClient, kd: killick.Client, cards: dict[str, Any]
) -> None:
    signed_in(web, cards["viewer"])
    [(name, session)] = sessions_of(web).items()
    version, _, until, signature = session.strip('"').split(".")
    admin = issue(kd.runtime.engine, "eve", "admin")[0].id
    web.cookies.clear()
    later = str(int(until) + 1)
    for forged in (
        f"{version}.{admin}.{until}.{signature}", f"{version}.{admin}.{later}.{signature}", f"..{signature}", "x", "",
        f"{version}.{admin}.{until}.", "1.1.1.1.1",
    ):  # fmt: skip
        answer = web.get("/health", headers={"Cookie": f"{name}={forged}"}, follow_redirects=False)
        assert answer.status_code == 303, forged


def test_signing_out_takes_the_proof_and_ends_the_session_here(web: TestClient, cards: dict[str, Any]) -> None:
    proof = signed_in(web, cards["viewer"])
    assert post(web, "/logout", {}).status_code == 403
    assert web.get("/health", follow_redirects=False).status_code == 200
    assert post(web, "/logout", {"csrf": proof}).status_code == 303
    assert web.get("/health", follow_redirects=False).status_code == 303


@pytest.mark.parametrize(
    "wanted",
    [
        "https://evil.example/",
        "//evil.example",
        "/\\evil.example",
        "javascript:alert(1)",
        "",
        "runs",
        "/\nSet-Cookie: a=b",
    ],
)
def test_after_signing_in_nobody_is_sent_elsewhere(web: TestClient, cards: dict[str, Any], wanted: str) -> None:
    assert sign_in(web, cards["viewer"], next=wanted).headers["location"] == "/"


def test_signing_in_takes_a_form_of_ours(web: TestClient, cards: dict[str, Any]) -> None:
    token = cards["admin"]
    proof = proof_in(web.get("/login").text)
    assert post(web, "/login", {"token": token}).status_code == 403
    assert post(web, "/login", {"token": token, "csrf": proof}, Origin="http://evil.example").status_code == 403
    assert web.post("/login", json={"token": token, "csrf": proof}).status_code == 415
    assert not sessions_of(web)


def test_a_wrong_token_is_told_as_wrong_logged_without_it_and_not_tried_for_ever(
    web: TestClient, clock: killick.clock.ManualClock, cards: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        answer = sign_in(web, cards["revoked"])
        assert answer.status_code == 401
        assert "This is no token of this store" in answer.text
        assert cards["revoked"] not in answer.text
    refused = sign_in(web, cards["viewer"])
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "a wrong token was given from testclient" in caplog.text
    assert cards["revoked"].split("_", 2)[2] not in caplog.text
    clock.advance(10)
    assert sign_in(web, cards["viewer"]).status_code == 303


def test_a_proof_fits_one_browser_and_one_session(kd: killick.Client, cards: dict[str, Any]) -> None:
    app = asgi(kd)
    with TestClient(app, base_url="http://localhost") as one, TestClient(app, base_url="http://localhost") as other:
        proof = signed_in(one, cards["admin"])
        signed_in(other, cards["admin"])
        answer = other.post("/api/v1/events", json={"name": "x"}, headers={"X-Killick-CSRF": proof})
        assert answer.json()["code"] == "csrf"
        # Cookies that somebody else planted, with the proof that fits them, do not fit the session.
        stranger = other.get("/login", headers={"Cookie": ""}, follow_redirects=False)
        planted = stranger.headers.get("set-cookie", "")
        assert SESSION not in planted


# on this machine alone ----------------------------------------------------------------------------


class Local(TestClient):
    """A client of a server without tokens; its owner's, unless a test wants a stranger's."""

    def __init__(self, kd: killick.Client, host: str = "localhost", *, stranger: bool = False, **options: Any) -> None:
        self.access = OwnerAccess(kd, **options)
        super().__init__(asgi(kd, access=self.access), base_url=f"http://{host}")
        if not stranger:
            self.headers["Authorization"] = f"Bearer {self.access.key.text}"

    @property
    def link(self) -> str:
        """The path and the query of the link that signs in next."""
        link = self.access.link("http://localhost/")
        assert link is not None
        return link.removeprefix("http://localhost")


local = Local


@pytest.mark.parametrize("route", [route for route in ROUTES if route.scope is not None], ids=named)
def test_without_tokens_a_process_of_this_machine_gets_nothing(kd: killick.Client, route: Route) -> None:
    app = asgi(kd, access=OwnerAccess(kd))
    path = "/api/v1" + re.sub(r"{[^}]+}", "x", route.path)
    for headers in (
        {},
        {"authorization": "Bearer " + "A" * 43},
        {"cookie": f"{TokenAccess(kd).session_cookie}=1.owner.99999999999.x"},
    ):
        status, _, body = asyncio.run(begun(app, route.method, path, headers))
        assert status == 401, body
        assert b"open the link that `killick serve` printed last" in body


def test_the_link_signs_one_browser_in_as_an_admin_by_their_own_name(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    with local(kd, stranger=True) as web:
        assert web.get("/health", follow_redirects=False).headers["location"] == "/login?next=%2Fhealth"
        used = web.link
        assert web.head(used, follow_redirects=False).status_code == 200, "a preview uses no link up"
        answer = web.get(used, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "HttpOnly" in answer.headers["set-cookie"]
        page = web.get("/health")
        assert page.status_code == 200
        assert "ada" in page.text
        proof = proof_in(page.text)
        made = web.post("/api/v1/events", json={"name": "x"}, headers={"X-Killick-CSRF": proof})
        assert made.status_code == 200


def test_a_link_is_refused_the_second_time_and_the_next_one_holds(kd: killick.Client) -> None:
    with local(kd, stranger=True) as web:
        told: list[str] = []
        web.access.on_link_used = lambda: told.append(web.link)
        used = web.link
        assert web.get(used, follow_redirects=False).status_code == 303
        web.cookies.clear()
        again = web.get(used, follow_redirects=False)
        assert again.status_code == 401
        assert "this link signs in once" in again.text
        assert "set-cookie" not in again.headers or SESSION not in again.headers["set-cookie"]
        [fresh] = told
        assert fresh not in (used, "")
        assert web.get(fresh, follow_redirects=False).status_code == 303


def test_a_guessed_link_can_be_tried_ten_times_a_minute(kd: killick.Client) -> None:
    with local(kd, stranger=True) as web:
        tried = [web.get("/login?key=nothing", follow_redirects=False).status_code for _ in range(11)]
        assert tried == [401] * 10 + [429]


def test_the_owners_key_opens_the_api_and_a_session(kd: killick.Client) -> None:
    with local(kd) as web:
        assert web.get("/api/v1/health").status_code == 200
        assert web.post("/api/v1/events", json={"name": "x"}).status_code == 200, "a key needs no page's proof"
    with killick.Client(MemoryStore(), behind=False) as other, local(other, stranger=True) as web:
        assert sign_in(web, "wrong").status_code == 401
        signed_in(web, web.access.key.text)


def test_the_owners_session_ends_by_its_time_and_with_the_first_token(
    kd: killick.Client, clock: killick.clock.ManualClock
) -> None:
    with local(kd, stranger=True) as web:
        web.get(web.link)
        assert web.get("/api/v1/health").status_code == 200
        clock.advance(SESSION_SECONDS)
        assert web.get("/api/v1/health").status_code == 401
        web.get(web.link)
        link = web.link
        issue(kd.runtime.engine, "ann", "viewer")
        assert web.get("/api/v1/health").status_code == 401
        assert web.get(link, follow_redirects=False).status_code == 401
        assert web.access.link("http://localhost/") is None


def test_an_app_without_identify_and_without_tokens_lets_nobody_in(kd: killick.Client) -> None:
    with TestClient(asgi(kd), base_url="http://localhost") as web:
        assert web.get("/api/v1/health").status_code == 401
        assert web.get("/runs", follow_redirects=False).status_code == 303
        assert web.get("/login?key=").status_code == 200


# cookies know no ports ----------------------------------------------------------------------------


@contextlib.contextmanager
def served(kd: killick.Client) -> Iterator[Served]:
    """A server as `killick serve` makes it on loopback, in a thread."""
    access = server.access_at(kd, "127.0.0.1")
    assert isinstance(access, OwnerAccess)
    bound, it = bind("127.0.0.1", 0), HttpServer(asgi(kd, access=access), http=server.Protocol, lifespan="off")
    thread = threading.Thread(target=lambda: asyncio.run(it.serve([bound])))
    thread.start()
    try:
        while not it.started:
            time.sleep(0.005)
        pages = f"http://{access.use_page_host()}:{bound.getsockname()[1]}/"
        yield Served(f"{url_of(bound)}/", pages, access.link(pages), access)
    finally:
        it.stop()
        thread.join()


class Served(NamedTuple):
    url: str
    pages: str
    link: str | None
    access: OwnerAccess


def status_of(browser: urllib.request.OpenerDirector, url: str | urllib.request.Request) -> int:
    try:
        with browser.open(url, timeout=300) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, list[str | None]]]:
    """Another server of this machine; yields its port, and the cookies that it is sent."""
    sent: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(self.headers.get("cookie"))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield other.server_port, sent
        other.shutdown()
        thread.join()


def test_a_session_reaches_no_other_server_of_this_machine(kd: killick.Client) -> None:
    with served(kd) as it, listening() as (port, sent):
        browser = browser_with_jar()
        assert it.link is not None
        assert status_of(browser, it.link) == 200
        assert status_of(browser, f"{it.pages}api/v1/runs") == 200
        for host in ("127.0.0.1", "localhost", "app.localhost"):
            assert status_of(browser, f"http://{host}:{port}/") == 200
            assert status_of(browser, f"http://{host}:{port}/{it.url.rpartition(':')[2]}") == 200
        assert set(sent) == {None}


def test_where_cookies_are_shared_no_browser_signs_in_and_the_name_of_the_store_is_not_told(kd: killick.Client) -> None:
    with served(kd) as it:
        name = it.pages.partition("//")[2].partition(":")[0]
        session = f"{it.access.session_cookie}={it.access.session('owner')}"
        for path in ("", "login", "runs", "login?key=x", "api/v1/health"):
            for host in ("127.0.0.1", "localhost", "[::1]"):
                request = urllib.request.Request(it.url + path, headers={"Host": host, "Cookie": session})
                with pytest.raises(urllib.error.HTTPError) as refused:
                    browser_with_jar().open(request, timeout=300)
                with refused.value as answer:
                    assert answer.code in (401, 421)
                    assert "set-cookie" not in answer.headers
                    assert name not in answer.read().decode() + str(answer.headers)
        known = urllib.request.Request(it.url, headers={"Host": name, "Cookie": session})
        assert status_of(browser_with_jar(), known) == 200
        evil = urllib.request.Request(it.url, headers={"Host": "evil.localhost", "Cookie": session})
        assert status_of(browser_with_jar(), evil) == 421
        token = urllib.request.Request(
            f"{it.url}api/v1/health", headers={"Authorization": f"Bearer {it.access.key.text}"}
        )
        assert status_of(browser_with_jar(), token) == 200


def test_two_dashboards_do_not_sign_each_other_out(kd: killick.Client) -> None:
    with killick.Client(MemoryStore(), behind=False) as other, served(kd) as one, served(other) as two:
        browser = browser_with_jar()
        assert one.link is not None
        assert two.link is not None
        for link in (one.link, two.link):
            assert status_of(browser, link) == 200
        for it in (one, two):
            assert status_of(browser, f"{it.pages}api/v1/runs") == 200
    assert OwnerAccess(kd).session_cookie != OwnerAccess(other).session_cookie, "also on one host name"


# keys of the server -------------------------------------------------------------------------------


def forged(key: bytes) -> str:
    """An admin's session, signed with what an attacker found."""
    signing = hmac.digest(key, b"killick web session 1", "sha256")
    said = "1.owner.99999999999"
    return f"{said}.{to_text(hmac.digest(signing, said.encode(), 'sha256'))}"


def test_nothing_in_the_store_signs_a_session(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd, local(kd, stranger=True) as web:
        session, owner = (tmp_path / f"killick.db-{name}-key" for name in ("session", "owner"))
        found = (kd.runtime.store.secret_key, kd.runtime.store.id.encode(), b"")
        for each in (*found, *(to_text(key).encode() for key in found)):
            assert (
                web.get("/api/v1/health", headers={"Cookie": f"{web.access.session_cookie}={forged(each)}"}).status_code
                == 401
            )
        known = forged(session.read_bytes())
        assert web.get("/api/v1/health", headers={"Cookie": f"{web.access.session_cookie}={known}"}).status_code == 200
        assert [oct(path.stat().st_mode & 0o777) for path in (session, owner)] == ["0o600", "0o600"]
        held = b"".join(path.read_bytes() for path in tmp_path.glob("killick.db*") if path not in (session, owner))
        assert session.read_bytes() not in held
        assert owner.read_bytes() not in held


def test_servers_of_a_file_share_its_keys(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        one, other = OwnerAccess(kd), OwnerAccess(kd)
        assert one.key == other.key
        assert one._session(other.session("owner"), kd.runtime.clock.now_us()) == "owner"


def test_a_variable_gives_several_servers_one_session_key(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now = kd.runtime.clock.now_us()
    assert TokenAccess(kd)._session(TokenAccess(kd).session("a"), now) is None
    monkeypatch.setenv("KILLICK_SECRET_KEY", "k" * 32)
    assert TokenAccess(kd)._session(TokenAccess(kd).session("a"), now) == "a"
    monkeypatch.setenv("KILLICK_SECRET_KEY", "k" * 31)
    with pytest.raises(AccessRefused, match="shorter than 32"):
        TokenAccess(kd)


def test_a_store_that_is_no_file_has_its_keys_in_the_users_state_folder(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(server_keys, "MemoryStore", type("Another", (), {}))
    place = OwnerAccess(kd).key.place
    assert place is not None
    assert place.parent == tmp_path / "state" / "killick"
    assert (oct(place.stat().st_mode & 0o777), oct(place.parent.stat().st_mode & 0o777)) == ("0o600", "0o700")


@pytest.mark.parametrize("host", ["localhost", "localhost:8300", "127.0.0.1", "127.0.0.1:1", "[::1]:8300", "LOCALHOST"])
def test_names_of_this_machine_are_answered_to(kd: killick.Client, host: str) -> None:
    with local(kd) as web:
        assert web.get("/api/v1/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8300", "", "[::2]", "127.0.0.2"]
)
def test_a_name_that_somebody_points_here_is_not(kd: killick.Client, host: str) -> None:
    with local(kd) as web:
        answer = web.get("/api/v1/health", headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (421, "host_unknown")


def test_a_further_name_can_be_given(kd: killick.Client) -> None:
    with local(kd, "box.lan", host_names=["Box.lan"]) as web:
        assert web.get("/api/v1/health").status_code == 200


def test_what_came_through_a_proxy_is_somebody_elses(kd: killick.Client) -> None:
    with local(kd) as web:
        assert web.get("/api/v1/health", headers={"X-Forwarded-For": "6.6.6.6"}).json()["code"] == "forwarded"


def test_the_first_token_closes_the_door_and_revoking_it_does_not_open_it(kd: killick.Client) -> None:
    with local(kd) as web:
        assert web.get("/api/v1/health").status_code == 200
        made, text = issue(kd.runtime.engine, "ann", "viewer")
        assert web.get("/api/v1/health").status_code == 401
        headers = {"Authorization": f"Bearer {text}"}
        assert web.get("/api/v1/health", headers=headers).status_code == 200
        revoke(kd.runtime.engine, made.id)
        assert web.get("/api/v1/health").status_code == 401
        assert web.get("/api/v1/health", headers=headers).status_code == 401


def test_a_write_without_tokens_takes_a_page_of_ours_all_the_same(kd: killick.Client) -> None:
    with local(kd, stranger=True) as web:
        web.get(web.link)
        body = {"name": "x"}
        assert web.post("/api/v1/events", json=body).json()["code"] == "csrf"
        proof = proof_in(web.get("/health").text)
        assert web.post("/api/v1/events", json=body, headers={"X-Killick-CSRF": proof}).status_code == 200


# in somebody's own app ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "person"),
    [
        (None, None),
        ("ann", Person("ann", "operator")),
        (("ann", "viewer"), Person("ann", "viewer")),
        (Person("ann", "admin"), Person("ann", "admin")),
    ],
)
@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_app_says_who_asks_in_any_of_these_ways(kd: killick.Client, told: Any, person: Any, how: str) -> None:
    async def later(request: Request) -> Any:
        return told

    access = Identified(kd, later if how == "async" else lambda request: told)
    assert asyncio.run(access.identify(Request({"type": "http", "headers": []}))) == person


def test_what_says_nothing_of_who_asks_lets_nobody_in(kd: killick.Client) -> None:
    for told in (7, "", ("ann", "root"), ("ann",), True):
        with TestClient(asgi(kd, identify=lambda request: told)) as web:
            assert web.get("/api/v1/health").status_code in (403, 500), told


def test_mounted_everything_is_below_the_mount_and_the_apps_own_people_get_in(kd: killick.Client) -> None:
    def who(request: Request) -> Any:
        return request.headers.get("x-user")

    own = Starlette(routes=[Mount("/ops/killick", asgi(kd, identify=who))])
    with TestClient(own, base_url="http://localhost") as web:
        assert web.get("/ops/killick/api/v1/health").status_code == 401
        page = web.get("/ops/killick/health", headers={"x-user": "ann"})
        assert page.status_code == 200
        assert 'href="/ops/killick/static/' in page.text
        assert CSRF in page.headers["set-cookie"]
        assert "Path=/ops/killick" in page.headers["set-cookie"]
        assert web.get("/ops/killick/health").status_code == 401, "there is no page of ours to sign in at"
        assert web.get("/ops/killick/login", headers={"x-user": "ann"}).status_code == 404


def test_mounted_people_sign_in_below_the_mount(kd: killick.Client, cards: dict[str, Any]) -> None:
    own = Starlette(routes=[Mount("/ops", asgi(kd))])
    with TestClient(own, base_url="http://localhost") as web:
        sent = web.get("/ops/health?limit=1", follow_redirects=False).headers["location"]
        assert sent == "/ops/login?next=%2Fops%2Fhealth%3Flimit%3D1"
        proof = proof_in(web.get(sent).text)
        fields = {"csrf": proof, "token": cards["viewer"], "next": "/ops/health"}
        answer = post(web, "/ops/login", fields)
        assert answer.headers["location"] == "/ops/health"
        assert web.get("/ops/health").status_code == 200
        assert (
            post(
                web, "/ops/login", {**fields, "csrf": proof_in(web.get("/ops/health").text), "next": "/other"}
            ).headers["location"]
            == "/ops/"
        )
