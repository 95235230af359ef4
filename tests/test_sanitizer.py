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
from killick.errors import ValueRefused
from killick.sanitizer import visible, visible_line
from killick.web import asgi

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


@pytest.mark.parametrize("evil", ["a\nb", "a\x1b[2Kb", "a\x9bb", "\r"])
def test_a_run_is_not_named_with_control_characters(evil: str) -> None:
    with killick.open("memory:") as kd, pytest.raises(ValueRefused, match="control characters"):
        kd.start(asks, "x", id=evil)


def test_a_name_with_a_newline_makes_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with killick.open("memory:"), caplog.at_level(logging.INFO, "killick"):
        logging.getLogger("killick.web").info("wrote %s", "x\n09:00 approved run=r\x1b[2K")
        logging.getLogger("mine").warning("two\nlines")
    assert [record.getMessage() for record in caplog.records] == [
        "wrote x\\u000a09:00 approved run=r\\u001b[2K", "two\nlines"
    ]  # fmt: skip
