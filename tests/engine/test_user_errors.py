"""What people read when their own code is wrong: their lines, their names, and the next move."""

from __future__ import annotations

import asyncio
import inspect
import re
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

import killick
from engine import bugs
from engine.bugs import Gift, Order
from killick.definitions.tools import TOOLS
from killick.engine.failures import describe
from killick.errors import DeclarationRefused, ValueRefused
from killick.history.timeline import timeline
from killick.llm.loop import LoopResult
from killick.model import events as e
from killick.model.failure import Failure, Frame
from killick.store.records import RunQuery


def amount_of(order: dict[str, int]) -> int:
    return order["amount"]


@killick.tool(effect="reads", name="looks_up")
async def looks_up(order: dict[str, int]) -> int:
    return amount_of(order)


@killick.agent(name="asks_for_it")
async def asks_for_it(run: killick.Run) -> int:
    return await run.call(looks_up, {"total": 3})


def printed(call: Any) -> str:
    with pytest.raises(killick.RunFailed) as failed:
        call()
    return "".join(traceback.format_exception(failed.value))


# frames --------------------------------------------------------------------------------------------


def test_the_first_frames_of_a_failed_run_are_those_of_the_users_code_live_and_from_the_record(world: Any) -> None:
    live = printed(lambda: world.kd.run(asks_for_it, id="r"))
    world.process()
    again = printed(lambda: world.kd.run(asks_for_it, id="r"))
    chain = "\n    return amount_of(order)\n"
    for text in (live, again):
        first, *others = text.split("The above exception was the direct cause of the following exception")
        assert first.count("File ") == 2, text
        assert chain in first
        assert 'return order["amount"]' in first
        assert first.strip().endswith("KeyError: 'amount'")
        assert "await run.call(looks_up" in others[0]
        assert others[0].count("File ") == 1
    assert live.partition("RunFailed")[0].count("src/killick") <= 2, "not the frames of our own loop"


def test_a_failed_run_names_its_step_once(world: Any) -> None:
    with pytest.raises(killick.RunFailed, match=r"^r: failed at step 1 \(looks_up\): KeyError: 'amount'; resume"):
        world.kd.run(asks_for_it, id="r")


def test_an_error_of_any_record_can_be_printed() -> None:
    odd = Failure("error", "a.\0b", (), "\0", ("note",), (Frame("…", 0, ""), Frame("\0", 2**40, "f.<locals>.g")))
    failure = describe(ValueError("outer"))
    for each in (odd, failure, Failure("error", "", (), "", cause=odd, context=failure)):
        assert traceback.format_exception(each.error())


# calls that cannot be meant ------------------------------------------------------------------------


@killick.tool(name="stores")
async def stores(what: Any) -> None:
    """Takes anything."""


@killick.agent(name="gives_a_lock")
async def gives_a_lock(run: killick.Run) -> None:
    await run.call(stores, object())


@killick.agent(name="returns_a_lock")
async def returns_a_lock(run: killick.Run) -> Any:
    return {"lock": object()}


def test_an_argument_that_cannot_be_stored_is_not_called_a_result(world: Any) -> None:
    with pytest.raises(killick.RunFailed, match=r"ValueRefused: step 1 \(stores\): what: cannot store a object; use"):
        world.kd.run(gives_a_lock, id="r")
    with pytest.raises(killick.RunFailed, match=r"result of returns_a_lock\.lock: cannot store a object"):
        world.kd.run(returns_a_lock, id="s")


@killick.agent(name="returns_the_whole")
async def returns_the_whole(run: killick.Run) -> str:
    return killick.Happened("sent")  # type: ignore[return-value]


def test_a_result_of_another_type_is_named_by_what_the_code_returned(world: Any) -> None:
    with pytest.raises(killick.RunFailed, match="result of returns_the_whole, a Happened: Expected `str`") as failed:
        world.kd.run(returns_the_whole)
    assert "returns_the_whole is declared to return str" in str(failed.value)


def test_a_loops_result_where_text_is_declared_is_told_its_text(world: Any) -> None:
    @killick.agent(name="returns_the_reply")
    async def returns_the_reply(run: killick.Run) -> str:
        return LoopResult("Paid.", [], None, 1)  # type: ignore[return-value]

    with pytest.raises(killick.RunFailed, match=r"is declared to return str; return its \.text"):
        world.kd.run(returns_the_reply)


def plain(run: Any) -> None:
    """A function that nobody declared."""


@pytest.mark.parametrize("what", [plain, stores, 3])
def test_what_is_no_agent_is_refused_by_name(world: Any, what: Any) -> None:
    name = getattr(what, "__name__", "3")
    for call in (world.kd.run, world.kd.start):
        with pytest.raises(DeclarationRefused, match=f"^{name}: is not an agent; declare it with @killick.agent"):
            call(what)


