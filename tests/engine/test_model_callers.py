"""A caller named `model:…` continues, answers and ends nothing that waits for a person. The engine decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

import killick
from killick import rules
from killick.engine.control.interventions import entries_of, person_only
from killick.errors import AnswerRefused, NotAsked
from killick.log.repair import repair
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.crash_loop import Crashes
from killick.model.facts import Facts
from processes import kinds

MODEL = "model:ops"
PAID: list[int] = []


@killick.tool(name="model_callers_pay", approve="managers")
async def pay(amount: int) -> int:
    PAID.append(amount)
    return amount


@killick.tool(name="model_callers_ring")
async def ring(bell: str) -> str:
    raise ConnectionError("the line is dead")


@killick.agent(contract=killick.Contract("brake", [rules.deny("model_callers_pay")], rejections=2))
async def looping(run: killick.Run) -> str:
    for amount in range(6):
        with suppress(killick.Rejected):
            await run.call(pay, amount)
    return "six tries"


@killick.agent
async def paying(run: killick.Run) -> int:
    return await run.call(pay, 5)


@killick.agent
async def ringing(run: killick.Run) -> str:
    return await run.call(ring, "front")


@killick.agent
async def asking(run: killick.Run) -> Any:
    return (await run.ask("Which color?")).value


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    PAID.clear()
    with killick.open("memory:") as client:
        yield client


def waiting(kd: killick.Client, agent: Any) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(agent, id="r")


def paused_by_its_contract(kd: killick.Client) -> None:
    waiting(kd, looping)
    assert kd.info("r").status == "paused"


def paused_by_a_person(kd: killick.Client) -> None:
    waiting(kd, asking)
    kd.pause("r", by="mia")


def paused_by_a_person_without_a_name(kd: killick.Client) -> None:
    waiting(kd, asking)
    kd.pause("r")


def paused_by_a_model_and_a_person(kd: killick.Client) -> None:
    waiting(kd, asking)
    kd.pause("r", by=MODEL)
    kd.pause("r", by="mia")
    kd.pause("r", by=MODEL)


def repaired(kd: killick.Client) -> None:
    waiting(kd, ringing)
    rows: Any = kd.runtime.store
    rows = rows._runs["r"].rows
    rows[2] = replace(rows[2], hash=bytes(32))
    assert not kd.store.verify().holds
    repair(kd.runtime.log, "r", at=1, reason="a flipped bit")


def quarantined(kd: killick.Client) -> None:
    waiting(kd, asking)
    kd.runtime.log.open("r").append(
        Entry(e.LeaseLapsed(at=1, holder="1-gone")), Entry(e.RunQuarantined(at=1, deaths=8))
    )


def cancelled(kd: killick.Client) -> None:
    waiting(kd, asking)
    kd.cancel("r", by="mia")


def rejected(kd: killick.Client) -> None:
    waiting(kd, paying)
    kd.answer("r", "reject", by="mia")
    with pytest.raises(killick.RunFailed):
        kd.run(paying, id="r")


def skipped(kd: killick.Client) -> None:
    waiting(kd, paying)
    kd.edit.skip("r", "1", by="mia")
    with pytest.raises(killick.RunFailed):
        kd.run(paying, id="r")


def stopped(kd: killick.Client) -> None:
    waiting(kd, ringing)
    kd.answer("r", "stop", by="mia")
    with pytest.raises(killick.RunFailed):
        kd.run(ringing, id="r")


def died(kd: killick.Client) -> None:
    """Its worker died without a word; the next one counts that."""
    kd.start(asking, id="r")
    head = kd.runtime.store.lease("r", "1-gone", seconds=30)
    kd.runtime.log.open("r", head=head).append(Entry(e.RunTaken(at=1, epoch=head.epoch, holder="1-gone")))
    kd.runtime.store.release("r", epoch=head.epoch, left=True)


HELD = [
    paused_by_its_contract, paused_by_a_person, paused_by_a_person_without_a_name, paused_by_a_model_and_a_person,
    repaired, quarantined, cancelled,
]  # fmt: skip
ENDED = [rejected, skipped, stopped, died]


def refused(kd: killick.Client, command: Callable[[], object]) -> None:
    before = kinds(kd, "r")
    with pytest.raises(AnswerRefused, match=r"a model may not .* Ask a person"):
        command()
    assert kinds(kd, "r") == before
    assert {row.id for row in kd.list()} == {"r"}


@pytest.mark.parametrize("put", [*HELD, *ENDED], ids=lambda put: put.__name__)
def test_a_model_does_not_resume_what_waits_for_a_person(
    kd: killick.Client, put: Callable[[killick.Client], None]
) -> None:
    put(kd)
    refused(kd, lambda: kd.resume("r", by=MODEL, because="trust me"))
    if put is not cancelled:
        kd.resume("r", by="mia")
        assert "run.resumed" in kinds(kd, "r") or "run.rewound" in kinds(kd, "r")


@pytest.mark.parametrize("put", HELD, ids=lambda put: put.__name__)
def test_a_model_neither_rewinds_forks_nor_ends_what_waits_for_a_person(
    kd: killick.Client, put: Callable[[killick.Client], None]
) -> None:
    put(kd)
    refused(kd, lambda: kd.fork("r", "start", by=MODEL))
    refused(kd, lambda: kd.rewind("r", "start", by=MODEL))
    refused(kd, lambda: kd.cancel("r", by=MODEL))
    kd.fork("r", "start", id="f", by="mia")


def test_a_model_resumes_what_a_model_paused_and_what_failed_by_itself(kd: killick.Client) -> None:
    waiting(kd, asking)
    kd.pause("r", by="model:other")
    assert kd.resume("r", by=MODEL) == "resumed"

    @killick.agent(name="model_callers_failing")
    async def failing(run: killick.Run) -> None:
        raise ValueError("a bug")

    with pytest.raises(killick.RunFailed):
        kd.run(failing, id="f")
    assert kd.resume("f", by=MODEL) == "resumed where its code failed"


@pytest.mark.parametrize("agent", [paying, ringing], ids=["approval", "doubt"])
def test_a_model_answers_skips_overrides_and_cancels_no_question_to_a_person(kd: killick.Client, agent: Any) -> None:
    waiting(kd, agent)
    verb = "approve" if agent is paying else "not"
    with pytest.raises(NotAsked):
        kd.answer("r", verb, by=MODEL)  # type: ignore[arg-type]
    for command in (
        lambda: kd.edit.skip("r", "1", by=MODEL),
        lambda: kd.edit.override("r", "1", 5, by=MODEL),
        lambda: kd.cancel("r", by=MODEL),
    ):
        with pytest.raises(AnswerRefused, match=r"a model may not|in doubt"):
            command()
    assert len(kd.inbox()) == 1
    assert PAID == []


def test_a_model_answers_what_names_it_and_what_anyone_is_asked(kd: killick.Client) -> None:
    @killick.tool(name="model_callers_publish", approve=MODEL)
    async def publish(text: str) -> str:
        return text

    @killick.agent(name="model_callers_publishing")
    async def publishing(run: killick.Run) -> str:
        return await run.call(publish, "it")

    for agent, verb, value in ((publishing, "approve", None), (asking, "respond", "red")):
        with pytest.raises(killick.RunWaiting):
            kd.run(agent, id=agent.name)
        kd.answer(agent.name, verb, value=value, by=MODEL)  # type: ignore[arg-type]
        assert kd.run(agent, id=agent.name) in ("it", "red")


def test_a_persons_pause_that_the_holder_has_not_taken_is_not_dropped_by_a_model(kd: killick.Client) -> None:
    waiting(kd, asking)
    head = kd.runtime.store.lease("r", "1-other", seconds=30)
    kd.runtime.log.open("r", head=head).append(Entry(e.RunTaken(at=1, epoch=head.epoch, holder="1-other")))
    kd.pause("r", by="mia")
    kd.runtime.store.release("r", epoch=head.epoch)
    refused(kd, lambda: kd.resume("r", by=MODEL))


def test_a_command_that_a_model_sent_to_a_holder_is_refused_on_record(kd: killick.Client) -> None:
    """The question came up between the sending and the taking: the holder decides again."""
    kd.start(paying, id="r")
    head = kd.runtime.store.lease("r", "1-other", seconds=30)
    kd.cancel("r", by=MODEL)
    kd.runtime.store.release("r", epoch=head.epoch)
    opened = e.WaitOpened(at=1, step="1", waits_for="answer", to=("managers",), rule="approve")
    log = kd.runtime.log.open("r")
    log.append(Entry(e.StepIntended(at=1, step="1", sort="tool", name=pay.name, effect="at_most_once")), Entry(opened))
    with pytest.raises(AnswerRefused, match="step 1 asks managers; a model may not cancel it"):
        entries_of(log.fold, {"command": "cancel"}, by=MODEL, at=1)


def test_whose_move_it_is_follows_from_the_facts_alone() -> None:
    loop = Crashes(8, 0, (), 5, 1, quarantined=True)
    held = [
        Facts(paused="contract"), Facts(paused="a person"), Facts(paused="mia"), Facts(cancelling=True),
        Facts(status="cancelled"), Facts(mend=7), Facts(mend=7, crashes=loop),
    ]  # fmt: skip
    free = [Facts(), Facts(paused="model:x"), Facts(mend=7, diverged=7), Facts(status="failed")]
    assert all(person_only(facts) for facts in held)
    assert not any(person_only(facts) for facts in free)
