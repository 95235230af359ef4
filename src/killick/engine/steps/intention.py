"""Intentions: a call as data, its effect class, and the types of its values. Has no effects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from killick.definitions.policy import DEFAULT_RETRY, EFFECTS, ONCE, Policy
from killick.definitions.tools import Shape, Tool, refuse_tx_misfit
from killick.engine.replay import RequestedStep
from killick.engine.steps.model_reply import rebuild, recordable, without_sdk_retries
from killick.errors import DeclarationRefused, ValueRefused
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import canonical, digest
from killick.model.retry import Retry
from killick.model.typed import convert
from killick.store.records import UniqueRight

_NONE: Final[Mapping[str, Any]] = {}
ERROR: Final = "killick:error"
"""The only field of an output that is an error: a text for a model, of any declared type."""


class Intent:
    """An intention: a call as data, and how it is to be carried out."""

    __slots__ = (
        "arguments", "bubbles", "claims", "digest", "effect", "fn", "given", "identity", "injected", "is_async", "name",
        "policy", "proposed", "recording", "returns", "settled", "shape", "sort", "undoes",
    )  # fmt: skip

    def __init__(
        self, sort: e.Sort, name: str, fn: Callable[..., Any], shape: Shape | None, arguments: dict[str, Any],
        policy: Policy, *, returns: Any = Any, given: Mapping[str, Any] | None = None,
        undoes: tuple[e.StepId, int] | None = None, recording: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.sort: e.Sort = sort
        self.name = name
        self.fn = fn
        self.shape = shape
        self.arguments = arguments
        self.policy = policy
        self.returns = returns
        self.given: Mapping[str, Any] = arguments if given is None else given
        self.undoes = undoes
        self.recording = arguments if recording is None else recording
        self.proposed = False
        """Whether an approver is asked even if no rule requires it."""
        self.bubbles: tuple[type[BaseException], ...] = ()
        """Errors with which external code ends before it did anything."""
        self.settled = False
        """Whether its values come from the record and cannot be changed by other code."""
        self.effect: e.EffectClass | None = None
        self.digest: bytes = b""
        self.identity: bytes | None = None
        self.claims: tuple[UniqueRight, ...] = ()
        self.injected: Mapping[str, Any] = shape.injected if shape is not None else _NONE
        self.is_async = shape.is_async if shape is not None else is_async(fn)

    @classmethod
    def of(cls, sort: e.Sort, name: str, arguments: dict[str, Any], digest: bytes) -> Intent:
        """The intention of a step that is no call: a child, a message."""
        intent = cls(sort, name, lambda: None, None, arguments, Policy())
        intent.digest = digest
        return intent

    def classify(self, step: e.StepId, secret_key: bytes) -> None:
        """Compute its digest and effect class. Refuses arguments that cannot be stored, naming the step."""
        policy = self.policy
        try:
            self.digest = digest(self.given, secret_key=secret_key)
            if policy.identity is not None:
                named = {name: self.arguments.get(name) for name in policy.identity}
                self.identity = digest(named, secret_key=secret_key)
            wide: bytes = getattr(secret_key, "store_wide", secret_key)  # a right is unique in the store
            self.claims = tuple(
                UniqueRight(name, digest(self.arguments[name], secret_key=wide))
                for name in policy.consumes
                if name in self.arguments
            )
        except ValueRefused as refused:
            place = refused.path.removeprefix("value").lstrip(".")
            raise ValueRefused(f"step {step} ({self.name}): {place}", refused.reason) from None
        if self.sort != "model":
            chosen = policy.effect
            self.effect = chosen(**self.arguments) if callable(chosen) else chosen
            if self.effect not in EFFECTS:
                raise DeclarationRefused(self.name, f"its effect is {self.effect!r}, not one of {', '.join(EFFECTS)}")
            refuse_tx_misfit(self.name, self.effect, self.shape)

    def replay(self, recorded: dict[str, Any], intended: e.StepIntended, step: e.StepId, secret_key: bytes) -> None:
        """Take the arguments from the record instead of from the code."""
        assert self.shape is not None
        effect = self.effect
        self.arguments = self.shape.restore(recorded, self.arguments)
        self.recording, self.settled = recorded, True
        self.classify(step, secret_key)
        self.effect = effect
        if intended.digest is not None:
            self.digest = e.from_text(intended.digest)
        self.identity = None if intended.identity is None else e.from_text(intended.identity)

    def edit(self, arguments: dict[str, Any], step: e.StepId, secret_key: bytes) -> dict[str, tuple[Any, Any]]:
        """Replace the arguments; returns the changes by name."""
        before = through_codec(self.recording, at="arguments", secret_key=secret_key)
        self.arguments = self.given = arguments
        self.recording = through_codec(arguments, at="arguments", secret_key=secret_key)
        self.settled = True
        self.classify(step, secret_key)
        return {
            name: (before.get(name), new)
            for name, new in self.recording.items()
            if name not in before or canonical(before[name]) != canonical(new)
        }

    def restore(self, before: Intent) -> None:
        """Restore the arguments from before an edit."""
        for name in ("arguments", "given", "recording", "settled", "digest", "identity", "claims", "effect"):
            setattr(self, name, getattr(before, name))

    def ask_instead(self, model: str) -> None:
        """In a fork with another model: replace the model that the code names."""
        if self.sort == "model" and "model" in self.arguments:
            self.arguments = {**self.arguments, "model": model}
            self.recording = self.given = {**self.given, "model": model}

    @property
    def action(self) -> e.Digest:
        """The digest by which two calls of a tool are the same action."""
        return e.to_text(self.identity or self.digest)

    @property
    def identity_text(self) -> e.Digest | None:
        return None if self.identity is None else e.to_text(self.identity)

    @property
    def retry(self) -> Retry:
        return self.policy.retry or (ONCE if self.effect == "at_most_once" else DEFAULT_RETRY)

    def asked(self) -> RequestedStep:
        binding = self.effect not in ("reads", None)
        return RequestedStep(self.sort, self.name, e.to_text(self.digest), self.identity_text, binding)


def claim_text(claim: UniqueRight) -> str:
    """A right as events name it."""
    return f"{claim.space}:{e.to_text(claim.key)}"


def is_error(output: Any) -> bool:
    """Whether an output is an error that a tool answered with."""
    return isinstance(output, dict) and output.keys() == {ERROR}


def restored(intent: Intent, value: Any, reply: str | None, step: e.StepId) -> Any:
    """A recorded value as the type that code expects."""
    if reply is not None:
        return rebuild(reply, value, intent.arguments)
    return as_returned(value, intent.returns, step, intent.name)


def as_returned(value: Any, returns: Any, step: e.StepId, name: str) -> Any:
    """A recorded value as the type that a tool returns."""
    if returns is Any or type(value) is returns or is_error(value):
        return value
    return convert(value, returns, at=f"step {step} ({name})")


def called(intent: Intent, injected: Mapping[str, Any]) -> Any:
    """Makes the intended call."""
    if intent.shape is None:
        positional = intent.arguments.get("args", ())
        named = {name: value for name, value in intent.arguments.items() if name != "args"}
        return intent.fn(*positional, **named)
    return intent.shape.call(intent.fn, intent.arguments, injected)


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await; the clients of providers wrap theirs."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(inspect.unwrap(fn))


_MODEL: Final = Policy(effect="reads")


def model_intent(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Intent:
    """A call of a model as an intention; the client's own retries are off, so that each attempt is on record."""
    policy, returns, name = _MODEL, Any, getattr(fn, "__qualname__", None) or type(fn).__name__
    if isinstance(fn, Tool):
        policy, returns, name, fn = fn.policy, fn.shape.returns, fn.name, fn.fn
    arguments = {**({"args": list(args)} if args else {}), **kwargs}
    given = recordable(arguments)
    return Intent(
        "model", name, without_sdk_retries(fn), None, arguments, policy, returns=returns, given=given, recording=given
    )
