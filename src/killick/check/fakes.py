"""Fakes for tools and models in rehearsals.

Nothing here touches the world or guesses: an ambiguous fake, or one that does not fit the tool's declaration, is
refused with the tool's name.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Final, NamedTuple, cast

from killick.check.samples import misfit, shown, spelled
from killick.definitions.current import HERE
from killick.definitions.markers import KEY, STEP, TX, ToolStep
from killick.definitions.policy import Effect, Unknown
from killick.definitions.tools import TOOLS, Tool
from killick.engine.steps.attempt import Applied
from killick.engine.steps.intention import Intent
from killick.engine.steps.model_reply import without_sdk_retries
from killick.errors import FakeRefused


class Always(NamedTuple):
    """The same value for every call."""

    value: Any


class InOrder(NamedTuple):
    """One outcome for each call: values, exceptions to raise, functions of the arguments."""

    outcomes: tuple[Any, ...]


def always(value: Any) -> Always:
    """Returns a fake that gives this value for every call, even if it is a list."""
    return Always(value)


def in_order(*outcomes: Any) -> InOrder:
    """Returns a fake with one outcome for each call: values, exceptions, or functions of the arguments."""
    return InOrder(outcomes)


# fakes --------------------------------------------------------------------------------------------


class Fakes:
    """Fakes by tool, model function, or name.

    A faked tool's companions are faked too, unless given: its compensation does nothing, its reconciler reports
    unknown, and its confirmation succeeds. Otherwise a rehearsal would reach the world.
    """

    def __init__(self, given: Mapping[Any, Any] | None = None) -> None:
        self._by_name: dict[str, Fake] = {}
        self._by_function: list[tuple[Callable[..., Any], Fake]] = []
        for key, outcome in (given or {}).items():
            self._add(key, _fresh(outcome, key))

    def _add(self, key: Any, outcome: Any) -> None:
        tool = TOOLS.get(key) if isinstance(key, str) else key
        if isinstance(tool, Tool):
            declared = cast("Tool[..., Any]", tool)
            fake = self._by_name[declared.name] = Fake(declared.name, outcome)
            fake.read(declared.shape.returns)
            given = [name for name, marker in declared.shape.injected.items() if marker is not TX]
            fake.refuse_strangers([*declared.shape.hints, *given])
            self._by_function.append((declared.fn, fake))
        elif isinstance(key, str):
            self._by_name[key] = Fake(key, outcome)
        elif callable(key):
            self._by_function.append((key, Fake(name_of(key), outcome)))
        else:
            raise FakeRefused(repr(key), "is neither a tool nor a function nor the name of one")

    def copied(self) -> Fakes:
        """Returns an independent copy with the same call counts."""
        twin = Fakes()
        twins = {id(fake): copy(fake) for fake in (*self._by_name.values(), *(fake for _, fake in self._by_function))}
        twin._by_name = {name: twins[id(fake)] for name, fake in self._by_name.items()}
        twin._by_function = [(key, twins[id(fake)]) for key, fake in self._by_function]
        return twin

    def for_(self, intent: Intent) -> Fake | None:
        """Returns the fake for a call, or None."""
        if intent.sort == "tool" and not (self._by_name or self._by_function):
            return None
        found = self._by_function_of(intent.fn)
        if intent.sort == "undo":
            named = self._by_name.get(name_of(intent.fn))
            return found or named or (_NOTHING if intent.name in self._by_name else None)
        if found is None and hasattr(inmost(intent.fn), "fresh"):
            found = Fake(intent.name, _fresh(inmost(intent.fn), intent.fn))
            self._by_function.append((intent.fn, found))
        return found or self._by_name.get(intent.name)

    async def apply(self, intent: Intent, place: ToolStep) -> Applied | None:
        """Makes one attempt of a faked call; None without a fake. Raises errors of the fake itself."""
        found = self.for_(intent)
        return None if found is None else await found.apply(intent, place)

    async def call_hook(self, fn: Callable[..., Any], effect: Effect, place: ToolStep | None = None) -> Applied | None:
        """Returns a faked reconciler's or confirmation's result; None without a fake."""
        found = self._by_function_of(fn) or self._by_name.get(name_of(fn))
        if found is not None:
            return await found.call(lambda outcome: outcome(effect) if _takes_some(outcome) else outcome(), Any, place)
        if effect.tool not in self._by_name:
            return None
        tool = TOOLS.get(effect.tool)
        confirm = tool.policy.confirm if tool is not None else None
        return Applied(True) if confirm is not None and is_same(confirm, fn) else Applied(Unknown())

    def _by_function_of(self, fn: Callable[..., Any]) -> Fake | None:
        return next((fake for key, fake in self._by_function if is_same(key, fn)), None)


class Fake:
    """The fake of one tool or model, and its call count."""

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.calls = 0
        self._given = given
        self._script: Always | InOrder | None = given if isinstance(given, Always | InOrder) else None

    def __copy__(self) -> Fake:
        """Copies it with its call count; a model's script continues independently."""
        twin = Fake(self.name, _twin(self._given))
        twin.calls = self.calls
        twin._script = _twin(self._script)
        return twin

    def read(self, returns: Any = Any, *, listed: bool = False) -> Always | InOrder:
        """Decides whether the fake is one outcome for all calls or one for each; for a list, by the declared type."""
        if self._script is None:
            given = self._given
            is_list = isinstance(given, list)
            self._script = self._read_list(cast("list[Any]", given), returns, listed) if is_list else Always(given)
        return self._script

    def _read_list(self, given: list[Any], returns: Any, listed: bool) -> Always | InOrder:
        if listed or any(isinstance(each, BaseException) or callable(each) for each in given):
            return InOrder(tuple(given))
        if returns is Any:
            reason = "a list may be its value or one value for each call, and it declares no return type to tell"
            raise FakeRefused(self.name, f"{reason}; write always([…]) or in_order(…)")
        whole = misfit(given, returns)
        apart = next(filter(None, (misfit(each, returns) for each in given)), None)
        if whole is None and apart is None and given:
            reason = f"{shown(given)} fits {spelled(returns)} as its value and as one value for each call"
            raise FakeRefused(self.name, f"{reason}; write always([…]) or in_order(…)")
        if whole is not None and apart is not None:
            reason = f"does not fit {spelled(returns)}, neither as its value ({whole}) nor as one value for each call"
            raise FakeRefused(self.name, f"its fake {shown(given)} {reason} ({apart})")
        return Always(given) if whole is None else InOrder(tuple(given))

    def refuse_strangers(self, names: Iterable[str]) -> None:
        """Refuses a function with parameters that are not among the arguments."""
        known = [*names]
        for act in self._script.outcomes if isinstance(self._script, InOrder) else [self._given]:
            for parameter in _named(act):
                if parameter.default is parameter.empty and parameter.name not in known:
                    takes = ", ".join(known) or "nothing"
                    raise FakeRefused(self.name, f"its fake takes {parameter.name!r}, but is given {takes}")

    async def apply(self, intent: Intent, place: ToolStep) -> Applied:
        """Returns the next outcome, checked against the tool's declaration."""
        self.read(intent.returns, listed=intent.sort == "model")
        returns = intent.returns if intent.sort == "tool" else Any
        return await self.call(partial(_called, intent, place), returns, place)

    async def call(self, with_: Callable[[Any], Any], returns: Any, place: ToolStep | None) -> Applied:
        """Returns the next outcome; calls a function by `with_`. Raises errors of the test itself."""
        outcome: Any = self._next()
        if inspect.isclass(outcome) and issubclass(outcome, BaseException):
            outcome = outcome()
        if isinstance(outcome, BaseException):
            return Applied(error=outcome)
        if callable(outcome) and not isinstance(self._given, Always):
            token = HERE.set(place) if place is not None else None
            try:
                outcome = with_(outcome.fn if isinstance(outcome, Tool) else outcome)
                outcome = await outcome if inspect.isawaitable(outcome) else outcome
            except (FakeRefused, AssertionError):
                raise
            except (Exception, asyncio.CancelledError) as error:
                return Applied(error=error)
            finally:
                if token is not None:
                    HERE.reset(token)
        if returns is not Any and (misfits := misfit(outcome, returns)) is not None:
            reason = f"its fake gives {shown(outcome)}, which does not fit {spelled(returns)}: {misfits}"
            raise FakeRefused(self.name, reason)
        return Applied(outcome)

    def _next(self) -> Any:
        script = self.read()
        self.calls += 1
        if isinstance(script, Always):
            return script.value
        most = len(script.outcomes)
        if self.calls > most:
            reason = f"is faked for {most} call{'s' * (most != 1)}, and call {self.calls} came"
            raise FakeRefused(self.name, f"{reason}; give one more outcome, or a function")
        return script.outcomes[self.calls - 1]