def test_an_id_that_is_no_text_is_refused_with_the_text(world: Any) -> None:
    with pytest.raises(ValueRefused, match="id: 17 is not text; give id='17'"):
        world.kd.run(asks_for_it, id=17)


def test_an_empty_id_is_refused_by_run_start_and_spawn(world: Any) -> None:
    @killick.agent(name="spawns_without_an_id")
    async def spawns(run: killick.Run) -> None:
        await run.spawn(asks_for_it, id="")

    empty = "id: is empty; leave it out or give one"
    for start in (world.kd.run, world.kd.start):
        with pytest.raises(ValueRefused, match=empty):
            start(asks_for_it, id="")
    with pytest.raises(killick.RunFailed, match=empty):
        world.kd.run(spawns, id="r")
    assert [row.run for row in world.kd.runtime.store.runs(RunQuery(), limit=9)] == ["r"]


def test_an_agent_of_two_inputs_is_told_to_take_a_dataclass() -> None:
    async def adds(run: killick.Run, a: int, b: int) -> int:
        return a + b

    with pytest.raises(DeclarationRefused, match="adds: takes one input; put a and b into a dataclass"):
        killick.agent(adds)  # type: ignore[call-overload]


def test_a_call_that_does_not_fit_names_the_tool_and_its_signature(world: Any) -> None:
    @killick.agent(name="misfits")
    async def misfits(run: killick.Run, how: str) -> None:
        await (run.call(looks_up, {}, 4) if how == "too many" else run.call(looks_up, m=4))  # type: ignore[call-arg]

    for how, told in (
        ("too many", "too many positional arguments"),
        ("missing", "missing a required argument: 'order'"),
    ):
        with pytest.raises(killick.RunFailed) as failed:
            world.kd.run(misfits, how)
        assert f"looks_up(order: dict[str, int]): {told}" in str(failed.value)


def test_an_agent_without_a_run_is_refused_with_its_signature() -> None:
    def none() -> None:
        """Takes nothing."""

    async def text(text: str) -> None:
        """Takes an input alone."""

    with pytest.raises(DeclarationRefused, match=r"none\(\).* is no agent: .*none\(run: killick\.SyncRun, …\)"):
        killick.agent(none)  # type: ignore[call-overload]
    with pytest.raises(DeclarationRefused, match=r"text\(text: .* is no agent: .*text\(run: killick\.Run, …\)"):
        killick.agent(text)  # type: ignore[call-overload]


def test_a_tool_that_is_a_method_is_refused_where_it_is_declared() -> None:
    with pytest.raises(DeclarationRefused, match="pay: is a method"):

        class Shop:
            @killick.tool
            async def pay(self, amount: int) -> None:
                """Pays."""

    class Bank:
        async def pay(self, amount: int) -> int:
            return amount

    assert list(killick.tool(name="bank_pay")(Bank().pay).shape.hints) == ["amount"]


@pytest.mark.parametrize(("declare", "option"), [(killick.tool, "efect"), (killick.agent, "contrct")])
def test_an_option_that_is_misspelt_is_refused_with_the_one_that_was_meant(declare: Any, option: str) -> None:
    meant = {"efect": "effect", "contrct": "contract"}[option]
    with pytest.raises(DeclarationRefused, match=f"{option}= is not an option; did you mean {meant}="):
        declare(**{option: "reads"})
    with pytest.raises(DeclarationRefused, match=r"zzz= is not an option; it takes [a-z]+, "):
        declare(zzz=1)


@killick.agent(name="gives_a_default")
async def gives_a_default(run: killick.Run, default: str) -> str:
    return (await run.ask("Which?", options=["red", "blue"], default=default, timeout="1h")).kind


def test_a_default_that_is_none_of_the_options_is_refused_before_the_question(world: Any) -> None:
    with pytest.raises(killick.RunFailed, match="default: 'green' is not one of the options 'red', 'blue'"):
        world.kd.run(gives_a_default, "green", id="r")
    assert not world.told("r", e.WaitOpened)
    for default in ("red", "reject"):
        with pytest.raises(killick.RunWaiting):
            world.kd.run(gives_a_default, default, id=default)


@killick.agent(name="waits_in_a_task")
async def waits_in_a_task(run: killick.Run) -> int:
    return await asyncio.create_task(run.call(looks_up, {"amount": 3}))


def test_a_step_in_a_task_of_the_agents_own_names_wait_for_and_what_to_use_instead(world: Any) -> None:
    with pytest.raises(killick.RunFailed, match=r"asyncio\.timeout\(…\) in place of asyncio\.wait_for"):
        world.kd.run(waits_in_a_task, id="r")


# what a person has to do ---------------------------------------------------------------------------


