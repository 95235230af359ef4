"""The answer of an approver to one call: approved, edited, rejected, answered instead, or expired."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from killick.errors import Rejected

T = TypeVar("T")

PERSON: Final = "rejected_by_person"
INSTEAD: Final = "answered_instead"
EXPIRED: Final = "expired"
_KINDS: Final = {PERSON: "reject", INSTEAD: "respond", EXPIRED: "expired"}


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An approver's answer to a call.

    kind     "approve", "edit", "reject", "respond" or "expired"
    by       the name of the person
    comment  their comment
    changed  the edits, by argument: the old and the new value
    """

    kind: str
    by: str | None = None
    comment: str | None = None
    changed: dict[str, tuple[Any, Any]] = {}

    def __str__(self) -> str:
        changes = ", ".join(f"{name} from {old!r} to {new!r}" for name, (old, new) in self.changed.items())
        said = f" ({self.comment})" if self.comment else ""
        return (
            f"{self.by or 'a person'} changed {changes}{said}" if changes else f"{self.by or 'a person'} agreed{said}"
        )


class Proposed(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The outcome of a proposed call.

    kind     "approve" or "edit": it was done; "reject", "respond" or "expired": it was not
    result   the result of the tool, if it was done
    value    the response of the person in its place
    changed  the edits, by argument: the old and the new value
    by       the name of the person
    comment  their comment
    """

    kind: str
    result: T | None = None
    value: Any = None
    changed: dict[str, tuple[Any, Any]] = {}
    by: str | None = None
    comment: str | None = None

    @property
    def ran(self) -> bool:
        """Whether the call was done."""
        return self.kind in ("approve", "edit")


def after_edit(
    before: CallAnswer | None, by: str, comment: str | None, changed: Mapping[str, tuple[Any, Any]]
) -> CallAnswer:
    """The answer after an edit: every change so far, from the agent's arguments to the current ones."""
    merged = dict(before.changed) if before is not None else {}
    for name, (old, new) in changed.items():
        merged[name] = (merged[name][0] if name in merged else old, new)
    kept = {name: pair for name, pair in merged.items() if pair[0] != pair[1]}
    return CallAnswer(kind="edit", by=by, comment=comment, changed=kept)


def after_approval(before: CallAnswer | None, by: str | None, comment: str | None) -> CallAnswer:
    """The answer after an approval. An earlier edit takes precedence."""
    return (
        before if before is not None and before.kind == "edit" else CallAnswer(kind="approve", by=by, comment=comment)
    )


def proposed(result: T, answer: CallAnswer | None) -> Proposed[T]:
    """A suggested action that was done."""
    if answer is None:
        return Proposed(kind="approve", result=result)
    return Proposed(kind=answer.kind, result=result, changed=answer.changed, by=answer.by, comment=answer.comment)


def declined(rejected: Rejected) -> Proposed[Any]:
    """A suggested action that a person declined; a rule's rejection is raised instead."""
    kind = _KINDS.get(rejected.code)
    if kind is None:
        raise rejected
    details = rejected.failure.details
    return Proposed(kind=kind, value=rejected.response, by=rejected.by, comment=details.get("comment"))
