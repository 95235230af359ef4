"""Agents: the declared function, its options, and the registry that finds agents by name. Runs nothing."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, get_origin, overload

import msgspec
from typing_extensions import TypeVar

from killick.contracts.contract import Contract
from killick.definitions.policy import names_of, refuse_unknown, signed
from killick.definitions.tools import resolved_hints
from killick.errors import AgentUnknown, ContractRefused, DeclarationRefused
from killick.fork_safety import cached_property
from killick.model.codec import digest
from killick.model.typed import convert
from killick.permissions import refuse_database
from killick.workspace.workspace import Workspace

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
OnFailure = Literal["stop", "compensate"]


class Agent(Generic[I, O]):
    """An agent, as `killick.agent` or `killick.machine` declares it. Runs find it by its name."""

    def __init__(self, fn: Callable[..., Any], name: str, options: AgentOptions, *, is_machine: bool = False) -> None:
        self.fn = fn
        self.name = name
        self.options = options
        self.is_machine = is_machine
        self.is_async = inspect.iscoroutinefunction(fn)
        self.__name__ = name
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        run = "Run" if self.is_async else "SyncRun"
        parameters = list(inspect.signature(fn).parameters.values())
        hints = resolved_hints(fn)
        first = None if not parameters else hints.get(parameters[0].name, Any)
        if not 1 <= len(parameters) <= 2 or getattr(get_origin(first) or first, "__module__", "") == "builtins":
            if len(parameters) > 2:
                *most, last = (each.name for each in parameters[1:])
                raise DeclarationRefused(name, f"takes one input; put {', '.join(most)} and {last} into a dataclass")
            reason = f"{name}{inspect.signature(fn)} is no agent: its first parameter is a Run, its second the input"
            raise DeclarationRefused(name, f"{reason}; declare it as {name}(run: killick.{run}, …)")
        self.takes_input = len(parameters) == 2
        self.input_type: Any = hints.get(parameters[1].name, Any) if self.takes_input else None
        self.returns: Any = hints.get("return", Any)

    def __repr__(self) -> str:
        return f"<killick.Agent {self.name}>"

    @cached_property
    def folder(self) -> str:
        """The folder of its source file; empty without one."""
        try:
            return os.path.dirname(inspect.getfile(inspect.unwrap(self.fn)))
        except (TypeError, OSError):
            return ""

    @cached_property
    def code(self) -> str:
        """A digest of the source files that this process loaded with the agent's own, as they are at the first call."""
        return _source_digest(self.folder, self.fn.__module__.partition(".")[0]) if self.folder else ""

    def digest_of(self, input: Any, key: bytes | None = None) -> bytes:  # noqa: A002
        """The digest that distinguishes inputs."""
        return digest(input, at="input", secret_key=key)

    def checked(self, value: Any) -> Any:
        """Converts an input to the type that the agent takes. Raises ValueRefused if it does not fit."""
        return convert(value, self.input_type, at="input") if self.takes_input else value


@lru_cache
def _source_digest(folder: str, package: str) -> str:
    """A digest of the loaded modules of a package, and of those in a folder."""
    found: dict[str, bytes] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.endswith(".py") and (os.path.dirname(file) == folder or name.partition(".")[0] == package):
            with contextlib.suppress(OSError):
                found[os.path.relpath(file, folder)] = Path(file).read_bytes()
    return sha256(b"\0".join(each for file in sorted(found) for each in (file.encode(), found[file]))).hexdigest()[:12]


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's options."""

    context: type[Any] | None = None
    migrations: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = ()
    on_failure: OnFailure = "stop"
    aliases: tuple[str, ...] = ()
    priority: int = 0
    contract: Contract | None = None
    workspace: Workspace | None = None

    @property
    def form(self) -> int:
        """The version of the context's form: one more for every migration."""
        return len(self.migrations) + 1


class _AgentDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[[Any, I], Coroutine[Any, Any, O]], /) -> Agent[I, O]: ...
    @overload
    def __call__(self, fn: Callable[[Any], Coroutine[Any, Any, O]], /) -> Agent[None, O]: ...
    @overload
    def __call__(self, fn: Callable[[Any, I], O], /) -> Agent[I, O]: ...
    @overload
    def __call__(self, fn: Callable[[Any], O], /) -> Agent[None, O]: ...


