"""The house rules: what may import what, what things may be called, what has to be written down.

A rule is a function of a source tree that returns what breaks it, one line each, so that the rules
can themselves be tried: the last part of this file breaks every one of them in a small tree.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Final

import pytest

from source_tree import ROOT, House, Module, as_it_stands, dotted, imports, nodes, part_of, references, uses, walk

LAYERS: Final = {
    "errors": 0, "browser_guard": 0, "http_server": 0, "clock": 0, "ids": 0, "type_init": 0,
    "blocking": 0, "logger": 0, "lru": 0, "version": 0, "permissions": 0, "fork_safety": 0, "sanitizer": 0, "text": 0,
    "threads": 0, "credentials": 0,
    "model": 1,
    "contracts": 2,
    "store": 3,
    "log": 4, "window": 4, "workspace": 4,
    "definitions": 5, "encryption": 5, "triggers": 5,
    "engine": 6,
    "history": 7, "llm": 7,
    "agents": 8, "audit": 8,
    "archive": 9, "replay": 9, "workers": 9,
    "client": 10,
    "check": 11,
    "presenting": 12,
    "web": 13, "adapters": 13, "testing": 13,
    "cli": 14,
}  # fmt: skip
"""Which layer each part of the package belongs to; a part imports its own layer and those below."""

DOOR: Final = 15
"""Where `killick/__init__.py` stands: above everything, so that nothing inside goes out through it."""

SURFACES: Final = frozenset(part for part, layer in LAYERS.items() if layer == 13)
STANDALONE: Final = frozenset({"window", "workspace"})
"""Parts that people use without the engine."""

IMPURE: Final = frozenset({
    "asyncio", "concurrent", "ctypes", "fcntl", "glob", "http", "io", "logging", "mmap", "multiprocessing",
    "os", "pathlib", "queue", "random", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib",
    "builtins.open", "builtins.input", "builtins.print",
})  # fmt: skip
OPENING: Final = re.compile(r"(^|\.)(open|fdopen|open_private|(read|write)_(bytes|text)|shutil\.(copy\w*|move))$")
"""Calls that open a file; in the stores, as `os.open` or `path.open`."""

OPENS_FILES: Final = {
    "killick.store.liveness": "lock files",
    "killick.store.notify": "named pipes",
    "killick.store.sqlite.identity": "the mount table",
    "killick.store.sql": "statements",
    "killick.store.lua": "scripts",
}
"""The modules of the stores that open files, and which."""

STORE_FILE: Final = re.compile(r"(^|\.)(store|raw|_file)\.(place|path)$")
"""Expressions for the path of a store's file."""

CLOCK_READS: Final = frozenset({
    "datetime.date.today", "datetime.datetime.now", "datetime.datetime.today", "datetime.datetime.utcnow",
})  # fmt: skip
CHANCE: Final = frozenset({
    "os.getrandom", "os.urandom", "random", "secrets",
    "uuid.uuid1", "uuid.uuid4", "uuid.uuid6", "uuid.uuid7", "uuid.uuid8",
})  # fmt: skip
UNSAFE: Final = frozenset({
    "builtins.eval", "builtins.exec",
    "cloudpickle", "dill", "jsonpickle", "marshal", "pickle", "shelve",
})  # fmt: skip
DECODES: Final = {
    f"msgspec.{name}": position
    for name, position in (
        ("convert", 1), ("json.decode", None), ("msgpack.decode", None), ("json.Decoder", 0), ("msgpack.Decoder", 0),
    )
}  # fmt: skip
"""What reads by a type, and where the type is among the arguments, unless it is `type=`."""

VAGUE_FILE: Final = re.compile(r"(^|_)(util|helper|common|misc|manager)s?$")
VAGUE_CLASS: Final = re.compile(r"^_*Base(?![a-z])|(Manager|Helper)s?$")
SQL: Final = re.compile(
    r"\s*(?:(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|CREATE|ALTER|DROP)\s"
    r"|(?i:select\s+[\w.*]+(?:\s*,\s*[\w.*]+)*\s+from|insert\s.*\binto|update\s+\S+\s+set|delete\s+from)\s)"
)
CLASS: Final = re.compile(r"^[ \t]*class[ \t]+(\w+)", re.MULTILINE)
NAMED: Final = re.compile(
    r"^[ \t]*from[ \t]+(killick[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|.*)"
    r"|(?:^[ \t]*import[ \t]+|[\"'])(killick(?:\.\w+)+)",
    re.MULTILINE,
)
"""An import of a module, or a string that begins with its name."""


