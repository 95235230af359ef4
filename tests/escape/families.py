"""What is tried by others: children, grandchildren, forks, renewals, several processes at the same instant, and the
same run after its process was killed or its contract was changed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from typing import Any

import killick
from escape import law, world
from escape.law import Tried
from escape.stage import Stage, Task, go
from escape.world import Plan
from killick import rules
from killick.engine.steps import fast_path, step_execution
from killick.model import events as e

_ASSESS: list[Any] = ["call", "assess", {"claim": "17"}]
_CLOSE: list[Any] = ["call", "close", {"account": "a"}]


def _pays(to: str, amount: int, tool: str = "pay") -> list[Any]:
    return ["call", tool, {"to": to, "amount": amount}]


def kin(kd: killick.Client, *runs: str) -> list[str]:
    """Runs, and all that they spawned, forked and went on as."""
    found = list(runs)
    for run in found:
        facts, ledger = kd.runtime.log.state(run).fold.facts, kd.runtime.log.ledger(run)
        below = [child.run for child in ledger.children] + list(ledger.facts.forks)
        found += [each for each in (*below, facts.renewed_as) if each is not None and each not in found]
    return found


# order ------------------------------------------------------------------------------------------


def in_another_order(stage: Stage) -> Tried:
    """Paid before anything was assessed; after it failed, after it was taken back, in a branch beside it."""
    broken: list[Any] = ["call", "assess", {"claim": "broken"}]
    plans: list[Plan] = [
        [_pays("ann", 5), _ASSESS],
        [broken, _pays("ann", 5)],
        [["together", [_pays("ann", 5)], [_ASSESS]], _pays("ann", 6)],
        [["together", [["sleep", 1], _pays("ann", 5)], [broken, _pays("bob", 5)]]],
        [["spawn", "helper", [_ASSESS]], _pays("ann", 5)],
        [_ASSESS, ["spawn", "helper", [_pays("ann", 5)]]],
    ]
    plan = stage.chance.choice(plans)
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        law.lawful(stage.grounds)
        return law.on_record(kd, *kin(kd, "r"))


def after_it_was_taken_back(stage: Stage) -> Tried:
    """Assessed, undone, then paid; or paid, and taken back to before it was assessed."""
    plan: Plan = [_ASSESS, ["wait", "go"], _pays("ann", 5)]
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        kd.undo("r", "1", by="mia")
        kd.send("r", "go")
        told = go(kd, "schemer", plan, "r")
        assert told[2] == "rejected too_early", told
        law.lawful(stage.grounds)
        return law.on_record(kd, "r")


def twice_at_once(stage: Stage) -> Tried:
    """What may be done once, in branches side by side, again after a rewind, in a fork, by a child, and renewed."""
    close = [_CLOSE, ["call", "close", {"account": "b"}]]
    helper = stage.chance.choice(("helper", "weak", "schemer"))
    ways: list[Plan] = [
        [["together", [_CLOSE], [close[1]], [_CLOSE]]],
        [["together", [["spawn", helper, [_CLOSE]]], [["spawn", helper, [close[1]]]], [_CLOSE]]],
        [_CLOSE, ["spawn", helper, [["spawn", helper, [close[1]]]]]],
        [_CLOSE, ["renew", [close[1], ["renew", [_CLOSE]]]]],
        [["spawn", helper, [_CLOSE, ["renew", [close[1]]]]], _CLOSE],
    ]
    plan = stage.chance.choice(ways)
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        assert len(stage.grounds.books.lines("close")) == 1
        run = kin(kd, "r")[0]
        if kd.runtime.log.state(run).fold.facts.renewed_as is None:
            kd.fork(run, "1:before", id="f", effects="live")
            go(kd, "schemer", plan, "f")
            kd.rewind(run, "1:before", by="mia")
            go(kd, "schemer", plan, run)
        assert len(stage.grounds.books.lines("close")) == 1, stage.grounds.books.lines()
        law.lawful(stage.grounds)
        return law.on_record(kd, *kin(kd, "r"))


def children_and_messages_once(stage: Stage) -> Tried:
    """A child and a message of which one is allowed, asked for in several branches."""
    world.declare(stage.grounds, rules.once("spawn:helper"), rules.budget("send", effects=1))
    spawn: list[Any] = ["spawn", "helper", [["call", "assess", {"claim": "x"}]], stage.chance.random() < 0.5]
    send: list[Any] = ["send", "box", "post", 1]
    plan: Plan = [["together", [spawn], [send], [spawn], [send]], spawn, send]
    with stage.client() as kd:
        go(kd, "schemer", [["wait", "post"], ["wait", "post"]], "box")
        go(kd, "schemer", plan, "r")
        found = law.on_record(kd, *kin(kd, "r"))
        children = kd.runtime.log.ledger("r").children
        sent = [message for message in kd.runtime.store.messages("box") if message.name == "post"]
        assert (len(children), len(sent)) == (1, 1)
        law.lawful(stage.grounds)
        return found


# others -----------------------------------------------------------------------------------------


def somebody_else_does_it(stage: Stage) -> Tried:
    """Children without a contract and with a weaker one are bound by the one above, and count together."""
    chance = stage.chance
    deeds: list[Callable[[], list[Any]]] = [
        lambda: _pays(chance.choice(world.RECIPIENTS), chance.choice((5000, 1001, -5, 0))),
        lambda: _pays(chance.choice(("mallory", "ann")), 1400),
        lambda: _pays(chance.choice(world.RECIPIENTS), chance.choice((100, 300, 500))),
        lambda: ["call", "delete_everything", {}],
        lambda: ["call", "read_file", {"path": chance.choice(("../outside/file.txt", "to_file", "chain/file.txt"))}],
        lambda: ["call", "write_file", {"path": str(stage.grounds.outside / "made.txt")}],
        lambda: _CLOSE,
    ]

    def made(depth: int) -> Plan:
        plan: Plan = [_ASSESS, *(chance.choice(deeds)() for _ in range(4))]
        if depth:
            plan.insert(chance.randint(1, len(plan)), ["spawn", chance.choice(("helper", "weak")), made(depth - 1)])
        return plan

    with stage.client() as kd:
        plan = made(2)
        told = go(kd, "schemer", plan, "r")
        law.unread(told)
        law.lawful(stage.grounds)
        if chance.random() < 0.5:
            kd.fork("r", "1:after", id="f", effects="live")
            go(kd, "schemer", plan, "f")
            law.lawful(stage.grounds, forks={"f": "r"})
        return law.on_record(kd, *kin(kd, "r"))


def a_child_asks_its_own_people(stage: Stage) -> Tried:
    """Who may answer what the contract above asks is said there, whatever a child's own contract calls managers."""
    plan: Plan = [["spawn", "weak", [_ASSESS, _pays("ann", 800)]]]
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        [wait] = kd.inbox()
        for by in ("mallory", "managers", "weak", "r"):
            try:
                kd.answer(wait.id, "approve", by=by)
                raise AssertionError(by)
            except killick.KillickError:
                pass
        assert go(kd, "schemer", plan, "r") == "waits"
        law.lawful(stage.grounds)
        return law.on_record(kd, *kin(kd, "r")) + Tried(4, 4)


