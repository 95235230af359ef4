"""Triggers, workers and health: what is shown is how things stand, and what is done to a trigger is done as by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

import killick
from killick.client.client import Client
from killick.clock import ManualClock, timestamp
from killick.errors import RunUnknown
from killick.log.writer import Entry
from killick.model import events as e
from killick.model import system_events
from killick.store.records import RunQuery
from killick.triggers import TRIGGERS
from killick.web.app import asgi
from killick.web.auth.access import Identified
from killick.workers import hooks
from killick.workers.hooks import HookEvent
from leasing import leased_by


@killick.agent
async def report(run: killick.Run, day: str) -> str:
    return f"report of {day}"


@killick.agent
async def sleeper(run: killick.Run) -> None:
    await run.sleep("1h")


@killick.agent
async def asks(run: killick.Run, to: str) -> None:
    await run.ask("May it?", to=to)


@killick.tool(effect="at_most_once")
async def posted() -> None:
    raise TimeoutError("no answer")


@killick.agent
async def doubts(run: killick.Run) -> None:
    await run.call(posted)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_794_819_600_000_000)


@pytest.fixture
def kd(tmp_path: Path, clock: ManualClock) -> Iterator[Client]:
    declared, listening = TRIGGERS.copy(), dict(hooks.HOOKS)
    with killick.open(str(tmp_path / "killick.db"), clock=clock) as made:
        yield made
    TRIGGERS.clear()
    TRIGGERS.update(declared)
    hooks.HOOKS.clear()
    hooks.HOOKS.update(listening)


@pytest.fixture
def web(kd: Client) -> Iterator[TestClient]:
    app = asgi(kd, access=Identified(kd, lambda request: ("ann", "operator")))
    # A header that no page of another site can make a browser send, so that no proof is asked for.
    with TestClient(app, headers={"Authorization": "Bearer mine"}) as made:
        yield made


def often(web: TestClient) -> dict[str, Any]:
    """The trigger that these tests declare, among those that others may have."""
    [line] = [each for each in told(web, "/triggers")["triggers"] if each["name"] == "often"]
    return cast("dict[str, Any]", line)


def told(web: TestClient, path: str) -> Any:
    answer = web.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    page = web.get(path)
    assert page.status_code == 200, page.text
    return answer.json()


# triggers -----------------------------------------------------------------------------------------


def test_a_trigger_that_no_worker_has_taken_up_is_shown_with_its_policies(kd: Client, web: TestClient) -> None:
    killick.triggers.every("10m", report, input="x", name="often", missed="all", overlap="queue")
    line = often(web)
    assert (line["name"], line["what"], line["agent"]) == ("often", "every 10m", "report")
    assert (line["missed"], line["overlap"], line["taken_up"]) == ("all", "queue", False)
    assert "no worker has taken it up yet" in web.get("/triggers").text


def test_firing_starts_a_run_in_the_name_of_who_asked(kd: Client, web: TestClient) -> None:
    killick.triggers.every("10m", report, input="x", name="often")
    fired = web.post("/api/v1/triggers/often/fire", json={"input": "today"})
    assert fired.status_code == 200, fired.text
    run = fired.json()["run"]
    assert fired.json() == {"trigger": "often", "run": run, "started": True}
    assert kd.runtime.log.data(run, 1)["input"] == "today"
    line = often(web)
    assert (line["run"], line["fired"], line["last_at"]) == (run, 1, timestamp(kd.runtime.clock.now_us()))
    assert [(each["did"], each["by"]) for each in line["recent"]][:1] == [("fired", "ann")]


def test_an_input_that_the_agent_cannot_take_is_refused_and_fires_nothing(kd: Client, web: TestClient) -> None:
    killick.triggers.every("10m", report, input="x", name="often")
    assert web.post("/api/v1/triggers/often/fire", json={"input": 5}).status_code in (409, 422)
    assert kd.list(agent="report") == []


def test_a_trigger_is_paused_and_resumed_with_who_and_why(kd: Client, web: TestClient) -> None:
    killick.triggers.every("10m", report, input="x", name="often")
    web.post("/api/v1/triggers/often/fire", json={})
    assert web.post("/api/v1/triggers/often/pause", json={"because": "wrong numbers"}).json()["did"] == "paused"
    line = often(web)
    assert line["paused"] is True
    assert (line["recent"][0]["did"], line["recent"][0]["by"], line["recent"][0]["why"]) == (
        "paused",
        "ann",
        "wrong numbers",
    )
    assert web.post("/api/v1/triggers/often/resume", json={}).status_code == 200
    assert often(web)["paused"] is False


def test_pausing_a_trigger_that_nobody_took_up_says_who_does(web: TestClient) -> None:
    killick.triggers.every("10m", report, input="x", name="often")
    refused = web.post("/api/v1/triggers/often/pause", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "trigger_not_set")
    assert "killick worker" in refused.json()["detail"]


def test_a_trigger_that_is_not_there_is_not_found(web: TestClient) -> None:
    for act in ("fire", "pause", "resume"):
        refused = web.post(f"/api/v1/triggers/nobody/{act}", json={})
        assert (refused.status_code, refused.json()["code"]) == (404, "trigger_unknown")


def test_what_was_missed_is_counted_and_said_why(kd: Client, web: TestClient, clock: ManualClock) -> None:
    killick.triggers.every("10m", report, input="x", name="often", missed="once", overlap="allow")
    web.post("/api/v1/triggers/often/fire", json={})
    clock.advance(3_600)
    kd.runtime.blocking(_attended(kd))
    line = often(web)
    assert line["passed"] > 0
    assert {each["why"] for each in line["recent"] if each["did"] == "passed"} == {"no worker was running"}


async def _attended(kd: Client) -> None:
    async with kd.worker():
        while any(each.next_us is None or each.next_us <= kd.runtime.clock.now_us() for each in _ours(kd)):
            await asyncio.sleep(0.01)


def _ours(kd: Client) -> list[killick.triggers.TriggerInfo]:
    return [each for each in kd.triggers.list() if each.name == "often"]


# hooks --------------------------------------------------------------------------------------------


def test_a_hook_that_fails_is_shown_with_what_it_did_not_take(kd: Client, web: TestClient) -> None:
    @killick.on("run.started", name="chat")
    def chat(event: HookEvent) -> None:
        raise ConnectionError("the chat is down")

    async def until_it_failed() -> None:
        hooks.ensure(kd.runtime.engine)
        async with kd.worker():
            await kd.as_async().start(report, "x", id="r1")
            while not any(isinstance(each.event, system_events.HookFailed) for each in _recorded(kd)):
                await asyncio.sleep(0.01)

    kd.runtime.blocking(until_it_failed())
    [line] = told(web, "/triggers")["hooks"]
    assert (line["name"], line["failing"], line["attempts"], line["kinds"]) == ("chat", True, 1, ["run.started"])
    [missed] = line["undelivered"]
    assert (missed["run"], missed["seq"]) == ("r1", 1)
    assert "the chat is down" in missed["why"]
    assert missed["retry_at"] > timestamp(kd.runtime.clock.now_us())
    assert told(web, "/health")["feed_behind"] > 0


def _recorded(kd: Client) -> Any:
    with contextlib.suppress(RunUnknown):
        return kd.events("hook:chat")
    return []


# workers ------------------------------------------------------------------------------------------


def test_who_holds_a_run_is_shown_with_what_it_is_at(kd: Client, web: TestClient) -> None:
    kd.start(sleeper, None, id="s1")
    log = leased_by("worker-7", kd.runtime.log, "s1", seconds=30)
    [line] = told(web, "/workers")["workers"]
    assert (line["holder"], line["runs"]) == ("worker-7", 1)
    kd.runtime.store.release("s1", epoch=log.epoch)
    assert told(web, "/workers")["workers"] == []


def test_runs_that_are_due_and_nobody_takes_are_a_warning_that_says_what_to_start(
    kd: Client, web: TestClient, clock: ManualClock
) -> None:
    assert told(web, "/workers")["advice"] is None
    kd.start(report, "x", id="r1")
    clock.advance(90)
    found = told(web, "/workers")
    assert [(each["run"], each["left_by"]) for each in found["due"]] == [("r1", None)]
    assert found["late"] is True
    assert "no worker holds a run" in found["advice"]
    assert "killick worker" in web.get("/workers").text


def test_a_run_whose_holder_is_gone_is_shown_as_left_by_it(kd: Client, web: TestClient) -> None:
    kd.start(report, "x", id="r1")
    log = leased_by("worker-7", kd.runtime.log, "r1", seconds=30)
    kd.runtime.store.release("r1", epoch=log.epoch, left=True)
    found = told(web, "/workers")
    assert [(each["run"], each["left_by"]) for each in found["due"]] == [("r1", "worker-7")]
    assert found["abandoned"] == 1


# health -------------------------------------------------------------------------------------------


def test_health_counts_runs_and_names_what_its_promises_rest_on(kd: Client, web: TestClient) -> None:
    kd.run(report, "x", id="r1")
    kd.start(report, "y", id="r2")
    found = told(web, "/health")
    assert (found["counts"]["completed"], found["counts"]["queued"], found["due"]) == (1, 1, 1)
    assert found["oldest_due"]["run"] == "r2"
    assert {"engine", "durability"} <= {each["name"] for each in found["conditions"]}
    assert found["seal"] is None


def test_health_the_tabs_the_badge_and_the_inbox_have_the_same_numbers(
    kd: Client, web: TestClient, clock: ManualClock
) -> None:
    kd.start(asks, "ann", id="asks")
    kd.start(asks, "max", id="other")
    kd.start(doubts, None, id="doubts")
    kd.start(asks, "ann", id="parts")
    for run in ("asks", "other", "doubts", "parts"):
        kd.advance(run)
    kd.start(report, "x", id="left")
    log = leased_by("w", kd.runtime.log, "left", seconds=30)
    log.append(Entry(e.RunTaken(at=clock.now_us(), epoch=log.epoch, holder="w")))
    clock.advance(31)
    log = leased_by("w2", kd.runtime.log, "parts", seconds=30)
    log.append(Entry(e.RunDiverged(at=clock.now_us(), step="1"), {"recorded": "ask", "found": "sleep", "builds": []}))
    kd.runtime.store.release("parts", epoch=log.epoch)

    health, runs, inbox = told(web, "/health"), told(web, "/runs"), told(web, "/inbox")
    assert health["counts"] == runs["counts"]
    assert {name: count for name, count in runs["counts"].items() if count} == {
        "waiting": 3, "code_mismatch": 1, "abandoned": 1, "total": 5,
    }  # fmt: skip
    for status, count in runs["counts"].items():
        if status != "total":
            assert len(told(web, f"/runs?status={status}")["runs"]) == count
    assert health["questions"] == len(inbox["questions"]) == 3
    assert runs["needs"] == {
        "abandoned": 1, "in_doubt": 1, "code_mismatch": 1, "failed": 0, "asks_you": 2, "late": 0, "more": False,
    }  # fmt: skip
    assert [each["run"] for each in told(web, "/inbox?asks=doubt")["questions"]] == ["doubts"]
    assert [each["id"] for each in told(web, "/runs?waits_for=person")["runs"]] == ["other", "asks"]
    assert [each["id"] for each in told(web, "/runs?waits_for=doubt")["runs"]] == ["doubts"]
    page = web.get("/runs").text
    assert "<title>(3) Runs" in page
    for text in ('<b class="num">1</b> code mismatch', '<b class="num">2</b> ask you', "code mismatch</span>"):
        assert text in page
    head = web.get("/runs/parts").text
    assert "Code mismatch at step 1" in head
    assert "/inbox/parts" not in head
    assert "its code no longer fits its record" in web.get("/inbox/parts:1").text


def test_a_run_that_no_worker_takes_for_a_minute_is_late_and_counted(
    kd: Client, web: TestClient, clock: ManualClock
) -> None:
    kd.start(report, "x", id="r1")
    assert told(web, "/runs")["needs"]["late"] == 0
    clock.advance(61)
    assert (told(web, "/runs")["needs"]["late"], told(web, "/workers")["late"]) == (1, True)
    assert '<b class="num">1</b> late' in web.get("/runs").text
    kd.advance("r1")
    assert told(web, "/runs")["needs"]["late"] == 0


def test_a_run_that_was_set_apart_is_wrong_and_named(kd: Client, web: TestClient) -> None:
    kd.run(report, "x", id="r1")
    assert told(web, "/health")["wrong"] == 0
    kd.runtime.store.quarantine("r1", "its log is shorter than its head")
    found = told(web, "/health")
    assert (found["wrong"], found["quarantined"][0]["run"]) == (1, "r1")
    assert "its log is shorter than its head" in web.get("/health").text


def test_the_last_seal_is_told_without_its_entries(kd: Client, web: TestClient) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    kd.run(report, "x", id="r1")
    kd.store.seal(key, by="ann")
    seal = told(web, "/health")["seal"]
    assert (seal["number"], seal["by"], seal["at"]) == (1, "ann", timestamp(kd.runtime.clock.now_us()))


def test_whether_somebody_answers_is_told_to_anybody_and_nothing_else(kd: Client) -> None:
    with TestClient(asgi(kd, access=Identified(kd, lambda request: None))) as web:
        assert web.get("/api/v1/alive").json() == {"alive": True}
        assert web.get("/api/v1/health").status_code == 401


@pytest.mark.slow
def test_a_page_reads_the_ends_of_logs_and_not_the_whole(kd: Client, web: TestClient) -> None:
    """However long the log of a trigger is, as much of it is read as is shown."""
    killick.triggers.every("10m", report, input="x", name="often")
    for _ in range(80):
        web.post("/api/v1/triggers/often/fire", json={})
    read: list[int] = []
    whole = kd.runtime.store.read

    def counting(run: str, **given: Any) -> Any:
        rows = whole(run, **given)
        read.append(len(rows))
        return rows

    kd.runtime.store.read = counting  # type: ignore[method-assign]
    assert web.get("/api/v1/triggers").status_code == 200
    assert sum(read) < 400
    assert len(kd.runtime.store.runs(RunQuery(agent="report"), limit=100)) == 80
