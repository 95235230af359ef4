"""Suggested actions: whoever is asked lets them be done, edits them, refuses them, answers instead, or nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import killick
import servers
from engine.desk import PEOPLE, Desk
from killick import rules
from killick.engine.approval.call_answer import Proposed
from killick.errors import AlreadyAnswered
from killick.model import events as e
from killick.testing import call, interrupt_everywhere, scripted, turn
from world import World

DONE: list[Any] = []
CONTRACT = killick.Contract(
    "propose",
    [
        rules.arguments("propose_send", text={"length": 12}, name="short"),
        rules.arguments("propose_send", to={"one_of": ["ann", "bob"]}, name="strangers", ask="directors"),
    ],
    people=PEOPLE,
)


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


@pytest.fixture(params=["warm", "cold"])
def desk(world: World, request: pytest.FixtureRequest) -> Desk:
    """In one process, and in another one after every answer."""
    return Desk(world, cold=request.param == "cold")


@killick.tool(effect="idempotent", name="propose_send", approve=killick.Approval("managers", timeout="1h"))
async def send(to: str, text: str, key: killick.Key = killick.KEY) -> str:
    DONE.append((to, text))
    return f"{text} for {to}"


def seen(done: Proposed[Any]) -> list[Any]:
    return [done.kind, done.result, done.value, done.changed, done.by, done.comment, done.ran]


# in every kind of agent ---------------------------------------------------------------------------


@killick.agent(name="propose.awaited", contract=CONTRACT)
async def awaited(run: killick.Run) -> Any:
    return seen(await run.propose(send, "ann", "hello"))


@killick.agent(name="propose.blocking", contract=CONTRACT)
def blocking(run: killick.SyncRun) -> Any:
    return seen(run.propose(send, "ann", "hello"))


@killick.agent(name="propose.in_a_branch", contract=CONTRACT)
async def in_a_branch(run: killick.Run) -> Any:
    async def one() -> Any:
        return seen(await run.propose(send, "ann", "hello"))

    async def other() -> int:
        return await run.decided("Which?", 1)

    return (await run.gather(one(), other()))[0]


@dataclass(frozen=True)
class Sent:
    told: list[Any]


@killick.machine(name="propose.machine", contract=CONTRACT)
async def machine(run: killick.Run, state: Sent) -> Any:
    if state.told:
        return killick.Done(state.told)
    return killick.Next(Sent(seen(await run.propose(send, "ann", "hello"))))


KINDS: dict[str, tuple[Any, Any]] = {
    "awaited": (awaited, None),
    "blocking": (blocking, None),
    "branch": (in_a_branch, None),
    "machine": (machine, Sent([])),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_what_is_approved_is_done(desk: Desk, kind: str) -> None:
    agent, value = KINDS[kind]
    wait = desk.asked(agent, value)
    desk.say("approve", by="mia", comment="go", wait=wait.id)
    assert desk.go(agent, value) == ["approve", "hello for ann", None, {}, "mia", "go", True]
    assert DONE == [("ann", "hello")]
    desk.holds(agent)


@every_kind
def test_what_is_edited_is_done_as_it_was_edited(desk: Desk, kind: str) -> None:
    agent, value = KINDS[kind]
    wait = desk.asked(agent, value)
    desk.say("edit", by="mia", value={"text": "hi"}, comment="shorter", wait=wait.id)
    changed = {"text": ("hello", "hi")}
    assert desk.go(agent, value) == ["edit", "hi for ann", None, changed, "mia", "shorter", True]
    assert DONE == [("ann", "hi")]
    desk.holds(agent)


@every_kind
def test_what_is_refused_is_not_done(desk: Desk, kind: str) -> None:
    agent, value = KINDS[kind]
    wait = desk.asked(agent, value)
    desk.say("reject", by="max", comment="not like this", wait=wait.id)
    assert desk.go(agent, value) == ["reject", None, None, {}, "max", "not like this", False]
    assert not DONE
    desk.holds(agent)


@every_kind
def test_who_answers_instead_is_heard(desk: Desk, kind: str) -> None:
    agent, value = KINDS[kind]
    wait = desk.asked(agent, value)
    desk.say("respond", by="moe", value={"call": "me"}, wait=wait.id)
    assert desk.go(agent, value) == ["respond", None, {"call": "me"}, {}, "moe", None, False]
    assert not DONE
    desk.holds(agent)


@every_kind
def test_when_nobody_answers_in_time_it_is_not_done(
    make_world: Callable[[killick.clock.ManualClock], World], kind: str
) -> None:
    clock = killick.clock.ManualClock()
    desk = Desk(make_world(clock), cold=True)
    agent, value = KINDS[kind]
    desk.go(agent, value)
    clock.advance(3601)
    assert desk.go(agent, value) == ["expired", None, None, {}, None, None, False]
    assert not DONE
    desk.holds(agent)


@every_kind
def test_an_edit_that_others_have_to_agree_to_waits_for_them(desk: Desk, kind: str) -> None:
    agent, value = KINDS[kind]
    wait = desk.asked(agent, value)
    desk.say("edit", by="mia", value={"to": "carl"}, wait=wait.id)
    wait = desk.asked(agent, value)
    assert (wait.rule, wait.may) == ("strangers", ("dan", "dora"))
    desk.say("approve", by="dora", wait=wait.id)
    done = desk.go(agent, value)
    assert done[:4] == ["edit", "hello for carl", None, {"to": ("ann", "carl")}]
    assert done[4] == "mia"
    assert DONE == [("carl", "hello")]
    desk.holds(agent)


def test_what_a_rule_rejects_is_raised_and_nobody_is_asked(desk: Desk) -> None:
    @killick.agent(name="propose.too_long", contract=CONTRACT)
    async def agent(run: killick.Run) -> Any:
        with pytest.raises(killick.Rejected) as rejected:
            await run.propose(send, "ann", "much too long a text")
        return [rejected.value.rule, rejected.value.code]

    assert desk.go(agent) == ["short", "argument_refused"]
    assert not desk.told(e.WaitOpened)


def test_a_tool_that_never_asks_is_asked_about_when_it_is_proposed_and_not_when_it_is_called(desk: Desk) -> None:
    @killick.tool(effect="idempotent", name="propose.plain")
    async def plain(what: str) -> str:
        DONE.append(what)
        return what

    @killick.agent(name="propose.both")
    async def agent(run: killick.Run) -> Any:
        return [await run.call(plain, "a"), (await run.propose(plain, "b")).result, run.call_answer is not None]

    wait = desk.asked(agent)
    assert (DONE, wait.to, wait.may) == (["a"], (), None)
    desk.say("approve", by=None)
    assert desk.go(agent) == ["a", "b", True]
    desk.holds(agent)


def test_what_was_told_of_one_call_is_not_told_of_the_next(desk: Desk) -> None:
    @killick.agent(name="propose.told", contract=CONTRACT)
    async def agent(run: killick.Run) -> Any:
        await run.call(send, "ann", "one")
        first = str(run.call_answer)
        with contextlib.suppress(killick.Rejected):
            await run.call(send, "ann", "two")
        second = str(run.call_answer)
        await run.call(send, "bob", "three")
        return [first, second, str(run.call_answer)]

    desk.asked(agent)
    desk.say("edit", by="mia", value={"text": "1"})
    desk.asked(agent)
    desk.say("reject", by="max")
    desk.asked(agent)
    desk.say("approve", by="moe")
    assert desk.go(agent) == ["mia changed text from 'one' to '1'", "None", "moe agreed"]
    desk.holds(agent)


@pytest.mark.parametrize(
    ("verb", "value", "answer"),
    [
        ("approve", None, "hello for ann"),
        ("edit", {"text": "hi"}, "hi for ann\n(mia changed text from 'hello' to 'hi' (so) before it was called)"),
        ("respond", "wait until Friday", "wait until Friday"),
        ("reject", None, "mia said no: so"),
    ],
)
def test_a_model_reads_what_a_person_made_of_its_call(desk: Desk, verb: str, value: Any, answer: str) -> None:
    tools = killick.Toolset(send)

    @killick.agent(name="propose.dispatches", contract=CONTRACT)
    async def agent(run: killick.Run) -> Any:
        model = scripted(turn(call("propose_send", to="ann", text="hello")))
        return await run.dispatch(tools, await run.model(model.async_call, messages=[]))

    desk.asked(agent)
    desk.say(verb, by="mia", value=value, comment="so")
    [said] = desk.go(agent)
    assert answer in said["content"]
    desk.holds(agent)


# when code or world get in the way ----------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, 0.02], ids=["while it is written", "while it waits"])
def test_code_that_gives_up_waiting_closes_the_question(world: World, seconds: float) -> None:
    @killick.tool(effect="reads", name="propose.slow")
    async def slow() -> int:
        await asyncio.sleep(0.1)
        return 1

    @killick.agent(name="propose.impatient", contract=CONTRACT)
    async def agent(run: killick.Run) -> Any:
        async def one() -> str:
            try:
                async with asyncio.timeout(seconds):
                    return (await run.propose(send, "ann", "hello")).kind
            except TimeoutError:
                return "gave up"

        told = (await run.gather(one(), run.call(slow)))[0]
        await run.wait("go")
        return told

    desk = Desk(world, cold=True)
    assert desk.go(agent) is None
    assert not desk.kd.inbox()
    desk.kd.send("r", "go")
    assert desk.go(agent) == "gave up"
    assert next(closed.event.how for closed in desk.told(e.WaitClosed)) == "cancelled"
    assert not DONE
    desk.holds(agent)


def test_a_sibling_that_fails_closes_the_question_and_ends_the_step_once(desk: Desk) -> None:
    @killick.tool(effect="reads", name="propose.broken", retry=killick.Retry(attempts=1))
    async def broken() -> None:
        raise ValueError("broken")

    @killick.agent(name="propose.sibling", contract=CONTRACT)
    async def agent(run: killick.Run) -> str:
        try:
            await run.gather(run.propose(send, "ann", "hello"), run.call(broken))
        except killick.StepFailed as failed:
            return failed.name
        return "?"

    assert desk.go(agent) == "propose.broken"
    assert not desk.kd.inbox()
    assert [ended.event.outcome for ended in desk.told(e.StepEnded) if ended.event.step == "1.1.1"] == ["cancelled"]
    desk.holds(agent)


def test_what_is_asked_and_done_after_new_code_is_what_is_on_record(world: World) -> None:
    desk = Desk(world, cold=True)

    @killick.tool(effect="idempotent", identity=("to",), approve="managers", name="propose.mail")
    async def mail(to: str, text: str) -> str:
        DONE.append((to, text))
        return text

    def release(text: str) -> Any:
        @killick.agent(name="propose.releases")
        async def agent(run: killick.Run) -> str:
            return await run.call(mail, "ann", text)

        return agent

    desk.asked(release("old"))
    after = release("new")
    wait = desk.asked(after)
    desk.say("approve", by="mia")
    done = desk.go(after)
    assert DONE == [("ann", wait.intention["arguments"]["text"])] == [("ann", done)]
    assert "old" in str(wait.prompt)


def test_the_rights_that_an_edited_call_consumes_are_those_of_the_edit(desk: Desk) -> None:
    @killick.tool(effect="idempotent", consumes=("token",), approve="managers", name="propose.redeem")
    async def redeem(token: str) -> str:
        DONE.append(token)
        return token

    @killick.agent(name="propose.redeems")
    async def agent(run: killick.Run) -> Any:
        said: list[Any] = []
        for token in ("t1", "t2", "t1"):
            try:
                said.append(await run.call(redeem, token))
            except killick.StepFailed as failed:
                said.append(failed.failure.type)
        return said

    desk.asked(agent)
    desk.say("edit", by="mia", value={"token": "t9"})
    desk.asked(agent)
    desk.say("edit", by="mia", value={"token": "t9"})
    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.go(agent) == ["t9", "killick.errors.AlreadyClaimed", "t1"]
    assert DONE == ["t9", "t1"]


def test_an_edit_decides_anew_what_a_call_does_to_the_world(desk: Desk) -> None:
    def does(command: str, dry: bool) -> Literal["reads", "at_most_once"]:
        return "reads" if dry else "at_most_once"

    @killick.tool(effect=does, approve="managers", name="propose.shell")
    async def shell(command: str, dry: bool = False) -> str:
        DONE.append((command, dry))
        return command

    @killick.agent(name="propose.shells")
    async def agent(run: killick.Run) -> Any:
        return [(await run.propose(shell, "push")).kind, (await run.propose(shell, "push", True)).kind]

    desk.asked(agent)
    desk.say("edit", by="mia", value={"dry": True})
    desk.asked(agent)
    desk.say("edit", by="mia", value={"dry": False})
    assert desk.go(agent) == ["edit", "edit"]
    assert DONE == [("push", True), ("push", False)]
    [effect] = desk.kd.runtime.log.ledger("r").effects
    assert (effect.step, effect.effect, effect.status) == ("2", "at_most_once", "happened")
    desk.holds(agent)


def test_an_edit_of_a_call_with_a_secret_names_only_what_was_changed(desk: Desk) -> None:
    @killick.tool(effect="idempotent", approve="managers", name="propose.login")
    async def login(password: killick.Secret, tries: int = 1) -> int:
        DONE.append(password.reveal())
        return tries

    @killick.agent(name="propose.logs_in")
    async def agent(run: killick.Run) -> Any:
        done = await run.propose(login, killick.Secret("hunter2"))
        return [done.result, done.changed]

    assert "hunter2" not in str(desk.asked(agent))
    desk.say("edit", by="mia", value={"tries": 3})
    assert desk.go(agent) == [3, {"tries": (1, 3)}]
    assert DONE == ["hunter2"]


@pytest.mark.parametrize(("verb", "value", "times"), [("not", None, 2), ("happened", 5, 1)])
def test_what_was_agreed_to_and_is_in_doubt_is_settled_and_not_asked_about_again(
    desk: Desk, verb: str, value: Any, times: int
) -> None:
    @killick.tool(approve="managers", name="propose.once")
    async def once() -> int:
        DONE.append("once")
        if len(DONE) == 1:
            raise ConnectionResetError("who knows")
        return 5

    @killick.agent(name="propose.doubts")
    async def agent(run: killick.Run) -> Any:
        return [await run.call(once), str(run.call_answer)]

    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.asked(agent).waits_for == "settlement"
    desk.say(verb, by="max", value=value)
    assert desk.go(agent) == [5, "mia agreed"]
    assert len(DONE) == times
    desk.holds(agent)


# anywhere it may die ------------------------------------------------------------------------------


@pytest.mark.gate(1)
@pytest.mark.parametrize("answer", ["approve", "reject", ("edit", {"text": "hi"}), ("respond", "later")], ids=str)
def test_whatever_people_say_it_is_the_same_after_any_interruption(answer: Any) -> None:
    interrupt_everywhere(awaited, real=["propose_send"], answers={"*": answer})


PROGRAM = """
import os, signal, sys
from pathlib import Path
import killick

