"""Writes docs/reference from the source: `python tests/python_reference.py`. `reference_topics` lists the names."""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import signatures
from killick import errors
from killick.cli.apps import SETTINGS
from killick.cli.exit_codes import code_of
from killick.cli.main import VARIABLES as COMMAND_LINE
from reference_topics import COMMON, FRAMEWORKS, GROUPS, GUIDES, HIDDEN, LIKE, TOPICS, TWINS, URLS, VARIABLES, Topic
from signatures import (
    Class,
    Doc,
    Found,
    Function,
    Member,
    Parameter,
    Signature,
    class_of,
    doc_of,
    find,
    module,
    options_of,
    text_below,
)

FOLDER: Final = Path("docs/reference")

_WRITTEN: Final = "This page is written by `tests/python_reference.py` from the source."


TYPES: Final = {"Duration": "Seconds, or text such as `90s`, `15m`, `1h30m`, `3d`."}


def pages() -> dict[str, str]:
    """Every page of the reference, by its file name."""
    gc.disable()  # Trees of many nodes that all stay: the collector would walk through them again and again.
    try:
        return _pages()
    finally:
        gc.enable()


def _pages() -> dict[str, str]:
    found = {f"{name}.md": _page(topic) for name, topic in TOPICS.items()}
    found["errors.md"] = _errors()
    found["frameworks.md"] = _frameworks()
    found["settings.md"] = _settings()
    return {"index.md": _index(), **found}


# topics -------------------------------------------------------------------------------------------


class Name(NamedTuple):
    """A public name: where it is found, how it is called, and how its entry looks."""

    place: str
    name: str
    is_made: bool = False
    is_brief: bool = False

    @property
    def found(self) -> Found:
        found = find(SOURCES.get(self.place, self.place), self.name)
        assert found is not None, f"{self.place} has no {self.name}"
        return found

    @property
    def called(self) -> str:
        """As a heading has it: names of a module with its name, except those of `killick` itself."""
        part = self.place.removeprefix("killick").lstrip(".")
        return f"{part}.{self.name}" if part in ("rules", "triggers", "testing") else self.name

    @property
    def heading(self) -> str:
        return f"class {self.called}" if self.is_class else self.called

    @property
    def is_class(self) -> bool:
        return isinstance(self.found.node, ast.ClassDef)

    @property
    def imported(self) -> str:
        """As a program calls it."""
        return f"{self.place}.{self.name}" if self.place in PUBLIC else self.name


PUBLIC: Final = ("killick", "killick.rules", "killick.triggers", "killick.testing")
SOURCES: Final = {"killick.rules": "killick.contracts.rules"}
"""The modules of public modules that `killick` has under another name."""


def names(topic: Topic) -> Iterator[Name]:
    """The names of a topic, in their order."""
    for place, listed in topic.names.items():
        yield from _names(place, listed)


def _names(place: str, listed: str) -> Iterator[Name]:
    for word in listed.split():
        yield Name(place, word.rstrip("!~"), "!" in word, "~" in word)


def _page(topic: Topic) -> str:
    parts = [f"# {topic.title}\n", f"{topic.opening}\n", f"{_WRITTEN} Guide: {_guide(topic.guide)}.\n"]
    for name in names(topic):
        parts += entry(name, "##", GUIDES.get(name.name, topic.guide))
    return "\n".join(parts)


def entry(name: Name, mark: str, guide: str) -> Iterator[str]:
    """The entry of one name."""
    node = name.found.node
    yield f"{mark} {name.heading}\n"
    if isinstance(node, ast.ClassDef):
        yield from _class(name, members(name), mark, guide)
    elif isinstance(node, Function):
        doc = doc_of(ast.get_docstring(node))
        is_decorator = name.name in ("tool", "agent", "machine", "on")
        signed = signatures.signature(name.found)
        yield _block([signed.shown(f"{'@' * is_decorator}{name.imported}")])
        yield from _described(doc, signed, guide, _shared(name, name.called))
    else:
        yield f"{text_below(name.found.module.tree.body, node)}\n"
        yield f"Guide: {_guide(guide)}.\n"


