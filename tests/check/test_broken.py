"""`check` names the fault of every broken agent, and the line to change."""

from __future__ import annotations

from pathlib import Path

import pytest

import killick
from check import broken
from killick.check.checker import check
from killick.check.findings import Finding

LINES = Path(broken.__file__).read_text().splitlines()
FAULTS = {
    "no_key": ("twice", "it takes no key", "killick.KEY"),
    "timeout_is_no_refusal": ("twice", "only the answer was lost", "reconcile="),
    "own_id": ("differs", "uuid.uuid4()", "run.uuid()"),
    "own_clock": ("differs", "datetime.now()", "run.now()"),
    "own_chance": ("differs", "random.choice()", "run.random()"),
    "stray_file": ("outside", "open(", "run.call"),
    "keeps_state": ("keeps", "the module's booked", "run.update"),
    "catches_all": ("swallows", "except BaseException:", "except Exception:"),
    "tries_itself": ("twice", "A new step has a new key", "retry=killick.Retry"),
    "unordered": ("differs", "{'Tue', 'Wed', slot}", "sorted("),
    "undeclared": ("undeclared", "would wake a person", "@killick.tool(effect="),
    "sleeps_in_memory": ("sleeps", "asyncio.sleep()", "run.sleep"),
    "sleeps_in_a_thread": ("sleeps", "time.sleep()", "run.sleep"),
    "cannot_undo": ("not_undone", "book_flight is not undone", "compensate="),
    "unstorable": ("fails", "cannot store a function", "correct"),
    "no_default": ("expires", "is not answered", "default="),
    "own_tasks": ("tasks", "asyncio.gather()", "run.gather"),
}
"""By agent: the kind of fault, words of what is wrong, and words of what to write."""

ADVICE = {"undeclared", "no_default"}


def line_of(fault: str) -> int:
    """The line to change."""
    return next(number for number, line in enumerate(LINES, 1) if line.endswith(f"# fault: {fault}"))


def found(name: str) -> list[Finding]:
    agent: killick.Agent[object, object] = getattr(broken, name)
    return list(check(agent).findings)


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_of_a_broken_agent_is_named_with_the_line_to_change(name: str) -> None:
    kind, what, write = FAULTS[name]
    findings = found(name)
    [named] = [each for each in findings if each.kind == kind and what in f"{each.title} {each.why}"]
    assert write in named.fix
    assert named.weight == ("advice" if name in ADVICE else "fault")
    if name != "unstorable":
        file, _, line = named.where.rpartition(":")
        assert Path(file).name == "broken.py"
        assert int(line) == line_of(name)


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"cannot_undo", "own_chance", "timeout_is_no_refusal"}))
def test_nothing_else_is_blamed(name: str) -> None:
    findings = found(name)
    assert len(findings) == 1, "\n".join(map(str, findings))


def test_every_broken_agent_is_tried() -> None:
    assert {name for name, value in vars(broken).items() if isinstance(value, killick.Agent)} == FAULTS.keys()
