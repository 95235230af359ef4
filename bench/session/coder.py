"""A coding agent as a script: three hundred turns of work on a real repository, the same for every strategy.

What it models is how such sessions go, not how any policy pages. A session is a row of tasks that a person gives. A
task has a working set of two to six files: one that it is about, and others that a search for one of its names really
found. The agent searches, reads, changes the files several times, runs the tests, and mends what it broke; a broken
change really breaks the file, so the tests really fail and their traceback names it. Large files are read in parts.

Every move names what it needs to have before its eyes: a change needs the text of the place as it was last read, and
its own changes since; mending needs the failed output as well; some moves need a second file, the search before, or
something long ago. Where the agent reads a file again by itself (to see its change, or because it comes back to it),
it does so under every strategy; that is no fault. A fault is a need that is not in the request, literally: then the
agent fetches it first, which takes a call more.

Parameters, all by judgement and set before any policy was run against them; the measured facts they were held against
are those of large collections of real sessions (three quarters of the bytes of results are file reads of 7.9 KB on
average; 79 % of all bytes are results; seven or eight turns in ten leave the tree as it is): see CHANCES.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Final

from bench.session.script import Move, Need, Session
from bench.session.toolset import tools
from bench.session.workshop import Workshop

EDITION: Final = 2
"""Sessions that were kept are of this edition of the script: raise it with every change of behaviour."""

TURNS: Final = 300
WHOLE_LINES: Final = 250
"""Files of more lines are read in parts of this length."""

CHANCES: Final[Mapping[str, float]] = {
    "a task is only a question": 0.15,
    "a task comes back to a file of an earlier one": 0.35,
    "what was read in an earlier task is trusted, and not read again": 0.4,
    "what was read in this task is trusted": 0.9,
    "the folder is listed first": 0.25,
    "the log is looked at first": 0.1,
    "a second search": 0.4,
    "a change is made to the file that the task is about": 0.6,
    "a change needs a second file": 0.25,
    "a change is wrong": 0.22,
    "the file is read again after a change": 0.3,
    "the tests run after a change": 0.55,
    "the file is read again after a failed test": 0.45,
    "a search in the middle of the work": 0.12,
    "another part of a large file is read in the middle of the work": 0.2,
    "a search's result is looked up later in the task": 0.1,
    "something from an earlier task is referred to": 0.03,
    "the difference is looked at in the end": 0.6,
    "the person named the file": 0.5,
}
FILES: Final = ((2, 25), (3, 30), (4, 20), (5, 15), (6, 10))
"""How many files a working set has, and how often."""
EDITS: Final = ((1, 10), (2, 20), (3, 20), (4, 20), (5, 10), (6, 10), (8, 10))
"""How many changes a task makes, and how often."""
TAIL: Final = 1.1
"""The exponent of how far back an earlier thing is: most are recent, some are from the start."""

_FAILED: Final = re.compile(r"^(\*\*\*|Sorry: |\w*Error:)", re.MULTILINE)
_DEFINED: Final = re.compile(r"^\s*(?:async\s+)?(?:def|class)\s+([A-Za-z]\w{4,})", re.MULTILINE)

SYSTEM: Final = """\
You are a coding agent. You work on the repository in the current folder with the tools that you are given, until the \
person's task is done, and then say in a few sentences what you did.

Look before you change: search for the names that matter, read the files that the search names, and understand how \
they hang together. Keep to the habits of the code around you: its names, its order, its comments. Make the smallest \
change that does the whole task. Change a file only after having read the place. After changes run the tests; when \
they fail, read the output to its end and mend the cause, not the symptom. Do not leave anything half done. Do not \
touch what the task does not ask for. Never invent the content of a file that you have not seen. If something stays \
unclear after you have looked, say so. Do not repeat large parts of files in your answers; name file and line instead.

The project's own guide follows.