Rule = Callable[[House], list[str]]


# The rules ----------------------------------------------------------------------------------------


def upward_imports(house: House) -> list[str]:
    broken = []
    for module in house.src:
        if module.part and module.part not in LAYERS:
            broken.append(f"{module.path}:1: {module.part} is in no layer; move it into one, or add it to LAYERS")
            continue
        layer = LAYERS.get(module.part, DOOR)
        for line, _, _, target in imports(module):
            above = LAYERS.get(part_of(target), DOOR)
            if target.partition(".")[0] != "killick" or above <= layer:
                continue
            if above == DOOR:
                what = f"imports {target} through the door; import from the module that defines it"
            else:
                what = (
                    f"{module.part} (layer {layer}) imports {target} (layer {above});"
                    " move what it needs down, or hand it in as an argument"
                )
            broken.append(f"{module.path}:{line}: {what}")
    return broken


def tangled_surfaces(house: House) -> list[str]:
    return [
        f"{module.path}:{line}: {module.part} imports {target}, another surface; move what both need below"
        for module in house.src
        for line, _, _, target in imports(module)
        if module.part in SURFACES and part_of(target) in SURFACES - {module.part}
    ]


def leaning_parts(house: House) -> list[str]:
    layer = {part for part in LAYERS if LAYERS[part] > LAYERS["store"]}
    return [
        f"{module.path}:{line}: {module.part} imports {target}, but is used without the engine too;"
        " let the engine hand it in"
        for module in house.src
        for line, _, _, target in imports(module)
        if module.part in STANDALONE and part_of(target) in layer - {module.part}
    ]


def impure_model(house: House) -> list[str]:
    return [
        f"{module.path}:{line}: uses {name} in the pure model; do it above the model and pass the outcome in"
        for module in house.src
        if module.part in ("model", "contracts")
        for line, name in uses(module, IMPURE)
    ]


def clock_reads(house: House) -> list[str]:
    return [
        f"{module.path}:{line}: {name} reads a clock; take a killick.clock.Clock as an argument"
        for module in house.src
        if module.name != "killick.clock"
        for line, name in sorted(set(references(module)))
        if name in CLOCK_READS or (name.startswith("time.") and name != "time.sleep")
    ]


def database_openings(house: House) -> list[str]:
    """Closing a descriptor of a database cancels the locks that SQLite has on it in this process."""
    reason = "may open a database, and cancel SQLite's locks on it; ask SQLite, or name the module in OPENS_FILES"
    broken = []
    for module in house.src:
        for node in nodes(module):
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
            is_connect = name == "sqlite3.connect" and module.name != "killick.store.sqlite.file"
            is_opening = OPENING.search(name) is not None and "sqlite3" not in name
            parts = (dotted(each) for each in walk(node) if isinstance(each, ast.Attribute))
            if is_connect or (
                is_opening
                and ((module.part == "store" and module.name not in OPENS_FILES) or any(map(STORE_FILE.search, parts)))
            ):
                broken.append(f"{module.path}:{node.lineno}: {name} {reason}")
    return broken


