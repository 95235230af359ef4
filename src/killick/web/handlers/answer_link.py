"""Answer links: one question, shown to and answered by the person whom a signed link is for. No login is needed.

The token of a link is in the fragment of its address: a script of the page sends it in the body of a POST. Reading
changes nothing, since mail scanners open links. An answer takes the way of the inbox, and counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from killick.clock import timestamp
from killick.engine.control.inbox import may_answer
from killick.engine.views import Wait
from killick.errors import AccessRefused, AnswerRefused, NotAsked
from killick.history.run_info import waits_of
from killick.presenting.documents import Document
from killick.web.handlers import inbox
from killick.web.handlers.inbox import AnswerRequest, AnswerResult, InboxQuestion, WaitAsked
from killick.web.problems import Problem
from killick.web.render import render
from killick.web.routes import Call, Person, post
from killick.workers.answer_links import PATH, SECRET, URL, Link, is_configured, outcome, read

if TYPE_CHECKING:
    from killick.web.app_context import AppContext


Token = Annotated[str, msgspec.Meta(min_length=1, max_length=6000, description="What follows # in the link.")]


class LinkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link."""

    link: Token


class LinkAnswerRequest(AnswerRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer by link."""

    link: Token


class LinkedQuestion(Document, frozen=True):
    """The question of an answer link, the person whom the link is for, and its expiry."""

    question: InboxQuestion | None = None
    by: str = ""
    expires_at_us: int | None = None


def read_link(call: Call[Any, Any], token: str, *, is_personal: bool = True) -> Link:
    """What a link of this server says. Raises a Problem where it is forged, altered or expired."""
    if not is_configured():
        raise Problem(404, f"this server has no answer links; set {URL} and {SECRET} for it", code="not_found")
    try:
        link = read(call.client.runtime.store, token, call.now_us)
        if bool(link.by) != is_personal:
            raise AccessRefused("this link", "is for another way to answer; open the original message")
    except AccessRefused as error:
        raise Problem(403, f"this link {error.reason}", code="link_refused") from None
    return link


def open_wait(call: Call[Any, Any], link: Link, by: str) -> Wait:
    """The open question of a link, for a person who is asked; from here on the call is theirs. Raises a Problem or
    AnswerRefused that says in one line why they cannot answer it."""
    client, id_ = call.client, f"{link.run}:{link.step}"
    store, state = client.runtime.store, client.state(link.run)
    if (said := outcome(client.runtime.log, link.run, link.opened)) is not None:
        raise Problem(409, f"{said}; nothing is left to answer", code="already_answered")
    wait = next((each for each in waits_of(store, state) if each.step == link.step and each.verbs), None)
    if wait is None:
        raise AnswerRefused(id_, f"it is not asked any more; the run is {state.status}")
    if not link.is_about(store, wait):
        raise AnswerRefused(id_, "the question has changed since this was sent; open the newest message")
    if not may_answer(by, wait, wait.may, client.runtime.engine.roles):
        raise NotAsked(id_, by=by, may=wait.may or wait.to)
    call.request.state.killick_person = call.person = Person(by, "operator")
    return wait


def _blank(_: Call[Any, Any]) -> LinkedQuestion:
    return LinkedQuestion()


def routes(context: AppContext) -> list[StarletteRoute]:
    """The page that a link opens, which has no question yet: the token does not leave the browser with its address."""

    def opened(request: Request) -> Response:
        return render(
            context, request, "answer.html", person=None, doc=None, twin=None, problem=None,
            now=timestamp(context.client.runtime.clock.now_us()),
        )  # fmt: skip

    return [StarletteRoute(PATH, opened, methods=["GET"])]


@post(f"{PATH}/question", scope=None, natural=True, page="answer.html", blank=_blank)
def shown(call: Call[Any, LinkRequest]) -> LinkedQuestion:
    """The one question of an answer link. Changes nothing."""
    link = read_link(call, call.body.link)
    found = inbox.question(call.client, open_wait(call, link, link.by), link.by)
    return LinkedQuestion(question=found, by=link.by, expires_at_us=link.until * 1_000_000)


@post(PATH, scope=None, natural=True)
def answer(call: Call[Any, LinkAnswerRequest]) -> AnswerResult:
    """Answer the question of an answer link, once, as the person whom it is for."""
    link = read_link(call, call.body.link)
    return answer_linked(call, open_wait(call, link, link.by), call.body, link.channel)


def answer_linked(call: Call[Any, Any], wait: Wait, body: AnswerRequest, channel: str | None = None) -> AnswerResult:
    """Answers as the inbox does. Without a key: a repeated request is a second answer, which is refused."""
    bound, asked = replace(body, digest=body.digest or wait.digest), WaitAsked(wait=wait.id)
    return inbox.answer_by(Call(call.context, call.request, call.person, asked, bound, None), channel)
