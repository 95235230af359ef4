"""A model works on a folder for sixty turns within a small window: what it does not need leaves, and comes back.

A function gets another name in twelve modules. For each the model looks where it is used, reads the module, changes it
and checks it; at the end it wants to see the rules again that it read at first, which have left by then. In the middle
the process dies. The next one goes on with the very same window, because what leaves is decided once and on record.

The model is a script. What it sees of the folder, what it does to it, and what it is sent are real.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import killick
from killick.history.window_report import windows

BUDGET = 16_000
MODULES = [f"shop/part_{number:02}.py" for number in range(12)]
TASK = "Rename total() to sum_of() in all modules. Keep to RULES.md, and say at the end which of its rules you kept."


def make_files() -> None:
    Path("shop").mkdir()
    Path("RULES.md").write_text("".join(f"Rule {n}: name things in module_{n} as users do.\n" for n in range(60)))
    for number, path in enumerate(MODULES):
        lines = [f"def item_{number}_{n}(count):\n    return total([{n}] * count)\n" for n in range(90)]
        Path(path).write_text("\n".join(["total = sum\n", *lines]))


# What the model can do. Only this agent writes to the folder, so what it reads changes by its own effects alone.


@killick.tool(effect="reads")
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


@killick.tool(effect="reads")
def search(text: str, path: str) -> list[str]:
    """Lines of a file that have a text in them."""
    lines = enumerate(Path(path).read_text().splitlines(), 1)
    return [f"{path}:{number}: {line.strip()}" for number, line in lines if text in line]


@killick.tool(effect="idempotent")
def replace(path: str, old: str, new: str) -> str:
    """Replace a word in a file, wherever it stands."""
    text, count = re.subn(rf"\b{re.escape(old)}\b", new, Path(path).read_text())
    Path(path).write_text(text)
    return f"{count} places in {path}"


@killick.tool(effect="reads")
def check(path: str) -> str:
    """Compile a module and call what is in it."""
    exec(compile(Path(path).read_text(), path, "exec"), {})
    return f"{path} is fine"


# The model. How far it is it sees from the calls that it made; nothing else is kept between two of them.

Turn = tuple[str, dict[str, str]]
SCRIPT: list[Turn] = [("read_file", {"path": "RULES.md"})] + [
    turn
    for path in MODULES
    for turn in (
        ("search", {"text": "total", "path": path}),
        ("read_file", {"path": path}),
        ("replace", {"path": path, "old": "total", "new": "sum_of"}),
        ("read_file", {"path": path}),
        ("check", {"path": path}),
    )
]


def chat(*, messages: list[dict[str, Any]], tools: list[Any]) -> Any:
    made = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    turn = int(made[-1].removeprefix("call_")) + 1 if made else 0
    if turn == 30 and os.environ.get("DIES"):
        os._exit(9)
    if turn < len(SCRIPT):
        name, arguments = SCRIPT[turn]
    elif messages[-1]["content"].endswith("as users do.\n"):
        kept = messages[-1]["content"].splitlines()[-1]
        return {"choices": [{"message": {"role": "assistant", "content": f"Done. I kept {kept!r}"}}]}
    else:  # the rules again: by the note that stands in their place, or in that of the turns that left with them
        said = [str(message["content"]) for message in reversed(messages)]
        notes = [re.search(r"(m\d+): read_file RULES|read_file RULES.*recall\W+(m[m\d-]+)", text) for text in said]
        handles = [note[1] or note[2] for note in notes if note]
        name, arguments = ("recall", {"handle": handles[0]}) if handles else SCRIPT[0]
    call = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}


@killick.agent
async def rename(run: killick.Run, task: str) -> str:
    tools = [read_file, search, replace, check]
    result = await killick.loop(run, chat, tools, messages=task, system="You mend code.", budget=BUDGET, turns_max=100)
    return result.text


def main() -> None:
    if os.environ.get("DIES"):
        killick.open("killick.db").run(rename, TASK, id="session")
    with tempfile.TemporaryDirectory(prefix="killick-") as folder:
        os.chdir(folder)
        make_files()
        died = subprocess.run([sys.executable, __file__], env={**os.environ, "DIES": "1"}, check=False)
        print(f"the first process died at turn 30, with {died.returncode}")
        with killick.open("killick.db") as kd:
            print(f"{kd.run(rename, TASK, id='session')}\n")
            told = windows(kd.log, "session")
        os.chdir("/")
    assert told is not None
    print("turn   everything    sent   pages left, wanted back")
    for row in (told.calls[at : at + 8] for at in range(0, len(told.calls), 8)):
        left, wanted = sum(call.evicted for call in row), sum(call.faulted for call in row)
        print(f"{row[-1].number:4} {row[-1].without:12,} {row[-1].sent:7,} {left or '':>7} {wanted or '':>12}".rstrip())
    print(f"\n{told.without:,} tokens with everything in every call, {told.sent:,} sent")
    print(f"{told.left} pages left; wanted back: {', '.join(each.what for each in told.faults)}")


if __name__ == "__main__":
    main()
