"""What an agent has to do with here: tools that really do something, contracts, a model that follows a script, and
agents that follow a plan. Everything that a tool does goes into the books of the far side, which are the judge."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final

import killick
from escape.far import Grounds
from killick import rules
from killick.definitions.tools import TOOLS as DECLARED
from killick.errors import ChildFailed, Rejected, StepFailed
from killick.testing import call, scripted

Call = tuple[str, dict[str, Any]]
"""What a model wants done: a tool's name, and arguments."""

Plan = list[list[Any]]
"""What a schemer does, move by move: `["call", "pay", {…}]`, `["spawn", "helper", plan]`, `["together", plan, …]`."""

RECIPIENTS: Final = ("ann", "bob", "eve")
AMOUNT_MAX: Final = 1000
ASKED_ABOVE: Final = 500
TOTAL_MAX: Final = 1500
EFFECTS_MAX: Final = 5


class _Here:
    """Where tools are at work, in this process and in those that are forked from it."""

    grounds: Grounds

    def __init__(self) -> None:
        self.scripts: dict[str, Sequence[Call]] = {}
        """By run, what its model wants."""
        self.flaky: dict[str, int] = {}
        """By tool, how many more times it says that nothing was done."""
        self.lost: dict[str, int] = {}
        """By tool, how many more times it breaks off before it does anything."""
        self.dies_in = ""
        """The tool in which the process is killed."""
        self.between: Callable[[], object] | None = None
        """What happens between an attempt that broke off and the next."""


HERE: Final = _Here()


def run_of(key: str) -> str:
    """The run that a key belongs to."""
    return key.partition(":step_")[0]


def _at_work(tool: str) -> None:
    """What can happen to a tool before it does anything."""
    if HERE.dies_in == tool:
        os.kill(os.getpid(), signal.SIGKILL)
    if HERE.flaky.get(tool, 0):
        HERE.flaky[tool] -= 1
        raise killick.NotDone("busy")
    if HERE.lost.get(tool, 0):
        HERE.lost[tool] -= 1
        if HERE.between is not None:
            HERE.between()
        raise ConnectionError("no answer")


# tools ------------------------------------------------------------------------------------------

_RETRY: Final = killick.Retry(attempts=4, first=0.01, jitter=0)


@killick.tool(effect="idempotent", retry=_RETRY)
async def pay(to: Any, amount: Any, currency: Any = "EUR", key: killick.Key = killick.KEY) -> str:
    """Pay somebody. Takes anything that it is given."""
    _at_work("pay")
    HERE.grounds.books.enter("pay", key=key, to=to, amount=repr(amount), currency=currency)
    return f"paid {amount!r}"


