"""Finds people's code: `app.py:agent`, `package.module:agent`, or a name in the app that pyproject.toml names.

Reports in one line which module cannot be found or imported, and where. Runs no agent.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from killick.cli.exit_codes import CommandFailed, nearest
from killick.errors import AgentUnknown

if TYPE_CHECKING:
    from killick.definitions.agents import AnyAgent

SETTINGS: Final = {
    "app": "the module that declares the agents: its dotted name or its file",
    "store": "the store: a path relative to pyproject.toml, or a URL",
    "redact": "a list of fields whose values `killick serve` never shows",
}
"""The settings of `[tool.killick]`."""


# settings -----------------------------------------------------------------------------------------


def settings(start: Path | None = None) -> dict[str, Any]:
    """`[tool.killick]` of the nearest pyproject.toml that has it; with `folder`, where that is."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if not file.is_file():
            continue
        import tomllib

        try:
            found = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("killick")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CommandFailed(f"{_relative(file)}: is not valid TOML ({error}); correct it") from None
        if found is not None:
            _check(file, found)
            return {**found, "folder": folder}
    return {}


def _check(file: Path, found: Any) -> None:
    if not isinstance(found, dict):
        raise CommandFailed(f"{_relative(file)}: tool.killick is no table; write [tool.killick]")
    for name, value in found.items():  # pyright: ignore[reportUnknownVariableType]
        if name not in SETTINGS:
            hint = nearest(str(name), SETTINGS, f"it knows {', '.join(SETTINGS)}")  # pyright: ignore[reportUnknownArgumentType]
            raise CommandFailed(f"{_relative(file)}: [tool.killick] has no entry {name!r}; {hint}")
        given: Any = value  # pyright: ignore[reportUnknownVariableType]
        texts: list[Any] = given if name == "redact" and isinstance(given, list) else [given]  # pyright: ignore[reportUnknownVariableType]
        if (name == "redact") != isinstance(given, list) or not all(isinstance(each, str) and each for each in texts):
            raise CommandFailed(f"{_relative(file)}: [tool.killick] {name} is {value!r}; give {SETTINGS[name]}")


# modules ------------------------------------------------------------------------------------------


def load_module(name: str) -> ModuleType:
    """A module by its file or its dotted name, as if its folder were the current one."""
    if name.endswith(".py") or "/" in name:
        return _from_file(Path(name))
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise CommandFailed(f"{name}: no such module; name it as app.py or package.module") from None
        raise _broken(name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(name, error) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        neighbours = map(str, path.parent.glob("*.py"))
        hint = nearest(str(path), neighbours, "name the file that declares the agent, as app.py:agent")
        raise CommandFailed(f"{path}: no such file; {hint}")
    file = path.resolve()
    folder, name = _dotted(file)
    _add_to_path(folder)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    if "." in name:
        return load_module(name)
    if name in sys.stdlib_module_names:
        # Under its own name it would shadow a module of the standard library.
        name = f"app_{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise CommandFailed(f"{path}: is no Python file; name the file that declares the agent, as app.py:agent")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(str(path), error) from error
    return module


def _dotted(file: Path) -> tuple[Path, str]:
    """A file's name for importing, and the folder it is to be imported from."""
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def _add_to_path(folder: Path) -> None:
    if (place := str(folder)) not in sys.path:
        sys.path.insert(0, place)


def _broken(name: str, error: BaseException) -> CommandFailed:
    """The user's module fails to import: say where, in one line."""
    if isinstance(error, SyntaxError):
        place, reason = f"{_relative(Path(error.filename or name))}:{error.lineno}", f"SyntaxError: {error.msg}"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_code(frame.filename)]
        place = f"{_relative(Path(frames[-1].filename))}:{frames[-1].lineno}" if frames else name
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SystemExit):
        reason = "it ends the process; guard that with if __name__ == '__main__'"
    return CommandFailed(f"{name}: cannot be imported; {place}: {reason}")


def _is_user_code(file: str) -> bool:
    """Whether a line is people's own code: neither Python's, nor a library's, nor ours."""
    ours = str(Path(__file__).parents[1])
    return not file.startswith(("<", sys.prefix, sys.base_prefix, ours)) and "site-packages" not in file


def _relative(file: Path) -> Path:
    """A path as it is seen from here."""
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


# agents -------------------------------------------------------------------------------------------


def load_agent(target: str, app: str | None = None) -> AnyAgent:
    """An agent by its target."""
    from killick.definitions.agents import Agent

    found = load(target, app)
    if not isinstance(found, Agent):
        raise CommandFailed(f"{target}: is no agent but a {type(found).__name__}; declare it with @killick.agent")
    return found  # pyright: ignore[reportUnknownVariableType]


def load(target: str, app: str | None = None) -> Any:
    """The agent that a target names: `module:name`, a file that declares one agent, or a name in the app."""
    module_name, colon, name = target.rpartition(":")
    if not colon and target.endswith(".py"):
        module_name, name = target, ""
    if not (module_name or app):
        raise CommandFailed(f"{target}: where is it? {_agent_hint(name)}")
    module = load_module(module_name or str(app))
    found = _named(module, name) if name else _sole_agent(module, target)
    if found is None:
        names = [agent.__name__ for agent in agents(module)]
        hint = nearest(name, names, f"its agents: {', '.join(names) or 'none'}")
        raise CommandFailed(f"{module_name or app}: has no agent {name!r}; {hint}")
    return found


def _named(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None) or next((agent for agent in agents(module) if agent.name == name), None)
    if found is None:
        # An app may import the modules that declare its agents without taking the agents over.
        from killick.definitions.agents import AGENTS

        try:
            return AGENTS.get(name)
        except AgentUnknown:
            return None
    return found


def _sole_agent(module: ModuleType, target: str) -> AnyAgent:
    found = agents(module)
    if len(found) == 1:
        return found[0]
    if not found:
        raise CommandFailed(f"{target}: declares no agent; declare one with @killick.agent")
    raise CommandFailed(
        f"{target}: declares several agents; name one: {', '.join(f'{target}:{one.__name__}' for one in found)}"
    )


def agents(module: ModuleType) -> list[AnyAgent]:
    """The agents that a module declares or imports, each once."""
    from killick.definitions.agents import Agent

    values: list[Any] = [value for value in vars(module).values() if isinstance(value, Agent)]
    return list({id(value): value for value in values}.values())


def _agent_hint(name: str) -> str:
    """Where an agent of that name seems to be, or how to say where."""
    targets = {target.rpartition(":")[2]: target for target in declared_here()}
    if close := get_close_matches(name, targets, 1):
        return f"did you mean {targets[close[0]]}?"
    return f'Name it as app.py:{name}, or put app = "your.module" under [tool.killick] in pyproject.toml'


# without importing --------------------------------------------------------------------------------

_DECLARING: Final = ("agent", "machine")
_FILES_MAX: Final = 50
"""Files of one folder that are looked into: a hint must not take long."""


def declared_here() -> list[str]:
    """The agents that files here declare, as targets, by reading and not by running."""
    files = sorted(Path().glob("*.py"))[:_FILES_MAX]
    return [f"{file}:{name}" for file in files for name in declared_in(file)]


def declared_in(file: Path) -> list[str]:
    """The functions of a file that are declared as agents."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.name for node in functions if any(map(_declares, node.decorator_list))]


def _declares(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in _DECLARING