"""

_SAID: Final = (
    "Something is off with `{name}`{where}: it does not do what its description says when it is called twice in a row. "
    "Please find out why, mend it, and make sure that whatever depends on it still works.",
    "I would like `{name}`{where} to be clearer for whoever reads it next. Go through it and through the places that "
    "use it, write down what is not obvious, and tidy up what has grown crooked. Behaviour stays as it is.",
    "We need `{name}`{where} to take one more case into account; the callers must not have to know of it. Have a look "
    "at how the similar places do it, follow them, and run the tests of the part when you are done.",
    "Somebody reported that `{name}`{where} is slow for long inputs. Look for what it does more than once, and write "
    "the reason next to it where it has to stay. Check the other users of it too, please.",
)
_THOUGHTS: Final = (
    "The line `{line}` is where it is decided, as far as I can see.",
    "I noticed `{line}`, which has to stay as it is for the callers.",
    "There are two ways to go about it: change the place itself, or give the callers what they need; the first is "
    "smaller and keeps what is known about it in one place.",
    "That is consistent with what the description says, so the cause has to be further down.",
    "I should keep the order of the arguments, because others pass them by position.",
    "If that is right, then `{line}` must come first, and nothing else depends on the order.",
    "Let me be careful here: the same name is used for two things, and only one of them is meant.",
    "This also explains why the second call behaves differently from the first one: what the first one left behind is "
    "still there, and nobody clears it before the next one begins.",
)
SENTENCES: Final = ((1, 15), (2, 20), (4, 30), (6, 20), (10, 15))
"""How many such sentences stand beside a call, and how often."""
_ASKED: Final = "How does `{name}`{where} work, and who depends on it? I do not want any change, only an explanation."


class Coder:
    """One session in the making: the moves so far, and what the agent remembers of them."""

    def __init__(self, seed: int, workshop: Workshop, turns: int = TURNS) -> None:
        self._chance = random.Random(seed)
        self._shop = workshop
        self._turns = turns
        self._moves: list[Move] = []
        self._said: str | None = None
        self._earlier: list[list[str]] = []
        """The files of each task so far."""
        self._parts: dict[str, dict[str, Any]] = {}
        """Per file: the arguments with which it was last read."""
        self._pages: list[tuple[str, dict[str, Any]]] = []
        """The reads and searches of earlier tasks."""
        self._files = [name for name in workshop.files if 400 < len(workshop.text(name)) < 60_000]
        self._code = [
            name
            for name in self._files
            if name.endswith(".py")
            and _DEFINED.search(workshop.text(name))
            and not name.startswith(("tests/", "bench/", "examples/"))
        ]

    def session(self, name: str, seed: int, system: str) -> Session:
        """Work until the turns are used up."""
        while len(self._moves) < self._turns:
            self._task()
        return Session(name, seed, system, tools(), self._moves[: self._turns])

    # A task ------------------------------------------------------------------------------------------

    def _task(self) -> None:
        before = len(self._moves)
        about, name = self._subject()
        question = self._may("a task is only a question")
        where = f" in {about}" if self._may("the person named the file") else ""
        self._said = (_ASKED if question else self._chance.choice(_SAID)).format(name=name, where=where)
        files = self._explored(about, name)
        for file in files:
            self._open(file, name, "an earlier task" if file in self._parts else "")
        if question:
            needs = [self._need("read_file", self._parts[file]) for file in files[:2]]
            self._do(f"`{name}` is defined in {about}. " + self._prose(files), needs=needs)
        else:
            self._work(files, name)
        self._earlier.append(files)
        self._pages += [
            (move.tool, move.arguments) for move in self._moves[before:] if move.tool in {"read_file", "search"}
        ]
        self._shop.commit(f"Settle {name}")

    def _subject(self) -> tuple[str, str]:
        if self._earlier and self._may("a task comes back to a file of an earlier one"):
            about = self._chance.choice(self._far_back(self._earlier))
            if about in self._code:
                return about, self._name(about)
        about = self._chance.choice(self._code)
        return about, self._name(about)

    def _explored(self, about: str, name: str) -> list[str]:
        if self._may("the log is looked at first"):
            self._do("Let me see what was done here lately.", "git_log", {})
        if self._may("the folder is listed first"):
            folder = about.rpartition("/")[0] or "."
            self._do(f"Let me look at what is in {folder}.", "list_dir", {"path": folder})
        found = self._search(name, f"I'll start by finding where `{name}` is defined and used.")
        if self._may("a second search"):
            other = self._name(about)
            found += self._search(other, f"`{other}` belongs to it; let me see who uses that.")
        wanted = self._weighted(FILES)
        near = list(dict.fromkeys(file for file in found if file != about and file in self._files))
        self._chance.shuffle(near)
        near += self._chance.sample(self._code, wanted)
        return list(dict.fromkeys([about, *near]))[:wanted]

    def _work(self, files: list[str], name: str) -> None:
        searched = [{"pattern": name}]
        for _ in range(self._weighted(EDITS)):
            target = files[0] if self._may("a change is made to the file that the task is about") else None
            target = target or self._chance.choice(files)
            needs = self._beside(files, target, searched)
            if self._may("another part of a large file is read in the middle of the work"):
                self._open(target, self._name(target), "")
            if self._may("a search in the middle of the work"):
                other = self._name(target)
                self._search(other, f"Before I touch it: who else relies on `{other}`?")
                searched.append({"pattern": other})
            wrong = target in self._code and self._may("a change is wrong")
            undo = self._change(target, wrong, needs)
            if self._may("the file is read again after a change"):
                self._read(target, f"Let me look at {target} as it is now.")
            if wrong or self._may("the tests run after a change"):
                self._try(target if target in self._code else files[0], target, undo)
        if self._may("the difference is looked at in the end"):
            path = {"path": files[0]} if self._chance.random() < 0.5 else {}
            self._do("Let me look over what I changed.", "git_diff", path)
            needs = [self._need("git_diff", path)]
        else:
            needs = []
        self._do(f"Done. I went through `{name}` in {files[0]}. " + self._prose(files), needs=needs)

    def _beside(self, files: list[str], target: str, searched: list[dict[str, Any]]) -> list[Need]:
        """What a change needs besides the place itself."""
        needs: list[Need] = []
        if self._may("a change needs a second file"):
            other = self._chance.choice(files)
            if other != target:
                needs.append(self._need("read_file", self._parts[other]))
        if self._may("a search's result is looked up later in the task"):
            needs.append(self._need("search", self._chance.choice(searched)))
        if self._pages and self._may("something from an earlier task is referred to"):
            tool, arguments = self._far_back(self._pages)
            needs.append(self._need(tool, arguments))
        return needs

    # Moves -------------------------------------------------------------------------------------------

    def _do(self, words: str, tool: str | None = None, arguments: Any = None, needs: Any = ()) -> str:
        words += self._thought()
        result = self._shop.call(tool, arguments) if tool else ""
        needed = tuple({need.key: need for need in needs}.values())
        self._moves.append(Move(words, tool, arguments or {}, result, needed, self._said))
        self._said = None
        return result

    def _need(self, tool: str, arguments: dict[str, Any]) -> Need:
        return Need(tool, arguments, self._shop.call(tool, arguments))

    def _search(self, name: str, words: str) -> list[str]:
        found = self._do(words, "search", {"pattern": name})
        return [line.split(":", 1)[0].removeprefix("./") for line in found.splitlines()]

    def _open(self, file: str, name: str, known: str) -> None:
        """Have a file before one's eyes: read it, or trust what was read."""
        trusted = "what was read in an earlier task is trusted, and not read again"
        if known and self._may(trusted):
            return
        lines = self._shop.text(file).splitlines()
        arguments: dict[str, Any] = {"path": file}
        if len(lines) > WHOLE_LINES:
            place = next((number for number, line in enumerate(lines) if name in line), 0)
            if file in self._parts and place // WHOLE_LINES == (self._parts[file].get("start", 1) - 1) // WHOLE_LINES:
                place = self._chance.randrange(len(lines))
            start = place // WHOLE_LINES * WHOLE_LINES + 1
            arguments |= {"start": start, "end": start + WHOLE_LINES - 1}
        elif self._parts.get(file) == arguments and not known and self._may("what was read in this task is trusted"):
            return
        self._parts[file] = arguments
        self._read(file, f"Let me read {file}.")

    def _read(self, file: str, words: str) -> None:
        self._do(words, "read_file", self._parts[file])

    def _change(self, file: str, wrong: bool, needs: list[Need]) -> tuple[str, str]:
        """A real change of a few lines; the text that mends it, if it is wrong, and what it mends."""
        old, indent = self._place(file)
        count = self._chance.randrange(1, 16)
        lines = [line.strip() for line in self._shop.text(file).splitlines() if line.strip() and "\\" not in line]
        noted = [f"{indent}# {self._chance.choice(lines)[:90]}" for _ in range(count)]
        good = "\n".join([*noted, old]) if file.endswith(".py") else "\n".join([old, *(line[2:] for line in noted)])
        bad = "\n".join([*noted, f"{indent}{self._chance.choice(('not_defined_anywhere', 'if (', 'def'))}", old])
        needed = [self._need("read_file", self._parts[file]), *needs]
        name = self._name(file)
        words = f"Now I'll change `{name}` in {file}: the case that is missing goes before the line that decides."
        if others := [need.arguments.get("path", need.arguments.get("pattern")) for need in needs]:
            words += f" It follows {', '.join(str(other) for other in others)}."
        self._do(words, "edit_file", {"path": file, "old": old, "new": bad if wrong else good}, needed)
        return (bad, good) if wrong else (good, old)

    def _place(self, file: str) -> tuple[str, str]:
        """A line or a few within the part that was read, which stand in the file once; and their indentation."""
        text = self._shop.text(file)
        lines = text.splitlines()
        first = self._parts[file].get("start", 1) - 1
        last = min(self._parts[file].get("end", len(lines)), len(lines))
        for _ in range(200):
            at = self._chance.randrange(first, max(first + 1, last))
            length = self._chance.randrange(1, 5)
            old = "\n".join(lines[at : min(at + length, last)])
            if old.strip() and lines[at].strip() and text.count(old) == 1:
                return old, re.match(r"\s*", lines[at])[0]  # type: ignore[index]
        return text.rstrip("\n"), ""

    def _try(self, tried: str, changed: str, undo: tuple[str, str]) -> None:
        """Run the tests; if they fail because of the change, mend it and run them again."""
        for again in range(2):
            told = self._do(
                f"Let me run the tests of {tried}." if not again else "Once more.", "run_tests", {"path": tried}
            )
            if not _FAILED.search(told) or again:
                return
            needs = [self._need("run_tests", {"path": tried})]
            if self._may("the file is read again after a failed test"):
                self._read(changed, f"That failed. Let me look at {changed} again.")
            needs.append(self._need("read_file", self._parts[changed]))
            words = f"The traceback points into {changed}; what I added there is wrong. I'll mend it."
            self._do(words, "edit_file", {"path": changed, "old": undo[0], "new": undo[1]}, needs)

    # Chance ------------------------------------------------------------------------------------------

    def _may(self, what: str) -> bool:
        return self._chance.random() < CHANCES[what]

    def _weighted(self, table: tuple[tuple[int, int], ...]) -> int:
        return self._chance.choices([row[0] for row in table], [row[1] for row in table])[0]

    def _far_back(self, things: list[Any]) -> Any:
        """One of them: the latest most often, by a power law the farther back the rarer."""
        weights = [(len(things) - place) ** -TAIL for place in range(len(things))]
        return self._chance.choices(things, weights)[0]

    def _name(self, file: str) -> str:
        found = sorted(set(_DEFINED.findall(self._shop.text(file)))) or [file.rpartition("/")[2].partition(".")[0]]
        return str(self._chance.choice(found))

    def _thought(self) -> str:
        """What models say besides: what they make of what they saw last, often with a line of it."""
        seen = (
            [line.strip() for line in self._moves[-1].result.splitlines()[:400] if len(line) > 30]
            if self._moves
            else []
        )
        told = self._chance.choices(_THOUGHTS, k=self._weighted(SENTENCES))
        quoted = self._chance.choice(seen)[:160] if seen else "nothing"
        return "".join(" " + thought.format(line=quoted) for thought in told)

    def _prose(self, files: list[str]) -> str:
        parts = (
            f"The part that matters is in {files[0]}; it is used from {', '.join(files[1:]) or 'nowhere else'}. ",
            "What it gives depends only on its arguments, so calling it twice is safe now. ",
            "I wrote the reason beside the line, because it is not plain from the code. ",
            "The tests of the part pass. ",
            "Nothing else had to change: the callers do not see the difference. ",
        )
        return "".join(parts[: self._chance.randrange(2, len(parts) + 1)]).strip()
