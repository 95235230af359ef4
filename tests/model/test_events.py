"""Events are a closed set, and their bytes are for ever."""

import re
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from killick.errors import EventUnknown
from killick.model import event_codec
from killick.model import events as e
from killick.model.hashing import data_hash

STEP = {"step": "6"}
SAMPLES: dict[str, dict[str, Any]] = {
    "run.started": {"run": "r", "agent": "a", "build": {"version": "1"}, "priority": 5, "tags": ["x"]},
    "fork.made": {"run": "f", "cut": 7, "by": "ann"},
    "run.forked": {"run": "f", "parent": "r", "cut": 7, "generation": 1, "effects": "live"},
    "run.taken": {"epoch": 2, "holder": "w1", "alone": True},
    "lease.lapsed": {"holder": "w1", "until": 9, "steps": ["2"], "alone": True},
    "run.quarantined": {"deaths": 8},
    "run.paused": {"by": "ann"},
    "run.resumed": {"by": "ann"},
    "run.prioritized": {"priority": 3},
    "run.tagged": {"tags": ["x", "y"]},
    "run.diverged": STEP,
    "run.rewound": {"cut": 7, "generation": 1, "keep": [9], "returned": [1]},
    "run.repaired": {"first": 3, "last": 9, "hash_before": "a", "hash_head": "b", "set_aside": 2},
    "run.renewed": {"run": "r2"},
    "cancel.requested": {"compensate": True},
    "run.completed": {},
    "run.failed": STEP,
    "run.cancelled": {},
    "step.intended": {**STEP, "sort": "tool", "name": "pay", "digest": "d", "effect": "at_most_once"},
    "step.started": {**STEP, "sort": "tool", "name": "pay", "digest": "d", "key": "k", "epoch": 2, "deadline": 9},
    "step.edited": {**STEP, "by": "ann", "digest": "d"},
    "step.delayed": {**STEP, "until": 9},
    "step.adopted": {**STEP, "run": "r", "key": "k", "seq": 4},
    "step.drifted": STEP,
    "step.overridden": {**STEP, "by": "ann"},
    "step.ended": {**STEP, "outcome": "failed"},
    "attempt.started": {**STEP, "attempt": 1, "key": "k", "epoch": 2, "deadline": 9, "claims": ["token:x"]},
    "attempt.progressed": {**STEP, "attempt": 1},
    "attempt.ended": {**STEP, "attempt": 1, "outcome": "returned", "usage": {"model": "m", "tokens_in": 3}},
    "attempt.settled": {**STEP, "attempt": 1, "key": "k", "settlement": "happened", "by": "ann"},
    "effect.confirmed": {**STEP, "key": "k", "confirmed": True},
    "decision.made": {**STEP, "by": "model"},
    "wait.opened": {**STEP, "waits_for": "answer", "name": "approve", "to": ["managers"], "deadline": 9},
    "wait.voted": {**STEP, "by": "ann"},
    "wait.closed": {**STEP, "how": "answered", "by": "ann", "message": 3},
    "message.taken": {"message": 3, "name": "paid", "id": "m1"},
    "message.sent": {**STEP, "run": "other", "name": "paid", "id": "m1"},
    "child.spawned": {**STEP, "run": "c", "agent": "b", "on_parent_end": "wait"},
    "child.ended": {**STEP, "run": "c", "status": "failed"},
    "context.changed": {"version": 2, "whole": True, "by": "ann"},
    "context.refused": {"version": 2, "saw": 1, "by": "ann"},
    "contract.bound": {"digest": "d", "name": "claims"},
    "plan.made": {"stages": ["fetch", "pay"]},
    "plan.reached": {"stage": "pay"},
    "note.made": STEP,
    "fact.drawn": {"name": "uuid"},
    "page.evicted": {
        **STEP,
        "pages": ["m3", "m5.1"],
        "tokens": 900,
        "because": "pays",
        "turn": 4,
        "marks": ["a1", "b2"],
    },
    "page.faulted": {**STEP, "page": "m3", "how": "recalled", "tokens": 400, "turn": 6},
    "page.pinned": {**STEP, "page": "m3", "until": 18, "because": "fault", "turn": 6},
    "value.erased": {"reason": "gdpr", "seqs": [4], "pieces": ["h"], "by": "ann"},
    "trigger.set": {"digest": "d", "sort": "cron", "agent": "report", "next": 9},
    "trigger.fired": {"number": 3, "run": "report@2026-11-15T09:00Z", "due": 8, "next": 9},
    "trigger.queued": {"number": 4, "due": 8, "next": 9},
    "trigger.passed": {"first": 5, "last": 8, "because": "missed", "count": 3, "next": 9},
    "trigger.turned": {"holds": True},
    "hook.set": {"position": 7},
    "hook.called": {"position": 8, "run": "r", "seq": 4},
    "hook.failed": {"position": 9, "run": "r", "seq": 5, "attempt": 2, "retry_at": 9},
    "hook.dropped": {"position": 9, "run": "r", "seq": 5, "attempt": 8},
    "hook.moved": {"position": 1000},
    "store.sealed": {"number": 2, "size": 7, "root": "h", "key": "95a61858", "before": 2, "by": "ann"},
    "store.verified": {"began": 1, "reached": 7, "runs": 7, "problems": 1, "done": True, "last": 3, "every": 6},
    "token.issued": {"id": "9k2m4x7q", "name": "ann", "scope": "operator", "hash": "h", "expires_at": 17, "by": "root"},
    "token.revoked": {"id": "9k2m4x7q", "by": "root"},
    "entry.kept": {"name": "1f0a", "labels": {"space": "inner"}},
    "entry.dropped": {"name": "1f0a"},
    "workspace.bound": {"path": "/srv/shop", "vault": "/srv/killick.files", "exclude": ["dist/"]},
    "workspace.captured": {"after": 12, "root": "d", "files": 9, "size_bytes": 4096, "changed": 2, "processes": 1},
    "workspace.restored": {**STEP, "root": "d", "because": "in doubt", "before": "f", "by": "maria"},
}


