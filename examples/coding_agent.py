"""A model mends a git checkout through a shell, and is killed in the middle of it: the files go back with the run.

A shell may do anything to a folder, and nobody keeps track of what. So the folder itself is looked at, and kept, at
every step: the second process puts it back to where the step began and runs the command again, with no person. The run
can be compared and rewound with its files, commits and all. A contract says what the model may not even try.

The model is a script. The checkout, the shell, git and the kill are real.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import killick
from killick import rules
from killick.model.events import WorkspaceRestored

TASK = "Of every three things the cheapest is free, and we charge for it. Mend that, and call the module checkout."
FILES = {
    ".gitignore": "__pycache__/\n",
    "shop.py": "def total(prices):\n    return sum(prices)\n",
    "test_shop.py": "import shop, unittest\n\n\nclass Total(unittest.TestCase):\n    def test_two_for_three(self):\n"
    "        self.assertEqual(shop.total([5, 3, 4]), 9)\n",
}

# The contract, and the one tool. It changes nothing but files of its folder: that is what its effect says.

contract = killick.Contract(
    "local",
    [
        rules.allow("shell"),
        rules.arguments(
            "shell",
            command={"excludes": r"\b(push|curl|ssh)\b"},
            message="nothing is sent from here; commit, and say so",
        ),
        rules.budget(calls=40),
    ],
)


@killick.tool(effect="workspace")
def shell(command: str, folder: Path = killick.WORKSPACE) -> str:
    """Run a command in the checkout, and see how what it prints ends."""
    done = subprocess.run(["sh", "-c", f"({command}) 2>&1"], cwd=folder, stdout=subprocess.PIPE, text=True)
    return "\n".join([*filter(None, done.stdout.splitlines()), f"exit {done.returncode}"][-3:])


# The model: what it says, and what it wants run. The patch takes a moment, so that it can be killed half way.

TEST = "python3 -B -m unittest -q"
FREE = "s|sum(prices)|sum(prices) - sum(sorted(prices)[: len(prices) // 3])|"
SCRIPT = [
    ("I begin with the tests.", TEST),
    (
        "The new name, then the rule, then the tests again.",
        f"git mv shop.py checkout.py; sleep 1; sed -i s/shop/checkout/ test_shop.py\n"
        f"sed -i '{FREE}' checkout.py\n{TEST}",
    ),
    ("They pass.", "git commit -qam 'The cheapest of three is free' && git log --format=%s"),
    ("And up with it.", "git push origin HEAD"),
    ("checkout.total() leaves out the cheapest of three. It is committed, and not pushed.", ""),
]


def chat(*, messages: list[Any], tools: list[Any]) -> Any:
    turn = sum(message["role"] == "assistant" for message in messages)
    text, command = SCRIPT[turn]
    call = {"name": "shell", "arguments": json.dumps({"command": command})}
    calls = [{"id": f"call_{turn}", "type": "function", "function": call}] if command else []
    return {"choices": [{"message": {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})}]}


@killick.agent(workspace="shop", contract=contract)
async def mend(run: killick.Run, task: str) -> str:
    result = await killick.loop(run, chat, [shell], messages=task, system="You mend code.")
    return result.text


def make_checkout(folder: Path) -> None:
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for command in ("init -q", "config user.name Ada", "config user.email ada@example.org", "add .", "commit -qm Shop"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)


def tell(what: str, *lines: str) -> None:
    print(what, *(f"    {line}" for text in lines for line in text.splitlines()), "", sep="\n")


def main() -> None:
    if "--work" in sys.argv:
        killick.open("killick.db").run(mend, TASK, id="mend_17")
        return
    with tempfile.TemporaryDirectory(prefix="killick-") as place:
        os.chdir(place)
        make_checkout(folder := Path("shop"))
        worker = subprocess.Popen([sys.executable, __file__, "--work"])
        while not (folder / "checkout.py").exists() and worker.poll() is None:
            time.sleep(0.01)
        worker.kill()
        tell(f"Killed in the middle of a patch, with {worker.wait()}:", shell("git status --short", folder))

        with killick.open("killick.db") as kd:
            result = kd.run(mend, TASK, id="mend_17")
            for back in (each for each in kd.events("mend_17") if isinstance(each.event, WorkspaceRestored)):
                told = kd.log.data("mend_17", back.seq)
                left = ", ".join(each["command"].partition("(")[0].strip() for each in told.get("ended", ()))
                tell(f"Another process put the files back before it ran step {back.event.step} again; it ended:", left)
            said = kd.state("mend_17").trace[-1].input["messages"][2:]
            for reply, answer in zip(said[::2], said[1::2], strict=True):
                command = json.loads(reply["tool_calls"][0]["function"]["arguments"])["command"]
                tell(reply["content"], f"$ {command}", answer["content"])
            tell(result)

            changes = [each for each in kd.diff("mend_17", "6").files.changes if not each.path.startswith(".git/")]
            tell("What step 6 did:", *(line for each in changes for line in (f"{each.how} {each.path}", *each.lines)))
            kd.rewind("mend_17", "6:before", by="mia", because="the old name was fine")
            tell("Rewound to before it:", *(shell(each, folder) for each in ("ls", TEST, "git log --format=%s")))
        os.chdir("/")


if __name__ == "__main__":
    main()
