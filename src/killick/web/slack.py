"""The buttons of Slack messages: a signed request of Slack's becomes the answer of the person who pressed one.

The signature is the proof that Slack sent it; the declaration says who the Slack user is on record. Each request counts
once. The answer is durable before the message is updated; the worker updates it too when the question is closed.
"""

from __future__ import annotations

from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs

import msgspec
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from killick.errors import KillickError, WebhookRefused
from killick.logger import get_logger
from killick.type_init import ready
from killick.web.handlers.answer_link import answer_linked, open_wait, read_link
from killick.web.handlers.inbox import AnswerRequest
from killick.web.idempotency import IdempotencyKeys
from killick.web.problems import Problem, problem_of
from killick.web.routes import Call, Nothing, Person
from killick.workers.answer_links import as_asked, outcome, personal_url
from killick.workers.hooks import HOOKS
from killick.workers.services import Service
from killick.workers.slack import SlackChannel, answered

if TYPE_CHECKING:
    from killick.web.app_context import AppContext

RESPOND_SECONDS: Final = 10.0

logger: Final = get_logger("killick.web")


class Pressed(NamedTuple):
    """A button that a person pressed: the Slack user, the button, the question, and where to reply."""

    user: str
    button: str
    token: str
    reply_to: str


def routes(context: AppContext) -> list[StarletteRoute]:
    """Where Slack sends interactions."""
    return [StarletteRoute("/slack/{name}", partial(_receive, context), methods=["POST"])]


async def _receive(context: AppContext, request: Request) -> Response:
    """Receives one interaction. The person reads in Slack why an answer is refused; the status is for Slack."""
    call: Call[Any, Any] = Call(context, request, Person("anybody"), Nothing(), Nothing(), None)
    try:
        channel, pressed = await _verified(call, request.path_params["name"])
        reply = await run_in_threadpool(_reply, call, channel, pressed)
    except Exception as error:
        return problem_of(error).response()
    return Response(background=BackgroundTask(_respond, pressed.reply_to, reply, call.now_us))


async def _verified(call: Call[Any, Any], name: str) -> tuple[SlackChannel, Pressed]:
    hook, body = HOOKS.get(name), await call.request.body()
    if hook is None or not isinstance(hook.fn, SlackChannel):
        raise Problem(404, f"{name}: no such Slack channel; serve the app that declares it", code="not_found")
    signature = hook.fn.verify(call.request.headers, body, call.now_us)
    once = call.client.runtime.ids.key().hex()  # a repeated signature is bound to another request
    if not await run_in_threadpool(IdempotencyKeys(call.client).bind, f"slack:{signature}", once):
        raise WebhookRefused("it was received before")
    try:
        payload = msgspec.json.decode(parse_qs(body.decode(), max_num_fields=10)["payload"][0])
        [action] = payload["actions"]
        pressed = Pressed(payload["user"]["id"], action["action_id"], action["value"], payload["response_url"])
    except (LookupError, TypeError, ValueError, RecursionError):
        raise Problem(400, "it is no pressed button of a message", code="not_an_interaction") from None
    return hook.fn, pressed


def _reply(call: Call[Any, Any], channel: SlackChannel, pressed: Pressed) -> dict[str, Any]:
    """Answers, and returns the message to Slack: the outcome for all, or a line for the person alone."""
    store, log, by = call.client.runtime.store, call.client.runtime.log, channel.people.get(pressed.user)
    if by is None:
        return _alone(f"{pressed.user} has no name here; add this Slack user to people= of killick.slack")
    try:
        link = read_link(call, pressed.token, is_personal=False)
    except Problem as problem:
        return _alone(problem.detail)
    try:
        wait = open_wait(call, link, by)
        if pressed.button == "edit":
            url = personal_url(store, link, by, f"slack {pressed.user}", call.now_us, wait.deadline_us)
            return _alone(f"look at it, and answer as {by}", url)
        body = msgspec.convert({"verb": pressed.button}, ready(AnswerRequest))
        said = answer_linked(call, wait, body).next  # Slack identifies the person: it is no answer by link
    except (Problem, KillickError, msgspec.ValidationError) as error:
        said = str(error)
    if (ended := outcome(log, link.run, link.opened)) is None:
        return _alone(said)
    return {"replace_original": True, **answered(as_asked(log, link.run, link.opened), ended)}


def _alone(text: str, link: str = "") -> dict[str, Any]:
    said = escape(text, quote=False)
    return {"response_type": "ephemeral", "replace_original": False, "text": f"<{link}|{said}>" if link else said}


def _respond(url: str, reply: dict[str, Any], now_us: int) -> None:
    """Sends the reply. A lost one is no loss: the worker updates the message, and a second press says the outcome."""
    try:
        Service("slack", url, RESPOND_SECONDS).post(msgspec.json.encode(reply), {}, now_us=now_us)
    except KillickError as error:
        logger.warning("the reply to a Slack interaction was lost: %s", error)