def unready_types(house: House) -> list[str]:
    """Threads that are the first to read by one type crash the process. Imports are one thread; calls are many."""
    found = {
        f"{module.path}:{call.lineno}: {name} reads by a type that two threads may build at once;"
        " pass it through killick.type_init.ready"
        for module in house.src
        if module.name != "killick.type_init"
        for function in nodes(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for call in walk(function)
        if isinstance(call, ast.Call) and (name := _imported(module, call.func)) in DECODES
        if any(map(_is_unready, _type_arguments(call, DECODES[name])))
    }
    return sorted(found)


def _imported(module: Module, node: ast.AST) -> str:
    """The full name of an expression that reads as one."""
    first, _, rest = dotted(node).partition(".")
    bound = {item.name: item.stands_for for item in imports(module)}
    return f"{bound.get(first, first)}.{rest}".rstrip(".")


def _type_arguments(call: ast.Call, position: int | None) -> Iterator[ast.AST]:
    yield from (each.value for each in call.keywords if each.arg == "type")
    if position is not None:
        yield from call.args[position : position + 1]


def _is_unready(kind: ast.AST) -> bool:
    """Whether a type is more than builtins, and not all of the rest goes through `ready`."""
    if isinstance(kind, ast.Call) and dotted(kind.func) == "ready":
        return False
    if isinstance(kind, ast.Name | ast.Attribute):
        return dotted(kind) not in {"Any", *dir(builtins)}
    return any(map(_is_unready, ast.iter_child_nodes(kind)))


def chance_draws(house: House) -> list[str]:
    return [
        f"{module.path}:{line}: {name} draws chance; take a killick.ids.Ids as an argument"
        for module in house.src
        if module.name != "killick.ids"
        for line, name in uses(module, CHANCE)
    ]


def crooked_door(house: House) -> list[str]:
    door = house.find("killick")
    if door is None:
        return ["src/killick/__init__.py:1: is missing; it holds the docstring, the imports and a sorted __all__"]
    broken, offered, at = [], None, 1
    for number, node in enumerate(door.tree.body):
        match node:
            case ast.Expr(value=ast.Constant(value=str())) if number == 0:
                pass
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as value):
                offered, at = [ast.literal_eval(item) for item in value.elts], node.lineno
            case ast.Assign(targets=[ast.Name(id="__version__" | "TYPE_CHECKING")], value=ast.Constant()):
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="_MODULES")]):
                pass
            case ast.Expr(value=ast.Constant(value=str())) | ast.FunctionDef(name="__getattr__" | "__dir__"):
                pass
            case _:
                broken.append(f"{door.path}:{node.lineno}: logic in the door; move it into the module it is about")
    if offered is None:
        return [*broken, f"{door.path}:1: has no __all__; list there what people may use"]
    if offered != sorted(set(offered), key=_as_ruff_sorts):
        broken.append(f"{door.path}:{at}: __all__ is not sorted; let `ruff check --fix` sort it")
    bound = {item.name for item in imports(door, typing=True)} | {"__version__"}
    broken += [
        f"{door.path}:{at}: __all__ offers {name}, which is not imported; import it, or take it out"
        for name in offered
        if name not in bound
    ]
    return broken


def silent_modules(house: House) -> list[str]:
    return [
        f"{module.path}:1: has no docstring; open with what the module owns and what it refuses"
        for module in house.src
        if not ast.get_docstring(module.tree)
    ]


def vague_names(house: House) -> list[str]:
    files = [(module.path, (house.root / module.path).read_text(encoding="utf-8")) for module in house.src]
    broken = []
    for path, text in (*files, *house.around):
        if any(VAGUE_FILE.search(part) for part in Path(path).with_suffix("").parts):
            broken.append(f"{path}:1: says nothing about what is in it; name it by its concept")
        broken += [
            f"{path}:{_line(text, found.start(1))}: class {found[1]} is named for no concept; say what it is"
            for found in CLASS.finditer(text)
            if VAGUE_CLASS.search(found[1])
        ]
    return broken


def dead_modules(house: House) -> list[str]:
    used = {"killick", "killick.__main__", *_entry_points(house.root)}
    for module in house.src:
        # A dotted name in a string is how `python -m` and import_module name a module.
        constants = {node.value for node in nodes(module, typing=True) if isinstance(node, ast.Constant)}
        for target in {item.target for item in imports(module, typing=True)} | constants:
            used |= _and_above(str(target)) - {module.name}
    for _, text in house.around:
        for found in NAMED.finditer(text):
            source, names = found[1] or found[3], found[2] or ""
            used |= {above for name in re.findall(r"\w+", names) for above in _and_above(f"{source}.{name}")}
            used |= _and_above(source)
    return [
        f"{module.path}:1: nothing imports {module.name}; delete it, or use and test it"
        for module in house.src
        if module.name not in used
    ]


