"""Other services: their addresses, the secrets that they share with us, and a POST to them.

A secret is read when it is needed and never recorded. Redirects are not followed. An unencrypted connection to another
machine needs `insecure=True`.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import SplitResult, urlsplit

from killick.browser_guard import is_loopback
from killick.engine.failures import rate_limit_seconds
from killick.errors import DeclarationRefused, WebhookFailed, WebhookGone, WebhookRefused

ANSWER_BYTES: Final = 500
"""How many bytes of a failed response are kept."""

SPARE_SECONDS: Final = 5.0
"""Extra time of a call, so that the connection's own timeout error is the recorded one."""

KEY_BYTES_MIN: Final = 16
"""The shortest key of a signature: a shorter one can be guessed, since receivers see what it signs."""

Secrets: TypeAlias = str | Sequence[str]
"""A secret, or several during rotation: `whsec_…`, plain text, or `env:NAME` to read a variable."""


# secrets ------------------------------------------------------------------------------------------


def checked_secrets(name: str, secret: Secrets) -> tuple[str, ...]:
    """The secrets of a declaration. Raises DeclarationRefused for one that can be guessed."""
    secrets = (secret,) if isinstance(secret, str) else tuple(secret)
    if not secrets or not all(secrets):
        raise DeclarationRefused(name, "is signed; give secret='env:NAME', or the secret itself")
    for each in secrets:
        if not each.startswith("env:"):
            signing_key(each, name=name)
    return secrets


def secret_text(secret: str, name: str = "secret") -> str:
    """A secret, read from the environment where it names a variable. An error about it never contains it."""
    if secret.startswith("env:"):
        variable = secret.removeprefix("env:")
        secret = os.environ.get(variable, "")
        if not secret:
            raise DeclarationRefused(name, f"the environment has no {variable}; set it to the secret")
    if not secret:
        raise DeclarationRefused(name, "is empty, so anyone could sign; set it")
    return secret


def signing_key(secret: str, *, name: str = "secret") -> bytes:
    """The signing key of a secret. `name` is what an error calls it. Raises DeclarationRefused for one too short."""
    secret = secret_text(secret, name)
    if not secret.startswith("whsec_"):
        key = secret.encode()
    else:
        try:
            key = b64decode(secret.removeprefix("whsec_"), validate=True)
        except (NotBase64, ValueError):
            key = b""
        if not key:
            raise DeclarationRefused(name, "its part after whsec_ is not base64; copy it again")
    if len(key) < KEY_BYTES_MIN:
        raise DeclarationRefused(name, f"has a secret of fewer than {KEY_BYTES_MIN} bytes; take a longer one")
    return key


def lacking(*secrets: str, read: Callable[[str], object] = secret_text) -> str | None:
    """Which of these secrets this process lacks, and what to do; None if it has all. `read`: signing_key, for keys."""
    try:
        return None if all(map(read, secrets)) else ""
    except DeclarationRefused as error:
        return error.reason


def check_age(sent: int, tolerance: float, now: float) -> None:
    """Refuses a request that is older than the tolerance, or from the future. Raises WebhookRefused."""
    if sent < now - tolerance:
        raise WebhookRefused(f"it was sent {now - sent:.0f} s ago, more than {tolerance:g} s")
    if sent > now + tolerance:
        raise WebhookRefused(f"it was sent {sent - now:.0f} s in the future; is this machine's clock right?")


# addresses ----------------------------------------------------------------------------------------


def checked_address(
    name: str, url: str, *, insecure: bool, schemes: tuple[str, str] = ("http", "https"), user: bool = False
) -> SplitResult:
    """The parts of an address. Raises DeclarationRefused for one that is none, or is not encrypted."""
    plain, encrypted = schemes
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError:
        host, address = None, SplitResult("", "", "", "", "")
    if host is None or address.scheme not in schemes:
        raise DeclarationRefused(name, f"is not the address of a service; give one such as {encrypted}://example.org")
    if address.username is not None and not user:
        raise DeclarationRefused(name, "its address names a user; remove it, the signature identifies the sender")
    if address.scheme == plain and not insecure and not is_loopback(host):
        raise DeclarationRefused(name, f"{plain}://{host} is not encrypted; use {encrypted}://, or give insecure=True")
    return address


class Service:
    """Another service that takes POSTs. `origin` is its address without parts that may be secret."""

    def __init__(self, name: str, url: str, timeout: float, *, insecure: bool = False) -> None:
        address = checked_address(name, url, insecure=insecure)
        self._url = url
        self._timeout = timeout
        self.host = address.hostname or ""
        self.origin = f"{address.scheme}://{address.netloc}"
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if is_loopback(self.host):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def post(
        self, body: bytes, headers: Mapping[str, str], *, now_us: int, path: str = "", reply_bytes: int = 0
    ) -> bytes:
        """Sends JSON to the address, or to a path below it; returns the start of the reply. Raises WebhookFailed."""
        sent = {"content-type": "application/json", "user-agent": "killick", **headers}
        request = urllib.request.Request(self._url + path, body, sent, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as answered:
                reply: bytes = answered.read(reply_bytes)
                return reply
        except urllib.error.HTTPError as refused:
            with refused:
                raise self._refused(refused, now_us) from None
        except (OSError, http.client.HTTPException) as broken:
            reason = getattr(broken, "reason", None) or broken
            if isinstance(reason, TimeoutError):
                raise WebhookFailed(self.origin, f"no answer within {self._timeout:g} s") from None
            raise WebhookFailed(self.origin, f"could not be reached: {reason or type(broken).__name__}") from None

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
            self.origin, reason, status_code=status, body=said, retry_after=rate_limit_seconds(answered, now_us=now_us)
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the declared address may receive the delivery."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
