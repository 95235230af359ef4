"""Reads public names from the source: signatures, fields and docstrings, without importing what is read.

A docstring has paragraphs; a table of parameters, each line a name, two or more spaces and its meaning; sentences
that begin with "Raises"; and examples, indented by four spaces.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).resolve().parents[1] / "src"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign

SENTINELS: Final = {"MISSING", "UNCHANGED", "_UNSET", "UNSET", "silent"}
"""Defaults that stand for "not given"; a signature shows them as an ellipsis."""
SHOWN_AS: Final = {f"Any{name}": name for name in ("Agent", "Client", "Handle", "Run", "Tool")}
PLAIN: Final = {
    "Agent", "AsyncHandle", "Callable", "Child", "Editor", "Finder", "Findings", "Handle", "Maintenance", "PathLike",
    "Proposed", "Run", "Tool", "TriggerControl",
}  # fmt: skip
"""Generic types that are shown without their arguments."""
KEPT: Final = frozenset({"Duration"})
"""Type aliases that are never replaced by their types."""
EXPANDED_MAX: Final = 50
"""Up to this many characters a type alias is replaced by its type."""

_ENTRY: Final = re.compile(r"(\**\w+(?:, \**\w+)*) {2,}(\S.*)")
_RAISES: Final = re.compile(r"(?:^|(?<=[.:] ))Raises .*?\.(?= [A-Z]|$)")
_SECTION: Final = re.compile(r"^    # (.+?) -{10,}$")


# docstrings ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doc:
    """A docstring in its parts."""

    prose: tuple[str, ...] = ()
    meanings: dict[str, str] = field(default_factory=dict)
    raises: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        return self.prose[0] if self.prose else ""

    @property
    def line(self) -> str:
        """The first sentence."""
        return re.split(r"(?<=[.])(?= [A-Z`])", self.summary, maxsplit=1)[0]


def doc_of(text: str | None) -> Doc:
    """Takes a docstring apart."""
    prose: list[str] = []
    meanings: dict[str, str] = {}
    raises: list[str] = []
    examples: list[str] = []
    is_example = False
    for paragraph in re.split(r"\n\s*\n", cleandoc(text or "")):
        lines = paragraph.splitlines()
        is_indented = bool(lines) and all(line.startswith("    ") for line in lines)
        lines = [line[4:] for line in lines] if is_indented else lines
        if is_indented and not _ENTRY.fullmatch(lines[0]):
            shown = "\n".join(lines)
            apart = "\n\n\n" if shown.startswith(("@", "def ", "async def ")) else "\n\n"
            examples[-1:] = [f"{examples[-1]}{apart}{shown}"] if is_example else [*examples[-1:], shown]
            is_example = True
            continue
        is_example = False
        if lines and _ENTRY.fullmatch(lines[0]):
            meanings |= _table(lines)
            continue
        told = " ".join(line.strip() for line in lines)
        raises += [each.removeprefix("Raises ") for each in _RAISES.findall(told)]
        if rest := " ".join(_RAISES.sub("", told).split()):
            prose.append(rest)
    return Doc(tuple(prose), meanings, tuple(raises), tuple(examples))


def _table(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if not line.startswith(" ") and (entry := _ENTRY.fullmatch(line)):
            names = [name.lstrip("*") for name in entry[1].split(", ")]
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


# modules ------------------------------------------------------------------------------------------


class Module(NamedTuple):
    """A module's tree, its top-level definitions, and where its imported names are defined."""

    name: str
    tree: ast.Module
    lines: list[str]
    own: dict[str, list[Definition]]
    imported: dict[str, tuple[str, str]]

    @property
    def all(self) -> list[str]:
        """What `__all__` lists."""
        for node in self.own.get("__all__", ()):
            if isinstance(node, ast.Assign):
                return [str(name) for name in ast.literal_eval(node.value)]
        return []


@cache
def text_of(name: str) -> str:
    """The source of a module."""
    path = SOURCE.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")


