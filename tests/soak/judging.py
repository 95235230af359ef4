"""What must hold when a soak is over: every run completed, every effect once, every log whole, nobody was asked."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final

import killick
from killick.model import events as e
from soak import errands
from soak.conducting import Played, Setting, fork, name_of
from soak.errands import STEPS

EFFECTS: Final = ("reserve", "pay", "enter", "notify", "ship")
"""Steps that change something: at the far side, or beside the record."""

NEW_EFFECTS: Final = ("confirm", "thank")
"""The same, of version 2 of the code."""

GOING: Final = ("queued", "running")
"""What a run that a worker lets go of cannot be: nothing would wake it."""


def judge(setting: Setting, played: Played) -> dict[str, Any]:
    """The verdict of a process that opens the store for this alone: counts, and under `wrong` what does not hold."""
    verdict = setting.folder / "verdict"
    os.waitpid(fork(lambda: verdict.write_text(json.dumps(_judged(setting, played))), setting.folder / "errors"), 0)
    if not verdict.exists():
        return {"wrong": [(setting.folder / "errors").read_text()]}
    found: dict[str, Any] = json.loads(verdict.read_text())
    return found


def _judged(setting: Setting, played: Played) -> dict[str, Any]:
    world = json.loads(asyncio.run(errands.asked({"do": "tell"})))
    counts: Counter[str] = Counter()
    with killick.open(setting.url) as kd:
        wrong = [*_runs(kd, setting, world, counts), *map(str, kd.store.verify().problems)]
    wrong += _requests(played, world["requests"], counts)
    wrong += _frozen(played, counts)
    wrong += [
        f"{each['run']}: let go of while it was {each['what']}"
        for each in played.told
        if each["what"] in GOING and each.get("wake_at_us") is None  # one that backs off after a death is woken
    ]
    wrong += [played.errors[-3_000:]] if played.errors else []
    said = Counter(each["what"] for each in played.told)
    return {
        "seed": setting.seed,
        "runs": setting.runs,
        "seconds": round(played.seconds, 1),
        "kills": played.kills,
        "freezes": len(played.freezes),
        "restarts": played.restarts,
        "takeovers": sum("left_by" in each for each in played.told if each["what"] == "claimed"),
        "lost": said["lost"],
        **counts,
        "said": dict(said),
        "wrong": wrong,
    }


# the record, and the far side ---------------------------------------------------------------------


def _runs(kd: killick.Client, setting: Setting, world: dict[str, Any], counts: Counter[str]) -> Iterator[str]:
    done = defaultdict[str, list[int]](list)
    for _, what, receipt in world["effects"]:
        done[what].append(receipt)
    for what in errands.entries(kd):
        done[what].append(1)
    listed = {row.id: row for row in kd.list(limit=10_000)}
    for run in (name_of(number) for number in range(setting.runs)):
        row = listed.pop(run, None)
        if row is None or row.status != "completed":
            yield f"{run}: {_standing(kd, run) if row is not None else 'not there'}"
            for label in (*EFFECTS, *NEW_EFFECTS):
                done.pop(f"{run}/{label}", None)
            continue
        state = kd.state(run)
        receipts = state.data(state.fold.facts.ended)["result"]
        new = [label for label in NEW_EFFECTS if label in receipts]
        counts["on the new code"] += bool(new)
        for label in (*EFFECTS, *new):
            what = f"{run}/{label}"
            if (there := done.pop(what, [])) != [receipts[label]]:
                yield f"{what}: the far side did {there}, and the run has {receipts[label]}"
        yield from _events(kd, run, len(STEPS) + len(new), counts)
    yield from (f"{run}: nobody started it" for run in listed)
    yield from (f"{what}: done {receipts}, and no run asked for it" for what, receipts in done.items())


def _standing(kd: killick.Client, run: str) -> str:
    info, head = kd.info(run), kd.runtime.store.head(run)
    waits = [(wait.step, wait.waits_for, wait.prompt) for wait in info.waits]
    assert head is not None
    return f"{info.status} at step {info.step}, wakes at {info.wake_at_us}, waits {waits}, {head}"


def _events(kd: killick.Client, run: str, steps: int, counts: Counter[str]) -> Iterator[str]:
    tops = len(kd.state(run).fold.tops)
    if tops != steps:
        yield f"{run}: {tops} steps"
    counts["steps"] += tops
    for recorded in kd.events(run, limit=10_000):
        event = recorded.event
        counts["events"] += 1
        counts["attempts"] += isinstance(event, e.Started)
        counts["taken"] += isinstance(event, e.RunTaken)
        counts["settled"] += isinstance(event, e.AttemptSettled)
        counts["diverged"] += isinstance(event, e.RunDiverged)
        if isinstance(event, e.WaitOpened) and event.waits_for == "settlement":
            yield f"{run}: a person was asked to settle step {event.step}"


def _requests(played: Played, requests: list[dict[str, Any]], counts: Counter[str]) -> Iterator[str]:
    """The far side refuses what it did before: only a worker that was frozen within a tool may come to that."""
    frozen = {freeze.pid for freeze in played.freezes}
    asked = defaultdict[str, set[int]](set)
    for request in requests:
        counts["requests"] += 1
        asked[request["key"]].add(request["pid"])
        counts[f"fate: {request['fate']}"] += 1
        if request.get("came to") == "void":
            counts["voided"] += 1
        elif request.get("came to") == "done already":
            counts["done already"] += 1
            if not asked[request["key"]] & frozen:
                yield f"{request['what']}: asked for again after it was done, by {request['pid']}, never frozen"
    yield from _after_thaw(played, requests, counts)


def _after_thaw(played: Played, requests: list[dict[str, Any]], counts: Counter[str]) -> Iterator[str]:
    """Nothing is applied after a thaw under a claim from before: but for a tool that had begun already."""
    claims = defaultdict[tuple[int, str], list[int]](list)
    for each in played.told:
        if each["what"] == "claimed":
            claims[each["pid"], each["run"]].append(each["at_ns"])
    for freeze in played.freezes:
        for request in requests:
            if request["pid"] != freeze.pid or request["dated"] <= freeze.until_ns:
                continue
            run = request["what"].partition("/")[0]
            claimed = max((at for at in claims[freeze.pid, run] if at < request["dated"]), default=0)
            if claimed < freeze.since_ns:
                # Between the last look at the lease and the tool's first line there is nothing but code.
                counts["begun before the freeze"] += 1
                late = (request["dated"] - freeze.until_ns) / 1e6
                if late > 50:
                    yield f"{request['what']}: applied {late:.0f} ms after a thaw, under a claim from before the freeze"


def _frozen(played: Played, counts: Counter[str]) -> Iterator[str]:
    """A worker that was frozen over its lease has lost what it had in hand, and says so."""
    for freeze in played.freezes:
        mine = [each for each in played.told if each["pid"] == freeze.pid]
        in_hand: dict[str, int] = {}
        for each in mine:
            if each["at_ns"] < freeze.since_ns and "run" in each:
                if each["what"] == "claimed":
                    in_hand[each["run"]] = each["at_ns"]
                elif each["what"] != "preempted":
                    in_hand.pop(each["run"], None)
        counts["in hand at a freeze"] += len(in_hand)
        ends: dict[str, str] = {}
        for each in mine:
            if each["at_ns"] > freeze.since_ns and each.get("run") in in_hand:
                ends.setdefault(each["run"], each["what"])
        counts["lost by a freeze"] += sum(end == "lost" for end in ends.values())
        for run in in_hand:
            if ends.get(run) in (None, "claimed"):
                yield f"{run}: {freeze.pid} had it when it was frozen, and never said what became of it"
