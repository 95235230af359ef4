"""Webhooks: hooks that notify another service, signed as in Standard Webhooks; and their verification by a receiver.

Of the address, only the origin is recorded.
"""

from __future__ import annotations

import hmac
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote

import msgspec

from killick.clock import Clock, SystemClock, timestamp
from killick.errors import DeclarationRefused, ValueErased, WebhookRefused
from killick.model.codec import plain
from killick.model.retry import Duration, Retry, seconds
from killick.workers.answer_links import lacks
from killick.workers.answer_links import links as answer_links
from killick.workers.hooks import Agents, Hook, HookEvent, declare_hook
from killick.workers.services import SPARE_SECONDS, Secrets, Service, check_age, checked_secrets, lacking, signing_key

WEBHOOK_VERSION: Final = 1
"""The version of the document that is sent."""

DATA_BYTES_MAX: Final = 65_536
"""How many bytes of an event's values are sent; larger values are named instead."""


def webhook(
    url: str,
    *kinds: str,
    secret: Secrets,
    name: str | None = None,
    agent: Agents = (),
    waits_for: str | Sequence[str] = (),
    retry: Retry | int | None = None,
    timeout: Duration = 10,
    insecure: bool = False,
    links: str | None = None,
) -> Hook:
    """Declares a service that receives run events by signed POST. Delivery is at least once and in order.

    url       the address
    kinds     the kinds of events, as in docs/events.md
    secret    the signing secret: `whsec_…`, plain text, or `env:NAME`; several during rotation
    name      the name of the hook and of its log; by default the host of the address
    timeout   the time limit of one delivery
    insecure  allow plain HTTP to another machine
    links     the one person whose answer links are sent with `wait.opened`; the receiver can answer in their name

    The other options are those of `killick.on`. Raises DeclarationRefused.

        killick.webhook("https://example.org/hook", "wait.opened", secret="env:HOOK_SECRET")
    """
    service = Service(name or "webhook", url, seconds(timeout), insecure=insecure)
    called = name or service.host
    secrets, people = checked_secrets(called, secret), () if links is None else (links,)
    if links is not None and (not isinstance(links, str) or not links.strip()):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationRefused(called, f"links={links!r} names no person; links are for one person of one webhook")

    def send(event: HookEvent) -> None:
        body = msgspec.json.encode(document(event, answer_links(event, people, to=url) if people else None))
        id_, sent = quote(event.key, safe=":"), str(event.sent_at // 1_000_000)
        signatures = (_signature(signing_key(each), id_, sent, body) for each in secrets)
        headers = {"webhook-id": id_, "webhook-timestamp": sent, "webhook-signature": " ".join(signatures)}
        service.post(body, headers, now_us=event.sent_at)

    return declare_hook(
        called, send, kinds, to=service.origin, same=sha256(url.encode()).digest(),
        lacks=lambda: (lacks if people else lacking)(*secrets, read=signing_key), agent=agent, waits_for=waits_for,
        retry=retry, timeout=seconds(timeout) + SPARE_SECONDS if seconds(timeout) else 0,
    )  # fmt: skip


# signing ------------------------------------------------------------------------------------------


def _signature(key: bytes, id: str, timestamp: str, body: bytes) -> str:  # noqa: A002
    signed = hmac.new(key, f"{id}.{timestamp}.".encode() + body, sha256)
    return f"v1,{b64encode(signed.digest()).decode()}"


# sending ------------------------------------------------------------------------------------------


def document(sent: HookEvent, links: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The document of an event, with the fields that the HTTP API gives it: equal for each delivery."""
    event: dict[str, Any] = msgspec.to_builtins(sent.event)
    left_out: list[str] = []
    data: dict[str, msgspec.Raw] = {}
    room = DATA_BYTES_MAX
    values: Mapping[str, Any] = {}
    erased = False
    try:
        values = sent.data
    except ValueErased:
        erased = True
    for name, value in values.items():
        encoded = msgspec.json.encode(plain(value, at=name))
        if len(encoded) > room:
            left_out.append(name)
            continue
        room -= len(encoded)
        data[name] = msgspec.Raw(encoded)
    because = msgspec.json.encode(plain(sent.because, at="because"))
    if len(because) > room:
        left_out.append("because")
    return {
        "version": WEBHOOK_VERSION, "id": sent.key, "agent": sent.agent, "run": sent.run, "seq": sent.seq,
        "at": timestamp(sent.at), "kind": sent.kind, "hash": sent.hash, "erased": erased,
        "fields": {name: value for name, value in event.items() if name not in ("kind", "at", "data")},
        "data": None if erased else data, "left_out": left_out,
        "because": msgspec.Raw(because) if len(because) <= room else None, **({"links": links} if links else {}),
    }  # fmt: skip


# receiving ----------------------------------------------------------------------------------------


def webhook_verify(
    secret: Secrets, headers: Mapping[str, str], body: bytes, *, tolerance: Duration = "5m", clock: Clock | None = None
) -> dict[str, Any]:
    """Verifies an incoming webhook and returns its document. Repeated deliveries have the same `id`: process each id
    once. Raises WebhookRefused if the signature is invalid or the webhook too old.

    secret     the secret, or several during rotation
    headers    the headers of the request
    body       the raw body of the request
    tolerance  the maximum age
    """
    given = {name.lower(): value for name, value in headers.items()}
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        if not given.get(name):
            raise WebhookRefused(f"it has no header {name}")
        if not given[name].isascii():
            raise WebhookRefused(f"its header {name} is not plain ASCII")
    timestamp = given["webhook-timestamp"]
    if not timestamp.isdigit() or len(timestamp) > 15:
        raise WebhookRefused("its webhook-timestamp is not a number of seconds")
    check_age(int(timestamp), seconds(tolerance), (clock or SystemClock()).now_us() / 1_000_000)
    _check_signature(secret, given, body)
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise WebhookRefused("its body is not a JSON object") from None


def _check_signature(secret: Secrets, headers: Mapping[str, str], body: bytes) -> None:
    signatures = [each for each in headers["webhook-signature"].split() if each.startswith("v1,")]
    if not signatures:
        raise WebhookRefused("it has no signature of version v1")
    holds = False
    for each in (secret,) if isinstance(secret, str) else secret:
        right = _signature(signing_key(each), headers["webhook-id"], headers["webhook-timestamp"], body).encode()
        for signature in signatures:
            # All signatures are compared, so that the timing reveals nothing.
            holds |= hmac.compare_digest(right, signature.encode())
    if not holds:
        raise WebhookRefused("no signature fits; the body was changed in transit, or the secret differs")
