"""What the pages say is true: what can be run on them is run, and everything that people use is on them."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, get_args

import click
import pytest

import command_reference as reference
import killick
import killick.testing
import python_reference
from killick.check.findings import FindingKind
from killick.cli.main import MODULES
from killick.cli.main import killick as commands
from killick.history import doctor
from killick.model.event_codec import KINDS
from killick.store.postgres.server import FORMAT as POSTGRES_FORMAT
from killick.store.records import STORE_FORMAT
from pages import ROOT, pages, run, run_page, split, write_page

WRITE: Final = os.environ.get("KILLICK_DOCS") == "write"
GENERATED: Final = ROOT / reference.PAGE
REFERENCE: Final = ROOT / python_reference.FOLDER

LINK: Final = re.compile(
    r"\]\(\s*<?([^\s()<>]+)>?(?:\s+[\"'][^)]*)?\)"  # [text](target "title")
    r"|^ *\[[^\]]+\]:\s+(\S+)"  # [name]: target
    r"|\b(?:href|src)=\"([^\"]+)\""
)
HEADING: Final = re.compile(r"^#{1,6}\s+(.+?)\s*#*$")

GATE: Final = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
"""What a newcomer types first; the other pages take minutes together."""
RUNNABLE: Final = [
    pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=() if page in GATE else pytest.mark.slow)
    for page in pages(ROOT)
    if page != GENERATED
    and page.parent != REFERENCE
    and page.parent.name != "neighbours"  # done where the packages are that they are about
    and any(block.language in ("python", "sh", "console") for block in split(page.read_text(encoding="utf-8"))[1])
]
EXAMPLES: Final = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", RUNNABLE)
def test_what_a_page_shows_is_so(page: Path, tmp_path: Path) -> None:
    wrong = list(run_page(page.read_text(encoding="utf-8"), tmp_path))
    if WRITE:
        write_page(page, wrong)
    if wrong:
        told = (f"{page.relative_to(ROOT)}:{each.number}: {each.what}" for each in wrong)
        pytest.fail("\n\n".join(told), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.name)
def test_an_example_runs_and_exits_with_0(example: Path, tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    done = run([sys.executable, example], here)
    if done.returncode:
        pytest.fail(f"{example.relative_to(ROOT)} exited with {done.returncode}:\n{done.stdout}", pytrace=False)


# What has to be on the pages ----------------------------------------------------------------------


def prose(*, by_hand: bool = False) -> str:
    """All pages as one text, or those that people wrote."""
    chosen = [page for page in pages(ROOT) if not by_hand or (page != GENERATED and page.parent != REFERENCE)]
    return "\n".join(page.read_text(encoding="utf-8") for page in chosen)


def unmentioned(names: Iterable[str], text: str, form: str = r"(?<![\w-])NAME(?!\w)") -> list[str]:
    """Those that no page mentions in this form."""
    return [name for name in names if re.search(form.replace("NAME", re.escape(name)), text) is None]


def test_every_public_name_is_on_a_page() -> None:
    assert unmentioned(killick.__all__, prose(), r"(?<![\w-])(?:killick\.)?NAME(?!\w)") == []
    assert unmentioned(killick.testing.__all__, prose()) == []


def test_every_command_is_shown_on_a_page_that_somebody_wrote() -> None:
    assert unmentioned(list(MODULES), prose(by_hand=True), r"killick NAME\b") == []


def test_a_page_that_declares_an_idempotent_tool_shows_how_to_pass_its_key_on() -> None:
    declares = re.compile(r"effect\"?[=:] ?\"idempotent\"")
    passes = re.compile(r"here\(\)\.key|killick\.KEY|\"key\":|# idempotent: ")  # or says why it needs none
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages(ROOT) if page.parent.name == "neighbours"}
    assert [name for name, text in texts.items() if declares.search(text) and not passes.search(text)] == []


def test_every_kind_of_finding_has_its_lines() -> None:
    page = (ROOT / "docs" / "checking.md").read_text(encoding="utf-8")
    assert unmentioned(get_args(FindingKind), page, r"\n\| `NAME` ") == []


def test_the_table_of_events_says_what_the_code_says() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    for kind, event in KINDS.items():
        said = " ".join((inspect.getdoc(event) or "").split())
        fields = ", ".join(f"`{name}`" for name in event.__struct_fields__ if name not in ("at", "data"))
        assert f"| `{kind}` | {said} | {fields} |" in page, f"docs/events.md: the row of {kind} is stale"


def test_the_format_page_has_the_layouts_of_the_stores() -> None:
    page = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    assert f"| `PRAGMA user_version` modulo 2²⁰ = {STORE_FORMAT} | {POSTGRES_FORMAT} |" in page


def test_every_reason_of_the_doctor_has_its_line() -> None:
    page = (ROOT / "docs" / "keeping.md").read_text(encoding="utf-8")
    assert unmentioned(doctor._REASONS, page, r"\n\| .*`NAME`.* \|") == []  # pyright: ignore[reportPrivateUsage]


def test_every_test_that_the_page_on_corruption_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "sqlite.md").read_text(encoding="utf-8")))
    known = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert "test_python_opens_no_file_of_a_store" in named
    assert named - known == set()


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} | {"reference/index.md"}
    assert sorted(name for name in names if f"]({name})" not in index) == []


def test_the_index_of_the_reference_leads_to_each_of_its_pages() -> None:
    index = (REFERENCE / "index.md").read_text(encoding="utf-8")
    names = {page.name for page in REFERENCE.glob("*.md")} - {"index.md"}
    assert sorted(name for name in names if f"]({name})" not in index) == []


def test_the_examples_in_the_reference_can_be_typed() -> None:
    lines = [
        line
        for block in split(GENERATED.read_text(encoding="utf-8"))[1]
        for line in block.lines
        if block.info == "sh" and line.startswith("killick ")
    ]
    assert len(lines) > 20
    for line in lines:
        words = shlex.split(re.split(r"   | > ", line)[0])[1:]
        context = click.Context(commands)
        command = commands.get_command(context, words[0])
        while isinstance(command, click.Group) and len(words) > 1:
            context, words = click.Context(command, parent=context), words[1:]
            command = command.get_command(context, words[0])
        assert command is not None, line
        command.make_context(words[0], words[1:], parent=context)


def test_every_option_in_a_sentence_is_one_of_its_command() -> None:
    wrong: list[str] = []
    for page in (page for page in pages(ROOT) if page != GENERATED and page.parent != REFERENCE):
        for text in re.findall(r"`killick ([^`]+)`", page.read_text(encoding="utf-8")):
            command: click.Command = commands
            words = text.split()
            while isinstance(command, click.Group) and words:
                inner = command.get_command(click.Context(command), words[0])
                if inner is None:
                    break
                command, words = inner, words[1:]
            known = {option for each in command.params for option in each.opts}
            options = (word.partition("=")[0].rstrip(".,…") for word in words if word.startswith("--"))
            wrong += [f"{page.name}: `killick {text}`: {option}" for option in options if option not in known]
    assert wrong == []


def test_little_is_only_there_to_be_read() -> None:
    own = [page for page in pages(ROOT) if page.parent.name != "neighbours" and page.parent != REFERENCE]
    blocks = [block for page in own for block in split(page.read_text(encoding="utf-8"))[1]]
    assert sum("no-run" in block.info for block in blocks) <= 12
    assert [
        block for block in blocks if not block.language and any(line.startswith("$ ") for line in block.lines)
    ] == []


# Links --------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The names that the headings of a page can be linked by."""
    found: set[str] = set()
    for line in split(text)[0]:
        if heading := HEADING.match(line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            count = 0
            while (anchor := f"{name}-{count}" if count else name) in found:
                count += 1
            found.add(anchor)
    return found


def dead_links(root: Path) -> list[str]:
    dead = []
    for page in pages(root):
        for number, line in enumerate(split(page.read_text(encoding="utf-8"))[0], 1):
            for groups in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                target = "".join(groups)
                path, _, anchor = target.partition("#")
                if re.match(r"[a-z][a-z0-9+.-]*:", target):
                    continue
                there = page.parent / path if path else page
                if not there.exists():
                    dead.append(f"{page.relative_to(root)}:{number}: {target} leads nowhere; mend the link")
                elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
                    dead.append(f"{page.relative_to(root)}:{number}: {path or 'this page'} has no heading #{anchor}")
    return dead


def test_every_relative_link_leads_somewhere() -> None:
    if dead := dead_links(ROOT):
        pytest.fail("\n".join(dead), pytrace=False)


# These tests, tried -------------------------------------------------------------------------------

PAGE: Final = """# A page

```python
from __future__ import annotations
x = 1
```

```python no-run
x = undefined
```

```python
# app.py
print("one", 17)
```

```console
$ export WORD=two
$ python app.py; (exit 3)
one …
$ echo $? $WORD \\
>   15 ms ago
3 two 4 s ago
```

```diff
--- app.py
-print("one", 17)
+print("other")
```

1. In a list:

   ```python
   assert x == 1
   ```

```sh
python app.py | grep other
```
"""


def tried(page: str, folder: Path) -> list[tuple[int, str]]:
    return [(each.number, each.what) for each in run_page(page, folder)]


def line_of(text: str) -> int:
    return PAGE[: PAGE.index(text)].count("\n") + 1


def test_a_page_is_done_in_order_and_what_varies_is_left_out(tmp_path: Path) -> None:
    assert tried(PAGE, tmp_path) == []


def test_a_failing_program_is_reported_at_its_line_on_the_page(tmp_path: Path) -> None:
    [(_, what)] = tried(PAGE.replace("assert x == 1", "assert x == 2"), tmp_path)
    assert f"line {line_of('   assert x == 1')}, in <module>" in what


def test_output_that_differs_is_told_with_both(tmp_path: Path) -> None:
    [(number, what)] = tried(PAGE.replace("3 two 4 s", "3 tow 4 s"), tmp_path)
    assert number == line_of("$ echo")
    assert "- 3 tow 4 s ago\n+ 3 two 15 ms ago" in what


def test_a_command_that_fails_and_a_change_that_does_not_fit_are_told(tmp_path: Path) -> None:
    wrong = tried(PAGE.replace('-print("one", 17)', '-print("none")'), tmp_path)
    assert [number for number, _ in wrong] == [line_of("--- app.py"), line_of("python app.py | grep")]


def test_what_commands_print_can_be_written_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("3 two 4 s ago\n", ""))
    write_page(page, list(run_page(page.read_text(), tmp_path / "first")))
    assert page.read_text() == PAGE.replace("4 s", "15 ms")


def test_dead_links_and_missing_headings_are_caught(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "there.md").write_text("# The `first` one\n\n[up](../README.md) [here](#the-first-one)\n")
    (tmp_path / "README.md").write_text(
        "[a](docs/there.md#the-first-one) [b](https://example.org/x) `[c](code.md)`\n"
        "```text\n[d](fenced.md)\n```\n"
        '[e](gone.md)\n[f](docs/there.md#gone "title")\n<img src="docs/gone.svg">\n\n[g]: lost.md\n'
    )
    assert [problem.split(";")[0] for problem in dead_links(tmp_path)] == [
        "README.md:5: gone.md leads nowhere",
        "README.md:6: docs/there.md has no heading #gone",
        "README.md:7: docs/gone.svg leads nowhere",
        "README.md:9: lost.md leads nowhere",
    ]
