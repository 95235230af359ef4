"""A record in which everything that an agent, a user or a token says is an attempt to get into the page."""

from __future__ import annotations

from typing import Any, Final

from browser.office import Claim, review
from killick.client.client import Client
from killick.log import Entry
from killick.model import events as e
from killick.model import system_events
from killick.triggers import LOG, OWN, TAG

FIRED: Final = "killick_payload_fired"


UNSEEN: Final = "\u2028\u202e\u200b"


def evil(where: str) -> str:
    """A payload for wherever it may be put: text, an attribute, a script, an address, a template."""
    fire = f"window.{FIRED}='{where}'"
    return (
        f'{where}"><img src=x onerror="{fire}"><svg onload="{fire}"></svg></textarea></script><script>{fire}</script>'
        f"' onfocus={fire} autofocus x='javascript:{fire}//{{{{7*7}}}}${{7*7}}</title></style><!--{UNSEEN}"
    )


PERSON: Final = f'"><img src=x onerror="window.{FIRED}=1">{{{{7*7}}}}'
"""A name that a person may have: short, and nothing in it that cannot be seen."""

RUN: Final = evil("run/id") + "/../%2e"
ANSWERED: Final = evil("answered")
FORK: Final = evil("fork").removesuffix(UNSEEN)  # what a client names has nothing in it that cannot be seen


def failure(where: str, *, cause: bool = True) -> dict[str, Any]:
    """An error of an agent's, in the form that is on record."""
    return {
        "kind": "error",
        "type": evil(f"{where}-type"),
        "types": [evil(f"{where}-type"), "Exception"],
        "message": evil(f"{where}-message"),
        "notes": [evil(f"{where}-note")],
        "frames": [{"file": evil(f"{where}-file"), "line": 7, "function": evil(f"{where}-function")}],
        "details": {evil(f"{where}-detail"): evil(f"{where}-value")},
        "cause": failure(f"{where}-cause", cause=False) if cause else None,
    }


def fill(kd: Client) -> None:
    """The runs, a trigger, a hook and tokens."""
    at = kd.runtime.clock.now_us()
    log = kd.runtime.log.begin(RUN)
    log.append(*_opening(at, RUN), *_steps(at), *_waits(at))
    over = kd.runtime.log.begin(ANSWERED)
    over.append(
        *_opening(at, ANSWERED), *_steps(at), Entry(e.RunFailed(at=at + 900, step="1"), {"failure": failure("run")})
    )
    kd.fork(RUN, at="2:after", id=FORK, by=evil("forked-by"), because=evil("forked-because"))
    kd.edit.note(FORK, evil("note"), by=evil("noter"))
    kd.pause(FORK, by=evil("pauser"), because=evil("because"))
    kd.send(RUN, evil("message"), {evil("body-key"): evil("body")}, by=evil("sender"))
    _trigger(kd, at)
    _hook(kd, at)
    kd.start(
        review, Claim(1, evil("name"), 2000, evil("mail")), id=evil("queued").removesuffix(UNSEEN), tags=[evil("tag")]
    )


def _opening(at: int, run: str) -> list[Entry]:
    build = e.Build(version=evil("version"), commit=evil("commit"))
    return [
        Entry(
            e.RunStarted(at=at, run=run, agent=evil("agent"), build=build, tags=(evil("tag"),)),
            {"input": {evil("input-key"): [evil("input"), {"deep": evil("deep")}]}},
        ),
        Entry(e.PlanMade(at=at + 1, stages=(evil("stage-1"), evil("stage-2")))),
        Entry(e.PlanReached(at=at + 2, stage=evil("stage-1"))),
        Entry(e.RunTaken(at=at + 3, epoch=0, holder=evil("holder"), build=build)),
    ]


