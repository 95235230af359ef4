"""`killick show`: where a run is and what to type come first, and a page fits the terminal that it is read on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from families import fork_of
from killick.cli import style
from killick.cli.main import main
from killick.log import Entry
from killick.model import events as e
from killick.testing import call, scripted, turn

TRIED: list[int] = []
LONG = "word " * 400


class Refused(Exception):
    """The far side said no."""

    status_code = 422
    body = '{"error": "vat_id", "message": "no such VAT id"}'


@killick.tool(effect="reads", name="show_fetch")
async def fetch(claim: int) -> list[str]:
    return ["report.pdf", "photo.jpg"]


@killick.tool(effect="idempotent", name="show_hold", retry=killick.Retry(attempts=4, first=0.01))
async def hold(claim: int, amount: int) -> str:
    TRIED.append(claim)
    if len(TRIED) < 3:
        raise ConnectionError("the bank is away")
    return f"held {amount}"


@killick.tool(effect="idempotent", name="show_post")
async def post(customer: str, lines: list[int], step: killick.ToolStep = killick.STEP) -> str:
    step.progress({"sent": 2})
    try:
        raise Refused("422 from https://books.example")
    except Refused as refused:
        raise ValueError("the books refused it") from refused


@killick.tool(name="show_charge")
async def charge(amount: int) -> str:
    return "charged"


@killick.agent(name="show_review")
async def review(run: killick.Run, claim: int) -> str:
    await run.plan(["fetch", "approve", "pay"])
    await run.at("fetch")
    await run.call(fetch, claim)
    await run.call(hold.options(because="it is due"), claim, 80)
    who = await run.decided("Who decides?", "manager", options=["auto", "manager"], because="it is large")
    await run.update(route=who)
    await run.note("asked a manager")
    await run.at("approve")
    answer = await run.ask("Pay 80?", to="managers", timeout="72h", default="reject")
    return str(answer.kind)


@killick.agent(name="show_invoice")
async def invoice(run: killick.Run, customer: str) -> str:
    await run.update(customer=customer)
    return await run.call(post, customer, [1, 2, 3])


@killick.agent(name="show_parent")
async def parent(run: killick.Run, claim: int) -> str:
    child = await run.spawn(review, claim)
    return await child.result()


@killick.agent(name="show_many")
async def many(run: killick.Run, n: int) -> str:
    for k in range(n):
        await run.call(fetch, k)
    return LONG


@killick.agent(name="show_patient")
async def patient(run: killick.Run, name: str) -> Any:
    await run.sleep("30d")
    return await run.wait("paid")


@killick.tool(effect="idempotent", name="show_transfer")
async def transfer(to: str, amount: int) -> str:
    return f"{amount} to {to}"


TRANSFERS = killick.Contract(
    "transfers",
    [
        killick.rules.arguments("show_transfer", amount={"max": 5000}),
        killick.rules.arguments("show_transfer", amount={"max": 100}, name="large sums", ask="managers"),
        killick.rules.deny("show_transfer", name="two people", ask=killick.Approval("directors", need=2)),
        killick.rules.arguments("update", route={"one_of": ["auto"]}),
    ],
    people={"managers": ["mia", "max"], "directors": ["dan", "dora"]},
)


@killick.agent(name="show_judged", contract=TRANSFERS)
async def judged(run: killick.Run, amount: int) -> str:
    for change in (run.call(transfer, "ann", 9000), run.update(route="none")):
        with contextlib.suppress(killick.Rejected):
            await change
    try:
        return await run.call(transfer, "ann", amount)
    except killick.Rejected as rejected:
        return rejected.code


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("show") / "killick.db"
    with killick.open(str(path)) as kd:
        with pytest.raises(killick.RunWaiting):
            kd.run(review, 17, id="claim_17")
        with pytest.raises(killick.RunFailed):
            kd.run(invoice, "Möller", id="invoice_7")
        with pytest.raises(killick.RunWaiting):
            kd.run(parent, 18, id="parent_1")
        kd.run(many, 120, id="many_1")
        kd.start(patient, "bob", id="patient_1")
        kd.advance("patient_1")
        kd.start(many, 3, id="queued_1")
        kd.start(many, 3, id="paused_1")
        kd.pause("paused_1", by="ops", because="closing")
    return path


@pytest.fixture(autouse=True)
def here(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    monkeypatch.delenv("KILLICK_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    def shown(*args: str) -> str:
        assert main(["show", *args]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return shown


def head(text: str) -> str:
    """What stands above the timeline."""
    return text.partition("\n\n")[0]


# the head -----------------------------------------------------------------------------------------


def test_a_waiting_run_begins_with_where_it_is_what_it_waits_for_and_what_to_type(show: Any) -> None:
    lines = head(show("claim_17")).splitlines()
    assert lines[0] == "claim_17  waiting  show_review"
    assert re.fullmatch(
        r"  at      approve: step 2 of 3 · step 4 since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(.* ago\)", lines[1]
    )
    assert lines[2] == "  waits   Pay 80?"
    assert re.fullmatch(r"          asked of managers .* ago; until .* \(in (3d|2d 23h)\)", lines[3])
    assert lines[4].startswith("  next    killick answer claim_17:4 approve  (or reject, edit")


def test_a_failed_run_begins_with_its_error_and_how_to_resume_it(show: Any) -> None:
    told = head(show("invoice_7"))
    assert "  failed  step 1: ValueError: the books refused it\n" in told
    assert told.endswith("  next    killick resume invoice_7")


def test_a_run_that_waits_for_a_child_says_what_the_child_waits_for_and_how_to_answer_that(show: Any) -> None:
    told = head(show("parent_1"))
    assert "  waits   for its child parent_1/1, which is waiting: Pay 80?" in told
    assert "  next    killick answer parent_1/1:4 approve" in told


def test_every_other_status_says_what_to_type_too(show: Any) -> None:
    assert "  held    paused by ops: closing\n  next    killick resume paused_1" in show("paused_1")
    assert re.search(r"  next    killick run .*--id queued_1", show("queued_1"))
    assert re.search(r"  waits   until .* \(in (30d|29d 23h)\)", show("patient_1"))
    assert "  result  word word" in show("many_1")


def test_a_run_for_which_an_answer_came_is_due_and_needs_no_other(store: Path, show: Any) -> None:
    with killick.open(str(store)) as kd:
        with pytest.raises(killick.RunWaiting):
            kd.run(review, 20, id="answered_1")
        kd.answer("answered_1", "approve", by="mia")
    assert re.search(
        r"  next    killick run .*--id answered_1  it is due, and continues when a worker", show("answered_1")
    )


def test_the_store_that_was_named_is_in_the_command_to_type(show: Any, store: Path) -> None:
    told = show("invoice_7", "--store", str(store))
    assert f"next killick resume invoice_7 --store {store}" in " ".join(told.split())  # a long path wraps


# the timeline -------------------------------------------------------------------------------------


def test_the_timeline_has_signs_numbers_calls_attempts_and_reasons(show: Any) -> None:
    told = show("claim_17")
    assert re.search(r'✓ 1  show_fetch\(claim=17\) → \["report.pdf", "photo.jpg"\]', told)
    assert re.search(
        r"✓ 2  show_hold\(claim=17, amount=80\) → held 80\n +because it is due\n +attempts 1–2 Connection", told
    )
    assert re.search(
        r"✓ 3  Who decides\? → manager\n +chosen by the agent from auto, manager\n +because it is large", told
    )
    assert re.search(r"… 4  asks managers: Pay 80\?", told)
    assert re.search(r'  context route="manager"\n.*  note: asked a manager\n.*  ── approve\n', told)


def test_a_failure_is_told_with_its_chain_its_place_and_what_was_known(show: Any) -> None:
    told = show("invoice_7").partition("\nfailed at step 1, show_post")[2]
    place = r"    at .*test_show\.py:\d+ in post\n"
    assert re.search(rf"  ValueError: the books refused it\n{place}  because of \S*\.Refused: 422 from https", told)
    assert re.search(r'    the service answered 422 \{"error": "vat_id"', told)
    assert '  input      customer="Möller", lines=[1, 2, 3]\n  progress   {"sent": 2}\n  context    customer=' in told
    assert "site-packages" not in told


def _amount_of(order: dict[str, int]) -> int:
    return order["amount"]


@killick.tool(name="show_invites", effect="at_most_once")
async def invites(order: dict[str, int]) -> int:
    await asyncio.sleep(0)
    return _amount_of(order)


@killick.agent(name="show_inviter")
async def inviter(run: killick.Run) -> int:
    return await run.call(invites, {})


def test_an_attempt_that_raised_shows_the_lines_of_the_users_code(store: Path, show: Any) -> None:
    with killick.open(str(store)) as kd, pytest.raises(killick.RunWaiting):
        kd.run(inviter, id="raised")
    told = " ".join(show("raised").split())
    assert re.search(r" at \S*test_show\.py:\d+ in _amount_of, \S*test_show\.py:\d+ in invites", told)


@pytest.mark.parametrize("columns", ["60", "80", "200"])
@pytest.mark.parametrize("run", ["claim_17", "invoice_7", "parent_1", "many_1"])
def test_no_line_is_wider_than_the_terminal(show: Any, monkeypatch: pytest.MonkeyPatch, columns: str, run: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    timeline = show(run).partition("\n\n")[2]
    assert max(map(len, timeline.splitlines())) <= int(columns)


def test_of_a_long_run_the_middle_is_left_out_unless_all_is_asked_for(show: Any) -> None:
    told = show("many_1")
    assert "72 entries left out; --all shows them" in told
    assert "✓ 1  " in told
    assert "✓ 60 " not in told
    assert "✓ 120" in told
    assert "✓ 60 " in show("many_1", "--all")


def test_long_values_are_cut_and_full_shows_them_whole(show: Any) -> None:
    assert show("many_1").count("word") < 100
    assert show("many_1", "--full").count("word") >= 800


@pytest.mark.slow
def test_a_pipe_gets_no_colour_and_a_terminal_does(store: Path) -> None:
    command = [sys.executable, "-m", "killick", "show", "claim_17"]
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    plain = subprocess.run(command, cwd=store.parent, env=kept, capture_output=True, text=True, check=True).stdout
    colour = subprocess.run(
        command, cwd=store.parent, env={**kept, "FORCE_COLOR": "1"}, capture_output=True, text=True, check=True
    ).stdout
    assert "\x1b[" not in plain
    assert "\x1b[33mwaiting" in colour


def test_as_it_was_at_a_place_in_time(show: Any) -> None:
    told = show("claim_17", "--at", "3:before")
    assert told.startswith("claim_17  running  show_review  as it was at 3:before, ")
    assert "Who decides?" not in told
    assert "next    killick" not in told, "nothing can be done about the past"


def test_a_rewind_shows_what_it_left_behind(store: Path, show: Any) -> None:
    with killick.open(str(store)) as kd:
        kd.run(many, 3, id="rewound_1")
        step = kd.state("rewound_1").fold.step("2")
        assert step is not None
        log = kd.runtime.log.open("rewound_1")
        log.append(Entry(e.RunRewound(at=step.at, cut=step.intended - 1, generation=1, by="mia"), {"because": "wrong"}))
    told = show("rewound_1")
    assert re.search(r"rewound to 2:before by mia: wrong\n +rewound ✓ 2 show_fetch\(claim=1\)\n +rewound ✓ 3", told)


# what was judged ----------------------------------------------------------------------------------


def test_a_page_tells_rejections_questions_votes_and_edits(store: Path, show: Any) -> None:
    with killick.open(str(store)) as kd:
        kd.start(judged, 400, id="judged_1")
        kd.advance("judged_1")
        moves = "  next    killick answer judged_1:2 approve\n          (or reject, edit --set amount=100, respond"
        assert moves in show("judged_1")
        kd.answer("judged_1", "edit", value={"amount": 300}, by="mia", comment="not so much")
        kd.advance("judged_1")
        kd.answer("judged_1", "approve", by="dan")
        told = show("judged_1")
        assert re.search(
            r'  waits   show_transfer\(to="ann", amount=300\)\n'
            r"          .*\(rule two people\)\n"
            r"          asked of directors \(dan, dora\) .* ago\n          1 of 2 approved \(dan\)\n"
            r"  next    killick answer judged_1:2 approve\n",
            told,
        ), told
        kd.answer("judged_1", "approve", by="dora")
        kd.advance("judged_1")
    told = show("judged_1")
    assert f"  contract transfers in force, 4 rules, {TRANSFERS.digest[:8]}\n" in told
    assert re.search(
        r'✗ 1  show_transfer\(to="ann", amount=9000\)\n'
        r" +rejected by rule arguments show_transfer: amount is 9000; at most 5000 is\n +allowed\n",
        told,
    )
    assert '  change rejected by rule arguments update route="none": route is "none";' in told
    assert re.search(
        r'✓ 2  show_transfer\(to="ann", amount=300\) → 300 to ann\n'
        r" +asked managers by rule large sums\n"
        r" +edited by mia: amount 400 → 300 “not so much”\n"
        r" +asked directors by rule two people: dan, dora approved\n",
        told,
    ), told


@pytest.mark.parametrize(
    ("verb", "value", "line"),
    [
        ("reject", None, "asked managers by rule large sums: mia rejected it “why?”"),
        ("respond", "ask her", "asked managers by rule large sums: mia answered instead: ask her “why?”"),
    ],
)
def test_who_said_no_or_something_else_is_told(store: Path, show: Any, verb: Any, value: Any, line: str) -> None:
    with killick.open(str(store)) as kd:
        kd.start(judged, 400, id=f"judged_{verb}")
        kd.advance(f"judged_{verb}")
        kd.answer(f"judged_{verb}", verb, value=value, by="mia", comment="why?")
        kd.advance(f"judged_{verb}")
    told = show(f"judged_{verb}")
    assert "✗ 2  show_transfer" in told
    assert line in told


def test_what_somebody_skipped_or_gave_by_hand_says_who_and_why(store: Path, show: Any) -> None:
    with killick.open(str(store)) as kd:
        for run in ("skipped_1", "overridden_1", "skipped_2"):
            kd.start(review if run == "skipped_2" else judged, 400, id=run)
            kd.advance(run)
        kd.edit.skip("skipped_1", "2", by="ops", because="it is late")
        kd.edit.override("overridden_1", "2", "by phone", by="ops", because="it was done")
        kd.edit.skip("skipped_2", "4", by="ops", because="it is late")
        for run in ("skipped_1", "overridden_1", "skipped_2"):
            kd.advance(run)
    assert re.search(r"✗ 2  show_transfer.*\n +asked managers.*\n +skipped by ops: it is late\n", show("skipped_1"))
    assert re.search(r"→ by phone\n.*\n +result given by ops “it was done”\n", show("overridden_1"))
    assert "asks managers: Pay 80? → skipped by ops “it is late”" in show("skipped_2")


@pytest.mark.parametrize("columns", [50, 80])
def test_what_was_judged_fits_the_terminal(
    store: Path, show: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    with killick.open(str(store)) as kd:
        kd.start(judged, 400, id=f"narrow_{columns}")
        kd.advance(f"narrow_{columns}")
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, show(f"narrow_{columns}").splitlines())) <= columns


# the family ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forked(store: Path) -> str:
    """A run of five steps that was rewound from 5 to before 4, and a fork that left it after step 2."""
    with killick.open(str(store)) as kd:
        kd.run(many, 5, id="forked_1")
        before, after = (kd.runtime.log.state("forked_1").fold.step(number) for number in ("4", "2"))
        assert before is not None
        assert after is not None
        log = kd.runtime.log.open("forked_1")
        log.append(Entry(e.RunRewound(at=before.at, cut=before.intended - 1, generation=1, by="mia")))
        kd.advance("forked_1")
        fork_of(
            kd.runtime.log, e.RunForked(at=1, run="forked_1-fork", parent="forked_1", cut=after.ended, generation=1)
        )
    return "forked_1"


def test_a_graph_has_the_run_its_forks_and_what_was_left(forked: str, show: Any) -> None:
    heads, *rows = [re.split(r"  +", line.rstrip()) for line in show(f"{forked}-fork", "--graph").splitlines()]
    assert heads == ["RUN", "OF", "STEPS", "STATUS", "ORIGIN"]
    assert rows[0] == ["forked_1", "5", "completed", "show_many"]
    assert ["rewound, generation 0", "forked_1", "2", "left", "rewound to 4:before by mia"] in rows
    assert ["forked_1-fork", "forked_1", "0", "queued", "fork at 2:after, effects recorded"] in rows


@pytest.mark.parametrize("columns", [50, 100])
def test_a_graph_fits_the_terminal(forked: str, show: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, show("claim_17", "--graph").splitlines())) <= columns


def test_a_graph_is_data_for_programs(forked: str, show: Any) -> None:
    found = json.loads(show(f"{forked}-fork", "--graph", "--json"))
    assert (found["run"], found["root"]) == ("forked_1-fork", "forked_1")
    assert [(lane["sort"], lane["cut"]) for lane in found["lanes"]] == [
        ("run", None), ("left", "4:before"), ("fork", "2:after"),
    ]  # fmt: skip


def test_a_graph_is_of_all_time(forked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", forked, "--graph", "--at", "2:before"]) == 2
    assert capsys.readouterr().err == "killick: --graph and --at do not go together; choose one\n"


def test_a_fork_and_who_was_forked_say_so_on_their_pages(forked: str, store: Path, show: Any) -> None:
    with killick.open(str(store)) as kd:
        kd.runtime.log.open(forked).append(Entry(e.ForkMade(at=2, run="forked_1-fork", cut=7, by="mia")))
    assert "forked from forked_1, effects recorded" in show("forked_1-fork")
    assert "forked by mia as forked_1-fork" in show(forked)
    assert "--graph" in show(forked).splitlines()[-1]


# what a model chose -------------------------------------------------------------------------------


@killick.tool(name="show_flaky", effect="reads")
async def flaky(n: int) -> int:
    return n


@killick.agent(name="show_chooser")
async def chooser(run: killick.Run) -> str:
    two = turn(call("show_flaky", n=2), call("show_flaky", n="two"))
    model = scripted(turn(call("show_flakky", n=1)), two, "Done.", provider="openai")
    return (await killick.loop(run, model, [flaky], messages="Go.", provider="openai", model="gpt-5.4")).text


def test_a_call_of_a_model_that_was_refused_says_why(store: Path, show: Any) -> None:
    with killick.open(str(store)) as kd:
        kd.run(chooser, id="chooser_1")
    told = show("chooser_1")
    assert re.search(r"from show_flaky\n +refused: no tool is called show_flakky; there are: show_flaky\n", told), told
    assert re.search(r"from show_flaky\n +refused: arguments: do not fit n: Input should be a valid integer", told), (
        told
    )
    assert told.count("refused: ") == 2


@killick.tool(name="show_wire", approve="managers")
async def wire(amount: int) -> str:
    raise OSError("the line went dead")


@killick.agent(name="show_wires")
async def wires(run: killick.Run, amount: int) -> str:
    return await run.call(wire, amount)


def test_an_approval_is_told_before_the_attempts_that_followed_it(store: Path, show: Any) -> None:
    with killick.open(str(store)) as kd:
        kd.start(wires, 900, id="wires_1")
        kd.advance("wires_1")
        kd.answer("wires_1", "edit", value={"amount": 700}, by="mia")
        kd.advance("wires_1")
    told = show("wires_1")
    assert re.search(r"asked managers\n +edited by mia: amount 900 → 700\n +attempt 1 OSError", told), told


# a process that died ------------------------------------------------------------------------------

DYING = """
import os, signal, sys, killick

