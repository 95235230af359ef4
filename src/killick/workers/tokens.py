"""API tokens: the identities and scopes of HTTP clients, in the internal log `killick:tokens`. No secret is stored.

A token is `killick_<id>_<secret>`. The log has the SHA-256 of the secret. A slow hash is not needed: the secret has 256
random bits, so no dictionary attack is possible.
"""

from __future__ import annotations

import hmac
import re
import threading
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

import msgspec

from killick.engine.engine import Engine
from killick.errors import AccessRefused, EpochStale, HeadMoved, RunExists
from killick.log.writer import Entry
from killick.model import events as e
from killick.model import system_events
from killick.model.system_events import Scope
from killick.store.grants import ALL, Grant
from killick.store.records import OWN_AGENTS

TOKENS: Final = "killick:tokens"
"""The log of the tokens."""

AGENT: Final = f"{OWN_AGENTS}tokens"
NAME_CHARS_MAX: Final = 80

_RANKS: Final[dict[str, int]] = {"viewer": 0, "operator": 1, "admin": 2}
_TEXT: Final = re.compile(r"killick_([0-9a-z]{8})_([A-Za-z0-9_-]{43})")
_ID_CHARS: Final = 8
_TRIES: Final = 5
"""How often an append is retried after a conflict."""


class Person(msgspec.Struct, frozen=True):
    """An authenticated person. The name is recorded with each of their actions."""

    name: str
    scope: Scope = "viewer"
    grant: Grant | None = None
    """The runs that they reach; None: all of the store."""

    def may(self, scope: Scope | None) -> bool:
        """Whether they have this scope: an operator may also read, an admin may do both."""
        return scope is None or _RANKS[self.scope] >= _RANKS[scope]


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded token, without its secret."""

    id: str
    name: str
    scope: Scope
    hash: e.Digest
    issued_at_us: int
    expires_at_us: int | None = None
    by: str | None = None
    agents: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    revoked_at_us: int | None = None
    revoked_by: str | None = None

    def holds(self, now_us: int) -> bool:
        """Whether it is neither expired nor revoked."""
        return self.revoked_at_us is None and (self.expires_at_us is None or now_us < self.expires_at_us)

    @property
    def person(self) -> Person:
        """The person whom it authenticates."""
        grant = Grant(self.agents, self.tags)
        return Person(self.name, self.scope, grant if grant != ALL else None)


class Tokens:
    """The tokens of a store. Reads only new events, so that it can be consulted on each request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seq = 0  # of the last event that was read
        self._found: dict[str, Token] = {}
        self._mutex = threading.Lock()

    def all(self) -> dict[str, Token]:
        """Every token ever issued, by id, the oldest first; includes the writes of other processes."""
        head = self._engine.store.head(TOKENS)
        return self.up_to(0 if head is None else head.seq)

    def up_to(self, seq: int) -> dict[str, Token]:
        """Every token of a log that has this length."""
        with self._mutex:
            while self.seq < seq and (rows := self._engine.log.read(TOKENS, after=self.seq)):
                found = dict(self._found)
                for each in rows:
                    _apply(found, each.event)
                self._found, self.seq = found, rows[-1].seq
            return self._found

    def check(self, text: str, now_us: int) -> Token | None:
        """The valid token with this text, if any."""
        return checked(self.all(), text, now_us)


def checked(tokens: Mapping[str, Token], text: str, now_us: int) -> Token | None:
    """The valid one of these tokens with this text, if any."""
    found = _TEXT.fullmatch(text)
    token = tokens.get(found[1]) if found is not None else None
    if found is None or token is None or not token.holds(now_us):
        return None
    return token if hmac.compare_digest(token.hash, _hash(found[2])) else None


def _apply(found: dict[str, Token], event: e.Event) -> None:
    match event:
        case system_events.TokenIssued():
            same = {name: getattr(event, name) for name in ("id", "name", "scope", "hash", "by", "agents", "tags")}
            found[event.id] = Token(**same, issued_at_us=event.at, expires_at_us=event.expires_at)
        case system_events.TokenRevoked():
            token = found.get(event.id)
            if token is not None and token.revoked_at_us is None:
                found[event.id] = msgspec.structs.replace(token, revoked_at_us=event.at, revoked_by=event.by)
        case _:
            pass


def _hash(secret: str) -> e.Digest:
    return e.to_text(sha256(secret.encode()).digest())


def tokens(engine: Engine) -> list[Token]:
    """Every token ever issued, the oldest first."""
    return list(Tokens(engine).all().values())


def issue(
    engine: Engine, name: str, scope: Scope = "viewer", *, expires_seconds: float | None = None, by: str | None = None,
    grant: Grant = ALL,
) -> tuple[Token, str]:  # fmt: skip
    """Issues a token for the runs of a grant; returns it and its text, which is not stored anywhere."""
    if not name.strip() or len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise AccessRefused(repr(name), f"is not a valid token name; give up to {NAME_CHARS_MAX} plain characters")
    if scope not in _RANKS:
        raise AccessRefused(repr(scope), f"is not a scope; give one of {', '.join(_RANKS)}")
    if expires_seconds is not None and expires_seconds <= 0:
        raise AccessRefused(name, "would have expired already; give a duration such as 30d")
    if scope == "admin" and grant != ALL:
        raise AccessRefused(name, "an admin reads Killick's own logs, which no agent or tag covers; give another scope")
    known = Tokens(engine).all()
    while (id := engine.ids.new("t")[-_ID_CHARS:]) in known:  # noqa: A001
        pass
    secret, now = e.to_text(engine.ids.key()), engine.clock.now_us()
    expires = None if expires_seconds is None else now + round(expires_seconds * 1_000_000)
    event = system_events.TokenIssued(
        at=now, id=id, name=name, scope=scope, hash=_hash(secret), expires_at=expires, by=by,
        agents=grant.agents, tags=grant.tags,
    )  # fmt: skip
    _append(engine, Entry(event))
    return Tokens(engine).all()[id], f"killick_{id}_{secret}"


def revoke(engine: Engine, token: str, *, by: str | None = None, because: str | None = None) -> Token:
    """Revokes a token, by its id or name, from the next request on."""
    known = Tokens(engine).all()
    now = engine.clock.now_us()
    named = [each for each in known.values() if each.name == token and each.holds(now)]
    found = known.get(token) or (named[0] if named else None)
    if found is None:
        raise AccessRefused(token, "no token in force has this id or name; `killick token list` lists them")
    if found.id != token and len(named) > 1:
        ids = ", ".join(each.id for each in named)
        raise AccessRefused(token, f"is the name of {len(named)} tokens; give one of their ids: {ids}")
    if found.revoked_at_us is not None:
        return found
    _append(
        engine, Entry(system_events.TokenRevoked(at=now, id=found.id, by=by), {"because": because} if because else None)
    )
    return Tokens(engine).all()[found.id]


def _append(engine: Engine, entry: Entry) -> None:
    """Appends to the log without a lease; a concurrent writer gets another position."""
    for tried in range(1, _TRIES + 1):
        row = engine.store.index(TOKENS)
        if row is not None and row.agent != AGENT:
            raise AccessRefused(TOKENS, f"is a run of {row.agent}, but this id is for tokens; use a store without it")
        try:
            if row is not None:
                engine.log.open(TOKENS).append(entry)
            else:
                started = e.RunStarted(at=entry.event.at, run=TOKENS, agent=AGENT)
                engine.log.begin(TOKENS).append(Entry(started), entry)
            return
        except (RunExists, HeadMoved, EpochStale):
            if tried == _TRIES:
                raise
