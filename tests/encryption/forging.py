"""A writer of an encrypted store who has no key, through the store itself, as on any backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Final

import killick
from encryption.rings import KEY
from killick.engine.control.inbox import ANSWER, answer_id
from killick.errors import KillickError
from killick.log.derived import snapshot_of
from killick.log.log import Log
from killick.model import event_codec
from killick.model import events as e
from killick.model.cipher import Place
from killick.store import Store
from killick.store.protocol import raw_store
from killick.store.records import Append, Delivery, Row

RUN: Final = "r"
paid: list[str] = []


@killick.tool(effect="at_most_once", approve=killick.Approval("mia"))
async def pay(to: str) -> str:
    paid.append(to)
    return f"paid {to}"


@killick.agent
async def cashier(run: killick.Run, to: str) -> str:
    await run.call(pay, to)
    return await run.call(pay, "mallory")


def _opened(raw: Store) -> tuple[int, e.WaitOpened, str]:
    """The open question: its seq, its event, and its digest, which anyone can read."""
    rows = [(row.seq, event_codec.decode(row.body)) for row in raw.read(RUN)]
    seq, event = next(each for each in reversed(rows) if isinstance(each[1], e.WaitOpened))
    assert isinstance(event, e.WaitOpened)
    assert event.digest is not None
    return seq, event, event.digest


def _answer(raw: Store, body: bytes | None = None) -> None:
    seq, event, digest = _opened(raw)
    approved = {"kind": "approve", "value": None, "comment": None, "digest": digest}
    body = json.dumps(approved).encode() if body is None else body
    said = Delivery(run=RUN, id=answer_id(RUN, event.step, seq), name=ANSWER, body=body, by="mia", at_us=raw.now_us())
    raw.deliver([said])


def an_answer_in_clear(raw: Store) -> None:
    _answer(raw)


def an_answer_to_another_question(raw: Store) -> None:
    _answer(raw, next(each.body for each in raw.messages(RUN) if each.name == ANSWER))


def an_answer_from_a_message_with_another_name(raw: Store) -> None:
    _answer(raw, next(each.body for each in raw.messages(RUN) if each.name == "chat"))


def _append(raw: Store, data: bytes | None) -> None:
    _, asked, _ = _opened(raw)
    head = raw.head(RUN)
    assert head is not None
    closed = e.WaitClosed(at=asked.at, step=asked.step, how="answered", by="mia")
    row = Row(head.seq + 1, *event_codec.chained(Place(RUN, head.seq + 1, head.hash), closed, data))
    [done] = raw.append([Append(run=RUN, after=head.seq, before=head.hash, epoch=head.epoch, rows=(row,))])
    assert not isinstance(done, Exception), done


def an_event_in_clear(raw: Store) -> None:
    _append(raw, b'{"answer":{"kind":"approve","value":null},"comment":null}')


def an_event_with_the_data_of_another(raw: Store) -> None:
    before = {type(event_codec.decode(row.body)): row.data for row in raw.read(RUN)}
    _append(raw, before[e.WaitClosed])


def an_event_without_data(raw: Store) -> None:
    _append(raw, None)


def a_run_in_clear(raw: Store) -> None:
    _start(raw, "forged")


def a_run_among_the_logs_of_keys(raw: Store) -> None:
    _start(raw, "killick:key:forged")


def _start(raw: Store, run: str) -> None:
    log = Log(raw)
    log.create(e.RunStarted(at=raw.now_us(), run=run, agent="cashier"), {"input": "mallory"})
    log.close()


FORGERIES: Final[list[Callable[[Store], None]]] = [
    an_answer_in_clear, an_answer_to_another_question, an_answer_from_a_message_with_another_name, an_event_in_clear,
    an_event_with_the_data_of_another, an_event_without_data, a_run_in_clear, a_run_among_the_logs_of_keys,
]  # fmt: skip


def forge(url: str, forgery: Callable[[Store], None]) -> None:
    """An approved payment, and a question about another one; then a forgery, which no execution and no verification
    takes for an approval."""
    paid.clear()
    kd = killick.open(url, keys=KEY)
    kd.start(cashier, "ann", id=RUN)
    kd.advance(RUN)
    kd.answer(RUN, "approve", by="mia")
    kd.advance(RUN)
    digest = kd.inbox()[0].digest
    kd.send(RUN, "chat", {"kind": "approve", "value": None, "comment": None, "digest": digest}, by="mia")
    assert kd.store.verify().problems == []
    forgery(raw_store(kd.runtime.store))
    if url != "memory:":
        kd.close()
        kd = killick.open(url, keys=KEY)
    with closing(kd):
        for run in (RUN, "forged", "killick:key:forged"):
            with suppress(KillickError):
                kd.advance(run)
        assert paid == ["ann"]
        assert not kd.store.verify().holds


def forge_a_snapshot(url: str) -> None:
    """A snapshot that says that a waiting run has completed is not read."""
    with killick.open(url, keys=KEY) as kd:
        kd.start(cashier, "ann", id=RUN)
        kd.advance(RUN)
        raw, log = raw_store(kd.runtime.store), kd.runtime.log
        head = log.head(RUN)
        fold, ledger = log.folds(RUN, head.seq)
        fold.facts.status = "completed"
        forged = snapshot_of(fold, ledger, Place(RUN, head.seq, head.hash), None)
        raw.append([Append(run=RUN, after=head.seq, before=head.hash, epoch=head.epoch, snapshot=forged)])
        assert raw.snapshots(RUN)
        assert kd.state(RUN).status == "waiting"
        raw.append([Append(run=RUN, after=head.seq, before=head.hash, epoch=head.epoch, snapshot=forged)])
        assert kd.store.verify().problems