@killick.tool(name="show_dying")
async def dying(amount: int) -> str:
    os.kill(os.getpid(), signal.SIGKILL)

@killick.agent(name="show_dies")
async def dies(run: killick.Run, amount: int) -> str:
    return await run.call(dying, amount)

with killick.open(sys.argv[1]) as kd:
    kd.run(dies, 990, id="orphan_1")
"""


def test_a_run_whose_process_was_killed_is_abandoned_and_says_how_to_go_on(store: Path, show: Any) -> None:
    dead = subprocess.run([sys.executable, "-c", textwrap.dedent(DYING), str(store)], check=False)
    assert dead.returncode == -signal.SIGKILL
    lines = head(show("orphan_1")).splitlines()
    assert lines[0] == "orphan_1  abandoned  show_dies"
    assert re.fullmatch(r"  dead    process \d+ died", lines[2])
    assert lines[3] == "  next    killick resume orphan_1  or start a worker"
    assert "The run's process died. Nothing happens until a worker takes the run or a person resumes it." in " ".join(
        show("orphan_1", "--why").split()
    )


# the other faces ----------------------------------------------------------------------------------


def test_why_is_lines_that_fit_a_letter(show: Any) -> None:
    told = show("claim_17", "--why", "2")
    assert max(map(len, told.splitlines())) <= 96
    assert "The agent's code gave this reason: “it is due”." in told
    assert show("claim_17", "--why").startswith("Run claim_17 of the agent show_review, started ")
    assert json.loads(show("claim_17", "--why", "2", "--json"))["why"][0].startswith("Step 2, ")


def test_json_is_the_timeline(show: Any) -> None:
    document = json.loads(show("claim_17", "--json"))
    assert (document["version"], document["status"], document["waits"][0]["prompt"]) == (1, "waiting", "Pay 80?")


def test_state_is_the_state_document(show: Any) -> None:
    assert json.loads(show("claim_17", "--state"))["position"]["stage"] == "approve"
    raw = show("claim_17", "--state", "--json")
    assert len(raw.splitlines()) == 1
    assert json.loads(raw)["version"] == 1
    assert json.loads(show("claim_17", "--at", "1:before", "--state"))["outputs"] == []


def test_log_is_every_event_on_a_line(show: Any, store: Path) -> None:
    with killick.open(str(store)) as kd:
        count = kd.runtime.log.head("claim_17").seq
    lines = show("claim_17", "--log").splitlines()
    assert len(lines) == count
    assert re.match(r" 1  \S+ \S+  run\.started +run=\"claim_17\", agent=\"show_review\"", lines[0])
    assert max(map(len, lines)) <= 100
    events = [json.loads(line) for line in show("claim_17", "--log", "--json").splitlines()]
    assert [event["seq"] for event in events] == list(range(1, count + 1))
    assert events[0]["data"] == {"input": 17}


def test_following_a_run_prints_what_is_committed_until_it_ends(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with killick.open(str(store)) as kd:
        TRIED[:] = [0, 0]
        with pytest.raises(killick.RunWaiting):
            kd.run(review, 19, id="followed_1")
        codes: list[int] = []
        following = threading.Thread(target=lambda: codes.append(main(["show", "followed_1", "--follow"])))
        following.start()
        kd.answer("followed_1", "approve", by="mia")
        kd.advance("followed_1")
        following.join(300)
        assert not following.is_alive()
    told = capsys.readouterr().out
    assert codes == [0]
    assert told.startswith("followed_1  ")
    assert told.count("✓ 1  show_fetch") == 1
    assert re.search(r"✓ 4  asks managers: Pay 80\? → mia: approve\n", told)
    assert told.rstrip().endswith("completed with approve")


# what is mistyped ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["claim_71"], "killick: claim_71: no such run in killick.db; did you mean claim_17?"),
        (["claim_17", "--why", "9"], "killick: claim_17: has no step 9; it has 1 to 4"),
        (["queued_1", "--why", "1"], "killick: queued_1: has no step 1; it has taken none yet"),
        (["claim_17", "--log", "--state"], "killick: --log and --state do not go together; choose one"),
        (["claim_17", "--follow", "--at", "1:before"], "killick: --follow and --at do not go together; choose one"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], args: list[str], told: str
) -> None:
    assert main(["show", *args]) == 2
    assert capsys.readouterr().err == f"{told}\n"


# how values look ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "told"),
    [
        (-86_398_121_513, "0 µs"),
        (350, "350 µs"), (12_000, "12 ms"), (999_600, "1.0 s"), (4_200_000, "4.2 s"), (59_960_000, "1m"),
        (185_000_000, "3m 5s"), (3_600_000_000, "1h"), (187_200_000_000, "2d 4h"),
    ],
)  # fmt: skip
def test_spans_have_at_most_two_units(us: int, told: str) -> None:
    assert style.span(us) == told


def test_values_on_a_line_have_air_and_are_cut() -> None:
    assert style.brief({"a": [1, 2]}) == '{"a": [1, 2]}'
    assert style.brief("a\n  b") == "a b"
    assert style.brief("x" * 50, 10) == "x" * 9 + "…"
    assert style.arguments({"to": "Ann", "n": 5}) == 'to="Ann", n=5'
