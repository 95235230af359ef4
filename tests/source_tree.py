"""The source of the project as trees: its modules, and what each imports and names. Read once for every rule."""

from __future__ import annotations

import ast
import builtins
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Module:
    """One file of Python: its dotted name, and its path as a person would look for it."""

    name: str
    path: str
    tree: ast.Module
    is_package: bool

    @property
    def part(self) -> str:
        return part_of(self.name)


class Import(NamedTuple):
    """One imported name: where, the name that is bound, what that name stands for, and what was asked for."""

    line: int
    name: str
    stands_for: str
    target: str


class House:
    """A repository as its files stand, whatever of it can be imported."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Millions of nodes that all stay: the garbage collector would walk through them again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self.src = tuple(self._read("src"))
        finally:
            if collecting:
                gc.enable()

    @cached_property
    def around(self) -> tuple[tuple[str, str], ...]:
        """The path and the text of each file around the package: no rule needs their trees."""
        return tuple(
            (file.relative_to(self.root).as_posix(), file.read_text(encoding="utf-8"))
            for folder in ("tests", "bench", "examples")
            for file in sorted((self.root / folder).rglob("*.py"))
        )

    def _read(self, folder: str) -> Iterator[Module]:
        for file in sorted((self.root / folder).rglob("*.py")):
            names = file.relative_to(self.root / folder).with_suffix("").parts
            is_package = names[-1] == "__init__"
            name = ".".join(names[:-1] if is_package else names)
            path = file.relative_to(self.root).as_posix()
            yield Module(name, path, ast.parse(file.read_text(encoding="utf-8"), path), is_package)

    def find(self, name: str) -> Module | None:
        return next((module for module in self.src if module.name == name), None)


@cache
def nodes(module: Module, *, typing: bool = False) -> tuple[ast.AST, ...]:
    """Every node of a module; those under `if TYPE_CHECKING` only when typing is asked for."""
    if typing:
        return tuple(walk(module.tree))
    every = nodes(module, typing=True)
    hidden = {
        id(node)
        for guard in every
        if isinstance(guard, ast.If) and dotted(guard.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in guard.body
        for node in walk(statement)
    }
    return tuple(node for node in every if id(node) not in hidden) if hidden else every


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and every node below, in the order of the text."""
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += reversed([*ast.iter_child_nodes(node)])


def dotted(node: ast.AST) -> str:
    """`a.b.c` of the expression that reads so; nothing of any other."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def part_of(name: str) -> str:
    """The part of the package that a dotted name is in; the door and `__main__` are in none."""
    package, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    return part if package == "killick" and part != "__main__" else ""


@cache
def imports(module: Module, *, typing: bool = False) -> tuple[Import, ...]:
    return tuple(_imports(module, typing=typing))


def _imports(module: Module, *, typing: bool) -> Iterator[Import]:
    for node in nodes(module, typing=typing):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield Import(node.lineno, alias.asname or first, alias.name if alias.asname else first, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = module.name.split(".")
            above = above[: len(above) - node.level + module.is_package] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                target = f"{source}.{alias.name}"
                yield Import(node.lineno, alias.asname or alias.name, target, target)
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "import_module":
            for name in (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)):
                yield Import(node.lineno, str(name), str(name), str(name))


@cache
def references(module: Module) -> tuple[tuple[int, str], ...]:
    """Every import, and every name reached through an import or from the builtins, by its full name."""
    return tuple(_references(module))


def _references(module: Module) -> Iterator[tuple[int, str]]:
    bound: dict[str, str] = {}
    for item in imports(module):
        bound[item.name] = item.stands_for
        yield item.line, item.target
    for node in nodes(module):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        name, _, rest = dotted(node).partition(".")
        if name in bound:
            yield node.lineno, f"{bound[name]}.{rest}".rstrip(".")
        elif hasattr(builtins, name) and isinstance(node.ctx, ast.Load):
            yield node.lineno, f"builtins.{name}"


def uses(module: Module, forbidden: frozenset[str]) -> Iterator[tuple[int, str]]:
    """The first use on each line of a forbidden name, or of anything below it."""
    seen: set[int] = set()
    for line, name in references(module):
        parts = name.split(".")
        if line not in seen and any(".".join(parts[:n]) in forbidden for n in range(1, len(parts) + 1)):
            seen.add(line)
            yield line, name.removeprefix("builtins.")


@cache
def as_it_stands() -> House:
    return House(ROOT)