def members(name: Name) -> Class:
    """A class without its hidden members."""
    found = class_of(name.found)
    hidden = HIDDEN.get(name.name, "").split()
    shown = {key: each for key, each in found.fields.items() if key not in hidden}
    methods = {key: each for key, each in found.methods.items() if key not in hidden}
    return replace(found, fields=shown, methods=methods)


def _class(name: Name, found: Class, mark: str, guide: str) -> Iterator[str]:
    if name.is_made and found.makes is not None:
        yield _block([found.makes.shown(name.imported)])
        shared = {key: _meaning(each, found.doc) for key, each in found.fields.items()}
        yield from _described(found.doc, Signature(found.makes.parameters), guide, shared)
        fields = {each.name: each for each in found.fields.values() if each.section == "derived" or not each.default}
        fields = {key: each for key, each in fields.items() if key not in {p.name for p in found.makes.named}}
    else:
        yield from _described(found.doc, Signature(), guide, is_class=True)
        found = replace(found, doc=replace(found.doc, meanings={**_shared(name, name.called), **found.doc.meanings}))
        fields = found.fields
    if fields:
        yield _rows(
            ("attribute", "type", "meaning"),
            ((f"`{each.name}`", _code(each.type), _meaning(each, found.doc)) for each in fields.values()),
        )
    if name.is_brief:
        listed = [each for each in found.methods.values() if each.doc.prose]
        if listed:
            yield _rows(("method", ""), ((f"`{_short(each)}`", each.doc.line) for each in listed))
        return
    if name.name in TWINS:
        place, twin, told = TWINS[name.name]
        same = class_of(Name(place, twin).found).methods
        methods = [each for key, each in found.methods.items() if key not in same]
        yield f"The methods and properties are those of `{twin}`; {told}.{' In addition:' * bool(methods)}\n"
    else:
        methods = [*found.methods.values()]
    section = ""
    deeper = f"{mark}#"
    for each in methods:
        if each.section != section and (section := each.section):
            yield f"{mark}# {name.name}: {section}\n"
            deeper = f"{mark}##"
        called = f"{GROUPS.get(name.name, name.name)}.{each.name}"
        assert each.signature is not None
        yield f"{deeper} {called}\n"
        yield _block([each.signature.shown(called)])
        yield from _described(each.doc, each.signature, GUIDES.get(called, ""), _shared(name, called))


def _short(each: Member) -> str:
    assert each.signature is not None
    return f"{each.name}({', '.join(one.stars + one.name for one in each.signature.parameters)})"


def _meaning(each: Member, doc: Doc) -> str:
    raises = [f"Raises {_linked(told)}" for told in each.doc.raises]
    return " ".join([*each.doc.prose, *raises]) or doc.meanings.get(each.name, "")


def _described(
    doc: Doc, signed: Signature, guide: str, shared: Mapping[str, str] | None = None, *, is_class: bool = False
) -> Iterator[str]:
    """What is below the signature: prose, parameters, result, errors, examples, guide."""
    yield from (f"{paragraph}\n" for paragraph in doc.prose[:1])
    rows = [] if is_class else [*_parameters(doc, signed, shared or {})]
    if rows:
        yield _rows(("parameter", "type", "default", "meaning"), rows)
    yield from (f"{paragraph}\n" for paragraph in doc.prose[1:])
    if signed.returns not in ("", "None") and not any("eturns " in paragraph for paragraph in doc.prose):
        yield f"Returns {_code(signed.returns)}.\n"
    if doc.raises:
        yield f"Raises {' '.join(map(_linked, doc.raises))}\n"
    for example in doc.examples:
        yield _block(example.splitlines())
    if guide:
        yield f"Guide: {_guide(guide)}.\n"