def test_every_kind_has_a_sample_here() -> None:
    assert SAMPLES.keys() == event_codec.KINDS.keys()


@pytest.mark.parametrize("kind", sorted(event_codec.KINDS))
def test_a_kind_is_noun_and_past_and_round_trips(kind: str) -> None:
    assert re.fullmatch(r"[a-z]+\.[a-z]+", kind)
    event = msgspec.convert({"kind": kind, "at": 5, **SAMPLES[kind]}, event_codec.KINDS[kind])
    body = event_codec.encode(event, b"{}")
    digest = e.to_text(data_hash(b"{}"))
    assert msgspec.json.decode(body) == {"kind": kind, "at": 5, "data": digest, **SAMPLES[kind]}
    assert event_codec.encode(event_codec.decode(body)) == body


def test_the_bytes_of_an_event_are_these() -> None:
    event = e.AttemptStarted(at=7, step="6", attempt=1, key="r:step_6:pay:f3a9b12c", epoch=2)
    expected = b'{"kind":"attempt.started","step":"6","attempt":1,"key":"r:step_6:pay:f3a9b12c","epoch":2,"at":7}'
    assert event_codec.encode(event) == expected
    data = b'{"arguments":{"amount":3}}'
    digest = urlsafe_b64encode(sha256(b"\x02json\x00" + data).digest()).rstrip(b"=")
    assert event_codec.encode(event, data) == expected[:-1] + b',"data":"' + digest + b'"}'


def test_an_event_cannot_be_changed() -> None:
    event = e.RunPaused(at=1)
    with pytest.raises(AttributeError):
        event.at = 2  # type: ignore[misc]


def test_an_older_version_is_upcast_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(fields: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "plan.reached", "at": fields["at"], "stage": fields["label"]}

    monkeypatch.setitem(event_codec.UPCASTERS, "label.reached", renamed)
    assert event_codec.decode(b'{"kind":"label.reached","at":3,"label":"pay"}') == e.PlanReached(at=3, stage="pay")


def test_upcasters_are_applied_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(event_codec.UPCASTERS, "a.b", lambda fields: {**fields, "kind": "a.b/2", "stage": "x"})
    monkeypatch.setitem(event_codec.UPCASTERS, "a.b/2", lambda fields: {**fields, "kind": "plan.reached"})
    assert event_codec.decode(b'{"kind":"a.b","at":3}') == e.PlanReached(at=3, stage="x")


@pytest.mark.parametrize(("kind", "version"), [("step.vanished", 1), ("step.intended/9", 9)])
def test_an_unknown_kind_or_version_is_refused_by_name(kind: str, version: int) -> None:
    with pytest.raises(EventUnknown, match=r"upgrade") as caught:
        event_codec.decode(b'{"kind":"%b","at":1}' % kind.encode())
    assert caught.value.version == version


def test_digests_round_trip_through_text() -> None:
    digest = bytes(range(32))
    assert len(e.to_text(digest)) == 43
    assert e.from_text(e.to_text(digest)) == digest
