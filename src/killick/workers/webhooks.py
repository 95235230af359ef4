"""Webhooks: hooks that notify another service, signed as in Standard Webhooks; and their verification by a receiver.

A secret is read when it is needed and never recorded; of the address, only the origin is recorded. Redirects are not
followed. Plain HTTP to another machine needs `insecure=True`.
"""

from __future__ import annotations

import hmac
import http.client
import os
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, Final, TypeAlias
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from killick.clock import Clock, SystemClock, timestamp
from killick.engine.failures import rate_limit_seconds
from killick.errors import DeclarationRefused, ValueErased, WebhookFailed, WebhookGone, WebhookRefused
from killick.model.codec import plain
from killick.model.retry import Duration, Retry, seconds
from killick.workers.hooks import Agents, Hook, HookEvent, declare_hook

WEBHOOK_VERSION: Final = 1
"""The version of the document that is sent."""

DATA_BYTES_MAX: Final = 65_536
"""How many bytes of an event's values are sent; larger values are named instead."""

ANSWER_BYTES: Final = 500
"""How many bytes of a failed response are kept."""

_SPARE_SECONDS: Final = 5.0
"""Extra time of a call, so that the connection's own timeout error is the recorded one."""

Secrets: TypeAlias = str | Sequence[str]
"""A secret, or several during rotation: `whsec_…`, plain text, or `env:NAME` to read a variable."""


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
) -> Hook:
    """Declares a service that receives run events by signed POST. Delivery is at least once and in order.

    url       the address
    kinds     the kinds of events, as in docs/events.md
    secret    the signing secret: `whsec_…`, plain text, or `env:NAME`; several during rotation
    name      the name of the hook and of its log; by default the host of the address
    timeout   the time limit of one delivery
    insecure  allow plain HTTP to another machine

    The other options are those of `killick.on`. Raises DeclarationRefused.

        killick.webhook("https://example.org/hook", "wait.opened", secret="env:HOOK_SECRET")
    """
    called = name or urlsplit(url).hostname or "webhook"
    address = _checked(called, url, insecure=insecure)
    secrets = (secret,) if isinstance(secret, str) else tuple(secret)
    _check_secrets(called, secrets)
    sending = _Sending(url, address, secrets, seconds(timeout))
    return declare_hook(
        called, sending, kinds, to=_origin(address), same=sha256(url.encode()).digest(), lacks=sending.lacks,
        agent=agent, waits_for=waits_for, retry=retry,
        timeout=seconds(timeout) + _SPARE_SECONDS if seconds(timeout) else 0,
    )  # fmt: skip


def _checked(name: str, url: str, *, insecure: bool) -> SplitResult:
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError:
        host, address = None, SplitResult("", "", "", "", "")
    if host is None or address.scheme not in ("http", "https"):
        raise DeclarationRefused(name, "is not the address of a webhook; give one such as https://example.org/hook")
    if address.username is not None:
        raise DeclarationRefused(name, "its address names a user; remove it, the signature identifies the sender")
    if address.scheme == "http" and not insecure and not _is_loopback(host):
        raise DeclarationRefused(name, f"http://{host} is not encrypted; use https://, or give insecure=True")
    return address


def _check_secrets(name: str, secrets: tuple[str, ...]) -> None:
    if not secrets or not all(secrets):
        raise DeclarationRefused(name, "a webhook is signed; give secret='env:NAME', or the secret itself")
    for secret in secrets:
        if not secret.startswith("env:"):
            signing_key(secret)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _origin(address: SplitResult) -> str:
    """The origin of an address, without parts that may be secret."""
    return f"{address.scheme}://{address.netloc}"


# signing ------------------------------------------------------------------------------------------


def signing_key(secret: str) -> bytes:
    """The signing key. An error about a secret never contains the secret."""
    if secret.startswith("env:"):
        name = secret.removeprefix("env:")
        secret = os.environ.get(name, "")
        if not secret:
            raise DeclarationRefused("secret", f"the environment has no {name}; set it to the webhook's secret")
    if not secret:
        raise DeclarationRefused("secret", "is empty, so anyone could sign; set it")
    if not secret.startswith("whsec_"):
        return secret.encode()
    try:
        key = b64decode(secret.removeprefix("whsec_"), validate=True)
    except (NotBase64, ValueError):
        key = b""
    if not key:
        raise DeclarationRefused("secret", "its part after whsec_ is not base64; copy it again")
    return key


def _signature(key: bytes, id: str, timestamp: str, body: bytes) -> str:  # noqa: A002
    signed = hmac.new(key, f"{id}.{timestamp}.".encode() + body, sha256)
    return f"v1,{b64encode(signed.digest()).decode()}"


# sending ------------------------------------------------------------------------------------------


def document(sent: HookEvent) -> dict[str, Any]:
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
        "because": msgspec.Raw(because) if len(because) <= room else None,
    }  # fmt: skip


class _Sending:
    """The hook of a webhook: one POST for each event."""

    def __init__(self, url: str, address: SplitResult, secrets: tuple[str, ...], timeout: float) -> None:
        self._url = url
        self._to = _origin(address)
        self._secrets = secrets
        self._timeout = timeout
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if _is_loopback(address.hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def __call__(self, event: HookEvent) -> None:
        body = msgspec.json.encode(document(event))
        headers = self._headers(quote(event.key, safe=":"), str(event.sent_at // 1_000_000), body)
        request = urllib.request.Request(self._url, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout):
                return
        except urllib.error.HTTPError as answered:
            with answered:
                raise self._refused(answered, event.sent_at) from None
        except (OSError, http.client.HTTPException) as broken:
            reason = getattr(broken, "reason", None) or broken
            if isinstance(reason, TimeoutError):
                raise WebhookFailed(self._to, f"no answer within {self._timeout:g} s") from None
            raise WebhookFailed(self._to, f"could not be reached: {reason or type(broken).__name__}") from None

    def lacks(self) -> str | None:
        """Why this process cannot sign; None if it can."""
        try:
            return None if all(map(signing_key, self._secrets)) else ""
        except DeclarationRefused as error:
            return error.reason

    def _headers(self, id: str, timestamp: str, body: bytes) -> dict[str, str]:  # noqa: A002
        return {
            "content-type": "application/json",
            "user-agent": "killick",
            "webhook-id": id,
            "webhook-timestamp": timestamp,
            "webhook-signature": " ".join(_signature(signing_key(each), id, timestamp, body) for each in self._secrets),
        }

    def _refused(self, answered: urllib.error.HTTPError, now_us: int) -> WebhookFailed:
        try:
            said = answered.read(ANSWER_BYTES)
        except (OSError, http.client.HTTPException):
            said = b""
        status = answered.code
        reason = f"answered {status}"
        if 300 <= status < 400:
            reason += " and points elsewhere, which is not followed; give the address it points to"
        return (WebhookGone if status == 410 else WebhookFailed)(
            self._to, reason, status_code=status, body=said, retry_after=rate_limit_seconds(answered, now_us=now_us)
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the declared address may receive the delivery."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


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
    _check_age(int(timestamp), seconds(tolerance), (clock or SystemClock()).now_us() / 1_000_000)
    _check_signature(secret, given, body)
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise WebhookRefused("its body is not a JSON object") from None


def _check_age(sent: int, tolerance: float, now: float) -> None:
    if sent < now - tolerance:
        raise WebhookRefused(f"it was sent {now - sent:.0f} s ago, more than {tolerance:g} s")
    if sent > now + tolerance:
        raise WebhookRefused(f"it was sent {sent - now:.0f} s in the future; is this machine's clock right?")


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