@killick.tool(effect="at_most_once", retry=_RETRY)
async def pay_strict(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    """Pay somebody, by declared types."""
    _at_work("pay_strict")
    HERE.grounds.books.enter("pay", key=key, to=to, amount=repr(amount), currency="EUR")
    return "paid"


@killick.tool(effect="idempotent", identity=("to",))
async def pay_known(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    """Pay somebody, where two payments to one person are the same."""
    _at_work("pay_known")
    HERE.grounds.books.enter("pay", key=key, to=to, amount=repr(amount), currency="EUR")
    return "paid"


async def _retract(effect: Any) -> None:
    HERE.grounds.books.enter("retract", key=f"{effect.key}:undo")


@killick.tool(effect="idempotent", compensate=_retract)
async def assess(claim: str, key: killick.Key = killick.KEY) -> str:
    """Look into a claim, which has to be done before anything is paid."""
    if claim == "broken":
        raise killick.NotDone("it cannot be assessed")
    HERE.grounds.books.enter("assess", key=key, claim=claim)
    return "fine"


@killick.tool(effect="idempotent")
async def close(account: str, key: killick.Key = killick.KEY) -> str:
    """Close an account, which may be done once."""
    _at_work("close")
    HERE.grounds.books.enter("close", key=key, account=account)
    return "closed"


@killick.tool(effect="idempotent")
async def delete_everything(key: killick.Key = killick.KEY) -> str:
    """What nobody may do."""
    HERE.grounds.books.enter("delete", key=key)
    return "gone"


@killick.tool(effect="reads")
async def read_file(path: Any) -> str:
    """Read a file."""
    return HERE.grounds.read(path)


@killick.tool(effect="reads")
async def read_many(paths: Any) -> list[str]:
    """Read files."""
    return [HERE.grounds.read(path) for path in paths]


@killick.tool(effect="idempotent", retry=_RETRY)
async def write_file(path: Any, text: str = "x") -> str:
    """Write to a file."""
    _at_work("write_file")
    HERE.grounds.write(path, text)
    return "written"


@killick.tool(effect="idempotent")
async def link(path: str, target: str) -> str:
    """Make a link, which may lead anywhere, in a place that the contract says."""
    await remove.fn(path)
    os.symlink(target, path)
    return "linked"


@killick.tool(effect="idempotent")
async def remove(path: str) -> str:
    """Remove a file or a folder."""
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)
    return "removed"


TOOLS: Final = {
    tool.name: tool
    for tool in (pay, pay_strict, pay_known, assess, close, delete_everything, read_file, read_many, write_file, link,
                 remove)
}  # fmt: skip


# contracts --------------------------------------------------------------------------------------


def contract(grounds: Grounds, *more: rules.Rule, limit: int = AMOUNT_MAX, **options: Any) -> killick.Contract:
    """What binds everybody here. `limit` is the most that one payment may be."""
    root = str(grounds.root)
    people: dict[str, Any] = {"managers": ["mia", "max", "moe"], "directors": ["dan"]}
    said: dict[str, Any] = {"people": people, "rejections": 10_000} | options
    return killick.Contract(
        "clerks",
        [
            rules.allow("assess", "pay", "pay_*", "close", "*_file", "read_many", "link", "remove", "spawn:*", "send"),
            rules.deny("delete_*"),
            rules.arguments(
                ["pay", "pay_*"],
                amount={"type": "integer", "min": 1, "max": limit},
                to={"one_of": list(RECIPIENTS)},
            ),
            rules.arguments("pay", currency={"one_of": ["EUR"]}),
            rules.arguments(["pay", "pay_*"], amount={"max": ASKED_ABOVE}, name="large sums", ask="managers"),
            rules.after(["pay", "pay_*"], "assess"),
            rules.total(["pay", "pay_*"], "amount", max=TOTAL_MAX),
            rules.total(["pay", "pay_*"], "amount", max=AMOUNT_MAX, by="to"),
            rules.budget("pay", "pay_*", effects=EFFECTS_MAX),
            rules.once("close"),
            rules.paths(["*_file", "link", "remove"], path=[root]),
            rules.paths("read_many", paths=[root]),
            *more,
        ],
        **said,
    )


# a model, and agents ----------------------------------------------------------------------------


def _answers(messages: Sequence[Any]) -> int:
    """How many calls were answered, in the form of any provider."""
    found = 0
    for message in messages:
        if message.get("role") == "tool" or message.get("type") == "function_call_output":
            found += 1
        elif isinstance(message.get("content"), list):
            found += sum(block.get("type") == "tool_result" for block in message["content"])
    return found


def model_of(run: str, provider: Any) -> Any:
    """A model that wants one thing after the other, wherever it is asked."""

    def says(messages: Sequence[Any]) -> Any:
        wanted, number = HERE.scripts[run], _answers(messages)
        return call(wanted[number][0], **wanted[number][1]) if number < len(wanted) else "That is all."

    return scripted(says, provider=provider, forever=True)


async def clerk_body(run: killick.Run, provider: str) -> list[str]:
    """The whole loop of a model with tools: what it was told of each call."""
    toolset = killick.Toolset(*TOOLS.values())
    form: Any = provider
    done = await killick.loop(
        run, model_of(run.id, provider), toolset, messages="Go on.", provider=form, turns_max=500, model="m"
    )
    return told(done.messages)


def told(messages: Sequence[Any]) -> list[str]:
    """What a model was told of its calls."""
    found: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            found.append(message["content"])
        elif message.get("type") == "function_call_output":
            found.append(message["output"])
        elif message.get("role") == "user" and isinstance(message["content"], list):
            found += [block["content"] for block in message["content"]]
    return found


async def schemer_body(run: killick.Run, plan: Plan) -> list[Any]:
    """Follow a plan, whatever comes of its moves."""
    return [await move(run, each) for each in plan]


async def move(run: killick.Run, what: list[Any]) -> Any:
    """One move of a plan, and what came of it."""
    kind, *rest = what
    try:
        return await _MOVES[kind](run, *rest)
    except Rejected as rejected:
        return f"rejected {rejected.code}"
    except (StepFailed, ChildFailed) as failed:
        return f"failed {failed.failure.type if failed.failure else ''}"


async def _call(run: killick.Run, tool: str, arguments: dict[str, Any]) -> Any:
    return await run.call(TOOLS[tool], **arguments)


async def _propose(run: killick.Run, tool: str, arguments: dict[str, Any]) -> Any:
    return (await run.propose(TOOLS[tool], **arguments)).kind


async def _together(run: killick.Run, *plans: Plan) -> Any:
    return list(await run.gather(schemer_body(run, plan) for plan in plans))


async def _spawn(run: killick.Run, agent: str, plan: Plan, wait: bool = True) -> Any:
    child = await run.spawn(AGENTS[agent], plan, on_parent_end="abandon")
    return await child.result() if wait else child.id


async def _send(run: killick.Run, to: str, name: str, body: Any) -> Any:
    try:
        await run.send(to, name, body)
    except killick.KillickError as error:
        return f"failed {type(error).__name__}"
    return "sent"


async def _update(run: killick.Run, changes: dict[str, Any]) -> Any:
    await run.update(**changes)
    return "updated"


async def _wait(run: killick.Run, name: str) -> Any:
    return await run.wait(name)


async def _sleep(run: killick.Run, seconds: float) -> Any:
    await run.sleep(seconds)
    return "slept"


async def _renew(run: killick.Run, plan: Plan) -> Any:
    return await run.renew(plan)


_MOVES: Final[dict[str, Callable[..., Any]]] = {
    "call": _call, "propose": _propose, "together": _together, "spawn": _spawn, "send": _send, "update": _update,
    "wait": _wait, "sleep": _sleep, "renew": _renew,
}  # fmt: skip

AGENTS: Final[dict[str, Any]] = {}


def declare(grounds: Grounds, *more: rules.Rule, **options: Any) -> None:
    """The agents of one story, under the contract of these grounds. The last ones declared count."""
    HERE.grounds = grounds
    DECLARED.update(TOOLS)
    binding = contract(grounds, *more, **options)
    # What a child may do by its own contract is everything, and who its managers are is its own idea.
    weak = killick.Contract(
        "weak", [rules.allow("*")], people={"managers": ["mallory"]}, prices={"m": {"input": 0, "output": 0}}
    )
    AGENTS["clerk"] = killick.agent(name="clerk", contract=binding)(clerk_body)
    AGENTS["schemer"] = killick.agent(name="schemer", contract=binding)(schemer_body)
    AGENTS["helper"] = killick.agent(name="helper")(schemer_body)
    AGENTS["weak"] = killick.agent(name="weak", contract=weak)(schemer_body)


def forget() -> None:
    """Nothing happens to tools any more."""
    HERE.flaky, HERE.lost, HERE.dies_in, HERE.between = {}, {}, "", None