def _parameters(doc: Doc, signed: Signature, shared: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    meanings = dict(doc.meanings)
    for each in signed.named:
        told = meanings.pop(each.name, "") or shared.get(each.name, "") or _common(each)
        yield f"`{each.stars}{each.name}`", _code(each.type), _given(each), told
    for name, told in meanings.items():
        yield f"`{name}`", "", "", told


def _shared(name: Name, called: str) -> Mapping[str, str]:
    """What parameters mean by the entry that this one is like, and by the options of its module."""
    if called not in LIKE:
        return options_of(name.found.module.name)
    listed = {other.called: other for topic in TOPICS.values() for other in names(topic)}
    if LIKE[called] in listed:
        return doc_of(_docstring(listed[LIKE[called]])).meanings
    owner, _, method = LIKE[called].rpartition(".")
    return class_of(listed[owner].found).methods[method].doc.meanings


def _docstring(name: Name) -> str | None:
    node = name.found.node
    return ast.get_docstring(node) if isinstance(node, Function | ast.ClassDef) else None


def _common(each: Parameter) -> str:
    kind, told = COMMON.get(each.name, ("", ""))
    given, known = {*each.type.split(" | ")} - {"None"}, {*kind.split(" | ")} - {"None"}
    return told if not kind or known <= given else ""


def _given(each: Parameter) -> str:
    if each.default is None:
        return "" if each.stars else "required"
    return "" if each.default == "..." else _code(each.default)


def _linked(text: str) -> str:
    """A text with the names of errors as links."""
    return re.sub(r"\b([A-Z]\w+)\b", lambda found: _error_link(found[1]), text.replace("`", ""))


def _error_link(name: str) -> str:
    is_error = isinstance(getattr(errors, name, None), type)
    return (
        f"[`{name}`](errors.md#class-{name.lower()})" if is_error else f"`{name}`" if name.endswith("Error") else name
    )


# errors -------------------------------------------------------------------------------------------


def _errors() -> str:
    parts = [
        "# Errors\n",
        "Every error that Killick raises: `killick.errors`. Some are names of `killick`, too.\n",
        f"{_WRITTEN} Guide: {_guide('errors.md')}, with what to do about each.\n",
        "The exit code is that of `killick` when a command ends with the error. The HTTP status and code are those of "
        "the problem document that the HTTP API returns.\n",
    ]
    for name, nodes in module("killick.errors").own.items():
        if isinstance(nodes[-1], ast.ClassDef):
            parts += _error(name)
    return "\n".join(parts)


def _error(name: str) -> Iterator[str]:
    found = class_of(Found(module("killick.errors"), [*module("killick.errors").own[name]]))
    kind: type[errors.KillickError] = getattr(errors, name)
    made = kind.__new__(kind)
    yield f"## class {name}\n"
    yield from (f"{paragraph}\n" for paragraph in found.doc.prose)
    if name in ("NotDone", "RateLimited"):
        yield _block([(found.makes or Signature((Parameter("message", "str"),))).shown(f"killick.{name}")])
    base = next(iter(found.bases))
    above = f"Extends {_error_link(base)}. " if name != "KillickError" else ""
    yield f"{above}Exit code {code_of(made).value}. HTTP {_status(kind)} `{_problem(name)}`.\n"
    fields = ", ".join(f"`{each.name}`" for each in (found.makes.named if found.makes else ()) if not each.stars)
    if fields:
        yield f"Made from {fields}.\n"
    for each in found.methods.values():
        assert each.signature is not None
        yield _block([each.signature.shown(f"{name}.{each.name}")])
        yield from (f"{paragraph}\n" for paragraph in each.doc.prose)


def _status(kind: type[errors.KillickError]) -> int:
    """The HTTP status of an error: the first of the table that it is. Read, for the web takes long to import."""
    [table] = module("killick.web.problems").own["_STATUSES"]
    assert isinstance(table, ast.AnnAssign)
    assert isinstance(table.value, ast.Dict)
    for status, kinds in zip(table.value.keys, table.value.values, strict=True):
        match status, kinds:
            case ast.Constant(value=int() as code), ast.Tuple(elts=parts):
                if any(
                    isinstance(each, ast.Attribute) and issubclass(kind, getattr(errors, each.attr)) for each in parts
                ):
                    return code
            case _:
                raise AssertionError(ast.unparse(kinds))
    raise AssertionError(kind)


def _problem(name: str) -> str:
    """The code of a problem document: `run_unknown` for RunUnknown."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


# frameworks ---------------------------------------------------------------------------------------


def _frameworks() -> str:
    parts = [
        "# Frameworks\n",
        "The adapters: `killick.adapters`. Each needs the package that it is for.\n",
        f"{_WRITTEN} Guide: {_guide('neighbours.md')}.\n",
    ]
    for place, (guide, listed) in FRAMEWORKS.items():
        where = f"killick.adapters.{place}"
        parts.append(f"## {where}\n")
        for name in _names(where, listed):
            parts += [line.replace(f"### {name.heading}\n", f"### {place}: {name.heading}\n")
                      for line in entry(name, "###", f"neighbours/{guide}")]  # fmt: skip
    return "\n".join(parts)


# settings -----------------------------------------------------------------------------------------


def _settings() -> str:
    variables = {**COMMAND_LINE, **VARIABLES}
    return "\n".join([
        "# Settings\n",
        "Environment variables, the table `[tool.killick]` of `pyproject.toml`, and the URLs of stores.\n",
        f"{_WRITTEN} Guide: {_guide('stores.md')}.\n",
        "## Environment variables\n",
        _rows(("variable", ""), ((f"`{name}`", told) for name, told in variables.items())),
        "Secrets of webhooks are read from the variables that `env:NAME` names.\n",
        "## pyproject.toml\n",
        "The nearest `pyproject.toml` with a table `[tool.killick]`, from the current folder upwards, is read. "
        "Options of a command take precedence, then environment variables.\n",
        _rows(("entry", ""), ((f"`{name}`", told) for name, told in SETTINGS.items())),
        "## Store URLs\n",
        _rows(("URL", "store", "options of the URL"), URLS),
        "The options of `killick.open` are in [its entry](client.md#open); those of each store are in "
        "[stores](stores.md).\n",
    ])  # fmt: skip


# the index ----------------------------------------------------------------------------------------


def _index() -> str:
    parts = [
        "# Python reference\n",
        "Every public name, with its signature, parameters, errors and the guide that teaches it.\n",
        f"{_WRITTEN}\n",
    ]
    for name, topic in TOPICS.items():
        rows = ((f"[`{each.called}`]({name}.md#{_anchor(each.heading)})", _line(each)) for each in names(topic))
        parts += [f"## {topic.title}\n", f"[{topic.title}]({name}.md): {topic.opening}\n", _rows(("name", ""), rows)]
    shown = ", ".join(
        f"[`{name}`](errors.md#class-{name.lower()})" for name in module("killick").all if _is_error(name)
    )
    parts += [
        "## Errors\n", f"[Errors](errors.md): every error of `killick.errors`. Names of `killick`: {shown}.\n",
        "## Frameworks\n", "[Frameworks](frameworks.md): the adapters of `killick.adapters`.\n",
        "## Settings\n", "[Settings](settings.md): environment variables, `[tool.killick]` and store URLs.\n",
        "## Type names\n", "Signatures use these short names for types:\n",
        _rows(("name", "type", ""), ((f"`{name}`", _code(kind), TYPES.get(name, told))
                                     for name, (kind, told) in sorted(signatures.ALIASES.items()))),
    ]  # fmt: skip
    return "\n".join(parts)


def _line(name: Name) -> str:
    told = _docstring(name)
    return doc_of(told).line if told else text_below(name.found.module.tree.body, name.found.node)


def _is_error(name: str) -> bool:
    return isinstance(getattr(errors, name, None), type)


# Markdown -----------------------------------------------------------------------------------------


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _guide(page: str) -> str:
    return f"[{page.removesuffix('.md').rpartition('/')[2]}](../{page})"


def _block(lines: Iterable[str]) -> str:
    return "\n".join(["```python no-run", *lines, "```", ""])


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _rows(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (heads, *rows)]
    return "\n".join([cells[0], f"|{'---|' * len(heads)}", *cells[1:], ""])


def main() -> int:
    """Write the pages, in the repository whose folder is the current one."""
    if not FOLDER.parent.is_dir():
        sys.stderr.write(f"killick: no {FOLDER.parent} here; run this in the folder of the repository\n")
        return 2
    FOLDER.mkdir(exist_ok=True)
    written = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
