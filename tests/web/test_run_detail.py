"""The page of a run and its documents: what is on record, all of it, read in parts, and nothing that an agent said is
more than text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

import killick
from killick import rules
from killick.clock import ManualClock
from killick.history.timeline import timeline
from killick.log.writer import Entry
from killick.model import events as e
from killick.presenting.explain import why
from killick.store import MemoryStore
from killick.store.records import Row
from killick.web.app import asgi
from killick.web.auth.access import Identified
from leasing import leased_by

XSS = "<img src=x onerror=alert(1)>\"'</script><script>alert(2)</script>{{7*7}}"
LETTER = "Dear Ada, " * 4_000
TRIED: list[int] = []
MAIL = "ada@example.org"
SMALL = rules.arguments("page_pay", amount={"max": 100}, name="small")


async def recall(effect: killick.Effect) -> None:
    return None


@killick.tool(effect="reads", name="page_fetch")
async def fetch(claim: int) -> dict[str, Any]:
    return {"claim": claim, "letter": LETTER, "email": MAIL}


@killick.tool(
    effect="idempotent", name="page_hold", retry=killick.Retry(attempts=3, first=0.001, jitter=0), compensate=recall
)
async def hold(amount: int, step: killick.ToolStep = killick.STEP) -> str:
    TRIED.append(amount)
    step.progress({"tried": len(TRIED)})
    if len(TRIED) < 3:
        try:
            raise TimeoutError("no answer")
        except TimeoutError as error:
            raise ConnectionError(f"the bank is away {XSS}") from error
    return f"held {amount}"


@killick.tool(effect="at_most_once", name="page_pay")
async def pay(to: str, amount: int) -> str:
    return f"paid {amount} to {to}"


def model(messages: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
    return {
        "type": "message", "role": "assistant", "model": "sonnet-5", "stop_reason": "end_turn",
        "content": [{"type": "thinking", "thinking": "let me see"}, {"type": "text", "text": f"Plausible. {XSS}"}],
        "usage": {"input_tokens": 100, "output_tokens": 20},
    }  # fmt: skip


@killick.agent(name="page_child")
async def child(run: killick.Run, n: int) -> int:
    await run.call(fetch, n)
    return n


@killick.agent(name="page_review")
async def review(run: killick.Run, claim: dict[str, Any]) -> str:
    await run.plan(["fetch", "ask", "pay"])
    await run.at("fetch")
    await run.call(fetch, 17)
    await run.gather(run.call(fetch, 1), run.call(hold, 5))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it?"}]
    reply = await run.model(model, messages=messages)
    messages += [{"role": "assistant", "content": reply["content"][1]["text"]}, {"role": "user", "content": "Sure?"}]
    await run.model(model, messages=messages)
    route = await run.decided(f"Who? {XSS}", "manager", options=["auto", "manager"], because=f"it is large {XSS}")
    await run.update(route=route, words=XSS, email=MAIL)
    await run.note(f"asked {XSS}")
    spawned = await run.spawn(child, 4)
    await spawned.result()
    await run.at("ask")
    answer = await run.ask(f"Pay? {XSS}", to="managers", timeout="3d", default="reject")
    await run.at("pay")
    if not answer.approved:
        return "rejected"
    return await run.call(pay.options(because="approved"), claim["email"], 1250)


@killick.agent(name="page_long")
async def long(run: killick.Run, n: int) -> int:
    for k in range(n):
        await run.call(fetch, k)
    return n


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    TRIED.clear()
    with killick.open("memory:") as made:
        yield made


def web(kd: killick.Client, scope: str = "viewer", **options: Any) -> TestClient:
    app = asgi(kd, identify=lambda request: ("mia", scope), **options)
    return TestClient(app, base_url="http://127.0.0.1")


def api(kd: killick.Client, path: str, **options: Any) -> Any:
    answer = web(kd, **options).get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def waiting(kd: killick.Client, run: str = "r") -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(review, {"email": MAIL, "words": XSS}, id=run, tags=("storm", XSS))


def done(kd: killick.Client, run: str = "r") -> None:
    waiting(kd, run)
    kd.answer(run, "approve", by="mia", comment=f"fine {XSS}")
    kd.advance(run)


# where it is --------------------------------------------------------------------------------------


def test_a_run_says_where_it_is_why_it_stands_there_and_what_will_wake_it(kd: killick.Client) -> None:
    waiting(kd)
    doc = api(kd, "/runs/r")
    assert doc["status"] == "waiting"
    assert doc["position"]["where"] == "Waiting at step 8 (ask)"
    assert doc["position"]["next"].startswith("Nothing happens until there is an answer from managers, or until 20")
    assert doc["position"]["place"] == "ask: step 2 of 3"
    [wait] = doc["waits"]
    assert (wait["id"], wait["to"], wait["prompt"]) == ("r:8", ["managers"], f"Pay? {XSS}")
    assert doc["counts"]["steps"] == 8
    assert doc["counts"]["effects"] == 1
    assert doc["counts"]["failures"] == 2
    assert (doc["usage"]["model_calls"], doc["usage"]["tokens_in"], doc["usage"]["tokens_out"]) == (2, 200, 40)
    assert [each["run"] for each in doc["children"]] == ["r/6"]
    assert "storm" in doc["tags"]
    assert doc["input"]["email"] == MAIL


def test_an_answer_that_no_worker_has_taken_is_what_the_run_page_says_next(kd: killick.Client) -> None:
    waiting(kd)
    kd.answer("r", "approve", by="mia")
    said = "Answered by mia: approve; a worker takes it next."
    assert api(kd, "/runs/r")["position"]["next"] == said
    assert said in web(kd).get("/runs/r").text
    assert api(kd, "/runs/r/steps/8")["why"][-1] == said
    [found] = api(kd, "/find?what=answers")["found"]
    assert (found["by"], found["verb"], found["taken"]) == ("mia", "approve", False)
    assert "not taken yet" in web(kd).get("/find?what=answers").text


def test_a_run_that_ended_says_how_and_with_what(kd: killick.Client) -> None:
    done(kd)
    doc = api(kd, "/runs/r")
    assert doc["position"]["where"] == "Completed"
    assert doc["result"] == f"paid 1250 to {MAIL}"
    assert doc["worker"] is None or not doc["worker"]["lives"] or doc["status"] == "completed"


def test_a_failed_run_says_at_which_step_and_why(kd: killick.Client) -> None:
    @killick.tool(effect="reads", name="page_break")
    async def break_it() -> None:
        raise LookupError("no such claim")

    @killick.agent(name="page_broken")
    async def broken(run: killick.Run, n: int) -> None:
        await run.call(break_it)

    with pytest.raises(killick.RunFailed):
        kd.run(broken, 1, id="r")
    doc = api(kd, "/runs/r")
    assert doc["position"]["where"] == "Failed at step 1 (page_break)"
    assert doc["position"]["next"] == "Nothing more happens until a person resumes the run."
    assert [each["type"] for each in doc["failure"]["errors"]] == ["killick.errors.StepFailed", "LookupError"]


def test_a_paused_run_says_who_paused_it(kd: killick.Client) -> None:
    waiting(kd)
    kd.pause("r", by="otto", because="for a while")
    doc = api(kd, "/runs/r")
    assert doc["status"] == "paused"
    assert "by otto" in doc["position"]["next"]
    assert "until a person resumes it" in doc["position"]["next"]


def test_a_run_that_nobody_knows_is_not_found(kd: killick.Client) -> None:
    for path in ("", "/steps", "/trace", "/decisions", "/failures", "/effects", "/events", "/export"):
        answer = web(kd).get(f"/api/v1/runs/none{path}")
        assert answer.status_code == 404, path
        assert answer.json()["code"] == "run_unknown"
    waiting(kd)
    assert web(kd).get("/api/v1/runs/r/steps/99").json()["code"] == "step_unknown"


def test_an_id_with_slashes_and_signs_is_found(kd: killick.Client) -> None:
    name = "claim/19 & <b>&amp;?#é"
    waiting(kd, name)
    at = quote(name, safe="")
    assert api(kd, f"/runs/{at}")["id"] == name
    page = web(kd).get(f"/runs/{at}")
    assert page.status_code == 200
    assert f"/runs/{at}/steps/1" in page.text


# steps --------------------------------------------------------------------------------------------


def test_sections_by_cursor_have_every_step_once(kd: killick.Client) -> None:
    kd.run(long, 57, id="r")
    found: list[str] = []
    cursor = ""
    while True:
        doc = api(kd, f"/runs/r/steps?limit=10{cursor}")
        found = [row["step"]["number"] for row in doc["rows"] if row["step"]] + found
        assert doc["total"] == 57
        if doc["next"] is None:
            break
        cursor = f"&cursor={doc['next']}"
    assert found == [str(n) for n in range(1, 58)]


def test_later_leads_to_the_steps_after(kd: killick.Client) -> None:
    kd.run(long, 40, id="r")
    first = api(kd, "/runs/r/steps?limit=10&cursor=11")
    assert (first["first"], first["last"]) == (1, 10)
    later = api(kd, f"/runs/r/steps?limit=10&cursor={first['later']}")
    assert (later["first"], later["last"]) == (11, 20)
    assert api(kd, "/runs/r/steps?limit=10")["later"] is None


def test_a_line_says_what_a_step_was_and_came_to(kd: killick.Client) -> None:
    done(kd)
    lines = {row["step"]["number"]: row["step"] for row in api(kd, "/runs/r/steps")["rows"] if row["step"]}
    assert lines["2"]["nested_steps"] == 2
    assert (lines["2.2.1"]["attempts"], lines["2.2.1"]["effect"], lines["2.2.1"]["outcome"]) == (
        3,
        "idempotent",
        "held 5",
    )
    assert lines["2.2.1"]["summary"] == "amount=5"
    assert lines["3"]["tokens"] == 120
    assert lines["5"]["outcome"] == "manager"
    assert lines["6"]["child"] == "r/6"
    assert lines["8"]["outcome"].startswith("mia: approve")
    assert lines["9"]["because"] == "approved"
    assert len(lines["1"]["outcome"]) <= 240


def test_moments_stand_between_the_steps(kd: killick.Client) -> None:
    done(kd)
    told = [row["moment"]["text"] for row in api(kd, "/runs/r/steps")["rows"] if row["moment"]]
    assert told[0].startswith("started with")
    assert "fetch" in told
    assert any(text.startswith("context ") for text in told)
    assert told[-1].startswith("completed with")


@pytest.mark.slow
def test_a_scope_with_very_much_inside_is_shown_in_part(kd: killick.Client) -> None:
    @killick.agent(name="page_wide")
    async def wide(run: killick.Run, n: int) -> None:
        await run.gather(*(run.call(fetch, k) for k in range(n)))

    kd.run(wide, 300, id="r")
    doc = api(kd, "/runs/r")
    rows = [row["step"]["number"] for row in doc["steps"]["rows"] if row["step"]]
    assert len(rows) == 61
    assert rows[-1] == "1.300.1"
    assert [
        row["moment"]["text"][:3] for row in doc["steps"]["rows"] if row["moment"] and row["moment"]["kind"] == "more"
    ] == ["240"]
    near = api(kd, "/runs/r?step=1.150.1")
    assert "1.150.1" in [row["step"]["number"] for row in near["steps"]["rows"] if row["step"]]


# one step -----------------------------------------------------------------------------------------


def test_a_step_has_every_attempt_with_its_error_and_what_led_to_it(kd: killick.Client) -> None:
    done(kd)
    doc = api(kd, "/runs/r/steps/2.2.1")
    assert [each["outcome"] for each in doc["attempts"]] == ["unknown", "unknown", "returned"]
    first = doc["attempts"][0]
    assert [each["type"] for each in first["errors"]] == ["ConnectionError", "TimeoutError"]
    assert first["errors"][0]["frames"][-1]["function"] == "hold"
    assert first["progress"] == {"tried": 1}
    assert first["retry_at"] > first["started_at"]
    assert first["idempotency_key"] == doc["attempts"][2]["idempotency_key"] == doc["effect_status"]["idempotency_key"]
    assert doc["effect_status"]["status"] == "happened"
    assert doc["arguments"] == {"amount": 5}
    assert doc["output"] == "held 5"
    assert any(line.startswith("Attempt 2 began") for line in doc["why"])
    assert any(each["part"] == "effects" for each in doc["changes"])


def test_a_step_has_who_was_asked_who_answered_and_what_was_decided(kd: killick.Client) -> None:
    done(kd)
    [wait] = api(kd, "/runs/r/steps/8")["waits"]
    assert (wait["to"], wait["by"], wait["outcome"]) == (["managers"], "mia", "answered")
    assert wait["comment"] == f"fine {XSS}"
    decision = api(kd, "/runs/r/steps/5")["decision"]
    assert (decision["by"], decision["choice"], decision["options"]) == ("agent", "manager", ["auto", "manager"])


def test_a_step_that_was_undone_says_by_which(kd: killick.Client) -> None:
    done(kd)
    kd.undo("r", "2.2.1", by="mia")
    doc = api(kd, "/runs/r/steps/2.2.1")
    assert doc["effect_status"]["status"] == "undone"
    effects = {each["step"]: each for each in api(kd, "/runs/r/effects")["effects"]}
    assert effects["2.2.1"]["status"] == "undone"
    assert effects["2.2.1"]["undone_by"] == doc["undone_by"]
    assert effects[doc["undone_by"]]["undoes"] == "2.2.1"


def test_a_step_that_a_contract_rejected_names_the_rule(kd: killick.Client) -> None:
    @killick.agent(name="page_bound", contract=killick.Contract("small", [SMALL]))
    async def bound(run: killick.Run, n: int) -> None:
        await run.call(pay, "ada", n)

    with contextlib.suppress(killick.RunFailed):
        kd.run(bound, 500, id="r")
    doc = api(kd, "/runs/r/steps/1")
    assert (doc["verdict"]["ruling"], doc["verdict"]["rule"]) == ("reject", "small")
    assert doc["errors"]


def test_every_step_of_the_timeline_has_its_document(kd: killick.Client) -> None:
    done(kd)
    for step in timeline(kd.runtime.log, "r").steps():
        doc = api(kd, f"/runs/r/steps/{step.number}")
        assert (doc["name"], doc["status"], doc["kind"]) == (step.name, step.status, step.sort)
        assert web(kd).get(f"/runs/r/steps/{step.number}").status_code == 200


# the record ---------------------------------------------------------------------------------------


def test_the_trace_tells_only_what_is_new_of_a_conversation(kd: killick.Client) -> None:
    done(kd)
    doc = api(kd, "/runs/r/trace")
    first, second = (each for each in doc["traced"] if each["kind"] == "model")
    assert (first["before"], [each["role"] for each in first["messages"]]) == (0, ["system", "user"])
    assert (second["before"], [each["text"] for each in second["messages"]]) == (3, ["Sure?"])
    assert first["reasoning"] == "let me see"
    assert first["said"] == f"Plausible. {XSS}"
    used = {"model": "sonnet-5", "tokens_in": 100, "tokens_out": 20, "tokens_cached": 0, "cost_micros": 0}
    assert first["usage"] == used
    assert [each["step"] for each in doc["traced"]] == ["1", "2.1.1", "2.2.1", "3", "4", "9"]
    part = api(kd, "/runs/r/trace?limit=2")
    assert ([each["step"] for each in part["traced"]], part["traced"][0]["before"]) == (["4", "9"], 3)
    assert [each["step"] for each in api(kd, f"/runs/r/trace?limit=2&cursor={part['next']}")["traced"]] == [
        "2.2.1",
        "3",
    ]


def test_decisions_and_failures_have_their_context(kd: killick.Client) -> None:
    done(kd)
    [decision] = api(kd, "/runs/r/decisions")["decisions"]
    assert (decision["step"], decision["because"]) == ("5", f"it is large {XSS}")
    failures = api(kd, "/runs/r/failures")
    assert [(each["step"], each["attempt"]) for each in failures["failures"]] == [("2.2.1", 2), ("2.2.1", 1)]
    assert failures["failures"][0]["input"] == {"amount": 5}
    assert failures["failures"][0]["progress"] == {"tried": 2}
    only = api(kd, "/runs/r/failures?limit=1")
    assert (len(only["failures"]), only["next"], only["total"]) == (1, "1", 2)


def test_effects_that_a_rewind_left_stay(kd: killick.Client) -> None:
    done(kd)
    kd.rewind("r", "9:before", by="mia")
    effects = {each["step"]: each for each in api(kd, "/runs/r/effects")["effects"]}
    assert effects["9"]["rewound"]
    assert not effects["2.2.1"]["rewound"]
    assert effects["9"]["result"] == f"paid 1250 to {MAIL}"


def test_the_log_is_verbatim_and_in_order(kd: killick.Client) -> None:
    done(kd)
    found, after = list[dict[str, Any]](), 0
    while True:
        doc = api(kd, f"/runs/r/events?after={after}&limit=7")
        found += doc["events"]
        if doc["next"] is None:
            break
        after = int(doc["next"])
    recorded = kd.events("r")
    assert [each["seq"] for each in found] == [each.seq for each in recorded]
    assert [each["hash"] for each in found] == [each.row.hash.hex() for each in recorded]
    last = api(kd, "/runs/r/events?limit=5")
    assert [each["seq"] for each in last["events"]] == [each.seq for each in recorded[-5:]]
    assert last["earlier"] == len(recorded) - 10


def test_a_value_is_there_whole(kd: killick.Client) -> None:
    done(kd)
    doc = api(kd, "/runs/r/steps/1")
    page = web(kd).get("/runs/r/steps/1").text
    assert LETTER not in page
    assert "All of it" in page
    answer = web(kd).get(f"/api/v1/runs/r/events/{doc['output_seq']}/output")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert LETTER in answer.text
    assert web(kd).get(f"/api/v1/runs/r/events/{doc['output_seq']}/nothing").status_code == 404
    assert web(kd).get("/api/v1/runs/r/events/100000/output").status_code == 404


def test_why_is_told_as_the_command_line_tells_it(kd: killick.Client) -> None:
    waiting(kd)
    whole = timeline(kd.runtime.log, "r")
    assert api(kd, "/runs/r/steps/5")["why"] == why(whole, "5", zone=None)
    assert api(kd, "/runs/r/steps/1")["why"] == why(whole, "1", zone=None)


def test_verifying_is_an_operators_and_says_what_it_found(kd: killick.Client) -> None:
    done(kd)
    client = web(kd, "operator")
    token = _csrf(client.get("/runs/r").text)
    found = client.post("/api/v1/runs/r/verify", headers={"X-Killick-CSRF": token})
    assert found.status_code == 200
    assert found.json()["holds"]
    assert found.json()["events"] == kd.runtime.log.head("r").seq


def _csrf(page: str) -> str:
    found = re.search(r'name="killick-csrf" content="([^"]*)"', page)
    assert found is not None
    return found[1]


def test_an_export_can_be_loaded(kd: killick.Client) -> None:
    done(kd)
    answer = web(kd).get("/api/v1/runs/r/export")
    assert answer.headers["content-disposition"] == 'attachment; filename="r.killick"'
    assert len(answer.content) > 1_000


# what is not to be seen ---------------------------------------------------------------------------

PATHS = (
    "", "/steps", "/steps/1", "/steps/2.2.1", "/steps/3", "/steps/5", "/steps/8", "/steps/9", "/trace", "/decisions",
    "/failures", "/effects", "/events", "/steps",
)  # fmt: skip


@pytest.mark.slow
def test_hidden_fields_are_hidden_in_every_document(kd: killick.Client) -> None:
    done(kd)
    client = web(kd, redact=["email"])
    for path in PATHS:
        answer = client.get(f"/api/v1/runs/r{path}")
        assert answer.status_code == 200, path
        assert MAIL not in answer.text, path
    for step in ("1", "9"):
        seq = client.get(f"/api/v1/runs/r/steps/{step}").json()["output_seq"]
        assert MAIL not in client.get(f"/api/v1/runs/r/events/{seq}/output").text
    refused = client.get("/api/v1/runs/r/export")
    assert (refused.status_code, refused.json()["code"]) == (403, "redacted")


class _Attributes(HTMLParser):
    """The names of all attributes of a page, as a browser reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {name for name, _ in attrs}

    @classmethod
    def of(cls, page: str) -> set[str]:
        found = cls()
        found.feed(page)
        return found.names