@cache
def module(name: str) -> Module:
    text = text_of(name)
    tree = ast.parse(text)
    own: dict[str, list[Definition]] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in _top(tree.body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                own.setdefault(node.name, []).append(node)
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
                own.setdefault(target, []).append(node)
            case ast.ImportFrom(module=str() as source):
                imported |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
            case _:
                pass
    return Module(name, tree, text.splitlines(), own, imported)


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _top(node.body)


class Found(NamedTuple):
    """A definition and the module that has it; of overloads, all."""

    module: Module
    nodes: list[Definition]

    @property
    def node(self) -> Definition:
        """The implementation."""
        return self.nodes[-1]


@cache
def find(place: str, name: str) -> Found | None:
    """A name as a module sees it, where that is defined in Killick."""
    here = module(place)
    if name in here.own:
        return Found(here, here.own[name])
    if name in here.imported and here.imported[name][0].startswith("killick"):
        source, original = here.imported[name]
        if SOURCE.joinpath(*source.split("."), f"{original}.py").exists():
            return None  # a module, not a name in one
        return find(source, original)
    return None


# types --------------------------------------------------------------------------------------------

ALIASES: Final[dict[str, tuple[str, str]]] = {}
"""The type aliases that signatures name, with their types and what their docstrings say."""


def type_of(annotation: ast.expr | None, place: str) -> str:
    """An annotation, short."""
    return "" if annotation is None else _shown(annotation, place)


def _shown(node: ast.expr, place: str) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return _shown(ast.parse(text, mode="eval").body, place)
        case ast.Constant(value=None):
            return "None"
        case ast.Constant():
            return "..." if node.value is ... else repr(node.value)
        case ast.Name(id=name):
            return _named(name, place)
        case ast.Attribute(value=ast.Name(id=prefix), attr=name):
            source, original = module(place).imported.get(prefix, ("", ""))
            below = f"{source}.{original}"
            return _named(name, below) if below.startswith("killick") else "Any" if name in ("args", "kwargs") else name
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            parts = [_shown(left, place), _shown(right, place)]
            return " | ".join(dict.fromkeys(part for each in parts for part in _united(each)))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            several = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            values = [ast.literal_eval(each) for each in several]
            return " | ".join(f'"{value}"' if isinstance(value, str) else repr(value) for value in values)
        case ast.Subscript(value=ast.Name(id="Step"), slice=inner):
            return _shown(inner, place)
        case ast.Subscript(value=value, slice=inner):
            outer = _shown(value, place)
            return outer if outer in PLAIN else f"{outer}[{_shown(inner, place)}]"
        case ast.Tuple(elts=several):
            return ", ".join(_shown(each, place) for each in several)
        case ast.List(elts=several):
            return f"[{', '.join(_shown(each, place) for each in several)}]"
        case _:
            return ast.unparse(node)


def _united(text: str) -> list[str]:
    """The parts of a union, where no bracket is between them."""
    return [text] if "[" in text else text.split(" | ")


def _named(name: str, place: str) -> str:
    if name in SHOWN_AS:
        return SHOWN_AS[name]
    found = find(place, name) if _is_assigned(place, name) else None
    value = None if found is None else _alias(found.node)
    if found is None or value is None:
        return name
    told = _shown(value, found.module.name)
    if name not in KEPT and (len(told) <= EXPANDED_MAX or told.startswith('"')):
        return told
    ALIASES[name] = told, text_below(found.module.tree.body, found.node)
    return name


@cache
def _is_assigned(place: str, name: str) -> bool:
    """Whether a name may be an alias: looked up in the text of the module, for parsing it takes longer."""
    source = module(place).imported[name][0] if name in module(place).imported else place
    return source.startswith("killick") and any(f"\n{name}{form} = " in text_of(source) for form in ("", ": TypeAlias"))


def _alias(node: Definition) -> ast.expr | None:
    """The type that an alias is for; None for any other definition."""
    match node:
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias"), value=ast.expr() as value):
            return value
        case ast.Assign(value=ast.Subscript(value=ast.Name(id="Literal")) as value):
            return value
        case _:
            return None


def text_below(body: list[ast.stmt], node: ast.stmt) -> str:
    """The docstring below an assignment."""
    after = body[body.index(node) + 1 :] if node in body else []
    match after:
        case [ast.Expr(value=ast.Constant(value=str() as text)), *_]:
            return " ".join(text.split())
        case _:
            return ""


# signatures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter, as a signature shows it."""

    name: str
    type: str = ""
    default: str | None = None
    stars: str = ""

    def __str__(self) -> str:
        shown = f"{self.stars}{self.name}" + (f": {self.type}" if self.type else "")
        return shown if self.default is None else f"{shown}{' = ' if self.type else '='}{self.default}"


@dataclass(frozen=True)
class Signature:
    """What a function takes and returns. A parameter without a name is the mark `/` or `*`."""

    parameters: tuple[Parameter, ...] = ()
    returns: str = ""

    @property
    def named(self) -> tuple[Parameter, ...]:
        return tuple(each for each in self.parameters if each.name)

    def shown(self, called: str) -> str:
        """The whole, on one line or with a line for each parameter."""
        parts = [str(each) if each.name else each.stars for each in self.parameters]
        after = f" -> {self.returns}" if self.returns and self.returns != "None" else ""
        one = f"{called}({', '.join(parts)}){after}"
        return one if len(one) <= 96 else "\n".join([f"{called}(", *(f"    {part}," for part in parts), f"){after}"])


def signature(found: Found, *, is_method: bool = False) -> Signature:
    """The signature of a function; of one that takes the options of an overload, with those."""
    node = found.node
    assert isinstance(node, Function)
    signed = next((each for each in node.decorator_list if _decorates(each, "signed")), None)
    if isinstance(signed, ast.Call):
        like = found if not signed.args else find(found.module.name, ast.unparse(signed.args[0]))
        assert like is not None
        options = like.nodes[-2]
        assert isinstance(options, Function)
        own = _parameters(node.args, found.module.name, is_method=is_method)[:2]
        more = _parameters(options.args, like.module.name, is_method=False)
        return Signature((*own, *more))
    parameters = _parameters(node.args, found.module.name, is_method=is_method)
    return Signature(tuple(parameters), type_of(node.returns, found.module.name))


def _decorates(node: ast.expr, name: str) -> bool:
    target = node.func if isinstance(node, ast.Call) else node
    return (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")) == name


def _parameters(given: ast.arguments, place: str, *, is_method: bool) -> list[Parameter]:
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    found = [
        Parameter(each.arg, type_of(each.annotation, place), _default(default, place))
        for each, default in zip(positional, [*defaults, *given.defaults], strict=True)
    ]
    if given.posonlyargs and (len(given.posonlyargs) > 1 or not is_method):
        found.insert(len(given.posonlyargs), Parameter("", stars="/"))
    found = found[1:] if is_method else found
    if given.vararg is not None:
        found.append(Parameter(given.vararg.arg, type_of(given.vararg.annotation, place), stars="*"))
    elif given.kwonlyargs:
        found.append(Parameter("", stars="*"))
    for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(Parameter(each.arg, type_of(each.annotation, place), _default(value, place)))
    if given.kwarg is not None:
        found += _further(given.kwarg, place, has_star=any(each.stars in ("*",) for each in found))
    return found


def _further(kwarg: ast.arg, place: str, *, has_star: bool) -> Iterator[Parameter]:
    """The keys of a TypedDict of options, or the rest of the keyword arguments."""
    match kwarg.annotation:
        case ast.Subscript(value=ast.Name(id="Unpack"), slice=ast.Name(id=name)):
            options = find(place, name)
            assert options is not None
            assert isinstance(options.node, ast.ClassDef)
            if not has_star:
                yield Parameter("", stars="*")
            for node in options.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    yield Parameter(node.target.id, type_of(node.annotation, options.module.name), "...")
        case annotation:
            yield Parameter(kwarg.arg, type_of(annotation, place), stars="**")


def _default(node: ast.expr | None, place: str) -> str | None:
    match node:
        case None:
            return None
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in SENTINELS:
            return "..."
        case ast.Name(id=name) if (found := find(place, name)) is not None:
            value = getattr(found.node, "value", None)
            return _default(value, found.module.name) if isinstance(value, ast.expr) else name
        case ast.Call(func=ast.Name(id="field"), keywords=keywords):
            return next(("{}" for each in keywords if each.arg == "default_factory"), None)
        case ast.Constant(value=str() as text):
            return f'"{text}"'
        case _:
            return ast.unparse(node)


# classes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A method, or a value that can be read: a field, a property or an attribute."""

    name: str
    doc: Doc
    section: str = ""
    signature: Signature | None = None
    type: str = ""
    default: str | None = None


@dataclass(frozen=True)
class Class:
    """A class with those it is derived from: what makes one, and what is public."""

    name: str
    doc: Doc
    bases: tuple[str, ...]
    makes: Signature | None
    fields: dict[str, Member]
    methods: dict[str, Member]


def class_of(found: Found) -> Class:
    """A class, with what it inherits from classes of Killick."""
    return _class_of(found.module.name, found.node)


@cache
def _class_of(place: str, node: Definition) -> Class:
    assert isinstance(node, ast.ClassDef)
    found = Found(module(place), [node])
    doc = doc_of(ast.get_docstring(node))
    makes: Signature | None = None
    fields = {each.name: each for each in _fields(node, found.module)}
    methods: dict[str, Member] = {}
    for name, each in _methods(node, found.module):
        if name == "__init__":
            makes = each.signature
            doc = replace(doc, meanings={**doc.meanings, **each.doc.meanings}, raises=(*doc.raises, *each.doc.raises))
        elif each.signature is None:
            fields[name] = each
        else:
            methods[name] = each
    for base in node.bases:
        above = find(found.module.name, _base(base))
        if above is not None and isinstance(above.node, ast.ClassDef):
            inherited = class_of(above)
            makes = makes or inherited.makes
            fields = {**inherited.fields, **fields}
            methods |= {name: each for name, each in inherited.methods.items() if name not in methods}
    if not any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in _top(node.body)):
        makes = _made_of_fields(node, fields) or makes
    bases = tuple(_base(base) for base in node.bases)
    return Class(node.name, doc, bases, makes, fields, methods)


def _base(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _made_of_fields(node: ast.ClassDef, fields: dict[str, Member]) -> Signature | None:
    is_record = any(_base(base) in ("Struct", "NamedTuple") for base in node.bases)
    if not is_record and not any(_decorates(each, "dataclass") for each in node.decorator_list):
        return None
    by_name = any(each.arg == "kw_only" for each in node.keywords)
    given = [Parameter(each.name, each.type, each.default) for each in fields.values() if each.section != "derived"]
    return Signature((Parameter("", stars="*"), *given) if by_name and given else tuple(given))


@cache
def options_of(place: str) -> dict[str, str]:
    """The meanings of options that functions of a module share, by the docstrings of its TypedDicts."""
    nodes = [node for listed in module(place).own.values() for node in listed if isinstance(node, ast.ClassDef)]
    dicts = [node for node in nodes if "TypedDict" in map(_base, node.bases)]
    return {name: told for node in dicts for name, told in doc_of(ast.get_docstring(node)).meanings.items()}


def _fields(node: ast.ClassDef, place: Module) -> Iterator[Member]:
    """The annotated names of a class, and the attributes that its constructor documents."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and _is_public(part.target.id):
            is_derived = part.value is not None and "init=False" in ast.unparse(part.value)
            yield Member(
                part.target.id,
                doc_of(text_below(node.body, part)),
                "derived" if is_derived else "",
                type=type_of(part.annotation, place.name),
                default=_default(part.value, place.name),
            )
    for made in node.body:
        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
            for part in made.body:
                match part:
                    case (
                        ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)])
                        | ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name))
                    ) if _is_public(name) and (told := text_below(made.body, part)):
                        annotation = part.annotation if isinstance(part, ast.AnnAssign) else None
                        yield Member(name, doc_of(told), "derived", type=type_of(annotation, place.name))
                    case _:
                        pass


def _methods(node: ast.ClassDef, place: Module) -> Iterator[tuple[str, Member]]:
    section = ""
    line = node.lineno
    for part in _top(node.body):
        for text in place.lines[line - 1 : part.lineno]:
            if (heading := _SECTION.match(text)) is not None:
                section = heading[1]
        line = part.end_lineno or part.lineno
        if not isinstance(part, Function) or any(_decorates(each, "overload") for each in part.decorator_list):
            continue
        if _is_public(part.name) or part.name == "__init__":
            doc = doc_of(ast.get_docstring(part))
            if any(_decorates(each, "property") or _decorates(each, "cached_property") for each in part.decorator_list):
                yield part.name, Member(part.name, doc, section, type=type_of(part.returns, place.name))
            else:
                is_static = any(_decorates(each, "staticmethod") for each in part.decorator_list)
                signed = signature(Found(place, [part]), is_method=not is_static)
                yield part.name, Member(part.name, doc, section, replace(signed, returns=_awaited(signed.returns)))


def _awaited(returns: str) -> str:
    """What comes of a coroutine when it is awaited."""
    found = re.fullmatch(r"(?:Awaitable|Coroutine)\[(?:Any, Any, )?(.+)\]", returns)
    return found[1] if found else returns


def _is_public(name: str) -> bool:
    return not name.startswith("_")
