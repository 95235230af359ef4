"""Makes characters visible that change how a text is shown, and letters that look like those of another script.

A prompt comes from a model or from a stranger's data. Its escapes are commands to a terminal, and can replace what the
approver reads. They are written as JSON writes them, so that JSON stays the same document. This is the only list of
such characters; what people read goes through it everywhere.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Final

_HIDDEN: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u00ad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202e\u205f-\u206f\u2800\u3164"
    "\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    "\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    "\u0334-\u0338\u20d2\u20d3\u20d8-\u20da\u20e5-\u20e7\u20ea\u20eb"  # overlays, which strike letters out
    "\ud800-\udfff\ue000-\uf8ff\U000f0000-\U0010ffff"  # surrogates; private use, which looks as a font says
)
_IN_TEXT: Final = re.compile(f"[{_HIDDEN}]")
_IN_LINE: Final = re.compile(f"[\t\n\u00a0\u202f\u3000{_HIDDEN}]")
_WORD: Final = re.compile(r"[\w\u0300-\u036f]+")
_NEUTRAL: Final = frozenset(
    [
        "BOPOMOFO",
        "CJK",
        "FEMININE",
        "HALFWIDTH",
        "HANGUL",
        "HIRAGANA",
        "IDEOGRAPHIC",
        "KATAKANA",
        "KATAKANA-HIRAGANA",
        "MASCULINE",
        "MICRO",
        "MODIFIER",
        "SUBSCRIPT",
        "SUPERSCRIPT",
    ]
)
"""Beginnings of the names of letters that are written beside those of other scripts, or look like none of them."""


def visible(text: str) -> str:
    """A text with every such character written as `\\\\u202e`. Newlines and tabs stay: they are layout."""
    return text if _IN_TEXT.search(text) is None else _IN_TEXT.sub(_written, text)


def visible_line(text: str) -> str:
    """The same on one line, with all spaces but the plain one: a newline must not begin a line that looks like another
    record."""
    return text if _IN_LINE.search(text) is None else _IN_LINE.sub(_written, text)


def unmixed(text: str) -> str:
    """A text for an approver: in a word that mixes scripts, the letters of all but its main one are written out."""
    return text if text.isascii() else _WORD.sub(lambda found: _unmixed(found[0]), text)


def mixed_words(text: str) -> list[str]:
    """The words of a text that mix scripts, each with them: `m\\u0430llory (Cyrillic, Latin)`."""
    words = dict.fromkeys(_WORD.findall(text)) if not text.isascii() else ()
    found = ((word, sorted(scripts)) for word in words if len(scripts := _scripts(word)) > 1)
    return [f"{visible_line(_unmixed(word))} ({', '.join(scripts)})" for word, scripts in found]


def _unmixed(word: str) -> str:
    scripts = _scripts(word)
    if len(scripts) < 2:
        return word
    main = max(scripts, key=lambda script: (scripts[script], script == "Latin"))
    return "".join(each if _script(each) in ("", main) else _escaped(each) for each in word)


def _scripts(word: str) -> Counter[str]:
    """How many letters of each script a word has."""
    return Counter(filter(None, map(_script, word)))


@lru_cache(maxsize=4096)
def _script(char: str) -> str:
    """The script of a letter; nothing for other characters, and for scripts that others are mixed with."""
    if char.isascii():
        return "Latin" if char.isalpha() else ""
    import unicodedata  # a large table, which most commands do not need

    first = unicodedata.name(char, "").partition(" ")[0] if char.isalpha() else ""
    return "" if first in _NEUTRAL else first.capitalize()


def _written(found: re.Match[str]) -> str:
    return _escaped(found[0])


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