def test_what_agents_and_people_wrote_is_text_and_nothing_else(kd: killick.Client) -> None:
    name = f"r {XSS}"
    done(kd, name)
    client, at = web(kd, "operator"), quote(name, safe="")
    for path in PATHS:
        if path.startswith("/steps?") or path == "/steps":
            continue
        page = client.get(f"/runs/{at}{path}")
        assert page.status_code == 200, path
        assert "<img src=x" not in page.text, path
        assert "<script>alert" not in page.text, path
        assert "49" not in re.findall(r"script&gt;(\S{0,7})", page.text), path
        assert not _Attributes.of(page.text) & {"style", "onerror", "onload", "onclick"}, path


# at its cost --------------------------------------------------------------------------------------


class _Counting:
    def __init__(self, store: Any) -> None:
        self._store, self.rows = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, *args: Any, **options: Any) -> list[Row]:
        found: list[Row] = self._store.read(*args, **options)
        self.rows += len(found)
        return found


@killick.tool(effect="reads", name="page_small")
async def small(n: int) -> int:
    return n


@killick.agent(name="page_longer")
async def longer(run: killick.Run, n: int) -> int:
    for k in range(n):
        await run.call(small, k)
    return n


@pytest.mark.slow
def test_a_page_of_a_long_run_reads_no_more_than_what_it_shows() -> None:
    """Between two snapshots lie a thousand events: a few of those, and the events that are shown."""
    store = MemoryStore()
    store.close = lambda: None  # type: ignore[method-assign]
    with killick.Client(store, behind=False) as kd:
        kd.run(longer, 4_000, id="r")
        total = kd.runtime.log.head("r").seq
    counting = _Counting(store)
    with killick.Client(counting, behind=False) as kd:
        client = web(kd)
        paths = (
            "",
            "?cursor=2000",
            "?step=100",
            "/steps/2000",
            "/trace",
            "/failures",
            "/effects",
            "/events",
            "/decisions",
        )
        for path in paths:
            counting.rows = 0
            assert client.get(f"/runs/r{path}").status_code == 200
            assert counting.rows < 7_000 < total, path
        text = client.get("/runs/r").text
        assert text.count('class="step ') <= 200


