"""People and processes that die anywhere: what people agreed to is done once, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import killick
from killick import rules
from killick.check.crashes import Outside, Story, simulate
from killick.model import events as e
from seeds import draw_seed
from simulation.crash_stories import Scenario, World, differences, tick, world

pytestmark = pytest.mark.slow

SEED = 7
PEOPLE = {"managers": ["mia", "max", "moe"], "directors": ["dan", "dora"]}


# what is done ---------------------------------------------------------------------------------------


@killick.tool(effect="idempotent", name="people.transfer")
async def transfer(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    done: str = world().do(f"{amount} to {to}", f"{amount} went to {to}", key=key)
    return done


@killick.tool(
    effect="idempotent",
    name="people.post",
    identity=("to",),
    approve=killick.Approval("managers", need=2, timeout="1h", escalate=[("directors", "2h")]),
)
async def post(to: str, text: str, key: killick.Key = killick.KEY) -> str:
    done: str = world().do(f"{text} for {to}", f"posted {text}", key=key)
    return done


def contract(total: int = 1500) -> killick.Contract:
    given = [
        rules.allow("people.*", "spawn:*"),
        rules.arguments("people.transfer", amount={"min": 1, "max": 900}),
        rules.arguments("people.transfer", amount={"max": 100}, name="large", ask="managers"),
        rules.arguments("people.transfer", to={"one_of": ["ann", "bob"]}, name="strangers", ask="directors"),
        rules.total("people.transfer", "amount", max=total),
    ]
    return killick.Contract("people", given, people=PEOPLE)


CONTRACT = contract()


async def told(run: killick.Run, step: Any) -> str:
    """What the agent comes to know of a call."""
    try:
        done = await step
    except killick.Rejected as rejected:
        done = f"{rejected.code} by {rejected.by} of rule {rejected.rule}: {rejected}; instead {rejected.response}"
    return f"{done} / {run.call_answer}"


@killick.agent(contract=CONTRACT, name="people.in_line")
async def in_line(run: killick.Run) -> list[str]:
    seen = [await told(run, run.call(transfer, "ann", 50))]
    tick()
    seen.append(await told(run, run.call(transfer, "ann", 500)))
    tick()
    seen.append(await told(run, run.propose(transfer, "carl", 300)))
    tick()
    seen.append(await told(run, run.call(transfer, "bob", 5000)))
    seen.append(await told(run, run.call(post, "ann", "hello")))
    tick()
    seen.append(await told(run, run.propose(transfer, "bob", 900)))
    seen.append(await told(run, run.call(transfer, "ann", 60)))
    return seen


@killick.agent(contract=CONTRACT, name="people.side_by_side")
async def side_by_side(run: killick.Run) -> Sequence[str]:
    async def one(to: str, amount: int) -> str:
        return await told(run, run.call(transfer, to, amount))

    async def other(to: str) -> str:
        return await told(run, run.propose(post, to, "hello")) + await told(run, run.call(transfer, to, 700))

    return await run.gather(one("carl", 400), other("ann"), one("bob", 200))


@killick.agent(contract=CONTRACT, name="people.blocking")
def blocking(run: killick.SyncRun) -> list[str]:
    seen: list[str] = []
    for to, amount in (("ann", 50), ("carl", 500), ("bob", 300)):
        done = run.propose(transfer, to, amount)
        tick()
        seen.append(f"{done.kind} {done.result} {done.changed} {done.by} {run.call_answer}")
    return seen


@killick.agent(contract=CONTRACT, name="people.below")
async def below(run: killick.Run) -> Sequence[str]:
    child = await run.spawn(in_line, id="child")
    seen = await child.result()
    return [*seen, await told(run, run.call(transfer, "ann", 800))]


# who answers ----------------------------------------------------------------------------------------

Policy = Callable[[killick.Wait], tuple[str, Any, str]]
SILENCE = "nobody says anything"


def answering(policy: Policy) -> Outside:
    """People who answer one question at a time, always the same to the same."""

    def outside(client: killick.Client, waits: Sequence[killick.Wait], around: World) -> bool:
        for wait in sorted(client.inbox(), key=lambda wait: wait.id):
            verb, value, by = policy(wait)
            if verb == "edit" and _was_rejected(client, wait):
                verb, value = "approve", None
            if verb == SILENCE:
                clock, until = client.runtime.clock, wait.deadline_us
                assert isinstance(clock, killick.clock.LeapingClock)
                assert until is not None
                clock.advance((until - clock.now_us()) / 1_000_000 + 1)
            else:
                said: Any = verb
                client.answer(wait.id, said, value=value, by=by, comment="so be it")
            return True
        return False

    return outside


def _was_rejected(client: killick.Client, wait: killick.Wait) -> bool:
    """Whether somebody's edit came to nothing: whoever is asked the same again does not edit it again."""
    edits = [told.event for told in client.events(wait.run) if isinstance(told.event, e.StepEdited)]
    mine = [edit.verdict for edit in edits if edit.step == wait.step]
    return bool(mine) and mine[-1] is not None and mine[-1].ruling == "reject"


