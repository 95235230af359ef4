"""Tool schemas on demand: full schemas, stubs, and the search for the rest.

Fixed for a session, because tools come first in what providers cache. Runs no tool. Ignores tools that a provider runs
or loads on demand itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import log
from typing import Any, Final, NamedTuple

from killick.window.messages import Shape, as_json, is_list, is_map, plain, size_of

LINE_CHARS_MAX: Final = 80
"""The maximum description length in a stub."""

WHOLE_TOKENS_MIN: Final = 120
SAVES_MIN: Final = 3
"""A smaller schema, or one that is not this many times its stub's size, is sent whole."""

_ANYTHING: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": True}
_KEPT: Final = ("type", "cache_control", "eager_input_streaming", "async")


class Schemas:
    """The sent form of a tools array: stubs for large unused tools, stable for a session.

    whole   names that are never stubs
    spare   up to this total of tokens, all tools are sent whole
    stubs   names that were stubs before; default: decided here
    """

    def __init__(
        self,
        tools: Sequence[Any],
        shape: Shape,
        tokens: Callable[[str], int],
        *,
        whole: Collection[str] = (),
        spare: int = 2000,
        stubs: Collection[str] | None = None,
    ) -> None:
        self._given = list(tools)
        said = [_plain(tool) for tool in self._given]
        taken = {name for tool in said if isinstance(name := _name(tool), str)}
        self.recall_name = _free("recall", taken)
        self.find_name = _free("find_tools", taken)

        self._tools: dict[str, _Tool] = {}
        names: list[str | None] = []
        self.tokens_whole = 0
        for tool in said:
            size, about = size_of(tool, tokens), _function(tool, shape)
            self.tokens_whole += size
            names.append(None if about is None else about["name"])
            if about is not None:
                stub = _stub(tool, about, shape, self.find_name)
                self._tools[about["name"]] = _Tool(about, size, stub, size_of(stub, tokens))
        if stubs is None:
            paying = [name for name, tool in self._tools.items() if tool.pays and name not in whole]
            stubs = paying if self.tokens_whole > spare else ()
        self.stubs = frozenset(stubs) & self._tools.keys()

        own = [_own(self.recall_name, _RECALL, "handle", _HANDLE, shape)]
        if self.stubs:
            own.append(_own(self.find_name, _FIND, "query", _QUERY, shape))
        instead = {name: self._tools[name].stub for name in self.stubs}
        self.sent: list[Any] = [instead.get(name or "", tool) for name, tool in zip(names, self._given, strict=True)]
        self.sent += own
        saved = sum(self._tools[name].tokens - self._tools[name].stub_tokens for name in self.stubs)
        self.tokens_sent = self.tokens_whole - saved + sum(size_of(tool, tokens) for tool in own)
        self._index: _Index | None = None

    def same(self, tools: Sequence[Any]) -> bool:
        """Returns whether these are the tools that it was built from."""
        return len(tools) == len(self._given) and all(
            one is other or one == other for one, other in zip(tools, self._given, strict=True)
        )

    def whole_tokens(self, name: str) -> int:
        """Returns the tool's cost a call when sent whole."""
        return self._tools[name].tokens

    def stub_tokens(self, name: str) -> int:
        """Returns its cost as a stub."""
        return self._tools[name].stub_tokens

    def find(self, query: str, limit: int = 5) -> list[str]:
        """Returns tool names, the best first. Names in the query come first, beyond the limit; "" matches all."""
        if not query.strip():
            return list(self._tools)
        known = {name.lower(): name for name in self._tools}
        asked = dict.fromkeys(known[word] for word in re.findall(r"[\w-]+", query.lower()) if word in known)
        if self._index is None:
            self._index = _Index({name: tool.about for name, tool in self._tools.items()})
        ranked = [name for name in self._index.ranked(query) if name not in asked]
        return [*asked, *ranked[: max(0, limit - len(asked))]]

    def text(self, name: str) -> str:
        """Returns the full schema as text, in the author's order: models write arguments in the order that they
        read."""
        about = self._tools[name].about
        lines = [name, str(about.get("description") or "").strip(), f"parameters: {as_json(_parameters(about))}"]
        lines += [f"{more}: {as_json(about[more])}" for more in ("input_examples", "output_schema") if about.get(more)]
        return "\n".join(line for line in lines if line)

    def found_text(self, names: Iterable[str]) -> str:
        """Returns find_tools' answer."""
        found = [self.text(name) for name in names]
        if found:
            return "\n\n".join(found)
        return f"No tool was found. Name one, or say otherwise what you want done. There are: {', '.join(self._tools)}"

    def called_text(self, name: str) -> str:
        """Returns the answer to a stub's first call."""
        return (
            f"Nothing was run: {name} was listed as a stub. Call it again with these parameters.\n\n{self.text(name)}"
        )