# what a page makes of it ---------------------------------------------------------------------------


@killick.agent(name="truth_child")
async def truth_child(run: killick.Run) -> None:
    raise RuntimeError("no")


@killick.tool(name="truth_flaky", effect="reads", retry=killick.Retry(attempts=3, first=0.001))
async def truth_flaky(seen: list[int]) -> str:
    TRUTH.append(1)
    if len(TRUTH) < 2:
        raise ConnectionError("503")
    return "ok"


TRUTH: list[int] = []


@killick.agent(name="truth_parent")
async def truth_parent(run: killick.Run) -> str:
    await run.plan(["first", "never", "last"])
    await run.at("first")
    child = await run.spawn(truth_child)
    with contextlib.suppress(killick.KillickError):
        await child.result()
    await run.at("last")
    return await run.call(truth_flaky, [])


def test_only_what_went_well_is_green(tmp_path: Path) -> None:
    """A failed child, a stage that was never entered, and a failure that was recovered from."""
    TRUTH.clear()
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.start(truth_parent, id="p")
        while kd.advance_due():
            pass
        with TestClient(asgi(kd, access=Identified(kd, lambda request: ("ann", "operator")))) as web:
            run, page = web.get("/api/v1/runs/p").json(), web.get("/runs/p").text
            [line] = web.get("/api/v1/runs?q=p&agent=truth_parent").json()["runs"]
    assert (run["status"], run["position"]["entered"], line["entered"]) == ("completed", [0, 2], [0, 2])
    assert re.findall(r'<li class="(\w*)" >(\w+)</li>', page) == [("done", "first"), ("", "never"), ("done", "last")]
    assert "is-failed" in page
    assert "<dt>Failures</dt>" not in page
    assert "1 step retried" in page
    assert line["reasons"] == [{"kind": "result", "text": "ok", "at": None}]