def _steps(at: int) -> list[Entry]:
    name, key = evil("tool"), evil("key")
    usage = e.Usage(model=evil("model"), tokens_in=5, tokens_out=7, cost_micros=3)
    said = [
        {"role": evil("role"), "content": evil("said")},
        {"role": "user", "content": [{"type": evil("part"), "text": evil("text")}]},
    ]
    return [
        Entry(
            e.StepIntended(at=at + 10, step="1", sort="tool", name=name, digest="d1", effect="at_most_once"),
            {"arguments": {evil("argument"): evil("value")}, "because": evil("rationale")},
        ),
        Entry(e.AttemptStarted(at=at + 11, step="1", attempt=1, key=key, epoch=0)),
        Entry(
            e.AttemptEnded(at=at + 12, step="1", attempt=1, outcome="refused", retry_at=at + 13),
            {"failure": failure("attempt")},
        ),
        Entry(e.AttemptStarted(at=at + 14, step="1", attempt=2, key=key, epoch=0)),
        Entry(e.AttemptProgressed(at=at + 15, step="1", attempt=2), {"progress": evil("progress")}),
        Entry(
            e.AttemptEnded(at=at + 16, step="1", attempt=2, outcome="returned"), {"output": {evil("k"): evil("output")}}
        ),
        Entry(
            e.StepIntended(at=at + 20, step="2", sort="model", name=evil("chat"), digest="m2"),
            {"arguments": {"model": evil("asked-model"), "messages": said, "tools": [{"name": evil("offered")}]}},
        ),
        Entry(e.AttemptStarted(at=at + 21, step="2", attempt=1, key=key + "2", epoch=0)),
        Entry(
            e.AttemptEnded(at=at + 22, step="2", attempt=1, outcome="returned", usage=usage),
            {
                "output": {"role": "assistant", "content": evil("reply")},
                "reply": {"text": evil("reply-text")},
                "reasoning": evil("reasoning"),
            },
        ),
        Entry(
            e.DecisionMade(at=at + 30, step="3", by=evil("decider")),
            {
                "question": evil("question"),
                "options": [evil("option-1"), evil("option-2")],
                "choice": evil("option-1"),
                "because": evil("reason"),
            },
        ),
        Entry(e.ContextChanged(at=at + 31, version=1, whole=True), {"document": {evil("entry"): evil("context")}}),
        Entry(e.NoteMade(at=at + 32), {"note": evil("note")}),
        Entry(e.StepIntended(at=at + 33, step="4", sort="child", name=evil("child"))),
        Entry(
            e.ChildSpawned(at=at + 34, step="4", run=evil("child-run"), agent=evil("child-agent")),
            {"input": evil("ci")},
        ),
        Entry(
            e.ChildEnded(at=at + 35, step="4", run=evil("child-run"), status="failed"), {"failure": failure("child")}
        ),
    ]


def _waits(at: int) -> list[Entry]:
    schema = {
        "type": "object",
        "title": evil("schema-title"),
        "description": evil("schema-description"),
        "required": [evil("field")],
        "properties": {
            evil("field"): {"type": "string", "title": evil("field-title"), "description": evil("field-description"),
                            "default": evil("default"), "pattern": evil("pattern"), "format": evil("format")},
            "choice": {"enum": [evil("enum-1"), evil("enum-2")], "title": evil("enum-title")},
            "nested": {"type": "object", "properties": {evil("inner"): {"title": evil("inner-title")}}},
            "listed": {"type": "array", "items": {"type": "string", "title": evil("item-title")}},
        },
    }  # fmt: skip
    asked = {
        "prompt": evil("prompt"),
        "schema": schema,
        "verbs": ["approve", "reject", "edit", "respond"],
        "options": [],
        "intention": {"tool": evil("tool"), "arguments": {evil("field"): evil("value"), "choice": evil("enum-1")}},
        "reason": evil("rule-reason"),
        "may": [evil("may")],
    }
    chosen = {"prompt": evil("prompt-2"), "verbs": ["respond"], "options": [evil("choose-1"), evil("choose-2")]}
    return [
        Entry(e.StepIntended(at=at + 40, step="5", sort="wait", name="ask", digest="w5")),
        Entry(e.WaitOpened(at=at + 41, step="5", waits_for="answer", name="ask", to=(evil("to"),), digest="w5"), asked),
        Entry(e.StepIntended(at=at + 42, step="6", sort="wait", name="ask", digest="w6")),
        Entry(
            e.WaitOpened(at=at + 43, step="6", waits_for="answer", name="ask", to=(evil("to-2"),), digest="w6"), chosen
        ),
        Entry(e.StepIntended(at=at + 44, step="7", sort="wait", name=evil("event"), digest="w7")),
        Entry(e.WaitOpened(at=at + 45, step="7", waits_for="event", name=evil("event")), {"prompt": evil("prompt-3")}),
    ]


def _trigger(kd: Client, at: int) -> None:
    name = evil("trigger")
    spec = {"sort": "every", "what": evil("every"), "agent": evil("agent"), "seconds": 60.0, "tz": evil("tz"),
            "makes_input": evil("makes")}  # fmt: skip
    log = kd.runtime.log.begin(LOG + name)
    log.append(
        Entry(e.RunStarted(at=at, run=LOG + name, agent=OWN + name, tags=(TAG,))),
        Entry(
            system_events.TriggerSet(at=at, digest="d", sort="every", agent=evil("agent"), next=at + 60_000_000),
            {"spec": spec},
        ),
        Entry(system_events.TriggerFired(at=at, number=1, run=RUN, by=evil("fired-by"))),
        Entry(
            system_events.TriggerPassed(at=at, first=at, last=at, because="input failed", by=evil("passed-by")),
            {"failure": failure("input")},
        ),
        Entry(e.RunPaused(at=at, by=evil("paused-by")), {"because": evil("paused-because")}),
    )


def _hook(kd: Client, at: int) -> None:
    name = "hook:" + evil("hook")
    log = kd.runtime.log.begin(name)
    log.append(
        Entry(e.RunStarted(at=at, run=name, agent="killick." + name, tags=("hook",))),
        Entry(
            system_events.HookSet(at=at, position=0),
            {"spec": {"to": evil("hook-to"), "kinds": [evil("kind")], "agents": [evil("a")]}},
        ),
        Entry(
            system_events.HookFailed(at=at, position=1, run=RUN, seq=1, attempt=1, retry_at=at + 5_000_000),
            {"failure": failure("h")},
        ),
    )
