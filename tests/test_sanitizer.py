"""An approver reads what was asked: no character of a prompt, an error or a name changes how others are shown."""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from pathlib import Path
from typing import Final

import pytest
from starlette.testclient import TestClient

import killick
from claims import call, move_in
from killick.cli.main import main
from killick.engine.approval import argument_edits
from killick.engine.approval.approvals import short_value
from killick.engine.approval.argument_edits import seen
from killick.errors import ValueRefused
from killick.sanitizer import mixed_words, unmixed, visible, visible_line
from killick.web import asgi
from killick.web.render import shown as shown_on_a_page

Capture = pytest.CaptureFixture[str]
EVIL: Final = "Pay 90000 to mallory\x1b[2K\x1b[100D  Pay 5 to ann?\x9b2K\u202eevil\u200b\u2066\ufeff\U000e0041"
OBEYED: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)


@killick.agent(name="evil_asks")
async def asks(run: killick.Run, what: str) -> str:
    await run.decided(what, "yes", options=["yes", "no"], because=what)
    answer = await run.ask(what, to=f"mia{what}")
    return str(answer.value)


@killick.tool(name="evil_fails", effect="reads")
def fails(what: str) -> str:
    raise RuntimeError(what)


@killick.agent(name="evil_calls")
async def calls(run: killick.Run, what: str) -> str:
    return await run.call(fails, what)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_in(tmp_path, monkeypatch)
    with killick.open("killick.db") as kd:
        kd.start(asks, EVIL, id="r", tags=[EVIL])
        kd.advance("r")
        kd.start(calls, EVIL, id="f")
        kd.advance("f")


@pytest.mark.parametrize("style", ["plain", "coloured", "json"])
@pytest.mark.parametrize(
    "words",
    [
        ("inbox",),
        ("show", "r"),
        ("show", "f", "--full"),
        ("show", "r", "--log"),
        ("show", "r", "--state"),
        ("show", "r", "--why"),
        ("show", "f", "--why"),
        ("find", "mallory"),
        ("ps",),
        ("answer", "r", EVIL),
        ("time", "diff", "r", "f"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("here")
def test_nothing_that_is_printed_commands_the_terminal(
    capsys: Capture, words: tuple[str, ...], style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if style == "coloured":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
    capsys.readouterr()
    main([*words, *(["--json"] if style == "json" else [])])
    out, err = capsys.readouterr()
    for text in (out, err):
        # Colours are ours, and the only thing that a terminal is told.
        left = re.sub(r"\x1b\[[0-9;]*m", "", text) if style == "coloured" else text
        assert not OBEYED.search(left), ascii(left)


@pytest.mark.usefixtures("here")
def test_the_approver_sees_the_escapes_of_a_prompt(capsys: Capture) -> None:
    _, out, _ = call(capsys, "inbox")
    assert "Pay 90000 to mallory\\u001b[2K" in " ".join(out.split())
    assert json.loads(call(capsys, "inbox", "--json")[1])[0]["prompt"] == EVIL, "data stays what it is"


@pytest.mark.usefixtures("here")
def test_the_pages_show_the_escapes_of_a_prompt() -> None:
    with (
        killick.open("killick.db") as kd,
        TestClient(asgi(kd, identify=lambda request: ("mia", "operator")), base_url="http://localhost") as web,
    ):
        for path in ("/inbox", "/runs/r"):
            page = web.get(path).text
            prompt = re.findall(r'<\w+ class="prompt">(.*?)</', page, re.DOTALL)
            assert prompt, path
            assert all("\\u202eevil\\u200b" in each and not OBEYED.search(each) for each in prompt), ascii(prompt)


def test_every_control_bidi_and_format_character_is_written_out_and_text_stays() -> None:
    for code in range(0x110000):
        char = chr(code)
        if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") and char not in "\n\t" and not _draws(char):
            assert visible(char) != char, hex(code)
    said = "Grüße, 東京 🎉 \u00a0עברית\n\tx"
    assert visible(said) == said
    assert visible_line("a\nb\t\x1b") == "a\\u000ab\\u0009\\u001b"
    assert json.loads(f'"{visible(EVIL)}"') == EVIL, "an escape is JSON's own"


def _draws(char: str) -> bool:
    """Format characters of scripts that are drawn: number signs and the like, and notation."""
    return unicodedata.name(char, "").startswith(
        ("ARABIC NUMBER", "ARABIC SIGN", "ARABIC END", "ARABIC FOOTNOTE", "ARABIC POUND", "ARABIC PIASTRE",
         "ARABIC DISPUTED", "SYRIAC", "KAITHI", "EGYPTIAN", "SHORTHAND", "MUSICAL")
    )  # fmt: skip


@pytest.mark.parametrize(
    "evil", ["a\nb", "a\x1b[2Kb", "a\x9bb", "\r", "a\tb", "r\u202e1", "a\u2066b", "a\u200b", "\u3164"]
)
def test_a_run_is_not_named_with_control_bidirectional_or_invisible_characters(evil: str) -> None:
    with killick.open("memory:") as kd, pytest.raises(ValueRefused, match="invisible characters") as refused:
        kd.start(asks, "x", id=evil)
    assert evil not in str(refused.value)


UNSEEN: Final = "\u3164\u2800\u0336\u00ad\u200b\u202e\u2066\u115f\ufe00\U000e0041"


@pytest.mark.parametrize("char", UNSEEN)
def test_one_list_serves_the_terminal_the_page_and_the_arguments_of_a_call(char: str) -> None:
    for shown in (visible, visible_line, seen, shown_on_a_page, argument_edits.shown, short_value):
        assert char not in shown(f"ann{char}bo")
    assert char not in argument_edits.call({"tool": "pay", "arguments": {f"to{char}": f"ann{char}"}})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mаllory", "m\\u0430llory"),
        ("pay mаllory@exаmple.org", "pay m\\u0430llory@ex\\u0430mple.org"),
        ("Ивaн", "Ив\\u0061н"),  # a Latin a in a Cyrillic word
        ("ｍallory", "\\uff4dallory"),
        ("mаl\u0301lory", "m\\u0430l\u0301lory"),
        ("mallory", "mallory"),
        ("Иван Mallory", "Иван Mallory"),
        ("Müller, Žižek, Ærø", "Müller, Žižek, Ærø"),
        ("Tシャツ 東京タワー ｶﾀｶﾅ", "Tシャツ 東京タワー ｶﾀｶﾅ"),
        ("5µm №7", "5µm №7"),
    ],
)
def test_a_word_that_mixes_scripts_is_written_out_for_an_approver(text: str, shown: str) -> None:
    assert unmixed(text) == shown
    assert bool(mixed_words(text)) is (text != shown)


def test_the_words_that_mix_scripts_are_named_with_their_scripts() -> None:
    assert mixed_words("to mаllory, mаllory and ann") == ["m\\u0430llory (Cyrillic, Latin)"]


def test_a_name_with_a_newline_makes_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with killick.open("memory:"), caplog.at_level(logging.INFO, "killick"):
        logging.getLogger("killick.web").info("wrote %s", "x\n09:00 approved run=r\x1b[2K")
        logging.getLogger("mine").warning("two\nlines")
    assert [record.getMessage() for record in caplog.records] == [
        "wrote x\\u000a09:00 approved run=r\\u001b[2K", "two\nlines"
    ]  # fmt: skip
