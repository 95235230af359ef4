"""Patterns against Python's `re`: what `matches` accepts, `re` matches; what `excludes` accepts, `re` does not find."""

from __future__ import annotations

import re
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.contracts.regex import compiled
from killick.errors import ContractRefused

HALF = "\ud83d"
"""A lone surrogate."""

ATOMS = [
    *"aksIK ü-", "[ab]", "[^a]", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[a-z]", r"[^\W\d]", r"\b", r"\B", "^",
    "$", r"\A", r"\Z", r"\u212a", r"[\u0100-\u0400]", r"[\ud800-\uffff]", "(?i:k)", "(?i:[i-s])", "(?i:[^s])", "(?i:µ)",
    "(?u:k)", r"(?u:\w)", r"(?u:\b)", r"(?a:\w)", r"(?iu:[\u0130-\u0132])", "(?s:.)", "(?m:^)", "(?m:$)", r"\n",
]  # fmt: skip
# Characters on which engines and versions of Unicode disagree: case, digits, marks, joiners, spaces, ends of lines.
CHARACTERS = (
    "abkKsSiI1_- \n.$üÜ\u212aſİıßẞ٣½\u0301\u200d‿ǅςΣσ🎉\u2028\x85\xa0\x1c𝟎𐐀𐐨漢\ue000\x00\x7fµμ\u0345ι\U0010ffff" + HALF
)
PATTERNS = st.builds(
    str.__add__,
    st.sampled_from(["", "", "(?i)", "(?s)", "(?m)"]),
    st.recursive(
        st.sampled_from(ATOMS),
        lambda inner: st.one_of(
            st.builds(str.__add__, inner, inner),
            st.builds("(?:{}|{})".format, inner, inner),
            st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{1,3}", "{2}", "*?", ""])),
        ),
        max_leaves=8,
    ),
)
TEXTS = st.one_of(st.text(st.sampled_from(CHARACTERS), max_size=6), st.text(st.characters(), max_size=6))


def finds(pattern: str, text: str) -> bool:
    """Whether Python finds the pattern in a text, as ASCII or as Unicode."""
    return bool(re.search(pattern, text, re.ASCII) or re.search(pattern, text))


def agree(pattern: str, text: str) -> None:
    """Compares both words with Python. On a text that UTF-8 can hold, they differ only where an edge does."""
    matches, excludes = compiled(pattern, "matches")(text), compiled(pattern, "excludes")(text)
    is_text = HALF not in text and not re.search("[\ud800-\udfff]", text)
    # Before Python 3.14, \B does not match in an empty text.
    is_edge = ("$" in pattern and "\n" in text) or (r"\B" in pattern and not text)
    if r"\B" not in pattern or text:
        assert not matches or re.fullmatch(pattern, text, re.ASCII)
    assert not excludes or not finds(pattern, text)
    if not is_text:
        assert not matches
        assert not excludes
    elif not is_edge:
        assert matches == bool(re.fullmatch(pattern, text, re.ASCII))
        assert excludes == (not finds(pattern, text))


@given(PATTERNS, TEXTS)
def test_what_a_word_accepts_python_confirms(pattern: str, text: str) -> None:
    agree(pattern, text)


@pytest.mark.slow
@pytest.mark.parametrize("atom", [r"\w", r"\d", r"\s", r"\W", "(?i:k)", "(?i:s)", "(?i:i)", "(?i:[^µ])", r"[^\W_]"])
def test_every_character_is_to_a_pattern_what_it_is_to_python(atom: str) -> None:
    every = array("I", [*range(0xD800), *range(0xE000, 0x110000)]).tobytes().decode("utf-32-le")
    # Where a run of matching characters begins and ends, and what lies beside.
    edges = {at + by for run in re.finditer(f"(?:{atom})+", every) for at in run.span() for by in (-1, 0)}
    for char in (every[at] for at in edges if 0 <= at < len(every)):
        for pattern in (atom, rf"\b{atom}", rf"x{atom}\b"):
            agree(pattern, f"x{char}")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?i)drop table", f"drop table x -- {HALF}"),
        ("(?i)insert", "ınsert"),
        ("(?i)insert", "INſERT"),
        ("(?i)kill", "\u212aill"),
        (r"\d{4}", "١٢٣٤"),
        (r"\bpush\b", "push\u0301"),
        (r"\Bx", "½x"),
        ("drop$", "drop\n"),
        ("drop$", "drop"),
        (r"^\w+$", "ürgent"),
        ("rm", "\n\u2028rm"),
    ],
)
def test_no_sign_hides_what_is_excluded(pattern: str, text: str) -> None:
    assert not compiled(pattern, "excludes")(text)


@pytest.mark.parametrize("pattern", [r"\d{16}", r"\bpush\b", "(?i)drop table", r"[\w.]+@[\w.]+", r"\$\d", "foo$"])
@pytest.mark.parametrize(
    "text", ["请把这笔款项转到以下账户谢谢你们", "Jürgen zahlt 5 € an Zoë", "cafe\u0301 👩\u200d🚀", "шесть\n"]
)
def test_text_of_any_script_passes_where_nothing_is_found(pattern: str, text: str) -> None:
    assert compiled(pattern, "excludes")(text)


@pytest.mark.parametrize("pattern", ["(?u)a", "(?L)a", "(", "[b-a]", "a{2,1}", "(?P<a>b)(?P=a)", "(?!)", 5, None])
def test_what_is_no_pattern_is_refused_in_one_line(pattern: Any) -> None:
    with pytest.raises(ContractRefused) as refused:
        compiled(pattern, "excludes")
    assert len(str(refused.value).splitlines()) == 1
