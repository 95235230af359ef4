"""Answer links: an address that shows one question to one person, and takes their answer without a login.

A link names the run, the step, the event that asked, a keyed digest of the question, the person, an expiry and the
channel that it is sent to. Its signature holds in one store. Answers by links of one channel are one approval, since a
reader of the channel could give them all. This module makes and reads links; it shows nothing and answers nothing.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Final

import msgspec

from killick.clock import timestamp
from killick.engine.approval.argument_edits import call
from killick.engine.control.inbox import ANSWER, VOTE, answer_id, body_of, may_answer
from killick.engine.views import Wait
from killick.errors import AccessRefused, DeclarationRefused, DurationRefused, KeyRefused, ValueErased
from killick.history.phrasing import cut, entries_of, inline
from killick.history.run_info import pending_answer, waits_of
from killick.log.log import Log
from killick.model import events as e
from killick.model.retry import seconds
from killick.permissions import LINK_SECRET, SECRET_FILE, read_secret
from killick.sanitizer import unmixed, visible
from killick.store.protocol import Store
from killick.type_init import ready
from killick.workers.hooks import HookEvent
from killick.workers.services import checked_address, lacking, secret_text, signing_key

PATH: Final = "/answer"
"""Where the dashboard's server serves links."""

URL: Final = "KILLICK_PUBLIC_URL"
"""The environment variable with the address of the server, as people reach it."""
SECRET: Final = LINK_SECRET
"""The environment variable with the secret that signs links; during rotation with several, of which the first signs."""
FILE: Final = SECRET_FILE
EXPIRES: Final = "KILLICK_LINK_EXPIRES"
"""The environment variable with the time that a link holds, such as `3d`; by default a day."""
BUTTONS_EXPIRE_US: Final = 7 * 86_400_000_000
"""How long the buttons of a message hold. They are no credential: the messenger identifies the person."""

TEXT_CHARS: Final = 2_000
"""How much of one text a message shows; the page of the link shows more."""

FOR_PEOPLE: Final = ("answer", "settlement")
"""What a wait for a person waits for."""

SAID: Final = {
    "approve": "approved", "reject": "rejected", "edit": "edited", "respond": "answered",
    "happened": "settled: it happened", "not": "settled: it did not happen", "stop": "stopped",
}  # fmt: skip


class Link(msgspec.Struct, frozen=True, array_like=True):
    """What a link says. One without a person names a question only: its reader identifies the person.

    `channel` is a keyed digest of the place that the link is sent to.
    """

    run: str
    step: str
    opened: int
    question: str
    by: str
    until: int
    channel: str = ""

    def is_about(self, store: Store, wait: Wait) -> bool:
        """Whether it was made for an open wait as it is now."""
        same = (self.run, self.step, self.opened) == (wait.run, wait.step, wait.opened)
        return same and hmac.compare_digest(self.question, _keyed(store, wait.digest))


def token(store: Store, link: Link) -> str:
    """A link as signed text; equal for equal links."""
    said = e.to_text(msgspec.json.encode(link))
    return f"{said}.{_signature(settings()[1][0], store, said)}"


def address(store: Store, link: Link) -> str:
    """The URL of a link. Its fragment has the token, so that no server, proxy or log on the way gets it."""
    return f"{settings()[0]}{PATH}#{token(store, link)}"


def read(store: Store, signed: str, now_us: int) -> Link:
    """What a link says, if it is of this store and has not expired. Raises AccessRefused."""
    said, _, signature = signed.partition(".")
    right = [_signature(each, store, said).encode() for each in settings()[1]]
    if not any(hmac.compare_digest(each, signature.encode()) for each in right):
        raise AccessRefused("this link", "was altered, or is not of this server; open the original message")
    link = msgspec.json.decode(e.from_text(said), type=ready(Link))
    if now_us >= (until_us := link.until * 1_000_000):
        raise AccessRefused("this link", f"expired at {moment(until_us)}; answer in the dashboard")
    return link


def _signature(secret: str, store: Store, said: str) -> str:
    return e.to_text(hmac.digest(signing_key(secret), f"killick answer link 2\n{store.id}\n{said}".encode(), sha256))


def _keyed(store: Store, text: str | None) -> str:
    """A digest that confirms no guess of a question or a channel."""
    return hmac.digest(store.secret_key, f"killick answer link 1\n{text}".encode(), sha256).hex()[:32]


def settings() -> tuple[str, tuple[str, ...], int]:
    """The public address of the server, the secrets that sign links to it, and how many microseconds they hold. Raises
    DeclarationRefused."""
    url, secrets = os.environ.get(URL, ""), tuple(map(_secret, os.environ.get(SECRET, "").split()))
    checked_address(URL, url, insecure=False)
    for each in secrets or ("",):
        signing_key(each, name=SECRET)
    try:
        expires = seconds(os.environ.get(EXPIRES) or "1d")
    except DurationRefused as error:
        raise DeclarationRefused(EXPIRES, str(error)) from None
    return url.rstrip("/"), secrets, round(expires * 1_000_000)


def _secret(given: str) -> str:
    """A secret itself, or what a file of it has, as `file:PATH`."""
    if not given.startswith(FILE):
        return given
    try:
        return read_secret(given.removeprefix(FILE)).decode().strip()
    except (OSError, KeyRefused) as error:
        reason = error.reason if isinstance(error, KeyRefused) else f"cannot be read ({error.strerror})"
        raise DeclarationRefused(SECRET, f"{given}: {reason}") from None


