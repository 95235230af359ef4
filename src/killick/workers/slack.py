"""Questions in a Slack channel: a message with buttons, which says who answered once the question is closed.

Workers post and update. The server receives the buttons (`killick.web.slack`) by the signing secret.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from typing import Any, Final

import msgspec

from killick.engine.views import Wait
from killick.errors import DeclarationRefused, WebhookFailed, WebhookGone, WebhookRefused
from killick.history.phrasing import cut
from killick.model.retry import Duration, Retry, seconds
from killick.workers import answer_links as links
from killick.workers.answer_links import FOR_PEOPLE, evidence, headline
from killick.workers.hooks import Agents, Hook, HookEvent, declare_hook
from killick.workers.services import SPARE_SECONDS, Service, check_age, secret_text, signing_key

API: Final = "https://slack.com/api/"
JSON: Final = "application/json; charset=utf-8"
TOLERANCE_SECONDS: Final = 300.0
TEXT_CHARS: Final = 2_900
"""Slack takes 3,000 characters in a section."""
REPLY_BYTES: Final = 65_536
GONE: Final = frozenset({"cant_update_message", "edit_window_closed", "message_not_found"})
"""Errors of a message that no retry mends: a person deleted it, or it can no longer be changed."""


def slack(
    channel: str,
    *,
    token: str,
    signing_secret: str,
    people: Mapping[str, str],
    name: str = "slack",
    agent: Agents = (),
    waits_for: str | Sequence[str] = FOR_PEOPLE,
    retry: Retry | int | None = None,
    timeout: Duration = 10,
    api: str = API,
) -> Hook:
    """Declares that questions are posted to a Slack channel, with buttons to answer them. Delivery is at least once.

    channel         the id of a channel, or of a user for direct messages
    token           the bot's token, or `env:NAME`; it needs the scope `chat:write`
    signing_secret  the app's signing secret, or `env:NAME`
    people          the name on record of each Slack user, by user id
    name            the name of the hook; Slack sends interactions to `/slack/NAME` of the server
    timeout         the time limit of one call
    api             the address of Slack's API

    The other options are those of `killick.on`. Links need the variables KILLICK_PUBLIC_URL and
    KILLICK_LINK_SECRET. Raises DeclarationRefused.

        killick.slack(
            "C01234567", token="env:SLACK_TOKEN", signing_secret="env:SLACK_SIGNING_SECRET", people={"U024BE7LH": "mia"}
        )
    """
    if not people:
        raise DeclarationRefused(name, "nobody could answer; give people= the name of each Slack user, by user id")
    if not signing_secret.startswith("env:"):
        signing_key(signing_secret, name=name)
    service = Service(name, api, seconds(timeout))
    return declare_hook(
        name, SlackChannel(channel, token, signing_secret, people, service), ("wait.opened", "wait.closed"),
        to=f"{service.origin}, {channel}", same=(api, channel), lacks=lambda: links.lacks(token), agent=agent,
        waits_for=waits_for, retry=retry, timeout=seconds(timeout) + SPARE_SECONDS,
    )  # fmt: skip


@dataclass(frozen=True, repr=False)
class SlackChannel:
    """One channel: posts what is asked, updates what was answered, verifies what Slack sends."""

    channel: str
    token: str
    signing_secret: str
    people: Mapping[str, str]
    service: Service

    def __call__(self, event: HookEvent) -> None:
        log = event.engine.log
        if event.kind == "wait.opened":
            if (wait := links.open_question(event)) is not None:
                message = asking(wait, links.token(log.store, links.buttons_of(event)))
                posted = self._call("chat.postMessage", {"channel": self.channel, **message}, event)
                event.receipt = f"{posted['channel']} {posted['ts']}"
            return
        asked = log.state(event.run, event.seq - 1).fold.facts.waits.get(event.event.step)
        if asked is None or asked.waits_for not in FOR_PEOPLE:
            return
        if (receipt := event.earlier_receipt(asked.opened)) is not None:
            channel, _, ts = receipt.partition(" ")
            said = links.outcome(log, event.run, asked.opened) or f"Not asked any more: {event.event.how}"
            message = answered(links.as_asked(log, event.run, asked.opened), said)
            self._call("chat.update", {"channel": channel, "ts": ts, **message}, event)

    def _call(self, method: str, body: Mapping[str, Any], event: HookEvent) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {secret_text(self.token)}", "content-type": JSON}
        sent = msgspec.json.encode(body)
        said = self.service.post(sent, headers, now_us=event.sent_at, path=method, reply_bytes=REPLY_BYTES)
        reply = msgspec.json.decode(said, type=dict[str, Any])
        if reply.get("ok") is not True:
            kind = WebhookGone if reply.get("error") in GONE else WebhookFailed
            raise kind(self.service.origin, f"{method} answered {reply.get('error')}", body=said)
        return reply

    def verify(self, headers: Mapping[str, str], body: bytes, now_us: int) -> str:
        """Verifies that Slack sent a request, within five minutes; returns its signature. Raises WebhookRefused."""
        sent, signature = headers.get("x-slack-request-timestamp", ""), headers.get("x-slack-signature", "")
        if not (sent.isascii() and sent.isdigit() and len(sent) < 15 and signature.isascii()):
            raise WebhookRefused("it has no valid X-Slack-Request-Timestamp and X-Slack-Signature")
        check_age(int(sent), TOLERANCE_SECONDS, now_us / 1_000_000)
        signed = hmac.digest(
            signing_key(self.signing_secret, name="signing_secret"), f"v0:{sent}:".encode() + body, sha256
        )
        if not hmac.compare_digest(f"v0={signed.hex()}", signature):
            raise WebhookRefused("its signature does not fit; the body was changed, or the signing secret differs")
        return signature


# messages -----------------------------------------------------------------------------------------


def asking(wait: Wait, token: str) -> dict[str, Any]:
    """A message that asks. Its texts are plain: nothing in them mentions people or links anywhere."""
    look = "Look and edit…" if "approve" in wait.verbs else "Answer…"
    verbs = [("approve", "Approve", "primary"), ("edit", look, ""), ("reject", "Reject", "danger")]
    buttons = [
        {"type": "button", "action_id": verb, "value": token, "text": _plain(label)} | ({"style": kind} if kind else {})
        for verb, label, kind in verbs
        if verb == "edit" or verb in wait.verbs
    ]
    return _message(wait, {"type": "actions", "elements": buttons})


def answered(wait: Wait, said: str) -> dict[str, Any]:
    """The same message once it is answered, without buttons."""
    return _message(wait, {"type": "context", "elements": [_plain(said)]}, f"{said}: ")


def _message(wait: Wait, last: dict[str, Any], said: str = "") -> dict[str, Any]:
    about = "\n".join(f"{name}: {text}" for name, text in evidence(wait).items())
    sections = [{"type": "section", "text": _plain(text)} for text in (headline(wait), about)]
    # Slack reads the text of a notification as markup.
    return {"text": escape(cut(said + headline(wait), TEXT_CHARS), quote=False), "blocks": [*sections, last]}


def _plain(text: str) -> dict[str, Any]:
    return {"type": "plain_text", "text": text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]}…", "emoji": False}