def by_chance(seed: int) -> Policy:
    """Whoever is asked decides by what they are asked, and by who agreed already."""

    def decide(wait: killick.Wait) -> tuple[str, Any, str]:
        chance = random.Random(f"{seed} {wait.prompt} {wait.votes} {wait.to} {wait.round}")
        by = chance.choice([name for name in wait.may or PEOPLE["managers"] if name not in wait.votes])
        arguments = wait.intention["arguments"]
        verb = chance.choice(
            ["approve"] * 4 + ["edit"] * 3 + ["reject", "respond"] + [SILENCE] * bool(wait.deadline_us)
        )
        if verb == "respond":
            return verb, "not today", by
        if verb != "edit":
            return verb, None, by
        amount = arguments.get("amount", 0)
        edits = [{"amount": amount // 2}, {"amount": amount - 1, "to": "bob"}, {"to": "dave"}, {"amount": amount + 500}]
        edit = chance.choice(edits) if amount else {"text": "hi"}
        same = all(arguments[name] == value for name, value in edit.items())
        # Nobody may edit for ever: sums become larger only while they are small.
        endless = edit.get("amount", 0) > amount and 100 < amount < 450
        return ("approve", None, by) if same or endless else ("edit", edit, by)

    return decide


AGENTS = {"in_line": in_line, "side_by_side": side_by_side, "blocking": blocking, "below": below}


def scenario(name: str, seed: int, **how: Any) -> Scenario:
    return Scenario(agent=AGENTS[name], outside=answering(by_chance(seed)), **how)


# what must be true ----------------------------------------------------------------------------------


def unruly(story: Story) -> Iterator[str]:
    """Where the record shows something done that those who had to agree did not, in these very arguments."""
    with killick.Client(story.store.copied(killick.clock.LeapingClock())) as kd:
        for listed in kd.list():
            yield from _unagreed(kd, listed.id)
            rejudged = kd.rejudge(listed.id)
            if not rejudged.agrees:
                yield f"{listed.id}: judged again it is otherwise: {rejudged.changes}"


def _unagreed(kd: killick.Client, run: str) -> Iterator[str]:
    """By the record alone, and by nothing that judges live."""
    arguments: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    behind: dict[str, list[tuple[Any, str]]] = {}
    for recorded in kd.events(run):
        event, data = recorded.event, kd.runtime.log.data(run, recorded.seq)
        match event:
            case e.StepIntended() if event.sort == "tool":
                arguments[event.step] = data["arguments"]
            case e.StepEdited() if event.verdict is None or event.verdict.ruling != "reject":
                arguments[event.step] = data["arguments"]
                behind.setdefault(event.step, []).append((data["arguments"], event.by))
            case e.WaitOpened() if event.rule is not None:
                asked[event.step] = data["intention"]["arguments"]
            case e.WaitVoted():
                behind.setdefault(event.step, []).append((asked[event.step], event.by))
            case e.WaitClosed() if event.step in asked and event.by and data["answer"]["kind"] == "approve":
                behind.setdefault(event.step, []).append((asked[event.step], event.by))
            case e.AttemptStarted():
                final = arguments[event.step]
                people = {by for about, by in behind.get(event.step, ()) if about == final}
                if not _enough(final, people):
                    yield f"{run}: step {event.step} was done with {final} on the word of {people}"
            case _:
                pass


def _enough(arguments: Any, people: set[str]) -> bool:
    managers, directors = people & {*PEOPLE["managers"]}, people & {*PEOPLE["directors"]}
    if "text" in arguments:
        return len(managers) >= 2 or len(directors) >= 2
    is_large, is_strange = arguments["amount"] > 100, arguments["to"] not in ("ann", "bob")
    return arguments["amount"] <= 900 and bool(managers or not is_large) and bool(directors or not is_strange)


def otherwise(expected: Story, story: Story) -> str:
    wrong = [*differences(expected, story), *unruly(story)]
    return "\n    ".join([f"{story}:", *wrong]) if wrong else ""


def undisturbed(how: Scenario) -> Story:
    expected = simulate(how, seed=SEED)
    assert expected.status == "completed", (expected.status, expected.outcome, expected.troubles)
    assert not list(unruly(expected))
    return expected


@pytest.mark.parametrize(("name", "every"), [("in_line", 4), ("side_by_side", 3), ("blocking", 3), ("below", 12)])
def test_whatever_people_say_dying_at_any_point_changes_nothing_of_it(name: str, every: int) -> None:
    seed = draw_seed()
    how = scenario(name, seed)
    expected = undisturbed(how)
    for point in range(1 + seed % every, expected.points[0] + 1, every):
        assert not (told := otherwise(expected, simulate(how, point, seed=SEED))), f"people {seed}, {told}"


HOWS: tuple[dict[str, Any], ...] = (
    {},
    {"warm": False},
    {"behind": True},
    {"takeover": "expiry"},
    {"warm": False, "behind": True},
)


@pytest.mark.parametrize("name", AGENTS)
def test_nothing_is_done_that_was_not_agreed_to_whoever_says_what_and_dies_where(name: str) -> None:
    first = draw_seed()
    for seed in range(first, first + 4):
        chance, expected = random.Random(seed), undisturbed(scenario(name, seed))
        for how in chance.sample(HOWS, 3):
            kills = [chance.randint(1, expected.points[0]) for _ in range(chance.randint(0, 3))]
            story = simulate(scenario(name, seed, **how), *kills, seed=SEED)
            assert not (told := otherwise(expected, story)), f"people {seed}, {how}, {told}"
