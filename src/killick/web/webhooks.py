"""Incoming webhooks: signed requests of other services become named events and messages to runs.

The signature is the proof, in the form of Standard Webhooks; no token is asked for. Each name has a secret of its own,
and its sender publishes events of that name and no other. A redelivery is received once: the webhook's id is
the event's, and old requests are refused before the id is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from starlette.concurrency import run_in_threadpool

from killick.errors import DeclarationRefused, RunUnknown
from killick.logger import get_logger
from killick.model import events as e
from killick.store.records import OWN_AGENTS
from killick.web.idempotency import IdempotencyKeys
from killick.web.problems import Problem
from killick.web.routes import Call, Nothing, post
from killick.workers.services import Secrets, signing_key
from killick.workers.webhooks import webhook_verify

if TYPE_CHECKING:
    from killick.client.client import Client


logger: Final = get_logger("killick")


class HookAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Which webhook."""

    name: Annotated[str, msgspec.Meta(description="Its name here, which is that of the event.")]


class HookToRunAsked(HookAsked, frozen=True, kw_only=True):
    """Which webhook, for which run."""

    run: Annotated[str, msgspec.Meta(description="The run that waits for it.")]


class WebhookReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a webhook."""

    name: str
    id: str
    receivers: Annotated[
        int,
        msgspec.Meta(
            description="How many triggers received it, each of which starts a run; 1 where it was for a run."
        ),
    ]


@post("/hooks/{name}", scope=None, status=202, natural=True)
async def receive(call: Call[HookAsked, Nothing]) -> WebhookReceipt:
    """Receive a webhook: publish its body as the event of its name.

    Its body is a JSON object; `webhook-id`, `webhook-timestamp` and `webhook-signature` are as Standard Webhooks has
    them, not older than five minutes. The id makes it count once. 404 if no trigger listens to the event.
    """
    name = call.asked.name
    id_, body = await _verified(call, name)
    triggers = call.client.as_async().triggers
    receivers = await triggers.publish(name, body, id=_message_id(name, id_), by=f"webhook:{name}")
    if not receivers:
        logger.warning("webhook %s (%s): refused, no trigger listens to this event; start a worker with one", name, id_)
        raise Problem(404, f"{name}: no trigger listens to this event; send it again later", code="trigger_unknown")
    return WebhookReceipt(name=name, id=id_, receivers=receivers)


@post("/hooks/{name}/runs/{run}", scope=None, natural=True)
async def receive_for_run(call: Call[HookToRunAsked, Nothing]) -> WebhookReceipt:
    """Receive a webhook for one run: send it the body, as the message that it waits for by that name.

    The run's id is no secret: a caller with the secret of this name may send to every run.
    """
    name = call.asked.name
    id_, body = await _verified(call, name)
    await run_in_threadpool(_send, call.client, call.asked.run, name, body, _message_id(name, id_))
    return WebhookReceipt(name=name, id=id_, receivers=1)


def _send(client: Client, run: str, name: str, body: Any, message: str) -> None:
    row = client.runtime.store.index(run)
    if row is not None and row.agent.startswith(OWN_AGENTS):
        raise RunUnknown(run)  # callers may not write to Killick's internal logs
    while row is not None and row.status == "completed":
        # A redelivered message was received by the run that this one continues: it is not for the successor.
        if client.runtime.store.message(run, message) is not None:
            return
        last = client.runtime.log.event(run, client.runtime.log.head(run).seq)
        if not isinstance(last, e.RunRenewed):
            break
        run = last.run
        row = client.runtime.store.index(run)
    client.send(run, name, body, id=message, by=f"webhook:{name}")


async def _verified(call: Call[Any, Any], name: str) -> tuple[str, Any]:
    """The id and the document of a webhook that holds. Who has no secret learns not even which names there are."""
    secret = call.context.webhooks.get(name) or call.client.runtime.ids.key().hex()
    headers, path = call.request.headers, call.request.url.path
    document = webhook_verify(secret, headers, await call.request.body(), clock=call.client.runtime.clock)
    # The signature does not cover the path: without this, one webhook would count for every run.
    if not await run_in_threadpool(IdempotencyKeys(call.client).bind, _message_id(name, headers["webhook-id"]), path):
        raise Problem(409, "this webhook was sent to another address before; give each its own id", code="id_reused")
    return headers["webhook-id"], document


def check(webhooks: Mapping[str, Secrets]) -> None:
    """Say at once which webhook cannot work: its name is none for an event, or its secret is not there."""
    for name, secret in webhooks.items():
        if not name or name.startswith(OWN_AGENTS):
            raise DeclarationRefused(name, "is not a valid event name; use one such as 'order.created'")
        for each in (secret,) if isinstance(secret, str) else secret:
            signing_key(each, name=name)


def _message_id(name: str, id_: str) -> str:
    return f"webhook:{name}:{id_}"