store, spool = sys.argv[1], Path(sys.argv[2])

@killick.tool(effect="idempotent", approve=killick.Approval("managers", need=2), name="killed.pay")
async def pay(to: str, amount: int, key: killick.Key = killick.KEY) -> int:
    with spool.open("a") as lines:
        lines.write(f"{key} {to} {amount}\\n")
    if len(spool.read_text().splitlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return amount

@killick.agent(name="killed.agent", contract=killick.Contract("killed", [], people={"managers": ["mia", "max", "moe"]}))
async def agent(run: killick.Run) -> list:
    done = await run.propose(pay, "ann", 500)
    return [done.kind, done.result, done.by, done.changed["amount"][0], done.changed["amount"][1]]

with killick.open(store) as kd:
    try:
        print(kd.run(agent, id="r"))
    except killick.RunWaiting:
        print("waits")
"""

ANSWER = """
import sys
import killick

store, by, verb = sys.argv[1:]
with killick.open(store) as kd:
    sys.stdin.readline()
    try:
        kd.answer("r", verb, by=by, value={"amount": 7} if verb == "edit" else None)
        print("ok")
    except killick.KillickError as refused:
        print(type(refused).__name__, refused)
"""


def started(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def answers(store: str, *given: tuple[str, str]) -> list[str]:
    """What people are told who answer in the same instant, each in a process of their own."""
    people = [started(ANSWER, store, by, verb) for by, verb in given]
    return [person.communicate("now\n")[0].strip() for person in people]


def in_a_file(folder: Path) -> str:
    return str(folder / "killick.db")


def on_a_server(folder: Path) -> str:
    return servers.postgres_store()


STORES: list[Any] = [
    pytest.param(in_a_file, id="sqlite"),
    pytest.param(on_a_server, id="postgresql", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("place", STORES)
def test_a_process_killed_in_the_middle_of_what_was_agreed_to_is_followed_by_one_that_does_that(
    place: Callable[[Path], str], tmp_path: Path
) -> None:
    store, spool = place(tmp_path), tmp_path / "spool"
    assert started(PROGRAM, store, spool).communicate()[0].strip() == "waits"
    with killick.open(store) as kd:
        kd.answer("r", "approve", by="mia")
        kd.answer("r", "edit", by="max", value={"amount": 7})
    assert started(PROGRAM, store, spool).communicate()[0].strip() == "waits"
    assert not spool.exists()
    with killick.open(store) as kd:
        assert [wait.votes for wait in kd.inbox()] == [("max",)]
        kd.answer("r", "approve", by="mia")
    killed = started(PROGRAM, store, spool)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    with killick.open(store) as kd:
        assert kd.state("r").fold.facts.waits == {}
        if not store.endswith(".db"):
            head = kd.runtime.store.head("r")
            assert head is not None
            kd.runtime.store.release("r", epoch=head.epoch)  # rather than sit out the lease of the dead
    assert started(PROGRAM, store, spool).communicate()[0].strip() == "['edit', 7, 'max', 500, 7]"
    lines = spool.read_text().splitlines()
    assert len(lines) == 2
    assert set(lines) == {lines[0]}
    assert lines[0].endswith("ann 7")
    with killick.open(store) as kd:
        assert not kd.store.verify("r").problems
        assert kd.rejudge("r").agrees


@pytest.mark.slow
@pytest.mark.parametrize("place", STORES)
def test_of_two_who_answer_in_the_same_instant_one_wins_and_the_other_is_told_who(
    place: Callable[[Path], str], tmp_path: Path
) -> None:
    store = place(tmp_path)
    with killick.open(store) as kd:
        with pytest.raises(killick.RunWaiting):
            kd.run(awaited, id="r")
        said = answers(store, ("mia", "approve"), ("max", "reject"))
        assert sorted(word.partition(" ")[0] for word in said) == [AlreadyAnswered.__name__, "ok"]
        winner = ("mia", "max")[said.index("ok")]
        assert winner in next(word for word in said if word != "ok")
        assert kd.run(awaited, id="r")[4] == winner
        assert len(DONE) == (winner == "mia")
        with pytest.raises(AlreadyAnswered, match=winner):
            kd.answer("r", "approve", by="moe")


@killick.tool(effect="idempotent", name="propose.gift", approve=killick.Approval("managers", need=2))
async def gift(to: str, amount: int) -> str:
    DONE.append((to, amount))
    return f"{amount} for {to}"


GIFTS = killick.Contract("gifts", [rules.total("propose.gift", "amount", max=100)], people=PEOPLE)


@killick.agent(name="propose.gifts", contract=GIFTS)
async def gifts(run: killick.Run) -> list[Any]:
    told: list[Any] = []
    for to, amount in (("ann", 90), ("bob", 20), ("carl", 15), ("dave", 10)):
        try:
            told.append(seen(await run.propose(gift, to, amount))[:2])
        except killick.Rejected as rejected:
            told.append(rejected.code)
    return told


@pytest.mark.parametrize("place", STORES)
def test_what_people_say_comes_to_the_same_on_every_store(place: Callable[[Path], str], tmp_path: Path) -> None:
    store = place(tmp_path)
    script: list[list[tuple[Any, str, Any]]] = [
        [("approve", "mia", None)],
        [("edit", "max", {"amount": 500})],  # which the total rejects
        [("edit", "max", {"amount": 60})],
        [("approve", "mia", None)],
        [("approve", "mia", None), ("approve", "moe", None)],
        [("reject", "moe", None)],
        [("approve", "max", None), ("approve", "moe", None)],
    ]
    for turn_of in script:
        with killick.open(store) as kd:
            with pytest.raises(killick.RunWaiting):
                kd.run(gifts, id="r")
            for verb, by, value in turn_of:
                kd.answer("r", verb, by=by, value=value)
    with killick.open(store) as kd:
        assert kd.run(gifts, id="r") == [
            ["edit", "60 for ann"], ["approve", "20 for bob"], ["reject", None], ["approve", "10 for dave"],
        ]  # fmt: skip
        assert DONE == [("ann", 60), ("bob", 20), ("dave", 10)]
        assert kd.replay("r", gifts, check=True).status == "completed"
        assert not kd.store.verify("r").problems
        assert kd.rejudge("r").agrees
