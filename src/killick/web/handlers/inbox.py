"""The inbox: open questions, the most urgent first, and their answers. Decides nothing: the runtime does.

An answer is the caller's own and bound to the displayed question: an old screen answers no new question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec.structs import asdict

from killick.client import answers
from killick.client import inbox as asked
from killick.client.client import Client
from killick.engine.approval import argument_edits
from killick.engine.control.inbox import ANSWER, VOTE, Verb, body_of
from killick.engine.views import Wait
from killick.errors import AlreadyAgreed, AlreadyAnswered, AnswerRefused
from killick.history.run_info import pending_answer, waits_of
from killick.model.chunks import through_codec
from killick.model.codec import digest as value_digest
from killick.model.state import State
from killick.presenting import approvals
from killick.presenting.documents import Attempt, Document, Question, attempt, open_wait
from killick.web.forms import NOTHING, unmasked
from killick.web.handlers.step_detail import about
from killick.web.problems import Problem
from killick.web.routes import Call, get, post
from killick.workers.answer_links import SAID

Kind = Literal["approval", "question", "doubt"]
ANSWERED_MAX: Final = 8
_PEOPLE: Final = ("answer", "settlement")


class InboxAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Whose questions, and from where on."""

    to: Annotated[str, msgspec.Meta(max_length=200, description="Only questions to this person or role.")] | None = None
    mine: Annotated[bool, msgspec.Meta(description="Only what the caller may answer and has not.")] = False
    asks: Annotated[tuple[Kind, ...], msgspec.Meta(max_length=3, description="Only these kinds.")] = ()
    wait: Annotated[str, msgspec.Meta(max_length=1000, description="The question that the page shows.")] | None = None
    cursor: Annotated[str, msgspec.Meta(max_length=200, description="`next` of the page before.")] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="At least so many, where there are.")] = 25


class WaitAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A wait, by its id."""

    wait: Annotated[str, msgspec.Meta(min_length=1, max_length=1000, description="The wait's id, as in `claim_17:3`.")]


class InboxQuestion(Question, frozen=True, kw_only=True):
    """A question to a person. `why_not` says why the caller cannot answer it; `attempt` is the one in doubt."""

    why_not: str | None
    attempt: Attempt | None


class AnsweredQuestion(Document, frozen=True):
    """Something that was answered, and which its run is yet to take."""

    wait: str
    run: str
    by: str | None
    at_us: int
    verb: str
    prompt: str | None


class Inbox(Document, frozen=True):
    """Open questions, the most urgent first; and recently answered ones. `one` is the question that was asked for, and
    `gone` says why it is not among them."""

    questions: tuple[InboxQuestion, ...]
    answered: tuple[AnsweredQuestion, ...]
    runs: tuple[str, ...]
    to: str | None
    mine: bool
    asks: tuple[Kind, ...] = ()
    one: str | None = None
    gone: str | None = None
    next: str | None = None


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer. `digest` is the question's, as it was shown: an answer to another version is refused."""

    verb: Verb
    value: Any = None
    comment: Annotated[str, msgspec.Meta(max_length=10_000)] | None = None
    digest: Annotated[str, msgspec.Meta(max_length=200)] | None = None


class AnswerResult(Document, frozen=True):
    """The result of an answer, and the next step."""

    wait: str
    run: str
    did: str
    next: str


# reading ------------------------------------------------------------------------------------------


@get("/inbox", page="inbox.html")
def inbox(call: Call[InboxAsked, Any]) -> Inbox:
    """Everything that waits for a person, the most urgent first."""
    client, wanted = call.client, call.asked

    def chosen(wait: Wait) -> bool:
        kind = not wanted.asks or open_wait(wait).asks in wanted.asks
        return (
            kind
            and asked.addressed(wanted.to)(wait)
            and (not wanted.mine or approvals.why_not(client, wait, call.person.name) is None)
        )

    found = asked.page(client.runtime.log, chosen, now_us=call.now_us, limit=wanted.limit, after=wanted.cursor)
    done: list[Wait] = []
    if wanted.cursor is None:
        done = asked.page(client.runtime.log, chosen, now_us=call.now_us, answered=True, limit=ANSWERED_MAX).waits
    doubts_first = sorted(found.waits, key=lambda wait: wait.waits_for != "settlement")
    questions, gone = tuple(question(client, wait, call.person.name) for wait in doubts_first), None
    if wanted.wait is not None and wanted.wait not in (each.id for each in questions):
        named, gone = _named(client, wanted.wait, call.person.name)
        questions = (*named, *questions)
    return Inbox(
        questions=questions,
        answered=tuple(_answered(client, done[:ANSWERED_MAX])),
        runs=tuple(dict.fromkeys(each.run for each in questions)),
        to=wanted.to, mine=wanted.mine, asks=wanted.asks, one=wanted.wait, gone=gone, next=found.next,
    )  # fmt: skip


@get("/inbox/{wait}", page="inbox.html")
def one(call: Call[WaitAsked, Any]) -> Inbox:
    """One question; or who answered it first."""
    questions, gone = _named(call.client, call.asked.wait, call.person.name)
    run = call.asked.wait.rpartition(":")[0]
    return Inbox(questions=questions, answered=(), runs=(run,), to=None, mine=False, one=call.asked.wait, gone=gone)


