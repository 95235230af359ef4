"""Finds credentials in text and in values: by the names that they have, and by the shapes that issuers give them.

Pure, and linear in the length of a text. A name is a key of a mapping, or precedes `=` or `:` in a text. Text that
speaks of passwords and tokens stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

DEPTH_MAX: Final = 200
"""How deep a value is returned without credentials; deeper parts are removed."""

_MARK: Final = "[removed:"

_NAMES: Final = {
    "authorization": r"authorization",
    "cookie": r"(?:set[-_]?)?cookies?",
    "private_key": r"private[-_]?key",
    "api_key": r"api[-_ ]?key|(?:access|account|subscription|signing|encryption|master)[-_]?key",
    "password": r"passw(?:or)?d|passphrase|(?<![a-z])pwd(?!\s?[:=]\s?/)",
    "secret": r"client[-_]?secret|secret[-_]?(?:access[-_]?)?key|(?<![a-z])secret",
    "token": r"(?:access|refresh|id|auth|bearer|session|security|csrf|api|bot|oauth)[-_]?token"
    r"|(?<![a-z])(?<!page[-_])(?<!next[-_])(?<!sync[-_])(?<!continuation[-_])(?<!cancel[-_])token",
    "signature": r"(?<=[?&])sig(?:nature)?|x-amz-signature",
}
_SHAPES: Final = {
    "private_key": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
    "url_password": r"(?<=://)[^\s/?#@:\"'<>]{0,256}:[^\s/?#\"'<>]{1,256}(?=@)",
    "authorization": r"(?<![a-zA-Z0-9])(?i:bearer|basic) {1,3}"
    r"(?![a-z_]{1,64}=\")(?=[a-z]{0,64}[A-Z0-9_~+/=])[\w.~+/=-]{8,}",
    "jwt": r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",
    "api_key": r"(?<![\w-])(?:sk-(?=[a-zA-Z_-]{0,64}\d)[\w-]{10,}|[srp]k_(?:live|test)_\w{10,}|whsec_[\w+/=]{16,}"
    r"|A[KS]IA[A-Z0-9]{16}(?![A-Z0-9])|AIza[\w-]{30,}|SG\.[\w-]{16,}\.[\w-]{16,})",
    "token": r"(?<![\w-])(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|hf_\w{20,}"
    r"|xapp-[\w-]{10,}|npm_\w{30,}|pypi-[\w-]{40,}|ya29\.[\w-]{20,}|killick_[0-9a-z]{8}_[\w-]{43})"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{20,}",
}
_NAMED: Final = re.compile(
    rf"""(?:{"|".join(_NAMES.values())}) (?![a-z]) (?:
    # An entry of JSON or of a repr, up to its closing quote.
    \\?["'`]?+ \s{{0,3}} [:=] \s{{0,3}}+ b?+ \\?["'](?!\[removed:) ([^"'\\\n]{{4,}})
    # A header with several parts: the line.
  | (?:(?<=cookie)|(?<=cookies)) :[ ]?+ (?!\[removed:) ([^\r\n=]{{1,256}}=[^\r\n]+)
  | (?<=authorization) [:=][ ]?+ (?!\[removed:) ((?:digest|aws4[\w-]*|hawk|token|apikey|negotiate)[ ][^\r\n]+)
    # An assignment, or a parameter of a URL.
  | \s?=\s?+ (?!\[removed:|(?:none|null|true|false)\b) ([^\s"'`\\&,;<>(){{}}\[\]]+)
    # Prose: what is no word.
  | :[ ]{{0,3}}+ (?!\[removed:) ((?=[^\s\d]{{0,64}}\d) [^\s"'`\\&,;<>(){{}}\[\]]{{8,}})
    )""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
_SHAPED: Final = re.compile("|".join(f"(?P<{kind}>{shape})" for kind, shape in _SHAPES.items()), re.ASCII)
_NAME_HINTS: Final = ("authorization", "cookie", "key", "pass", "pwd", "secret", "token", "sig")
_SHAPE_HINTS: Final = (
    "://", "PRIVATE KEY-", "earer ", "asic ", "EARER ", "ASIC ", "eyJ", "sk-", "k_live_", "k_test_", "whsec_", "AKIA",
    "ASIA", "AIza", "SG.", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "hf_", "xapp-",
    "npm_", "pypi-", "ya29.", "killick_", "hooks.slack.com",
)  # fmt: skip
"""Texts without any of these need no search: a substring is found much faster than a pattern."""
_KIND: Final = re.compile("|".join(f"(?P<{kind}>{names})(?![a-z])" for kind, names in _NAMES.items()), re.A | re.I)


class Found(NamedTuple):
    """A credential in a value: its kind, and the names and indexes that lead to it."""

    kind: str
    path: tuple[str, ...]


def named(name: str) -> str | None:
    """Returns the kind of credential that a name says a value is, if any."""
    match = _KIND.search(name)
    return None if match is None else match.lastgroup


def without(text: str) -> str:
    """Returns a text with the kind of each credential in its place: `[removed:password]`."""
    text = _without_named(text)
    return _SHAPED.sub(lambda match: _mark(match.lastgroup), text) if _may(text, _SHAPE_HINTS) else text


def without_credentials(value: Any) -> Any:
    """Returns a value without credentials, such as the result of a tool: a text, and texts in dicts, lists and tuples.

    A text under the name of a credential is replaced as a whole: `{"token": "[removed:token]"}`. Objects of other types
    are returned as they are.

        return killick.without_credentials(response.json())
    """
    return _without(value, None, 0)


def _without(value: Any, kind: str | None, depth: int) -> Any:
    if isinstance(value, str):
        return without(value) if kind is None or not value else _mark(kind)
    if depth == DEPTH_MAX and isinstance(value, dict | list | tuple):
        return _mark("depth")
    if isinstance(value, dict):
        parts: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {name: _without(part, kind or named(str(name)), depth + 1) for name, part in parts.items()}
    if type(value) in (list, tuple):
        return type(value)(_without(part, kind, depth + 1) for part in value)
    return value


def find(value: Any) -> Iterator[Found]:
    """Finds the credentials of a value. Does not recurse, so that any depth is searched."""
    stack: list[tuple[tuple[str, ...], str | None, Any]] = [((), None, value)]
    while stack:
        path, kind, node = stack.pop()
        if isinstance(node, str):
            kinds = _kinds(node) if kind is None else {kind} if node and not node.startswith(_MARK) else ()
            yield from (Found(each, path) for each in sorted(kinds))
        elif isinstance(node, Mapping):
            parts: Mapping[Any, Any] = node  # pyright: ignore[reportUnknownVariableType]
            stack += [((*path, without(str(name))), kind or named(str(name)), part) for name, part in parts.items()]
        elif isinstance(node, list | tuple):
            stack += [((*path, str(index)), kind, part) for index, part in enumerate(node)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _kinds(text: str) -> set[str]:
    after = _without_named(text)
    names = {named(match[0]) or "secret" for match in _NAMED.finditer(text)} if after is not text else set[str]()
    shaped = _SHAPED.finditer(after) if _may(after, _SHAPE_HINTS) else ()
    return names | {str(match.lastgroup) for match in shaped if not match[0].startswith(_MARK)}


def _may(text: str, hints: Iterable[str]) -> bool:
    return any(hint in text for hint in hints)


def _without_named(text: str) -> str:
    return _NAMED.sub(_value_removed, text) if _may(text, "=:") and _may(text.lower(), _NAME_HINTS) else text


def _value_removed(match: re.Match[str]) -> str:
    start, end = match.span(match.lastindex or 0)
    before, after = match.string[match.start() : start], match.string[end : match.end()]
    return f"{before}{_mark(named(before))}{after}"


def _mark(kind: str | None) -> str:
    return f"{_MARK}{kind or 'secret'}]"