def wrong_drawing(house: House) -> list[str]:
    """Compares the tree drawn in docs/errors.md with the classes of errors.py, line by line."""
    module, page = house.find("killick.errors"), house.root / "docs/errors.md"
    if module is None:
        return []
    classes = {node.name: node for node in module.tree.body if isinstance(node, ast.ClassDef)}
    children: dict[str | None, list[str]] = {}
    for node in classes.values():
        above = next((base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes), None)
        children.setdefault(above, []).append(node.name)

    def draw(above: str | None, lead: str) -> Iterator[str]:
        for name in children.get(above, []):
            last = name == children[above][-1]
            yield lead + ("" if above is None else "└── " if last else "├── ") + name
            yield from draw(name, lead + ("" if above is None else "    " if last else "│   "))

    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    drawn = text.partition("```text\n")[2].partition("```")[0].splitlines()
    for line, wanted in zip_longest(drawn, draw(None, ""), fillvalue="nothing"):
        if line != wanted:
            found = classes.get(wanted.split()[-1])
            return [
                f"{module.path}:{found.lineno if found else 1}: docs/errors.md draws {line!r} where the classes have"
                f" {wanted!r}; draw the tree of the classes"
            ]
    return []


def undocumented_errors(house: House) -> list[str]:
    module = house.find("killick.errors")
    body = module.tree.body if module else []
    return _undocumented(
        house, {node.name: node.lineno for node in body if isinstance(node, ast.ClassDef)},
        "src/killick/errors.py", "docs/errors.md",
    )  # fmt: skip


def undocumented_kinds(house: House, kinds: Mapping[str, object]) -> list[str]:
    path = "src/killick/model/events.py"
    lines = (house.root / path).read_text(encoding="utf-8").splitlines()
    places = {kind: next((n for n, line in enumerate(lines, 1) if f'"{kind}"' in line), 1) for kind in kinds}
    return _undocumented(house, places, path, "docs/events.md")


def unsafe_calls(house: House) -> list[str]:
    return [
        f"{module.path}:{line}: {name} runs what it reads; store values through the codec, and code as code"
        for module in house.src
        for line, name in uses(module, UNSAFE)
    ]


def stray_prints(house: House) -> list[str]:
    return [
        f"{module.path}:{line}: prints; return the text and let the command line print it"
        for module in house.src
        if module.part != "cli"
        for line, _ in uses(module, frozenset({"builtins.print"}))
    ]


def inline_sql(house: House) -> list[str]:
    broken = []
    for module in house.src:
        if module.part != "store":
            continue
        prose = {id(node.value) for node in nodes(module) if isinstance(node, ast.Expr)}
        broken += [
            f"{module.path}:{node.lineno}: SQL in a string; give it a name in a .sql file of store/sql"
            for node in nodes(module)
            if isinstance(node, ast.Constant) and id(node) not in prose
            if isinstance(node.value, str) and SQL.match(node.value)
        ]
    return broken