@killick.agent(name="asks_somebody")
async def asks_somebody(run: killick.Run, how: str) -> None:
    if how == "options":
        await run.ask("Which?", options=["red", "blue"])
    elif how == "free":
        await run.ask("Well?", to="ann")
    else:
        await run.wait("paid")


@pytest.mark.parametrize(
    ("how", "move"),
    [
        ("options", "kd.answer('r:1', 'respond', value='red' | 'blue')"),
        ("free", "kd.answer('r:1', 'approve' | 'reject' | 'edit' | 'respond', value=…, by=…)"),
        ("event", "kd.send('r', 'paid', …)"),
    ],
)
def test_a_run_that_waits_names_the_call_that_ends_the_wait(world: Any, how: str, move: str) -> None:
    with pytest.raises(killick.RunWaiting, match=re.escape(f"; call {move}") + "$"):
        world.kd.run(asks_somebody, how, id="r")


def boom(effect: killick.Effect) -> Any:
    raise LookupError("no such order")


@pytest.mark.parametrize(
    ("reconcile", "said"),
    [(lambda effect: False, "reconcile returned False; it has to return killick.Happened"),
     (lambda effect: None, "reconcile returned None; it has to return killick.Happened"),
     (boom, "reconcile failed: LookupError: no such order")],
)  # fmt: skip
def test_the_question_and_the_record_say_what_a_reconciler_did_that_says_nothing(
    world: Any, reconcile: Any, said: str
) -> None:
    @killick.tool(name="lost", reconcile=reconcile)
    async def lost() -> None:
        raise ConnectionError("gone")

    @killick.agent(name="loses")
    async def loses(run: killick.Run) -> None:
        await run.call(lost)

    with pytest.raises(killick.RunWaiting, match=re.escape(f"(ConnectionError: gone; {said}")):
        world.kd.run(loses, id="r")
    notes = [str(note.note) for step in timeline(world.kd.runtime.log, "r").steps() for note in step.notes]
    assert any(note.startswith(said) for note in notes), notes


# arguments -----------------------------------------------------------------------------------------


TAKEN: list[Any] = []


@killick.tool(name="pays")
async def pays(to: str, amount: int) -> None:
    TAKEN.append((to, amount))


@killick.tool(name="buys")
async def buys(
    order: Order | None = None, *, at: datetime | None = None, share: float = 1.0, tags: Sequence[str] = ()
) -> None:
    TAKEN.append((order, at, share, tags))


@killick.agent(name="calls_with")
async def calls_with(run: killick.Run, how: str) -> None:
    tool, args, kwargs = CALLS[how]
    await run.call(tool, *args, **kwargs)


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "number for text": (pays, (5, 12), {}),
    "text for number": (pays, ("bob",), {"amount": "12"}),
    "deep": (buys, ({"item": "tea", "amount": "many"},), {}),
    "list": (buys, (), {"tags": ["a", 3]}),
    "object": (buys, (Gift("tea", 3),), {}),
    "dict": (buys, ({"item": "tea", "amount": 3},), {"share": 1, "at": "2026-01-02T03:04:05+00:00", "tags": ("a",)}),
}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("number for text", r"pays: to: Expected `str`, got `int`; to takes str, and got 5"),
        ("text for number", r"pays: amount: Expected `int`, got `str`; amount takes int, and got '12'"),
        ("deep", r"buys: order\.amount: Expected `int`, got `str`; order takes .*Order.*, and got \{'item': 'tea'"),
        ("list", r"buys: tags\[1\]: Expected `str`, got `int`; tags takes .*Sequence\[str\], and got \['a', 3\]"),
    ],
)
def test_an_argument_of_another_type_is_refused_before_anything_is_intended(world: Any, how: str, told: str) -> None:
    TAKEN.clear()
    with pytest.raises(killick.RunFailed, match=told):
        world.kd.run(calls_with, how, id="r")
    assert not world.told("r", e.StepIntended)
    assert not TAKEN


def test_an_argument_that_converts_without_loss_arrives_as_the_declared_type(world: Any) -> None:
    TAKEN.clear()
    world.kd.run(calls_with, "dict", id="r")
    world.kd.run(calls_with, "object", id="s")
    order, at, share, tags = TAKEN[0]
    assert (order, at, list(tags)) == (Order("tea", 3), datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), ["a"])
    assert type(share) is float
    assert TAKEN[1][0] == Gift("tea", 3), "one of a derived class stays what it is"


# steps that are never awaited ----------------------------------------------------------------------


