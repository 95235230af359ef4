"""Where a path leads by its letters, and which names look alike."""

from __future__ import annotations

import os.path
import unicodedata
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from killick.contracts.lookalikes import Names, folded, lies_inside, path_refused, root_of
from seeds import repeats

ESCAPES = [
    "../secret",
    "a/../../secret",
    "..",
    "a/..",
    "./../x",
    "a/.. /x",
    " ../x",
    "a/...",
    "a/. ./x",
    "~",
    "~/x",
    "~root/x",
    "a\x00b",
    "a\nb",
    "a\x7fb",
    "a\u202eb",
    "a\u200bb",
    "..\\x",
    "a\\b",
    "C:\\x",
    "C:x",
    "file:///etc/passwd",
    "http://x/y",
    "%2e%2e/x",
    "%2E%2E%2Fx",
    "..%2fx",
    "a%2f..%2fb",
    "%252e%252e%252fx",
    "a%5cb",
    "a%00",
    "%c0%ae%c0%ae/x",
    "．．/x",
    "a／b",
    "‥/x",
    "…/x",
    "․․/x",
    "a∕..∕b",
    "a⁄b",
    "＼x",
    "﹨x",
    "a∖b",
    "a⧵b",
    "～/x",
    " ~",
    " /etc",
    "%20/etc",
    "%ef%bc%8e%ef%bc%8e/x",
    "",
    " ",
    "\ud800",
    "x" * 5000,
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_path_that_could_lead_elsewhere_is_refused_by_its_letters(text: str) -> None:
    assert path_refused(text) is not None


@pytest.mark.parametrize("value", [None, 5, True, b"a", ["a"], {"path": "a"}])
def test_what_is_no_text_is_no_path(value: object) -> None:
    told = path_refused(value)
    assert told is not None
    assert told.endswith("a path as text is needed")


@pytest.mark.parametrize(
    "text", ["a", "a/b.txt", "./a", "a//b", "/srv/x", ".env", "a/.b", "ü/日本.txt", "50%.csv", "a..b", "a~"]
)
def test_a_plain_path_is_taken(text: str) -> None:
    assert path_refused(text) is None


def test_a_relative_path_is_taken_from_the_first_root() -> None:
    assert lies_inside("a/b", ("work/", "/tmp/"), None, {})


def test_by_its_letters_an_absolute_path_lies_only_under_an_absolute_root() -> None:
    assert lies_inside("/srv/a", ("/srv/",), None, {})
    assert lies_inside("/srv", ("/srv/",), None, {})
    assert not lies_inside("/srvx/a", ("/srv/",), None, {})
    assert not lies_inside("/etc/passwd", ("work/",), None, {})
    assert not lies_inside("/srv", ("/srv/a/",), None, {})


def test_what_a_path_really_is_goes_before_its_letters() -> None:
    roots = {"work/": "/home/me/work"}
    assert lies_inside("a", ("work/",), "/home/me/work/a", roots)
    assert not lies_inside("link", ("work/",), "/etc/passwd", roots)
    assert not lies_inside("link", ("work/",), "/home/me/workshop", roots)
    assert not lies_inside("link", ("work/",), "/home/me/work/../x", roots)
    assert lies_inside("/home/me/work/a", ("work/",), "/home/me/work/a", roots)
    assert not lies_inside("a", ("work/",), "home/me/work/a", roots)


def test_a_link_of_the_root_itself_is_followed() -> None:
    assert lies_inside("a", ("work/",), "/data/7/a", {"work/": "/data/7"})


def test_everything_lies_under_the_root_of_all() -> None:
    assert lies_inside("/etc/passwd", ("/",), "/etc/passwd", {"/": "/"})


@pytest.mark.parametrize(
    ("text", "root"),
    [("work", "work/"), ("work/", "work/"), ("./work//a/.", "work/a/"), (".", "./"), ("/", "/"), ("/a//b", "/a/b/")],
)
def test_a_root_is_kept_in_one_form_that_no_argument_is_called_by(text: str, root: str) -> None:
    assert root_of(text) == root
    assert root_of(root) == root


PIECES = st.sampled_from(
    [
        "..",
        ".",
        "/",
        "a",
        "~",
        "\\",
        "%2e",
        "%2f",
        "%25",
        "．",
        "／",
        "‥",
        "∕",
        "\x00",
        " ",
        "b.txt",
        "//",
        ":",
        "C:",
        "…",
        "\u200b",
    ]
)


@pytest.mark.slow
@given(st.one_of(st.text(max_size=20), st.lists(PIECES, max_size=8).map("".join)))
@settings(max_examples=repeats(100, 400))
def test_what_is_taken_stays_inside_however_it_is_read(text: str) -> None:
    if path_refused(text) is not None or not lies_inside(text, ("/r/w/",), None, {}):
        return
    readings = {
        text,
        unicodedata.normalize("NFKC", text),
        unquote(text),
        unquote(unquote(text)),
        text.replace("\\", "/"),
    }
    for reading in readings:
        for read in (reading, reading.strip(), unicodedata.normalize("NFKD", reading)):
            found = os.path.normpath(os.path.join("/r/w", os.path.expanduser(read)))
            assert found == "/r/w" or found.startswith("/r/w/"), (text, read)


# Names


def test_names_are_folded_to_what_people_tell_them_apart_by() -> None:
    for name in ("bob", "Bob", " bob ", "BOB", "b\u200bob", "ｂｏｂ", "bo\ufe0fb", "b\u3164ob", "bob\u00a0"):
        assert folded(name) == "bob"
    assert folded("bob  smith") == "bob smith"
    assert folded("Straße") == folded("STRASSE")
    assert folded("Jose\u0301") == folded("José") != folded("Jose")
    assert folded("किताब") != folded("कताब")


@given(st.text(max_size=12))
def test_folding_again_changes_nothing(text: str) -> None:
    assert folded(folded(text)) == folded(text)


def test_patterns_know_case_and_stand_for_whole_names() -> None:
    names = Names(["pay", "delete_*", "get_?"])
    assert [
        name
        for name in ("pay", "Pay", "payout", "delete_", "delete_all", "xdelete_a", "get_a", "get_ab")
        if names.match(name)
    ] == [
        "pay",
        "delete_",
        "delete_all",
        "get_a",
    ]
    assert not names.is_literal
    assert Names(["pay"]).is_literal