class _Tool(NamedTuple):
    about: Mapping[str, Any]
    tokens: int
    stub: dict[str, Any]
    stub_tokens: int

    @property
    def pays(self) -> bool:
        return not _elsewhere(self.about) and self.tokens >= max(WHOLE_TOKENS_MIN, SAVES_MIN * self.stub_tokens)


# The shapes ---------------------------------------------------------------------------------------


def _plain(tool: Any) -> Any:
    """Returns a tool's wire form: clients also accept objects that describe themselves."""
    describe = None if is_map(tool) else getattr(tool, "to_dict", None)
    return describe() if callable(describe) else plain(tool)


def _name(tool: Any) -> Any:
    if not is_map(tool):
        return None
    return tool["function"].get("name") if is_map(tool.get("function")) else tool.get("name")


def _function(tool: Any, shape: Shape) -> Mapping[str, Any] | None:
    """Returns the part with name, description and parameters; None for tools that the provider defines or runs."""
    if not is_map(tool):
        return None
    if shape == "anthropic":
        about: Any = tool if tool.get("type") in (None, "custom") and is_map(tool.get("input_schema")) else None
    elif tool.get("type") != "function":
        about = None
    else:
        about = tool.get("function") if shape == "openai" else tool
    return about if is_map(about) and isinstance(about.get("name"), str) else None


def _elsewhere(about: Mapping[str, Any]) -> bool:
    """Returns whether the provider loads it on demand or enforces its schema, or code calls it that cannot retry."""
    return bool(about.get("defer_loading") or about.get("strict")) or any(
        who != "direct" for who in about.get("allowed_callers") or ()
    )


def _parameters(about: Mapping[str, Any]) -> Any:
    return about.get("input_schema") or about.get("parameters") or {"type": "object", "properties": {}}


def _stub(tool: Mapping[str, Any], about: Mapping[str, Any], shape: Shape, find_name: str) -> dict[str, Any]:
    kept = {key: tool[key] for key in _KEPT if key in tool}
    line = f"{_first_sentence(str(about.get('description') or ''))} [stub: see {find_name}]".strip()
    return kept | _shaped(about["name"], line, _ANYTHING, shape)


def _shaped(name: str, description: str, parameters: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": name, "description": description}
    if shape == "anthropic":
        return fields | {"input_schema": parameters}
    if shape == "openai":
        return {"type": "function", "function": fields | {"parameters": parameters}}
    # Explicit: the Responses API defaults to strict schemas.
    return {"type": "function"} | fields | {"parameters": parameters, "strict": False}


def _first_sentence(text: str) -> str:
    """Returns the first sentence of the first paragraph, cut between words."""
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip(), maxsplit=1)[0].split())
    end = re.search(r"(?<!\be\.g)(?<!\bi\.e)(?<!\betc)[.!?](?=\s|$)", paragraph)
    sentence = paragraph[: end.end()] if end else paragraph
    if len(sentence) <= LINE_CHARS_MAX:
        return sentence
    cut = sentence[:LINE_CHARS_MAX]
    return (cut.rpartition(" ")[0] or cut) + "…"


# The window's own tools ---------------------------------------------------------------------------

_RECALL: Final = "Recalls evicted content. The note in its place names the handle."
_HANDLE: Final = "such as m41, m41.2 or m10-m37"
_FIND: Final = (
    "Gives the full schemas of tools. Those marked [stub] are listed without their parameters: ask here before you "
    "call one (a first call only gives its schema, too)."
)
_QUERY: Final = "names of tools, or words for what you want done"