def time_that_begins_anew(stage: Stage) -> Tried:
    """A time budget is not longer for being used by a child, or after a renewal."""
    world.declare(stage.grounds, rules.budget(time="1h"))
    late = [["sleep", 1800], _pays("ann", 5)]
    plans: list[Plan] = [
        [_ASSESS, ["sleep", 2400], ["spawn", stage.chance.choice(("helper", "weak")), [_ASSESS, *late]]],
        [_ASSESS, ["sleep", 2400], ["renew", [_ASSESS, *late]]],
    ]
    with stage.client() as kd:
        go(kd, "schemer", stage.chance.choice(plans), "r")
        assert law.paid(stage.grounds) == []
        return law.on_record(kd, *kin(kd, "r"))


def the_context_made_to_fit(stage: Stage) -> Tried:
    """What has to be so before something is done is not made so by whoever wants to do it."""
    world.declare(stage.grounds, rules.context("pay", approved={"one_of": [True]}), rules.arguments(
        "update", {"approved": {"one_of": [False], "optional": True}}
    ))  # fmt: skip
    value = stage.chance.choice((True, 1, "true", [True], {"approved": True}, "True"))
    fits: Plan = [_ASSESS, ["update", {"approved": value}], _pays("ann", 5)]
    plan: Plan = [*fits, ["update", {"Approved": True}], _pays("ann", 5), ["spawn", "helper", fits]]
    with stage.client() as kd:
        told = go(kd, "schemer", plan, "r")
        assert told[1].startswith("rejected"), told
        with contextlib.suppress(killick.KillickError):
            kd.edit.set("r", by="mia", approved=True)
        assert law.paid(stage.grounds) == []
        return law.on_record(kd, *kin(kd, "r"))


# processes --------------------------------------------------------------------------------------


def _advance(agent: str, plan: Plan, run: str) -> Task:
    def task(kd: killick.Client) -> Any:
        return go(kd, agent, plan, run)

    return task