@overload
def agent(fn: Callable[[Any, I], Coroutine[Any, Any, O]], /) -> Agent[I, O]: ...
@overload
def agent(fn: Callable[[Any], Coroutine[Any, Any, O]], /) -> Agent[None, O]: ...
@overload
def agent(fn: Callable[[Any, I], O], /) -> Agent[I, O]: ...
@overload
def agent(fn: Callable[[Any], O], /) -> Agent[None, O]: ...
@overload
def agent(
    *, name: str | None = None, context: type[Any] | None = None,
    migrations: Sequence[Callable[[dict[str, Any]], dict[str, Any]]] = (), on_failure: OnFailure = "stop",
    aliases: Sequence[str] = (), priority: int = 0, contract: Contract | str | os.PathLike[str] | None = None,
    workspace: Workspace | str | os.PathLike[str] | None = None,
) -> _AgentDecorator: ...  # fmt: skip


@signed()
def agent(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Declares an agent: an `async def` that takes a Run, or a plain `def` that takes a SyncRun, and an optional input.
    Raises DeclarationRefused.

    name        the name in the log, by which runs find their code; by default the function's name
    aliases     earlier names, so that runs of an older name continue
    context     the type of the agent's document, which `run.context` reads and `run.update` changes
    migrations  functions that update older documents, one for each version
    on_failure  "compensate" undoes the effects of a run that fails; "stop" (the default) keeps them
    priority    the priority of its runs, if they are given none
    contract    a Contract that evaluates every intention, or the path of its TOML file, relative to the agent's file
    workspace   a folder, or a Workspace, whose files are captured before and after every step

        @killick.agent(on_failure="compensate")
        async def settle(run: killick.Run, claim: Claim) -> str: ...
    """
    return declared(fn, options, is_machine=False)


def declared(fn: Callable[..., Any] | None, options: dict[str, Any], *, is_machine: bool) -> Any:
    """An agent of either style, with its options, entered in the registry."""
    refuse_unknown("killick.agent", options, ("name", *AgentOptions.__struct_fields__))
    name = options.pop("name", None)
    for field in ("migrations", "aliases"):
        options[field] = names_of(options.get(field, ()))

    def declare(fn: Callable[..., Any]) -> Agent[Any, Any]:
        called = name or getattr(fn, "__name__", "agent")
        if isinstance(options.get("contract"), str | os.PathLike):
            folder = os.path.dirname(inspect.getsourcefile(inspect.unwrap(fn)) or "")
            options["contract"] = read_contract(os.path.join(folder, options["contract"]))
        if isinstance(options.get("workspace"), str | os.PathLike):
            options["workspace"] = Workspace(options["workspace"])
        made: Agent[Any, Any] = Agent(fn, called, AgentOptions(**options), is_machine=is_machine)
        AGENTS.add(made)
        return made

    return declare if fn is None else declare(fn)


def read_contract(path: str | os.PathLike[str]) -> Contract:
    """Reads a contract from a TOML file. Raises ContractRefused, which names the invalid rule."""
    try:
        refuse_database(path)
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractRefused(os.fspath(path), f"cannot be read ({error}); name a TOML file") from None
    return Contract.parse(text)


class Registry:
    """The agents declared in this process, by name and alias. The last one declared under a name counts."""

    def __init__(self) -> None:
        self.declared: dict[str, AnyAgent] = {}
        """By their own names, without aliases."""

    def add(self, declared: Agent[Any, Any]) -> None:
        self.declared[declared.name] = declared

    def get(self, name: str) -> Agent[Any, Any]:
        found = self.declared.get(name) or self._aliases().get(name)
        if found is None:
            raise AgentUnknown(name, known=self.declared)
        return found

    def _aliases(self) -> dict[str, Agent[Any, Any]]:
        return {alias: each for each in self.declared.values() for alias in each.options.aliases}

    def names(self) -> tuple[str, ...]:
        """Every name and alias by which runs find an agent here."""
        return (*self.declared, *self._aliases())


AGENTS: Final = Registry()
AnyAgent: TypeAlias = Agent[Any, Any]
