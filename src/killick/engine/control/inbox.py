"""The inbox of a run: the engine's own messages, their ids and bodies; which answers a wait takes, and whose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from killick.engine.views import Wait as WaitView
from killick.errors import AnswerRefused
from killick.log.log import Log
from killick.log.slots import answer_id as answer_id
from killick.model import events as e
from killick.model.chunks import pack
from killick.model.cipher import message_place
from killick.model.facts import Wait, is_model
from killick.store.records import COMMAND as COMMAND
from killick.store.records import Delivery, Message

FORKED: Final = "forked:"
"""The beginning of the id of a command that announces a fork to the run's holder."""

ANSWER: Final = "killick.answer"

VOTE: Final = "killick.vote"
"""The name of an answer that does not end a wait by itself, because several people have to agree."""

CHILD: Final = "killick.child"
SAID: Final = "killick.said"

APPROVE: Final = "approve"
"""The rule by which a tool itself, or a proposal, asks a person."""

STARTED: Final = "started this run"
EDITED: Final = "edited this call"
OVERTAKEN: Final[dict[type[e.Event], str]] = {
    e.RunCompleted: "completed", e.RunFailed: "failed", e.RunCancelled: "was cancelled", e.RunRenewed: "was renewed",
}  # fmt: skip

Verb = Literal["approve", "reject", "edit", "respond", "happened", "not", "stop"]
QUESTION_VERBS: Final[tuple[Verb, ...]] = ("approve", "reject", "edit", "respond")
SETTLEMENT_VERBS: Final[tuple[Verb, ...]] = ("happened", "not", "stop")


_DERIVED: Final = ("answer:", FORKED, "child:", "permit:", "sent:")
"""How the ids begin that the engine derives. A caller's id begins otherwise, and takes the place of none of them."""


def refuse_own(run: str, name: str, id: str | None) -> None:  # noqa: A002
    """Refuse a message of a caller under a name or an id of Killick's own."""
    if name.startswith("killick."):
        raise AnswerRefused(run, f"messages named {name!r} are Killick's own; choose another name")
    if id is not None and id.startswith(_DERIVED):
        raise AnswerRefused(run, f"message ids such as {id!r} are Killick's own; choose another id")


def sent_id(run: str, step: e.StepId) -> str:
    """The id of a message that a run sends."""
    return f"sent:{run}:{step}"


def child_id(run: str, ended: int) -> str:
    """The id of the message that a child ended. One that was rewound ends again, with another event."""
    return f"child:{run}@{ended}"


def body_of(log: Log, message: Message) -> Any:
    return log.unpacked(message.run, message.body)


def message_taken(message: Message, at: int, *, step: e.StepId | None = None) -> e.MessageTaken:
    """The event of a message that leaves the inbox."""
    return e.MessageTaken(at=at, message=message.number, name=message.name, id=message.id, step=step, by=message.by)


def delivery(
    log: Log, run: str, name: str, body: Any, *, id: str, by: str | None, at_us: int, key_of: str | None = None,  # noqa: A002
) -> Delivery:  # fmt: skip
    """A message on its way, encrypted as the values of its run, or of another whose fork that is to be."""
    cipher = log.cipher(key_of or run)
    packed = pack(body, at="body", cipher=cipher)
    raw = packed.raw
    if cipher is not None:
        raw = cipher.encrypt_json(raw, message_place(log.root_of(run, fork_of=key_of), id, name, by, at_us))
    return Delivery(run=run, id=id, name=name, body=raw, by=by, at_us=at_us, pieces=tuple(packed.blobs))


def question_verbs(has_options: bool, has_type: bool) -> list[Verb]:
    """The answers that a question takes. Approving names no value, so it answers nothing that wants one."""
    if has_options:
        return ["reject", "respond"]
    return ["reject", "edit", "respond"] if has_type else list(QUESTION_VERBS)


def link_vote_id(answer: str, channel: str) -> str:
    """The id of a vote by answer link: one for each channel. No name of a person begins with a space."""
    return f"{answer}# {channel}"


def verbs_of(waits_for: str) -> tuple[Verb, ...]:
    """The answers that a wait takes of which nothing else is known."""
    return {"answer": QUESTION_VERBS, "settlement": SETTLEMENT_VERBS}.get(waits_for, ())


def separated(apart: Mapping[str, str] | None, by: str | None, verb: str, *, is_call: bool) -> str | None:
    """Why an answer would not separate duties; None where it does, or where nothing has to be separate.

    `apart` says what each person did who cannot approve. Anyone may reject, and propose other arguments of a call.
    """
    if apart is None or verb == "reject" or (verb == "edit" and is_call):
        return None
    if by is None:
        return "duties are separate here; say who you are"
    return f"{by} {apart[by]}; another person has to answer, since duties are separate here" if by in apart else None


def asks_person(by: str | None, wait: Wait | WaitView | e.WaitOpened, may: Iterable[str] = ()) -> bool:
    """Whether a wait is not for this model to answer: it asks others by name, for an approval, or whether an effect
    happened."""
    asked = {*wait.to, *may}
    is_open = not asked and wait.rule is None and wait.waits_for == "answer"
    return wait.waits_for in ("answer", "settlement") and by not in asked and not is_open


def may_answer(
    by: str | None,
    wait: WaitView | e.WaitOpened,
    may: Sequence[str] | None,
    roles: Callable[[str], Iterable[str]] | None,
) -> bool:
    """Whether a caller is an addressee: by name, or by role. Without declared people every person is, and no model."""
    to = wait.to
    if is_model(by) and asks_person(by, wait, may or ()):
        return False
    if not to or (may is None and roles is None):
        return True
    if by is None:
        return False
    if may is not None and by in may:
        return True
    found = None if roles is None else roles(by)
    if found is None:
        return False  # the declared roles have no person of that name, which may be the name of a role
    return by in to or not set((found,) if isinstance(found, str) else found).isdisjoint(to)