def test_a_process_that_died_is_a_break_in_the_timeline_and_is_counted() -> None:
    clock = ManualClock()
    with killick.open("memory:", clock=clock) as kd:
        kd.start(truth_child, id="r")
        log = leased_by("14532-gone", kd.runtime.log, "r", seconds=30)
        log.append(Entry(e.RunTaken(at=kd.runtime.clock.now_us(), epoch=log.epoch, holder="14532-gone")))
        clock.advance(31)
        kd.start(truth_child, id="crashing")
        crashing = leased_by("14533-gone", kd.runtime.log, "crashing", seconds=30)
        crashing.append(Entry(e.LeaseLapsed(at=clock.now_us(), holder="14533-gone")))
        kd.advance("r")
        kd.fork("r", at="start", id="f", by="ann")
        with TestClient(asgi(kd, access=Identified(kd, lambda request: ("ann", "operator")))) as web:
            run, page, fork = web.get("/api/v1/runs/r").json(), web.get("/runs/r").text, web.get("/runs/f").text
            crashed = web.get("/api/v1/runs/crashing").json()["counts"]
    assert (run["counts"]["crashes"], run["counts"]["repeated"]) == (1, 0)
    assert "1 survived <small>0 effects repeated</small>" in page
    assert re.search(r'kind-lease-lapsed".*?died: process 14532 between steps', page, re.DOTALL)
    assert "it was rewound" not in fork
    assert (crashed["crashes"], crashed["events"]) == (0, 2)