def _begun(stage: Stage, agents: list[str], plan: Plan) -> list[str]:
    """Children that wait for the sign."""
    waiting: Plan = [["wait", "go"], *plan]

    def begin(kd: killick.Client) -> Any:
        children = go(kd, "schemer", [["spawn", agent, waiting, False] for agent in agents], "r")
        for child in children:
            kd.send(child, "go")
        return children

    children: list[str] = stage.live(begin)
    return children


def _raced(stage: Stage, agents: list[str], plan: Plan) -> Tried:
    children = _begun(stage, agents, plan)
    waiting: Plan = [["wait", "go"], *plan]
    stage.together(*(_advance(agent, waiting, child) for agent, child in zip(agents, children, strict=True)))
    law.lawful(stage.grounds)

    def look(kd: killick.Client) -> Any:
        return law.on_record(kd, *kin(kd, "r"))

    return Tried(*stage.live(look))


def two_processes_at_once(stage: Stage) -> Tried:
    """The children of one run spend its budget in two processes at the same instant."""
    amount = stage.chance.choice((200, 400, 500))
    people = stage.chance.choice((["ann"], ["ann", "bob"]))
    plan: Plan = [_ASSESS, *(_pays(stage.chance.choice(people), amount) for _ in range(4)), _CLOSE]
    if stage.chance.random() < 0.5:
        world.HERE.flaky = {"pay": 2, "close": 1}
    found = _raced(stage, [stage.chance.choice(("helper", "weak")), stage.chance.choice(("helper", "weak"))], plan)
    assert law.paid(stage.grounds), "nothing was paid, so nothing was tried"
    return found


def two_processes_spawn_at_once(stage: Stage) -> Tried:
    """Two children spawn at the same instant what may be spawned once."""
    world.declare(stage.grounds, rules.once("spawn:schemer"))
    return _raced(stage, ["helper", "weak"], [["spawn", "schemer", [_ASSESS, _CLOSE], True], _CLOSE])


def a_fork_at_the_same_instant(stage: Stage) -> Tried:
    """A run and its fork, which was told to do something else, spend the same budget in two processes."""
    amount = stage.chance.choice((400, 500))

    def made(to: str, account: str) -> Plan:
        return [
            _ASSESS,
            ["wait", "go"],
            *(_pays(to, amount) for _ in range(3)),
            ["call", "close", {"account": account}],
        ]

    plan, other = made("ann", "a"), made("bob", "b")

    def begin(kd: killick.Client) -> Any:
        go(kd, "schemer", plan, "r")
        kd.fork("r", "1:after", id="f", input=other, effects="live")
        go(kd, "schemer", other, "f")
        for run in ("r", "f"):
            kd.send(run, "go")
        return None

    def look(kd: killick.Client) -> Any:
        return law.on_record(kd, *kin(kd, "r"))

    stage.live(begin)
    told = stage.together(_advance("schemer", plan, "r"), _advance("schemer", other, "f"))
    law.lawful(stage.grounds, forks={"f": "r"})
    assert "waits" not in told, told
    assert law.paid(stage.grounds), "nothing was paid, so nothing was tried"
    return Tried(*stage.live(look))


def killed_and_the_contract_changed(stage: Stage) -> Tried:
    """Killed between the verdict and the effect, before or after it began; then the contract is looser or tighter."""
    amount = stage.chance.choice((400, 5000))
    tool = stage.chance.choice(("pay", "pay_strict"))
    before, after = stage.chance.choice(((300, 1000), (1000, 300), (1000, 1000)))
    plan: Plan = [_ASSESS, _pays("ann", amount, tool), _pays("bob", 400, tool)]
    place = stage.chance.choice(("before it begins", tool))

    def first(kd: killick.Client) -> Any:
        if place != tool:
            fast_path.is_common = lambda branch, ex: False  # type: ignore[assignment]
            step_execution.StepExecution._attempt = dying(step_execution.StepExecution._attempt)  # type: ignore[method-assign]
        return go(kd, "schemer", plan, "r")

    world.declare(stage.grounds, limit=before)
    stage.live(first, dies_in=place)
    world.declare(stage.grounds, limit=after)

    def second(kd: killick.Client) -> Any:
        told = go(kd, "schemer", plan, "r")
        return [told, law.on_record(kd, "r")]

    _, found = stage.live(second)
    began = place == tool  # what was open goes on under its key; what was not is judged anew
    paid = [amount for _, amount, _ in law.paid(stage.grounds)]
    assert set(paid) <= {400}, paid
    assert sum(amount > after for amount in paid) <= began, (paid, place, before, after)
    return Tried(*found)


