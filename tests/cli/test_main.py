"""The front: help on one screen, one line for every mistake, and the ways a process is stopped from outside."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import click
import pytest

from claims import Called, call, move_in, on_terminal, open_office, plain_environment, run_killick
from command_reference import told
from killick.cli.main import COMMANDS, GROUPS, MODULES, killick, main
from killick.client.client import open as killick_open
from killick.workers.trigger_runner import ensure

FIXING = '''
"""An agent that changes files in a folder."""

from pathlib import Path

import killick


@killick.tool(effect="workspace")
async def write(number: int, folder: Path = killick.WORKSPACE) -> None:
    (folder / "src").mkdir(exist_ok=True)
    (folder / "src" / "app.py").write_text(f"# draft {number}\\n")


@killick.agent(workspace="checkout")
async def fix(run: killick.Run) -> None:
    for number in range(7):
        await run.call(write, number)
'''


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an app and runs of every kind, and some files that are not what they seem."""
    folder = tmp_path_factory.mktemp("office")
    with pytest.MonkeyPatch.context() as monkeypatch:
        move_in(folder, monkeypatch)
        open_office()
        assert main(["run", "app.py:give_back", "-q", "-i", "400", "--id", "refund_20"]) == 3
        with killick_open("killick.db") as client:
            ensure(client.runtime.engine)  # as a worker does
        (folder / "checkout").mkdir()
        (folder / "fixing.py").write_text(FIXING, encoding="utf-8")
        assert main(["run", "fixing.py:fix", "-q", "--id", "fix_17"]) == 0
        (folder / "broken.py").write_text("import killick\n\nraise ValueError('not\\ntoday')\n", encoding="utf-8")
        (folder / "syntax.py").write_text("def f(:\n", encoding="utf-8")
        (folder / "leaving.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
        (folder / "missing.py").write_text("import nosuch_library\n", encoding="utf-8")
        (folder / "empty.py").write_text("", encoding="utf-8")
        (folder / "bad.json").write_text('{"id": 1,', encoding="utf-8")
        (folder / "claims.toml").write_text('name = "claims"\n[[rules]]\ndeny = "delete_*"\n', encoding="utf-8")
        (folder / "binary").write_bytes(b"\xff\xfe\x00")
        (folder / "data").mkdir()
        (folder / "nothing.db").touch()
        other = sqlite3.connect("other.db")
        other.execute("CREATE TABLE cats (name)")
        other.close()
        shutil.copy("killick.db", "newer.db")
        db = sqlite3.connect("newer.db")
        db.execute("PRAGMA user_version = 99")
        db.commit()
        db.close()
    return folder


@pytest.fixture
def office(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder, to look at and to change nothing in."""
    return move_in(prepared, monkeypatch)


# mistakes -----------------------------------------------------------------------------------------

MISTAKES = [
    ("shwo", "shwo: no such command; did you mean show?"),
    ("frobnicate", "frobnicate: no such command; `killick --help` lists them"),
    ("--stoer x ps", "--stoer: no such option here; options come after the command"),
    ("ps --sicne 2h", "--sicne: killick ps has no such option; did you mean --since?"),
    ("ps --xyzzy", "--xyzzy: killick ps has no such option; see killick ps --help"),
    ("ps --store", "--store"),
    ("ps claim_17", "claim_17"),
    ("ps --limit many", "--limit: 'many' is not a valid integer"),
    ("ps --since yesterday", "'yesterday' is not a duration"),
    ("ps --status wating", "wating"),
    ("ps --store nosuch.db", "nosuch.db: no store here; `killick demo` and `killick run` make one"),
    ("ps --store nothing.db", "nothing.db: no store here"),
    ("ps --store other.db", "other.db: this SQLite file is not a Killick store"),
    ("ps --store claim.json", "claim.json: is a file, but no store"),
    ("ps --store data", "data: cannot be opened"),
    ("ps --store newer.db", "newer.db: format 99, this build of Killick reads up to"),
    ("ps --store mongodb://host/x", "mongodb: no store has the scheme 'mongodb'"),
    ("ps --store memory:", "memory: keeps nothing from one command to the next"),
    ("show", "show: needs RUN"),
    ("show claim17", "claim17: no such run in killick.db; did you mean claim_17?"),
    ("show qqqq", "qqqq: no such run in killick.db; `killick ps` lists them"),
    ("show claim_17 --at 99:before", "99"),
    ("time diff claim_17 99", "99"),
    ("store verify claim17", "did you mean claim_17?"),
    ("store export claim17", "did you mean claim_17?"),
    ("find whatever", "whatever"),
    ("store doctr", "doctor"),
    ("check app.py:reveiw", "did you mean review?"),
    ("run", "run what? Name an agent, as app.py:agent, or a run to continue, as --id RUN"),
    ("run review", "review: where is it? did you mean app.py:review?"),
    ("run frobnicate", "Name it as app.py:frobnicate"),
    ("run ap.py:review", "ap.py: no such file; did you mean app.py?"),
    ("run nosuch/place.py:review", "nosuch/place.py: no such file; name the file"),
    ("run nosuch.module:review", "nosuch.module: no such module"),
    ("run app.py:reveiw", "app.py: has no agent 'reveiw'; did you mean review?"),
    ("run app.py", "app.py: declares several agents; name one: app.py:review"),
    ("run empty.py", "empty.py: declares no agent"),
    ("run app.py:Claim", "app.py:Claim: is no agent but a StructMeta"),
    ("run broken.py:x", "broken.py: cannot be imported; broken.py:3: ValueError: not today"),
    ("run syntax.py:x", "syntax.py: cannot be imported; syntax.py:1: SyntaxError"),
    ("run leaving.py:x", "leaving.py: cannot be imported; leaving.py:2: it ends the process"),
    ("run missing.py:x", "missing.py: cannot be imported; missing.py:1: ModuleNotFoundError"),
    ("run app.py:review", "review takes Claim(id: int, name: str, amount: int"),
    ("""run app.py:review -i '{"id": "x"}'""", "input.id: expected int, got str; review takes Claim(id: int"),
    ("""run app.py:review -i '{"id": 1, "on": "soon"}'""", "input.on: expected date"),
    ("""run app.py:review -i '{"id": '""", "--input: is not JSON"),
    ("run app.py:review -i hello", "input: expected object, got str"),
    ("run app.py:review -i @nosuch.json", "@nosuch.json: cannot be read (No such file or directory)"),
    ("run app.py:review -i @bad.json", "@bad.json: is not JSON"),
    ("run app.py:review -i @binary", "@binary: cannot be read (it is no UTF-8 text)"),
    ("run app.py:choose -i 3", "choose takes no input; leave --input out"),
    ("run app.py:review --priority high", "--priority: 'high' is not a valid integer"),
    ("run app.py:review --resume --id claim_17", "leave one of them out"),
    ("""run app.py:review -i '{"id": 99}' --id claim_17""", "claim_17: was started with another input"),
    ("run app.py:greet -i Ann --id claim_17", "claim_17: was started with another agent (review)"),
    ("run --id claim17", "did you mean claim_17?"),
    ("run --id claim_17 --app nosuch", "nosuch: no such module"),
    ("start", "start what?"),
    ("start app.py:review", "add --input VALUE"),
    ("answer", "answer: needs WAIT_OR_RUN"),
    ("answer claim_17", "claim_17: answer what? claim_17:9 takes approve, reject, edit, respond"),
    ("answer claim_17 aprove", "aprove: no such answer; did you mean approve?"),
    ("answer claim_17 yes", "yes: no such answer; it is one of approve, reject, edit, respond,"),
    ("answer claim_17 xyzzy", "it is one of approve, reject, edit, respond, happened, not, stop"),
    ("answer claim_17 happened", "'happened' is not an answer to this; give one of approve, reject, edit, respond"),
    ("answer claim_17 edit", "claim_17:9: 'edit' needs a value; add --value"),
    ("answer claim_17:99 approve", "claim_17:99: nothing to answer here; the run is waiting; `killick inbox` shows"),
    ("answer claim17 approve", "claim17: no such run in killick.db; did you mean claim_17?"),
    ("answer claim17:9 approve", "claim17: no such run in killick.db; did you mean claim_17?"),
    ("answer done_1 approve", "done_1: nothing to answer here; the run is completed"),
    ("inbox --limit 0", "--limit: 0 is not in the range x>=1"),
    ("message say done_1 hello", "done_1: is over (completed) and takes no messages"),
    ("message say claim_16 hello", "`killick resume claim_16` continues it"),
    ("message say claim_17", "say: needs TEXT"),
    ("pause", "pause what? Name runs, or select them"),
    ("pause claim17", "did you mean claim_17?"),
    ("pause claim_17 claim17", "did you mean claim_17?"),
    ("pause claim_17 --all", "not both"),
    ("pause --agent nosuch", "nothing to pause: no run matches (agent nosuch)"),
    ("pause --status wating", "--status: 'wating' is not one of"),
    ("pause --since soon --all", "'soon' is not a duration"),
    ("pause --all", "pause 3 runs (claim_17, claim_18, refund_20)? There is no terminal to confirm at; add --yes"),
    ("cancel --failed --agent nosuch", "nothing to cancel: no run matches (failed, agent nosuch)"),
    ("resume", "resume what?"),
    ("message send claim_17", "send: needs NAME"),
    ("message send done_1 paid", "done_1: is over (completed) and takes no messages"),
    ("message send claim_17 killick.answer", "messages named 'killick.answer' are Killick's own"),
    ("edit set claim_17", "claim_17: set what?"),
    ("edit set claim_17 amount", "'amount': no name and value; write it as name=value"),
    ("edit set claim_17 x=1 --unset x", "x: is set and unset at once"),
    ("edit set done_1 x=1", "done_1: the run is over (completed)"),
]


def is_one_line(told: Called) -> bool:
    return told.err.count("\n") == 1 and told.err.startswith("killick: ") and told.err.endswith("\n")


@pytest.mark.parametrize(("typed", "says"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line_that_names_it(
    office: Path, capsys: pytest.CaptureFixture[str], typed: str, says: str
) -> None:
    found = call(capsys, *shlex.split(typed))
    assert (found.code, found.out) == (2, ""), found
    assert is_one_line(found), found.err
    assert says in found.err
    assert "Traceback" not in found.err
    assert "bug in Killick" not in found.err


def test_no_mistake_makes_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_in(tmp_path, monkeypatch)
    before = sorted(tmp_path.iterdir())
    for typed in [typed for typed, says in MISTAKES if "was started with another" not in says]:
        main(shlex.split(typed))
    assert [path for path in sorted(tmp_path.iterdir()) if path not in before and path.name != "__pycache__"] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.killick\n", "is not valid TOML"),
        ("[tool]\nkillick = 3\n", "tool.killick is no table"),
        ('[tool.killick]\nstroe = "x"\n', "[tool.killick] has no entry 'stroe'; did you mean store?"),
        ("[tool.killick]\nstore = 3\n", "[tool.killick] store is 3"),
        ('[tool.killick]\napp = "nosuch"\n', "nosuch: no such module"),
    ],
)
def test_wrong_settings_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    move_in(tmp_path, monkeypatch)
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    found = call(capsys, "start", "review")
    assert found.code == 2
    assert is_one_line(found), found.err
    assert says in found.err


# errors that are ours -----------------------------------------------------------------------------


def failing(*_: object, **__: object) -> None:
    raise RuntimeError("two\nlines")


def test_a_bug_is_one_line_and_70_and_its_traceback_is_there_for_the_asking(
    office: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("killick.cli.commands.inbox.print_wait", failing)
    found = call(capsys, "inbox")
    assert found.code == 70
    assert is_one_line(found)
    assert "this is a bug in Killick (RuntimeError: two lines); KILLICK_DEBUG=1 shows where" in found.err
    monkeypatch.setenv("KILLICK_DEBUG", "1")
    found = call(capsys, "inbox")
    assert found.code == 70
    assert "Traceback" in found.err
    assert "in failing" in found.err


def test_a_store_that_somebody_else_keeps_locked_is_no_bug(
    office: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from killick.errors import StoreBusy

    def busy(*_: object, **__: object) -> None:
        raise StoreBusy("killick.db", 60)

    monkeypatch.setattr("killick.cli.context.open_store", busy)
    found = call(capsys, "ps")
    assert (found.code, is_one_line(found)) == (4, True)


# help ---------------------------------------------------------------------------------------------


def test_help_fits_one_screen_of_24_lines_and_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = call(capsys, "--help").out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 79
    assert call(capsys).out.splitlines() == lines
    assert call(capsys, "help").out.splitlines() == lines


def test_every_command_is_in_one_group_and_has_a_module() -> None:
    inside = [f"{group} {name}" for group, (_, words) in GROUPS.items() for name in words]
    assert sorted([*COMMANDS, *inside]) == sorted(MODULES)
    assert not COMMANDS.keys() & GROUPS.keys()


def commands(group: click.Group = killick, path: str = "") -> dict[str, click.Command]:
    """Every command that is there, by how it is called."""
    found: dict[str, click.Command] = {}
    for name in group.list_commands(click.Context(group)):
        try:
            command = group.get_command(click.Context(group), name)
        except ImportError:
            continue
        assert command is not None
        found[f"{path}{name}"] = command
        if isinstance(command, click.Group):
            found |= commands(command, f"{path}{name} ")
    return found


@pytest.mark.parametrize("name", commands())
def test_the_help_of_a_command_is_short_and_not_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = call(capsys, *name.split(), "--help")
    assert found.code == 0
    assert found.out.startswith(f"Usage: killick {name}")
    prose = [line for line in found.out.splitlines() if not line.strip().startswith("killick ")]
    assert max(map(len, prose)) <= 80
    assert len(prose) <= 40


def test_every_command_that_runs_answers_or_acts_shows_how() -> None:
    ours = ["run", "start", "inbox", "answer", "message say", "pause", "resume", "cancel", "message send",
            "edit set"]  # fmt: skip
    assert [name for name, command in commands().items() if name in ours and not told(command)[1]] == []


EXAMPLES = [line for command in commands().values() for line in told(command)[1]]
PATIENT = ("--watch", "--follow", "killick serve", "postgresql://")
"""Examples that continue until they are stopped, or need a server."""


def example_args(line: str) -> list[str]:
    """What an example would have a person type: without the remark behind it, and with runs that there are."""
    typed = re.split(r"\s{2,}|\s[>|]\s", line)[0]
    names = {"RUN": "claim_17", "RUN_A": "claim_17", "RUN_B": "claim_18"}
    args = [names.get(word, word) for word in shlex.split(typed)[1:]]
    return [*args, "--until-idle"] if args[0] == "worker" else args  # which otherwise serves until somebody stops it


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow if line.startswith("killick check") else ())
        for line in EXAMPLES
        if not any(word in line for word in PATIENT)
    ],
)
def test_an_example_in_a_help_text_works(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    shutil.copytree(prepared, tmp_path / "copy", ignore=shutil.ignore_patterns("*-holder-*"))
    move_in(tmp_path / "copy", monkeypatch)
    if line.startswith("killick token revoke"):
        call(capsys, "token", "create", "ann")
    if line.startswith("killick time restore") and "--to" not in line:
        call(capsys, "time", "restore", "fix_17", "--at", "1:after", "--to", str(prepared / "checkout"))
    if "--snapshot" in line:
        kept = json.loads(call(capsys, "time", "restore", "fix_17", "--at", "1:before", "--json").out)["before"]
        line = re.sub(r"--snapshot \w+", f"--snapshot {kept}", line)
    if "repair" in line and "--from" in line:
        shutil.copy("killick.db", "backup.db")
        call(capsys, "store", "export", "claim_17", "-o", "claim_17.killick")
        line = f"{line.partition('  ')[0]} --yes"
    found = call(capsys, *example_args(line))
    # A run that waits for a person is no failure of the example, and a selection may find nothing to do.
    waits, finds_nothing = found.code == 3, found.code == 2 and "no run matches" in found.err
    assert found.code == 0 or waits or finds_nothing, found


# pipes, colours, signals --------------------------------------------------------------------------


def test_whoever_reads_may_go_before_the_end(office: Path) -> None:
    pipe = f"set -o pipefail; {sys.executable} -m killick show claim_17 --state | head -1"
    done = subprocess.run(
        ["bash", "-c", pipe],
        cwd=office,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


def test_output_that_cannot_be_written_is_told(office: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "killick", "inbox", "--json"],
            cwd=office, env=plain_environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=300,
            check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the disk is full" in done.stderr


@pytest.mark.slow
def test_a_pipe_carries_no_colours_and_no_remarks(office: Path) -> None:
    for command in (["inbox"], ["--help"], ["ps"]):
        done = run_killick(*command, cwd=office)
        assert done.returncode == 0
        assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_terminal_gets_colours_unless_it_wants_none(office: Path) -> None:
    command = [sys.executable, "-m", "killick"]
    assert "\x1b[" in on_terminal([*command, "inbox"], cwd=office, env=plain_environment(), shades=True)[1]
    for args in (["--help"], ["inbox"]):
        _, seen = on_terminal([*command, *args], cwd=office, env=plain_environment(NO_COLOR="1"), shades=True)
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", seen), seen


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(r"killick \d+\.\d+\S*\n", call(capsys, "--version").out)


def test_nothing_heavy_is_imported_for_help(office: Path) -> None:
    code = (
        "import sys; from killick.cli.main import main; main(['--help']); "
        "print([m for m in ('pydantic', 'rich', 'killick.cli.context') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", ["--version", "edit --help", "store --help", "rewind"])
def test_neither_the_version_nor_a_group_imports_a_command(office: Path, words: str) -> None:
    code = (
        f"import sys; from killick.cli.main import main; main({words.split()!r}); "
        "print([m for m in sys.modules if m.startswith(('killick.', 'rich', 'msgspec'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    imported = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    light = ("cli", "cli.main", "cli.exit_codes", "errors", "sanitizer", "text", "version")
    assert imported <= {f"killick.{name}" for name in light}


@pytest.mark.gate(1)
@pytest.mark.parametrize("words", ["ps", "inbox", "show claim_17", "find calls pay"])
def test_a_command_that_reads_starts_without_the_engine(office: Path, words: str) -> None:
    code = f"import sys; from killick.cli.main import main; main({words.split()!r}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=office, capture_output=True, text=True, timeout=300, check=True
    )  # fmt: skip
    imported = done.stdout.splitlines()[-1].split()
    heavy = ("asyncio", "killick.agents.", "killick.client.client", "killick.contracts.", "killick.definitions.",
             "killick.engine.execution", "killick.llm.", "killick.workspace.")  # fmt: skip
    assert [name for name in imported if name.startswith(heavy)] == []


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("ps", 187), ("inbox", 188), ("show claim_17", 194), ("find calls pay", 177), ("store doctor", 229),
        ("time diff claim_17 3", 269), ("store verify", 267), ("edit note claim_17 x", 343),
    ],
)  # fmt: skip
def test_a_command_imports_what_it_needs_and_no_more(prepared: Path, tmp_path: Path, words: str, most: int) -> None:
    shutil.copy(prepared / "killick.db", tmp_path / "killick.db")
    code = f"import sys; from killick.cli.main import main; main({words.split()!r}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )  # fmt: skip
    imported = done.stdout.splitlines()[-1].split()
    # How many modules the standard library is made of differs between versions of Python.
    ours = [name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names]
    assert len(ours) < most
    slow = {"pydantic_core", "email.utils", "importlib.metadata", "tomllib", "rich.live"}
    assert not (slow if words.startswith("edit") else {*slow, "killick.client.client"}) & set(imported)


def test_an_interrupt_is_one_line_and_130(office: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "from claims_wait import main; raise SystemExit(main(['inbox']))"
    (office / "claims_wait.py").write_text(
        "import os, signal, time\nimport killick.cli.commands.inbox as people\nfrom killick.cli.main import main\n"
        "def stop(*a, **k):\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\npeople.print_wait = stop\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=office, env=plain_environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "killick: interrupted\n")
