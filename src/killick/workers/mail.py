"""E-mail to the people whom a question is put to, each with their own answer link. Sent by SMTP, at least once."""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import parseaddr
from functools import partial
from hashlib import sha256
from html import escape
from typing import Final
from urllib.parse import unquote

from killick.browser_guard import is_loopback
from killick.engine.views import Wait
from killick.errors import DeclarationRefused, WebhookGone
from killick.history.phrasing import cut
from killick.logger import get_logger
from killick.model.retry import Duration, Retry, seconds
from killick.workers.answer_links import FOR_PEOPLE, asked_of, evidence, headline, lacks, links, open_question
from killick.workers.hooks import Agents, Hook, HookEvent, declare_hook
from killick.workers.services import checked_address, secret_text

SUBJECT_CHARS: Final = 150
DELIVERY_SECONDS: Final = 300.0
"""The time limit of all messages of one question."""
PORTS: Final = {"smtp": 587, "smtps": 465}

logger: Final = get_logger("killick")


def email(
    server: str,
    *,
    sender: str,
    people: Mapping[str, str] | Callable[[str], str | None],
    password: str | None = None,
    name: str = "email",
    agent: Agents = (),
    waits_for: str | Sequence[str] = FOR_PEOPLE,
    retry: Retry | int | None = None,
    timeout: Duration = 30,
    insecure: bool = False,
) -> Hook:
    """Declares that the people whom a question is put to get it by e-mail, with a link to answer it. Delivery is at
    least once; a repeated message has the same Message-ID.

    server    `smtp://USER@HOST:PORT`, which must offer STARTTLS, or `smtps://USER@HOST:PORT`. Percent-encode the user
    sender    the address that mail comes from, as in `Killick <killick@example.org>`
    people    the address of each person, by name; or a function from a name to an address or None
    password  the user's password, or `env:NAME`
    timeout   the time limit of each step of the conversation with the server
    insecure  allow an unencrypted connection to another machine

    The other options are those of `killick.on`. Links need the variables KILLICK_PUBLIC_URL and
    KILLICK_LINK_SECRET. Raises DeclarationRefused.

        killick.email(
            "smtp://mailer@smtp.example.org",
            sender="killick@example.org",
            password="env:SMTP_PASSWORD",
            people={"mia": "mia@example.org"},
        )
    """
    # A server without STARTTLS is refused when it is reached.
    address = checked_address(name, server, insecure=True, schemes=("smtp", "smtps"), user=True)
    host, user = address.hostname or "", unquote(address.username or "")
    if "@" not in parseaddr(sender)[1]:
        raise DeclarationRefused(name, f"sender={sender!r} is not an address; give one such as killick@example.org")
    if bool(user) != (password is not None):
        raise DeclarationRefused(name, "a user and a password go together; give USER@ in the address, and password=")

    def deliver(mail: Sequence[EmailMessage]) -> None:
        limit, tls = seconds(timeout), ssl.create_default_context()
        port, is_tls = address.port or PORTS[address.scheme], address.scheme == "smtps"
        kind = partial(smtplib.SMTP_SSL, context=tls) if is_tls else smtplib.SMTP
        with kind(host, port, timeout=limit) as server:
            server.ehlo_or_helo_if_needed()
            if not is_tls and (server.has_extn("starttls") or not (insecure or is_loopback(host))):
                server.starttls(context=tls)
            if password is not None:
                server.login(user, secret_text(password))
            _send(server, mail)

    def send(event: HookEvent) -> None:
        if (wait := open_question(event)) is None:
            return
        names, address_of = ((), people) if callable(people) else (people, people.get)
        found = [(each, to) for each in asked_of(event, names) if (to := address_of(each)) is not None]
        mail = [_message(event, wait, sender, to, links(event, [each], to=to)[each]) for each, to in found]
        if mail:
            deliver(mail)

    secrets = () if password is None else (password,)
    return declare_hook(
        name, send, ("wait.opened",), to=f"{address.scheme}://{host}", same=(server, sender),
        lacks=lambda: lacks(*secrets), agent=agent, waits_for=waits_for, retry=retry, timeout=DELIVERY_SECONDS,
    )  # fmt: skip


def _send(server: smtplib.SMTP, mail: Sequence[EmailMessage]) -> None:
    """Sends messages. One that the server refuses for good is logged; if it refuses all, the delivery is dropped: a
    retry would only delay the mail of other questions."""
    refused = 0
    for each in mail:
        try:
            server.send_message(each)
        except (smtplib.SMTPRecipientsRefused, smtplib.SMTPDataError) as error:
            replies = (
                [(error.smtp_code, b"")] if isinstance(error, smtplib.SMTPDataError) else error.recipients.values()
            )
            if any(code < 500 for code, _ in replies):
                raise
            refused += 1
            logger.warning("e-mail to %s was refused: %s", each["to"], error)
            if refused == len(mail):
                raise WebhookGone("e-mail", f"was refused for {each['to']}: {error}") from None


def _message(event: HookEvent, wait: Wait, sender: str, to: str, link: str) -> EmailMessage:
    title, domain = headline(wait), parseaddr(sender)[1].rpartition("@")[2]
    message = EmailMessage()
    message["Subject"] = cut(title, SUBJECT_CHARS)
    message["From"] = sender
    message["To"] = Address(addr_spec=to)
    message["Date"] = datetime.fromtimestamp(event.sent_at / 1_000_000, UTC)
    message["Message-ID"] = f"<{sha256(f'{event.key}:{to}'.encode()).hexdigest()[:40]}@{domain}>"
    message["Auto-Submitted"] = "auto-generated"
    end = "The link is for you alone: who has it answers in your name."
    lines = [f"{name}: {text}" for name, text in evidence(wait).items()]
    message.set_content("\n".join([title, "", *lines, "", "Look at it and answer:", link, "", end, ""]))
    html = (
        f"<html><body style='{_BODY}'><p style='{_TITLE}'>{escape(title)}</p><p>{'<br>'.join(map(escape, lines))}</p>"
        f"<p style='margin:24px 0'><a style='{_BUTTON}' href='{escape(link)}'>Look at it and answer</a></p>"
        f"<p style='color:#5f6368'>{end}</p></body></html>"
    )
    message.add_alternative(html, subtype="html")
    return message


_BODY: Final = "font:15px/1.5 system-ui,sans-serif;max-width:640px"
_TITLE: Final = "font-size:18px;font-weight:600;white-space:pre-line"
_BUTTON: Final = "background:#1a5fb4;color:#fff;padding:10px 18px;border-radius:6px;text-decoration:none"