def killed_at_any_moment(stage: Stage) -> Tried:
    """Killed again and again at moments that nobody chose, with children and branches under way."""
    chance = stage.chance
    amounts = (100, 400, 500, 1200, 501)

    def made() -> Plan:
        return [_ASSESS, *(_pays(chance.choice(world.RECIPIENTS), chance.choice(amounts)) for _ in range(3)), _CLOSE]

    plan: Plan = [_ASSESS, ["together", made(), made(), [["spawn", chance.choice(("helper", "weak")), made()]]]]

    def lived(kd: killick.Client) -> Any:
        go(kd, "schemer", plan, "r")
        for wait in kd.inbox():
            kd.answer(wait.id, "reject", by="mia")
        return kd.info("r").status

    for _ in range(4):
        stage.live(lived, after=chance.uniform(0.005, 0.06))
    for _ in range(6):
        if stage.live(lived) == "completed":
            break
    else:
        raise AssertionError("it does not come to its end")
    law.lawful(stage.grounds)
    assert law.paid(stage.grounds), "nothing was paid, so nothing was tried"

    def look(kd: killick.Client) -> Any:
        return law.on_record(kd, *kin(kd, "r"))

    return Tried(*stage.live(look))


def dying(attempt: Any) -> Any:
    """The way a step is begun, in a process that is killed where a payment would be."""

    async def dies(self: step_execution.StepExecution) -> Any:
        if self.intent.name.startswith("pay"):
            await self.ex.barrier()
            world.HERE.dies_in = "now"
            world._at_work("now")  # pyright: ignore[reportPrivateUsage]
        return await attempt(self)

    return dies


def another_folder_between_two_attempts(stage: Stage) -> Tried:
    """The folder that a file is in becomes a link between the first attempt and the second."""

    def swap() -> None:
        shutil.rmtree(stage.grounds.root / "sub")
        (stage.grounds.root / "sub").symlink_to(stage.grounds.outside)

    plan: Plan = [["call", "write_file", {"path": "sub/made.txt", "text": "escaped"}]]
    if stage.chance.random() < 0.5:
        world.HERE.lost, world.HERE.between = {"write_file": 1}, swap
        with stage.client() as kd:
            go(kd, "schemer", plan, "r")
            law.lawful(stage.grounds)
            return law.on_record(kd, "r")
    stage.live(_advance("schemer", plan, "r"), dies_in="write_file")
    swap()

    def look(kd: killick.Client) -> Any:
        go(kd, "schemer", plan, "r")
        return law.on_record(kd, "r")

    found = stage.live(look)
    law.lawful(stage.grounds)
    return Tried(*found)


def another_root(stage: Stage) -> Tried:
    """The root made a link to elsewhere; then read by the run, a child, what it is renewed as, or the next run."""
    chance, name = stage.chance, stage.chance.choice((".", "./", "sub/..", str(stage.grounds.root), "./."))
    away: Plan = [
        ["call", "remove", {"path": name}],
        ["call", "link", {"path": name, "target": str(stage.grounds.outside)}],
        ["call", "write_file", {"path": name}],
    ]
    reads: Plan = [["call", "read_file", {"path": "file.txt"}], ["call", "write_file", {"path": "made.txt"}]]
    after: Plan = chance.choice((reads, [["spawn", "helper", reads]], [["renew", reads]]))
    with stage.client() as kd:
        told = [go(kd, "schemer", [*away, *after], "r"), go(kd, "schemer", reads, "next")]
        law.unread(told)
        law.lawful(stage.grounds)
        return law.on_record(kd, *kin(kd, "r", "next"))


def other_arguments_than_those_on_record(stage: Stage) -> Tried:
    """A payment waits for somebody; after a crash the code asks for less under the same identity."""
    much: Plan = [_ASSESS, _pays("ann", 900, "pay_known")]
    stage.live(_advance("schemer", much, "r"))

    async def less(run: killick.Run, plan: Plan) -> list[Any]:
        return await world.schemer_body(run, [_ASSESS, _pays("ann", 10, "pay_known")])

    world.AGENTS["schemer"] = killick.agent(name="schemer", contract=world.contract(stage.grounds))(less)
    stage.live(_advance("schemer", much, "r"))
    law.lawful(stage.grounds)

    def look(kd: killick.Client) -> Any:
        asked = [event for _, event, _ in kd.runtime.log.read("r") if isinstance(event, e.WaitOpened)]
        return [len(asked), *law.on_record(kd, "r")]

    asked, *found = stage.live(look)
    assert asked >= 1
    return Tried(*found)