def _own(name: str, description: str, parameter: str, about: str, shape: Shape) -> dict[str, Any]:
    takes = {"type": "object", "properties": {parameter: {"type": "string", "description": about}}}
    return _shaped(name, description, takes | {"required": [parameter]}, shape)


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name = f"killick_{name}"
    return name


# Finding ------------------------------------------------------------------------------------------

_NAME_WEIGHT: Final = 4.0
_LINE_WEIGHT: Final = 2.0
_ALIKE: Final = 0.5
"""The weight of a shared word stem relative to an exact match."""

_ALIKE_CHARS_MIN: Final = 3
_SATURATION: Final = 1.2
_LENGTH_SHARE: Final = 0.5

_DULL: Final = set(re.findall(r"\w+", """
    a an and any are as at be by can for from how i if in into is it me my of on or that the this to tool use want what
    which with you
"""))  # fmt: skip


class _Index:
    """Ranks tools by the words of name, description and parameters (BM25 with weighted fields)."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._words = {name: _word_weights(about) for name, about in tools.items()}
        self._lengths = {name: sum(words.values()) for name, words in self._words.items()}
        self._usual = (sum(self._lengths.values()) / len(self._lengths) if self._lengths else 0) or 1.0

    def ranked(self, query: str) -> list[str]:
        """Returns the matches; ties keep their order."""
        asked = set(_words(query))
        scores: defaultdict[str, float] = defaultdict(float)
        for word in sorted(asked - _DULL or asked):
            hits = {name: hit for name, words in self._words.items() if (hit := _hit(word, words))}
            rarity = log(1 + (len(self._words) - len(hits) + 0.5) / (len(hits) + 0.5))
            for name, hit in hits.items():
                length = 1 - _LENGTH_SHARE + _LENGTH_SHARE * self._lengths[name] / self._usual
                scores[name] += rarity * hit * (_SATURATION + 1) / (hit + _SATURATION * length)
        return sorted((name for name in self._words if name in scores), key=lambda name: -scores[name])


def _word_weights(about: Mapping[str, Any]) -> dict[str, float]:
    """Returns a tool's words and their weights."""
    description = str(about.get("description") or "")
    words: defaultdict[str, float] = defaultdict(float)
    fields = [(about["name"], _NAME_WEIGHT), (_first_sentence(description), _LINE_WEIGHT), (description, 1.0)]
    for text, weight in [*fields, *((text, 1.0) for text in _parameter_texts(_parameters(about)))]:
        for word in _words(text):
            words[word] += weight
    return dict(words)


def _parameter_texts(schema: Any) -> Iterator[str]:
    """Returns the names and descriptions of parameters at any depth."""
    if is_map(schema):
        for key, value in schema.items():
            if key == "description" and isinstance(value, str):
                yield value
            elif key in ("properties", "$defs", "definitions") and is_map(value):
                if key == "properties":
                    yield from value
                for part in value.values():
                    yield from _parameter_texts(part)
            else:
                yield from _parameter_texts(value)
    elif is_list(schema):
        for part in schema:
            yield from _parameter_texts(part)


def _words(text: str) -> Iterator[str]:
    """Returns lower-case words, split at punctuation and camelCase, in the singular."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", text)
    for word in re.findall(r"[^\W_]+", parted.lower()):
        if len(word) > 3 and word.endswith("ies"):
            yield word[:-3] + "y"
        elif len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
            yield word[:-1]
        else:
            yield word


def _hit(asked: str, words: Mapping[str, float]) -> float:
    """Returns the weight of a query word in a tool's text."""
    weight = words.get(asked, 0.0)
    if len(asked) < _ALIKE_CHARS_MIN:
        return weight
    alike = [of for word, of in words.items() if word != asked and _share_prefix(asked, word)]
    return weight + _ALIKE * max(alike, default=0.0)


def _share_prefix(one: str, other: str) -> bool:
    """Returns whether one word starts with the other, or with all but its last letter: write, writing."""
    short, long = sorted((one, other), key=len)
    stem = short[:-1] if len(short) > _ALIKE_CHARS_MIN + 1 else short
    return len(short) >= _ALIKE_CHARS_MIN and long.startswith(stem)
