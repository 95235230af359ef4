"""A scripted model in any provider's form, which records its requests.

Sends nothing. Replayed steps do not call it, so a crash uses no turn.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypeAlias, cast

import msgspec

from killick.check.reply_forms import Call, ReplyForm, Turn, asked_by, is_clients
from killick.check.samples import shown
from killick.engine.steps.model_reply import Provider, provider_of
from killick.errors import FakeRefused

_MODEL: Final = "scripted"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's error in place of a reply."""

    status: int
    message: str
    retry_after: float | None = None


Said: TypeAlias = str | Call | Turn | Refusal | BaseException | type[BaseException]
Scripted: TypeAlias = Said | Callable[..., Said]
"""A turn; a function receives the parts of the request that it names, such as `messages`."""


def call(name: str, /, **arguments: Any) -> Call:
    """Returns a tool call of a scripted model.

    name       the name of the tool
    arguments  the arguments of the call
    """
    return Call(name, arguments)


def turn(
    *parts: str | Call, reasoning: str | None = None, usage: tuple[int, int] | None = None, stop: str | None = None
) -> Turn:
    """Returns one reply of several parts.

    parts      texts and parallel tool calls
    reasoning  the model's reasoning
    usage      the tokens read and written
    stop       the stop reason, in the provider's words, if not the default
    """
    return Turn(parts=parts, reasoning=reasoning, usage=usage, stop=stop)


def refusal(status: int, message: str = "refused by its script", *, retry_after: float | None = None) -> Refusal:
    """Returns a provider's error in place of a reply.

    status       429 is a rate limit, 529 overload, 401 a wrong key
    message      the text of the error
    retry_after  seconds
    """
    return Refusal(status=status, message=message, retry_after=retry_after)