def is_configured() -> bool:
    """Whether this process is to have links."""
    return bool(os.environ.get(URL) or os.environ.get(SECRET))


def lacks(*secrets: str, read: Callable[[str], object] = secret_text) -> str | None:
    """What this process lacks to send messages with links; None if it has all."""
    try:
        settings()
    except DeclarationRefused as error:
        return f"messages to people need links; {error}"
    return lacking(*secrets, read=read)


# of a hook's event --------------------------------------------------------------------------------


def buttons_of(event: HookEvent) -> Link:
    """What the buttons of a message say of the question of a `wait.opened`: equal for each delivery."""
    opened = event.event
    until = min(opened.at + BUTTONS_EXPIRE_US, opened.deadline or opened.at + BUTTONS_EXPIRE_US) // 1_000_000
    return Link(event.run, opened.step, event.seq, _keyed(event.engine.store, opened.digest), "", until)


def personal_url(store: Store, link: Link, by: str, channel: str, at: int, deadline: int | None) -> str:
    """The URL of a link to the same question, for one person, sent to a channel at that time."""
    until = at + settings()[2]
    until = min(until, deadline or until) // 1_000_000
    keyed = _keyed(store, f"channel {channel}")
    return address(store, msgspec.structs.replace(link, by=by, until=until, channel=keyed))


def links(event: HookEvent, people: Iterable[str] = (), *, to: str = "") -> dict[str, str]:
    """Returns the answer links of a `wait.opened`, by the person whom each is for; none where links are not configured.

    event   the event that a hook received
    people  who gets a link, if they are asked; by default everyone whom the question names. A question to any person
            has one link, in the name of the hook
    to      the channel that these links are sent to, such as an address or the id of a chat; by default the hook.
            Answers by links of one channel count as one approval
    """
    if not (asked := asked_of(event, people)):
        return {}
    opened, store, link = event.event, event.engine.store, buttons_of(event)
    channel = to or f"hook {event.hook}"
    return {name: personal_url(store, link, name, channel, opened.at, opened.deadline) for name in asked}


def asked_of(event: HookEvent, people: Iterable[str] = ()) -> list[str]:
    """Who of these people may get a link to the question of a `wait.opened`, as for `links`."""
    opened = event.event
    if not is_configured() or not isinstance(opened, e.WaitOpened) or opened.waits_for not in FOR_PEOPLE:
        return []
    try:
        may, roles = event.data.get("may"), event.engine.roles
    except ValueErased:
        return []
    known = opened.to if may is None and roles is None else may  # any person may answer; those who are named are told
    named = people or may or opened.to or (event.hook,)
    return [each for each in named if may_answer(each, opened, known, roles)]


def open_question(event: HookEvent) -> Wait | None:
    """The question of a `wait.opened`; None if it was answered or withdrawn since."""
    found = [wait for wait in event.info().waits if wait.opened == event.seq and wait.waits_for in FOR_PEOPLE]
    return found[0] if found and pending_answer(event.engine.log, event.run, found[0]) is None else None


# in words -----------------------------------------------------------------------------------------


def headline(wait: Wait) -> str:
    """What is asked: Approve refund(to="ann", amount=900)?"""
    if wait.waits_for == "settlement":
        return f"Did {call(wait.intention)} happen?"
    return (
        f"Approve {call(wait.intention)}?"
        if wait.rule is not None
        else visible(unmixed(wait.prompt or "The run asks."))
    )


def evidence(wait: Wait) -> dict[str, str]:
    """What a person needs to know to answer, by its name."""
    found = {
        "Why it is asked": wait.reason,
        "The agent’s reason": wait.because if isinstance(wait.because, str | None) else inline(wait.because),
        "Asked of": ", ".join(wait.may or wait.to),
        "Until": None if wait.deadline_us is None else moment(wait.deadline_us),
        "Run": f"{wait.run}, step {wait.step}",
    }
    return {name: cut(visible(unmixed(text)), TEXT_CHARS) for name, text in found.items() if text}


def as_asked(log: Log, run: str, opened: int) -> Wait:
    """A question as it was when it was asked."""
    return next(each for each in waits_of(log.store, log.state(run, opened)) if each.opened == opened)


def outcome(log: Log, run: str, opened: int) -> str | None:
    """How a question was answered: `Approved by mia, max at …`; None while it is not."""
    asked = log.event(run, opened)
    if not isinstance(asked, e.WaitOpened):
        return None  # the store was restored from a copy, and continued otherwise
    id_ = answer_id(run, asked.step, opened)
    said = [each for each in log.store.messages(run) if each.name in (ANSWER, VOTE)]
    given = [each for each in said if each.id == id_ or each.id.startswith(f"{id_}#")]
    last = next((each for each in given if each.id == id_), None)
    if last is None and len({each.by for each in given}) < max(asked.need, 2):
        return None
    last = last or given[-1]
    verb = str(entries_of(body_of(log, last)).get("kind"))
    names = dict.fromkeys(each.by or "a person" for each in given if verb == "approve" or each is last)
    return f"{SAID[verb].capitalize()} by {', '.join(names)} at {moment(last.at_us)}"


def moment(at_us: int) -> str:
    """A time in UTC, to the second."""
    return f"{timestamp(at_us)[:19].replace('T', ' ')} UTC"