_NOTHING: Final = Fake("undo", None)


def _fresh(outcome: Any, key: Any) -> Any:
    """Returns a scripted model without calls: fakes are used for several runs."""
    if isinstance(outcome, InOrder):
        return InOrder(tuple(_fresh(each, key) for each in outcome.outcomes))
    return outcome.fresh(key) if hasattr(outcome, "fresh") else outcome


def _twin(outcome: Any) -> Any:
    if isinstance(outcome, InOrder):
        return InOrder(tuple(map(_twin, outcome.outcomes)))
    if isinstance(outcome, Always):
        return Always(_twin(outcome.value))
    return copy(outcome) if hasattr(outcome, "fresh") else outcome


def name_of(fn: Any) -> str:
    """Returns a function's display name."""
    inner = inmost(fn)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def called_for(key: Any, intent: Intent) -> bool:
    """Returns whether a call is of this tool, function or name."""
    if isinstance(key, str):
        return key == (name_of(intent.fn) if intent.sort == "undo" else intent.name)
    if isinstance(key, Tool) and intent.sort != "undo":
        return intent.name == cast("Tool[..., Any]", key).name
    return is_same(key, intent.fn)


def is_same(key: Any, fn: Any) -> bool:
    mine, other = inmost(key), inmost(fn)
    if mine == other:
        return True
    # An official client's method is called on a copy of the client with retries disabled.
    mine = without_sdk_retries(mine)
    owner = getattr(mine, "__self__", None)
    return (
        hasattr(owner, "_client")
        and getattr(mine, "__func__", None) is getattr(other, "__func__", mine)
        and getattr(owner, "_client", None) is getattr(getattr(other, "__self__", None), "_client", owner)
    )