class ModelRefused(Exception):
    """Raised for a refusal by a scripted model that replaces no official client."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.status}: {refusal.message}")
        self.status_code = refusal.status
        self.headers = {} if refusal.retry_after is None else {"retry-after": f"{refusal.retry_after:g}"}


class ScriptedModel:
    """A model that returns the next turn of its script on each call; `scripted` makes it."""

    def __init__(
        self,
        turns: tuple[Scripted, ...],
        *,
        provider: Provider | None,
        objects: bool | None,
        usage: tuple[int, int],
        forever: bool,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        """Its requests, one for each call."""
        self.__name__ = self.__qualname__ = _MODEL
        self._turns = turns
        self._options: dict[str, Any] = {
            "provider": provider, "objects": objects, "usage": usage, "forever": forever,
        }  # fmt: skip
        self._asked = 0
        self._calls = 0

    def __call__(self, *args: Any, **request: Any) -> Any:
        """Returns the next turn, and records the request."""
        whole = {**({"args": args} if args else {}), **request}
        self.requests.append(_copied(whole))
        self._asked += 1
        return self._given(self._next(), whole)

    async def async_call(self, *args: Any, **request: Any) -> Any:
        """Returns the next turn, for code that awaits."""
        return self(*args, **request)

    def fresh(self, fn: Any) -> ScriptedModel:
        """Returns the same script from its start, for a function; requests are recorded here too."""
        options = dict(self._options)
        if is_clients(fn):
            options["provider"] = options["provider"] or provider_of(fn)
            options["objects"] = True if options["objects"] is None else options["objects"]
        made = ScriptedModel(self._turns, **options)
        made.requests = self.requests
        return made

    @property
    def left(self) -> int:
        """The number of unused turns."""
        return max(len(self._turns) - len(self.requests), 0)

    def _next(self) -> Scripted:
        if self._asked <= len(self._turns):
            return self._turns[self._asked - 1]
        if self._options["forever"] and self._turns:
            return self._turns[-1]
        turns = f"{len(self._turns)} turn{'s' * (len(self._turns) != 1)}"
        reason = f"its script has {turns}, and it was asked {self._asked} times; the last request ends with"
        raise FakeRefused(_MODEL, f"{reason} {_last(self.requests[-1])}")

    def _given(self, said: Scripted, request: Mapping[str, Any]) -> Any:
        if isinstance(said, type):
            raise cast("type[BaseException]", said)
        if isinstance(said, BaseException):
            raise said
        provider: Provider = self._options["provider"] or asked_by(request)
        if isinstance(said, Refusal):
            raise self._refused(said, provider)
        if not isinstance(said, str | Call | Turn):
            chosen: Any = said
            return self._given(chosen(**_wanted(chosen, request)), request)
        if request.get("stream"):
            raise FakeRefused(_MODEL, "a scripted model does not stream; give a generator function that yields chunks")
        said = said if isinstance(said, Turn) else Turn(parts=(said,))
        form = ReplyForm(said, number=self._asked, calls=self._calls, model=_MODEL, usage=self._options["usage"])
        self._calls += said.calls
        return form.reply(provider, request, objects=bool(self._options["objects"]))

    def _refused(self, refusal: Refusal, provider: Provider) -> Exception:
        """Returns the provider's client's error for a status."""
        plain = ModelRefused(refusal)
        if not self._options["objects"]:
            return plain
        package, httpx = import_module(provider.partition("-")[0]), import_module("httpx")
        request = httpx.Request("POST", "https://example.org/")
        response = httpx.Response(refusal.status, headers=plain.headers, request=request)
        known = {429: "RateLimitError", 401: "AuthenticationError", 400: "BadRequestError"}
        name = known.get(refusal.status, "InternalServerError" if refusal.status >= 500 else "APIStatusError")
        error: Exception = getattr(package, name)(refusal.message, response=response, body=None)
        return error


def scripted(
    *turns: Scripted,
    provider: Provider | None = None,
    objects: bool | None = None,
    usage: tuple[int, int] = (10, 5),
    forever: bool = False,
) -> ScriptedModel:
    """Returns a model that returns the next turn of its script on each call.

    turns     texts, calls, turns, refusals, exceptions, or functions that receive the parts of the request they name
    provider  the form of the replies; by default that of the replaced client, or of the request
    objects   whether replies are objects of the official client; by default if it replaces such a client
    usage     the tokens read and written of a turn without its own
    forever   whether the last turn repeats

    A text directly before a call belongs to the same turn: the example has two turns. `turn(…)` separates texts, or
    combines calls.

        model = scripted("Let me look.", call("search", q="x"), "Done.")
    """
    return ScriptedModel(_joined(turns), provider=provider, objects=objects, usage=usage, forever=forever)


def _joined(turns: Sequence[Scripted]) -> tuple[Scripted, ...]:
    """Splits the script into turns: a text directly before a call joins it."""
    joined: list[Scripted] = []
    for said in turns:
        if not (isinstance(said, str | Call | Turn | Refusal | BaseException) or callable(said)):
            raise FakeRefused(_MODEL, f"{shown(said)} is not a turn; give a text, call(name, …), turn(…) or a function")
        if isinstance(said, Call) and joined and isinstance(joined[-1], str):
            joined[-1] = Turn(parts=(joined[-1], said))
        else:
            joined.append(said)
    return tuple(joined)


def _messages(request: Mapping[str, Any]) -> Any:
    return request.get("messages", request.get("input", request.get("args")))


def _wanted(act: Callable[..., Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a request that a function names."""
    values = {"messages": _messages(request), **request}
    parameters = inspect.signature(act).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return values
    return {each.name: values.get(each.name) for each in parameters}


def _last(request: Mapping[str, Any]) -> str:
    messages: Any = _messages(request)
    if isinstance(messages, list | tuple) and messages:
        messages = cast("Sequence[Any]", messages)[-1]
    return shown(messages)


def _copied(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(request)
    except Exception:
        return dict(request)  # a live object among the arguments; it is kept as it is