def _named(client: Client, wait: str, person: str) -> tuple[tuple[InboxQuestion, ...], str | None]:
    """A question by its id; or none, and why."""
    run, _, step = wait.rpartition(":")
    state = client.state(run)
    found = [each for each in waits_of(client.runtime.store, state) if each.step == step and each.waits_for in _PEOPLE]
    if not found or pending_answer(client.runtime.log, run, found[0]) is not None:
        return (), _gone(client, run, step, state)
    return tuple(question(client, each, person) for each in found), None


def question(client: Client, wait: Wait, person: str) -> InboxQuestion:
    """A wait with the facts that a person needs to answer it."""
    state = client.runtime.log.state(wait.run)
    why_not = approvals.why_not(client, wait, person)
    if state.status == "code_mismatch":
        why_not = "its code no longer fits its record; the run takes answers again when the code is fixed"
    return InboxQuestion.of(
        state.fold.facts, **asdict(open_wait(wait)), why_not=why_not,
        attempt=_last_attempt(client, state, wait.step) if wait.waits_for == "settlement" else None,
    )  # fmt: skip


def _last_attempt(client: Client, state: State, number: str) -> Attempt | None:
    timeline = about(client.runtime.log, state.run, state.fold, number)
    step = timeline.step(number) if timeline is not None else None
    return attempt(step.attempts[-1]) if step is not None and step.attempts else None


def _answered(client: Client, waits: Iterable[Wait]) -> Iterator[AnsweredQuestion]:
    """Who answered each wait, as far as its run has not taken the answer."""
    for wait in waits:
        if (found := pending_answer(client.runtime.log, wait.run, wait)) is not None:
            prompt = argument_edits.call(wait.intention) if wait.rule is not None else wait.prompt
            yield AnsweredQuestion.of(
                wait, wait=wait.id, by=found.by, at_us=found.at_us, verb=found.verb, prompt=prompt
            )


def _gone(client: Client, run: str, step: str, state: State) -> str:
    """Why there is nothing to answer any more."""
    for message in reversed(client.runtime.store.messages(run)):
        if message.name == ANSWER and f":{step}@" in message.id:
            body = cast("Mapping[str, Any]", body_of(client.runtime.log, message))
            return f"{message.by or 'a person'} answered first: {body.get('kind')}"
    if state.fold.step(step) is None:
        raise Problem(404, f"{run}: asks nothing at step {step}", code="wait_unknown")
    return f"it is not asked any more; the run is {state.status}"


# answering ----------------------------------------------------------------------------------------


@post("/inbox/{wait}", natural=True)
def answer(call: Call[WaitAsked, AnswerRequest]) -> AnswerResult:
    """Answer a run's question; the first answer counts."""
    return answer_by(call)


def answer_by(call: Call[WaitAsked, AnswerRequest], channel: str | None = None) -> AnswerResult:
    """Answers as the caller, who may have it by a link that was sent to a channel."""
    client, wait, body, by = call.client, call.asked.wait, call.body, call.person.name
    run, _, step = wait.rpartition(":")
    found = next((each for each in waits_of(client.runtime.store, client.state(run)) if each.step == step), None)
    value, saw = body.value, body.digest
    if body.digest is None and body.verb in ("approve", "edit"):
        raise AnswerRefused(wait, f"{body.verb!r} needs the version that was shown; send the question's digest with it")
    if found is not None and call.mask:
        intention = cast("Mapping[str, Any]", found.intention or {})
        value = unmasked(value, intention.get("arguments") if body.verb == "edit" else NOTHING)
        if saw == call.mask.keyed(found.digest or ""):
            saw = found.digest  # as it was shown
    if found is not None and found.rule is not None and body.verb == "edit" and value is not None:
        value = argument_edits.checked(found, value)
    is_free = found is not None and found.rule is None and body.verb in ("edit", "respond")
    if found is not None and is_free and (misfit := argument_edits.misfit(found.schema, value)) is not None:
        raise AnswerRefused(found.id, misfit)  # while the person can correct it; the run would discard it later
    try:
        given = {"by": by, "comment": body.comment, "saw": saw, "tx": None, "channel": channel}
        client.runtime.notify(answers.answer(client.runtime.engine, found or wait, body.verb, value, **given))
    except (AlreadyAnswered, AlreadyAgreed) as first:
        # A client that lost the response repeats the request with its key; a different answer is a different request.
        if call.key is None or first.by != by or not _said(client, run, step, by, body.verb, value, body.comment):
            raise
    did, following = SAID[body.verb], ""
    if found is not None:
        did += approvals.answered(found, body.verb, value)
        following = approvals.lacks(found, by, body.verb) or approvals.continues(
            client, run, f"{run} continues when a worker takes it"
        )
        voters = approvals.voters(found, by, body.verb)
        did += f": {asked.agreement(found.need, voters)}" if voters else ""
    return AnswerResult(wait=wait, run=run, did=did, next=following)


def _said(client: Client, run: str, step: str, by: str, verb: str, value: Any, comment: str | None) -> bool:
    """Whether a person's last answer to a question equals this one."""
    for message in reversed(client.runtime.store.messages(run)):
        if message.name in (ANSWER, VOTE) and message.by == by and f":{step}@" in message.id:
            said = cast("Mapping[str, Any]", body_of(client.runtime.log, message))
            there = (said.get("kind"), said.get("value"), said.get("comment"))
            return value_digest(there) == value_digest((verb, through_codec(value, at="value"), comment))
    return False