def _as_ruff_sorts(name: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Constants, then classes, then the rest, and ten after two: the order that the linter asks for."""
    case = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    pieces = re.findall(r"\d+|\D+", name)
    return case, [(0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in pieces]


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _and_above(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def _entry_points(root: Path) -> set[str]:
    file = root / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.exists() else {}
    groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    return {target.partition(":")[0] for group in groups for target in group.values()}


def _undocumented(house: House, places: Mapping[str, int], path: str, page: str) -> list[str]:
    file = house.root / page
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [
        f"{path}:{line}: {name} is not in {page}; write a line about it there"
        for name, line in places.items()
        if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text)
    ]


# The house as it stands ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def house() -> House:
    return as_it_stands()


def holds(broken: list[str]) -> None:
    if broken:
        pytest.fail("\n".join(broken), pytrace=False)


def test_a_layer_imports_only_itself_and_the_layers_below(house: House) -> None:
    holds(upward_imports(house))


def test_surfaces_never_import_each_other(house: House) -> None:
    holds(tangled_surfaces(house))


def test_window_and_workspace_work_without_the_engine(house: House) -> None:
    holds(leaning_parts(house))


def test_the_model_touches_no_clock_no_file_and_no_thread(house: House) -> None:
    holds(impure_model(house))


def test_only_clock_py_reads_a_clock(house: House) -> None:
    holds(clock_reads(house))


def test_only_sqlite_opens_a_database(house: House) -> None:
    holds(database_openings(house))


def test_a_type_that_is_first_read_by_in_a_call_is_made_ready(house: House) -> None:
    holds(unready_types(house))


def test_only_ids_py_draws_chance(house: House) -> None:
    holds(chance_draws(house))


def test_the_door_is_a_sorted_list_without_logic(house: House) -> None:
    holds(crooked_door(house))


def test_every_name_the_door_offers_can_be_imported() -> None:
    killick = importlib.import_module("killick")
    missing = [name for name in killick.__all__ if not hasattr(killick, name)]
    holds(
        [f"src/killick/__init__.py:1: offers {name}, which is nowhere; define it, or take it out" for name in missing]
    )


def test_the_door_finds_each_name_where_type_checkers_do(house: House) -> None:
    door = house.find("killick")
    assert door is not None
    seen = {item.name: item.target for item in imports(door, typing=True) if item.target.startswith("killick.")}
    killick = importlib.import_module("killick")
    submodules = {name: f"killick.{name}" for name in set(killick.__all__) - set(killick._MODULES)}
    assert seen == {name: f"killick.{module}.{name}" for name, module in killick._MODULES.items()} | submodules


def test_the_door_is_small() -> None:
    assert len(dir(importlib.import_module("killick"))) <= 61


@pytest.mark.parametrize(("code", "at_most"), [("import killick", 60), ("import killick.cli.main", 140)])
def test_the_door_and_the_command_line_import_little(code: str, at_most: int) -> None:
    """Counts modules instead of time: a busy machine changes nothing about it."""
    program = f"{code}; import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    ours = [name for name in loaded if name.startswith("killick.")]
    assert len(loaded) <= at_most
    assert set(ours) <= {
        "killick.cli",
        "killick.cli.exit_codes",
        "killick.cli.main",
        "killick.errors",
        "killick.text",
        "killick.version",
    }


def test_every_module_opens_with_a_docstring(house: House) -> None:
    holds(silent_modules(house))


def test_names_say_what_a_thing_is(house: House) -> None:
    holds(vague_names(house))


def test_no_module_is_dead(house: House) -> None:
    holds(dead_modules(house))


def test_the_tree_drawn_in_the_docs_is_the_tree_of_error_classes(house: House) -> None:
    holds(wrong_drawing(house))


def test_every_error_has_a_line_in_the_docs(house: House) -> None:
    holds(undocumented_errors(house))


def test_every_event_kind_has_a_line_in_the_docs(house: House) -> None:
    events = importlib.import_module("killick.model.event_codec")
    holds(undocumented_kinds(house, events.KINDS))


def test_nothing_is_pickled_or_evaluated(house: House) -> None:
    holds(unsafe_calls(house))


def test_only_the_command_line_prints(house: House) -> None:
    holds(stray_prints(house))


def test_sql_lives_in_sql_files(house: House) -> None:
    holds(inline_sql(house))


# The rules, tried ---------------------------------------------------------------------------------

KIND_RULE: Final = partial(undocumented_kinds, kinds={"run.started": object})


def build(root: Path, files: Mapping[str, str]) -> House:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return House(root)


ERRORS: Final = '''"""Errors."""
class Root(Exception): ...
class Left(Root): ...
class Right(Root, TypeError): ...
'''
TREE: Final = "```text\nRoot\n├── Left\n└── Right\n```\n`Root`, `Left`, `Right`"

BROKEN: Final[list[tuple[Rule, str, str, int]]] = [
    (upward_imports, "src/killick/model/a.py", "import json\nfrom killick.store.protocol import Row", 2),
    (upward_imports, "src/killick/model/a.py", "def f():\n    from ..store import protocol", 2),
    (upward_imports, "src/killick/store/__init__.py", "from ..log import Log", 1),
    (upward_imports, "src/killick/model/__init__.py", "from killick import store", 1),
    (upward_imports, "src/killick/store/a.py", "try:\n    import killick.log\nexcept ImportError: ...", 2),
    (upward_imports, "src/killick/engine/a.py", "from killick import Run", 1),
    (upward_imports, "src/killick/stuff.py", "import json", 1),
    (tangled_surfaces, "src/killick/web/a.py", "import killick.adapters.mcp", 1),
    (leaning_parts, "src/killick/window/a.py", "\nfrom killick.engine import execution", 2),
    (leaning_parts, "src/killick/workspace/a.py", "from killick.engine.effects.fork import cut", 1),
    (impure_model, "src/killick/model/a.py", "import os", 1),
    (impure_model, "src/killick/model/a.py", "def f(p):\n    return open(p).read()", 2),
    (impure_model, "src/killick/model/a.py", "from concurrent.futures import Future", 1),
    (clock_reads, "src/killick/store/a.py", "import time as t\nx = 1\ny = t.monotonic()", 3),
    (clock_reads, "src/killick/store/a.py", "from time import perf_counter", 1),
    (clock_reads, "src/killick/model/a.py", "from datetime import UTC, datetime\nx = datetime.now(UTC)", 2),
    (clock_reads, "src/killick/model/a.py", "import datetime as dt\nx = dt.date.today", 2),
    (database_openings, "src/killick/store/a.py", "def f(p):\n    with p.open('rb') as file: return file", 2),
    (database_openings, "src/killick/store/a.py", "import shutil\nshutil.copyfile('a', 'b')", 2),
    (database_openings, "src/killick/history/a.py", "def f(store):\n    return open(store.place, 'rb')", 2),
    (database_openings, "src/killick/history/a.py", "import sqlite3\nsqlite3.connect('a')", 2),
    (unready_types, "src/killick/store/a.py", "import msgspec\ndef f(x):\n    msgspec.convert(x, Row)", 3),
    (unready_types, "src/killick/store/a.py", "import msgspec as m\nf = lambda x: m.json.decode(x, type=list[Row])", 2),
    (unready_types, "src/killick/store/a.py", "from msgspec import json\ndef f():\n    json.Decoder(Row | None)", 3),
    (
        unready_types,
        "src/killick/store/a.py",
        "import msgspec\ndef f(x):\n    msgspec.convert(x, tuple[ready(A), B])",
        3,
    ),
    (chance_draws, "src/killick/store/a.py", "import uuid\nx = uuid.uuid4()", 2),
    (chance_draws, "src/killick/store/a.py", "import os\nx = os.urandom(4)", 2),
    (chance_draws, "src/killick/store/a.py", "from random import choice", 1),
    (crooked_door, "src/killick/__init__.py", "from a import b, c\n__all__ = ['c', 'b']", 2),
    (crooked_door, "src/killick/__init__.py", "from a import b\n__all__ = ['b', 'c']", 2),
    (crooked_door, "src/killick/__init__.py", "from a import b\n__all__ = ['b']\nif b: ...", 3),
    (crooked_door, "src/killick/__init__.py", "from a import b", 1),
    (silent_modules, "src/killick/store/a.py", "import json", 1),
    (vague_names, "src/killick/store/sql_utils.py", "", 1),
    (vague_names, "src/killick/common/a.py", "", 1),
    (vague_names, "tests/helpers.py", "", 1),
    (vague_names, "src/killick/store/a.py", "x = 1\nclass RunManager: ...", 2),
    (vague_names, "bench/a.py", "class BaseStore: ...", 1),
    (dead_modules, "src/killick/store/a.py", "import killick.store.a", 1),
    (wrong_drawing, "src/killick/errors.py", ERRORS + "class More(Left): ...\n", 5),
    (wrong_drawing, "src/killick/errors.py", ERRORS + "class Other(Exception): ...\n", 5),
    (wrong_drawing, "src/killick/errors.py", ERRORS.replace("class Right(Root, TypeError): ...\n", ""), 3),
    (wrong_drawing, "src/killick/errors.py", ERRORS.replace("class Right(Root", "class Right(Left"), 3),
    (undocumented_errors, "src/killick/errors.py", "class Lost(Exception): ...", 1),
    (KIND_RULE, "src/killick/model/events.py", '\nclass RunStarted(Event, tag="run.started"): ...', 2),
    (unsafe_calls, "src/killick/store/a.py", "import pickle", 1),
    (unsafe_calls, "src/killick/store/a.py", "x = 1\neval('x')", 2),
    (unsafe_calls, "src/killick/cli/a.py", "run = exec", 1),
    (stray_prints, "src/killick/log.py", "def f():\n    print('x')", 2),
    (inline_sql, "src/killick/store/a.py", "x = 1\ny = 'SELECT 1'", 2),
    (inline_sql, "src/killick/store/a.py", "x = f'''\n  DELETE FROM {y}'''", 1),
    (inline_sql, "src/killick/store/a.py", "x = 'insert or ignore into runs values (1)'", 1),
]

SOUND: Final = '''
== docs/events.md
A run begins with `run.started`.
== src/killick/__init__.py
"""The door."""
from killick.log import KEY, Log
__all__ = ["KEY", "Log"]
== src/killick/__main__.py
"""The command."""
from killick.cli import main
main()
== src/killick/clock.py
"""The clock."""
import time
now = time.time
== src/killick/ids.py
"""Ids."""
import os, random, uuid
drawn = os.urandom(1), random.random(), uuid.uuid4()
== src/killick/model/events.py
"""Events."""
from datetime import datetime
from uuid import UUID
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import os
    from killick.store.protocol import Row
def read(row: "Row", run) -> UUID:
    return run.now(), run.uuid4(), run.random(), datetime.fromisoformat(row)
== src/killick/store/protocol.py
"""A store."""
import time
from ..model import events
from killick.errors import Left
def sweep(db):
    """Delete values."""
    time.sleep(1)
    db.execute("PRAGMA foreign_keys = 1")
    db.execute("BEGIN IMMEDIATE")
    raise ValueError("select a store from the list")
== src/killick/log.py
"""The log."""
import msgspec
from killick.store import protocol
read = msgspec.json.Decoder(protocol.Row).decode
def rows(body, kind):
    return msgspec.json.decode(body, type=list[ready(kind)]), msgspec.convert(body, dict[str, Any])
import killick.clock, killick.ids
KEY = 1
class Log: ...
== src/killick/window/__init__.py
"""The window."""
from killick.store import protocol
== src/killick/engine/__init__.py
"""The engine."""
from killick.window import pages
== src/killick/cli/__init__.py
"""The command line."""
import killick.engine
class Baseline: ...
def main(): print(1)
'''

RULES: Final[list[Rule]] = list({id(rule): rule for rule, *_ in BROKEN}.values())


@pytest.mark.parametrize(
    ("rule", "path", "text", "line"),
    BROKEN,
    ids=[f"{getattr(rule, '__name__', 'undocumented_kinds')}-{n}" for n, (rule, *_) in enumerate(BROKEN)],
)
def test_a_broken_rule_is_caught_with_its_file_and_line(
    tmp_path: Path, rule: Rule, path: str, text: str, line: int
) -> None:
    broken = rule(build(tmp_path, {"docs/errors.md": TREE, path: text}))
    assert len(broken) == 1
    assert broken[0].startswith(f"{path}:{line}: ")
    assert ";" in broken[0], "a message says what is wrong and, after a semicolon, what to do"


def test_a_sound_house_breaks_no_rule(tmp_path: Path) -> None:
    files = dict(text.split("\n", 1) for text in SOUND.split("\n== ")[1:])
    sound = build(tmp_path, {**files, "docs/errors.md": TREE, "src/killick/errors.py": ERRORS})
    assert [problem for rule in RULES for problem in rule(sound)] == []


def test_the_project_has_one_name() -> None:
    """No file says the name that the project had before it had its own."""
    old = "ked" + "ge"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    named = [path for path in tracked if old in path.lower()]
    named += [
        path
        for path in filter(None, tracked)
        if (ROOT / path).is_file() and old.encode() in (ROOT / path).read_bytes().lower()
    ]
    assert not named
