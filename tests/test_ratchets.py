"""The size and the shape of the house: budgets that only go down.

A budget is what the tree has today. Whoever makes the tree smaller lowers it; nobody raises one.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from source_tree import ROOT, House, Module, as_it_stands, imports, nodes

CIRCLES: Final = ()
"""How many modules each import circle has, the largest first. Imports for typing and inside of functions count."""

LINES: Final = {
    "adapters": 8283, "agents": 1103, "archive": 1154, "audit": 1343, "check": 3135, "cli": 7359, "client": 2487,
    "contracts": 2704, "definitions": 1810, "encryption": 680, "engine": 13186, "history": 5546, "llm": 1071,
    "log": 3888, "model": 5190, "presenting": 3648, "replay": 693, "store": 8920, "testing": 961, "top": 2511,
    "web": 7627, "window": 2219, "workers": 3605, "workspace": 4550,
}  # fmt: skip
"""Lines of Python by package."""

FOLDER_MODULES_MAX: Final = 20
FILE_LINES_MAX: Final = 600

VAGUE: Final = re.compile(
    r"\b(whoever|whatever|somebody|someone|anybody|nobody|told|stands?|left behind|beside|goes on|gone on|come by"
    r"|otherwise than)\b",
    re.IGNORECASE,
)
VAGUE_IN_A_THOUSAND_MAX: Final = 2
"""Vague words in a thousand words of a package's docstrings."""

ENDINGS: Final = re.compile(r"(ings?|ers?|ed|es|s|e|y)$")


@pytest.fixture(scope="module")
def house() -> House:
    return as_it_stands()


def package_of(module: Module) -> str:
    parts = Path(module.path).parts
    return parts[2] if len(parts) > 3 else "top"


# circles ------------------------------------------------------------------------------------------


def circles(modules: Iterable[Module]) -> list[list[str]]:
    """The sets of modules that import each other, the largest first; the package's door is in none."""
    known = {module.name for module in modules if module.name != "killick"}
    edges: dict[str, list[str]] = {}
    for module in modules:
        if module.name in known:
            targets = {_module(item.target, known) for item in imports(module, typing=True)}
            edges[module.name] = sorted(targets & known - {module.name})
    return sorted((sorted(found) for found in _strong(edges) if len(found) > 1), key=lambda found: (-len(found), found))


def _module(target: str, known: set[str]) -> str:
    return target if target in known else target.rpartition(".")[0]


def _strong(edges: dict[str, list[str]]) -> Iterator[list[str]]:
    """Strongly connected components, after Tarjan, without recursion."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    for root in edges:
        work = [(root, iter(edges[root]))] if root not in order else []
        while work:
            name, targets = work[-1]
            if name not in order:
                order[name] = low[name] = len(order)
                path.append(name)
            for target in targets:
                if target not in order:
                    work.append((target, iter(edges[target])))
                    break
                if target in path:
                    low[name] = min(low[name], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == order[name]:
                    at = path.index(name)
                    yield path[at:]
                    del path[at:]


def test_import_circles_only_shrink(house: House) -> None:
    found = circles(house.src)
    sizes = tuple(len(each) for each in found)
    told = "\n".join(f"{len(each)}: {', '.join(each)}" for each in found)
    assert sizes == CIRCLES, f"the circles are now\n{told}\nuntie what is new, or lower CIRCLES"


def test_a_circle_through_typing_a_function_or_a_name_is_found() -> None:
    files = {
        "killick.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from killick.b import B",
        "killick.b": "def f():\n    from killick import c",
        "killick.c": "import killick.a",
        "killick.d": "from killick.a import A",
        "killick.e": "import importlib\nimportlib.import_module('killick.f')",
        "killick.f": "from killick.e import E",
    }
    made = [Module(name, f"src/{name}.py", ast.parse(text), False) for name, text in files.items()]
    assert circles(made) == [["killick.a", "killick.b", "killick.c"], ["killick.e", "killick.f"]]


# sizes --------------------------------------------------------------------------------------------


def _lines(module: Module) -> int:
    return (ROOT / module.path).read_text(encoding="utf-8").count("\n")


def test_packages_only_shrink(house: House) -> None:
    found: Counter[str] = Counter()
    for module in house.src:
        found[package_of(module)] += _lines(module)
    over = {name: count for name, count in found.items() if count > LINES.get(name, 0)}
    assert not over, f"over the budget: {over}"


def test_no_file_outgrows_its_budget(house: House) -> None:
    found = {module.path.removeprefix("src/killick/"): _lines(module) for module in house.src}
    over = {path: count for path, count in found.items() if count > FILE_LINES_MAX}
    assert not over, f"what are they really two of? {over}"


def test_no_folder_has_more_modules_than_a_person_can_survey(house: House) -> None:
    found = Counter(str(Path(module.path).parent) for module in house.src if not module.is_package)
    assert not {folder: count for folder, count in found.items() if count > FOLDER_MODULES_MAX}


def test_no_two_modules_of_a_package_differ_by_an_ending_alone(house: House) -> None:
    stems: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for module in house.src:
        path = Path(module.path)
        if not module.is_package:
            stems[str(path.parent), ENDINGS.sub("", path.stem)].append(path.stem)
    twins = {folder: names for (folder, _), names in stems.items() if len(names) > 1}
    assert not twins, f"give each its own noun: {twins}"


# prose --------------------------------------------------------------------------------------------


def _docstrings(module: Module) -> Iterator[str]:
    for node in nodes(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_prose_names_actors_and_terms(house: House) -> None:
    words: Counter[str] = Counter()
    vague: Counter[str] = Counter()
    for module in house.src:
        for text in _docstrings(module):
            words[package_of(module)] += len(text.split())
            vague[package_of(module)] += len(VAGUE.findall(text))
    found = {name: round(1000 * vague[name] / words[name], 1) for name in words}
    over = {name: count for name, count in found.items() if count > VAGUE_IN_A_THOUSAND_MAX}
    assert not over, "name the actor and the field's term"
