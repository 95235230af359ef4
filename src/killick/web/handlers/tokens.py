"""Tokens by HTTP: list, create, revoke. For admins. A token's text is returned once, to its creator."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from killick.model.retry import seconds
from killick.model.system_events import Scope
from killick.presenting.documents import Document
from killick.web.problems import Problem
from killick.web.routes import Call, Nothing, delete, get, post
from killick.workers import tokens
from killick.workers.tokens import NAME_CHARS_MAX, Token


class AccessToken(Document, frozen=True):
    """A token, without anything that opens something."""

    id: str
    name: Annotated[str, msgspec.Meta(description="Whose it is: the name on record of all that is done with it.")]
    scope: Scope
    holds: Annotated[bool, msgspec.Meta(description="Whether it opens anything now.")]
    issued_at_us: int
    expires_at_us: int | None
    by: str | None
    revoked_at_us: int | None
    revoked_by: str | None
    yours: Annotated[bool, msgspec.Meta(description="Whether this request was made with it.")]


class AccessTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Every token that was ever issued, the newest first."""

    tokens: list[AccessToken]


class TokenAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Which token."""

    id: Annotated[str, msgspec.Meta(description="Its id.")]


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token that is to be made."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX, description="Who will use it.")]
    scope: Scope = "viewer"
    expires: Annotated[
        str | None, msgspec.Meta(description="How long it is to hold, such as `30d`; for ever, if not given.")
    ] = None


class IssuedToken(msgspec.Struct, frozen=True, kw_only=True):
    """A new token with its text, which is not stored and returned only this once."""

    token: str
    made: AccessToken


def tokens_page(call: Call[Nothing, Nothing]) -> AccessTokens:
    """List all tokens"""
    found = reversed(tokens.tokens(call.client.runtime.engine))
    return AccessTokens(tokens=[_document(each, call.now_us, call.person.token) for each in found])


def issue(call: Call[Nothing, TokenRequest]) -> IssuedToken:
    """Make a token

    Its text is in the response and nowhere else. Not kept for its Idempotency-Key: asked twice, there are two.
    """
    wanted, engine = call.body, call.client.runtime.engine
    expires = None if wanted.expires is None else seconds(wanted.expires)
    made, text = tokens.issue(engine, wanted.name, wanted.scope, expires_seconds=expires, by=call.person.name)
    return IssuedToken(token=text, made=_document(made, call.now_us, call.person.token))


def revoke(call: Call[TokenAsked, Nothing]) -> None:
    """Revoke a token

    It opens nothing from the next request on, and the sessions that were opened with it end.
    """
    known = {each.id for each in tokens.tokens(call.client.runtime.engine)}
    if call.asked.id not in known:
        raise Problem(404, f"{call.asked.id}: no token has this id", code="token_unknown")
    tokens.revoke(call.client.runtime.engine, call.asked.id, by=call.person.name)


def _document(token: Token, now_us: int, yours: str | None) -> AccessToken:
    return AccessToken.of(token, holds=token.holds(now_us), yours=token.id == yours)


ROUTES: Final = (
    get("/tokens", tokens_page, gives=AccessTokens, scope="admin", page="tokens.html"),
    post("/tokens", issue, takes=TokenRequest, gives=IssuedToken, scope="admin", status=201, keeps=False),
    delete("/tokens/{id}", revoke, asks=TokenAsked, scope="admin"),
)