def inmost(fn: Any) -> Any:
    """Unwraps a function."""
    while isinstance(fn, partial):
        fn = cast("Any", fn.func)
    return fn.fn if isinstance(fn, Tool) else fn


def _named(act: Any) -> Sequence[inspect.Parameter]:
    """Returns the parameters that a function takes by name."""
    if isinstance(act, type | BaseException) or not callable(act):
        return ()
    try:
        found = inspect.signature(act.fn if isinstance(act, Tool) else act).parameters.values()
    except (TypeError, ValueError):
        return ()
    return [each for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def _takes_some(act: Any) -> bool:
    try:
        return bool(inspect.signature(act).parameters)
    except (TypeError, ValueError):
        return True


def _called(intent: Intent, place: ToolStep, act: Callable[..., Any]) -> Any:
    """Calls a fake's function: a model's with the call's arguments, a tool's with those that it names."""
    arguments = intent.arguments
    if intent.sort == "undo":
        return act(*arguments.values()) if _takes_some(act) else act()
    if intent.shape is None:
        fn: Any = intent.fn
        while isinstance(fn, partial):
            act, fn = partial(act, *fn.args, **fn.keywords), cast("Any", fn.func)
        return act(*arguments.get("args", ()), **{name: each for name, each in arguments.items() if name != "args"})
    named = {each.name for each in _named(act)}
    markers = {
        name: place.key if marker is KEY else place
        for name, marker in intent.injected.items()
        if name in named and (marker is KEY or marker is STEP)
    }
    kinds = {each.kind for each in inspect.signature(act).parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return intent.shape.call(act, arguments, markers)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        arguments = {name: each for name, each in arguments.items() if name in named}
    return act(**arguments, **markers)