@killick.agent(name="forgets")
async def forgets(run: killick.Run, how: str) -> str:
    if how == "call":
        run.call(pays, "bob", 3)  # type: ignore[unused-coroutine]
        await run.call(pays, "eve", 4)
    elif how == "last":
        await run.call(pays, "eve", 4)
        run.note("over")  # type: ignore[unused-coroutine]
    elif how == "kept":
        kept = run.call(pays, "bob", 3)
        await run.call(pays, "eve", 4)
        assert kept is not None
    elif how == "late":
        late = run.call(pays, "bob", 3)
        await run.call(pays, "eve", 4)
        await late
    else:
        await run.gather([run.call(pays, "bob", number) for number in range(30)])
        await run.gather(*(run.call(pays, "bob", number) for number in range(3)))
    return "done"


def test_a_step_whose_result_is_used_without_await_is_named_in_the_error(world: Any) -> None:
    @killick.agent(name="adds_to_a_step")
    async def adds(run: killick.Run, how: str) -> Any:
        if how == "call":
            return run.call(pays, "bob", 3) + 1  # type: ignore[operator]
        return run.ask("Pay?").approved  # type: ignore[attr-defined]

    for how, call in (("call", "run.call(pays, …)"), ("ask", "run.ask(…)")):
        with pytest.raises(killick.RunFailed) as failed:
            world.kd.run(adds, how)
        assert "'coroutine'" in str(failed.value)
        assert re.search(r"test_user_errors\.py:\d+: " + re.escape(call) + " was never awaited", str(failed.value))


@pytest.mark.parametrize(
    ("how", "written", "call", "paid"),
    [
        ("call", '        run.call(pays, "bob"', "run.call(pays, …)", []),
        ("last", "        run.note(", "run.note(…)", ["eve"]),
        ("kept", "        kept = run.call(", "run.call(pays, …)", ["eve"]),
    ],
)
def test_a_step_that_is_never_awaited_fails_the_run_and_names_the_call_and_its_line(
    world: Any, how: str, written: str, call: str, paid: list[str]
) -> None:
    TAKEN.clear()
    source, first = inspect.getsourcelines(forgets.fn)
    line = next(first + number for number, text in enumerate(source) if text.startswith(written))
    told = re.escape(f"test_user_errors.py:{line}: {call} was never awaited, and nothing was called")
    with pytest.raises(killick.RunFailed, match=told):
        world.kd.run(forgets, how, id="r")
    assert [to for to, _ in TAKEN] == paid, "it fails as soon as that is certain"


@pytest.mark.parametrize("how", ["late", "many"])
def test_a_step_may_be_awaited_late(world: Any, how: str) -> None:
    assert world.kd.run(forgets, how, id="r") == "done"


# bugs in tools -------------------------------------------------------------------------------------


@killick.agent(name="has_a_bug")
async def has_a_bug(run: killick.Run, name: str) -> None:
    await run.call(TOOLS[name], Order("tea", 3))


@pytest.mark.parametrize("body", ["name_error", "in_a_thread", "no_key", "asserts"])
def test_a_bug_before_the_tool_called_anything_is_a_failure_with_its_frames_and_no_question(
    world: Any, body: str
) -> None:
    killick.tool(name="has_it", retry=3)(getattr(bugs, body))
    text = printed(lambda: world.kd.run(has_a_bug, "has_it", id="r"))
    assert f"in {body}\n" in text
    assert {end.outcome for end in world.told("r", e.AttemptEnded)} == {"refused"}
    assert not world.told("r", e.WaitOpened)


@pytest.mark.parametrize(
    "body",
    ["after_a_call", "in_helpers", "in_a_loop", "by_a_function_of_c", "in_a_helper_that_sends", "of_c_itself", "caught",
     "after_an_await", "of_an_attribute", "raised_on_purpose", "raised_again", "in_the_end", "in_the_end_of_a_helper"],
)  # fmt: skip
def test_a_bug_of_which_it_is_not_known_what_came_before_is_a_question_that_says_so(world: Any, body: str) -> None:
    killick.tool(name="has_it", retry=3)(getattr(bugs, body))
    with pytest.raises(
        killick.RunWaiting, match=r"it had called other code, which may have acted; raise killick\.NotDone"
    ):
        world.kd.run(has_a_bug, "has_it", id="r")
    assert [end.outcome for end in world.told("r", e.AttemptEnded)] == ["unknown"]


@pytest.mark.parametrize("kind", ["cyclic", "deep"])
def test_model_arguments_that_cannot_be_recorded_are_refused_by_name(kind: str) -> None:
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"in": deep}

    async def model(messages: Any) -> str:
        return "reply"

    @killick.agent(name="asks_with_anything")
    async def agent(run: killick.Run) -> str:
        return await run.model(model, messages=cyclic if kind == "cyclic" else deep)

    with killick.open("memory:") as kd, pytest.raises(killick.RunFailed, match="refer to themselves, or are nested"):
        kd.run(agent)
