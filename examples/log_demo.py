"""Append, kill, verify, fold: what the log does, for real.

A child process writes the log of a small agent, one step after the other, and is killed in the middle of
step 6. This process then opens the same file, proves that nothing acknowledged was lost, and shows what is
known: where the agent was, what it had, what it decided and why, and what is in doubt. Last it changes one
word in a copy of the file and finds it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import kedge
from kedge.model import events as e
from kedge.model.keys import action_key, arguments_digest

CLOCK = kedge.SystemClock()
RUN = "claim_review_001"
STAGES = ("fetch", "read", "assess", "decide", "draft", "send", "book", "file", "close")
TOOLS = ("fetch_documents", "read_policy", "chat", "decide", "draft_letter", "send_email")


def say(text: str = "", style: str = "") -> None:
    if style and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[{style}m{text}\x1b[0m"
    print(text, flush=True)


# the child: an agent's log, written step by step -------------------------------------------------------


def write_steps(path: str) -> None:
    store = kedge.open_store(path)
    log = kedge.Log(store)
    started = e.RunStarted(at=CLOCK.now_us(), run=RUN, agent="review", tags=("demo",))
    run = log.create(started, {"input": {"claim": 17, "amount": 1250}}, holder="worker-1")
    run.append(kedge.Entry(e.RunTaken(at=CLOCK.now_us(), epoch=1, holder="worker-1")))
    run.append(kedge.Entry(e.PlanMade(at=CLOCK.now_us(), stages=STAGES)))
    for number, (stage, tool) in enumerate(zip(STAGES, TOOLS, strict=False), 1):
        run.append_behind(kedge.Entry(e.PlanReached(at=CLOCK.now_us(), stage=stage)))
        if tool == "decide":
            decide(run, str(number))
        else:
            call(run, str(number), tool)
        say(f"  step {number}  {tool}")


def decide(run: kedge.RunLog, step: str) -> None:
    values = {
        "question": "Who decides?",
        "options": ["auto", "manager"],
        "choice": "auto",
        "because": "1250 is below the limit of 2000 and the policy covers storm damage",
    }
    run.append(kedge.Entry(e.DecisionMade(at=CLOCK.now_us(), step=step, by="model"), values))


def call(run: kedge.RunLog, step: str, tool: str) -> None:
    effect: e.EffectClass = "at_most_once" if tool == "send_email" else "reads"
    arguments = {"claim": 17, "to": "ann@example.org"}
    digest = arguments_digest(arguments)
    key = action_key(RUN, step, tool, digest)
    sort: e.Sort = "model" if tool == "chat" else "tool"
    intended = e.StepIntended(
        at=CLOCK.now_us(), step=step, sort=sort, name=tool, digest=e.to_text(digest), effect=effect
    )
    began = e.AttemptStarted(at=CLOCK.now_us(), step=step, attempt=1, key=key, epoch=1)
    run.append(kedge.Entry(intended, {"arguments": arguments}), kedge.Entry(began))
    if tool == "send_email":
        say(f"  step {step}  {tool} …  the API does not answer, and the process dies here")
        os.kill(os.getpid(), signal.SIGKILL)
    ended = e.AttemptEnded(at=CLOCK.now_us(), step=step, attempt=1, outcome="returned")
    run.append_behind(kedge.Entry(ended, {"output": {"tool": tool, "pages": 3}}))


# the parent: what is left ----------------------------------------------------------------------------


def show(log: kedge.Log) -> None:
    state = log.state(RUN)
    position = state.position
    say(f"  {RUN} is {state.status} at step {position.step}, stage {position.stage!r} of {len(position.plan)}")
    say(f"  done     {', '.join(position.committed)}")
    say(f"  pending  {', '.join(position.pending)}")
    for decision in state.decisions:
        say(f"  decided  {decision.choice!r} by {decision.by}, because {decision.because}")
    for step, output in state.outputs.items():
        say(f"  output   {step}: {output}")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kedge-demo-") as folder:
        path = Path(folder) / "kedge.db"
        say("1. An agent's steps, each on record before the next one starts", "1")
        child = subprocess.run([sys.executable, __file__, "--child", str(path)], check=False)
        assert child.returncode == -signal.SIGKILL, f"the child should have died, but returned {child.returncode}"
        say(f"  killed (signal {-child.returncode})", "31")

        say("\n2. Another process opens the same file: the lock is free, so it takes over at once", "1")
        store = kedge.open_store(str(path))
        log = kedge.Log(store)
        run = log.open(RUN, holder="worker-2")
        run.append(kedge.Entry(e.RunTaken(at=CLOCK.now_us(), epoch=run.epoch, holder="worker-2")))
        show(log)
        for doubt in run.ledger.in_doubt():
            say(f"  in doubt {doubt.key}: it started, and nobody knows how it ended", "33")

        say("\n3. The state before step 5, as it was then", "1")
        step = log.state(RUN).fold.step("5")
        assert step is not None
        before = log.state(RUN, step.intended - 1)
        say(f"  done     {', '.join(before.position.committed)}; step 5 was not there yet")

        say("\n4. The whole record, verified", "1")
        report = kedge.verify(log)
        assert report.holds, report.problems
        say(f"  {report.events} events, every hash and every copy as written", "32")
        log.close()
        store.close()

        say("\n5. One word of a copy, changed: why the model decided as it did", "1")
        forged = Path(folder) / "forged.db"
        shutil.copy(path, forged)
        with sqlite3.connect(forged) as db:
            find = "SELECT id, data FROM events WHERE CAST(body AS TEXT) LIKE '%decision.made%'"
            event, data = db.execute(find).fetchone()
            forgery = data.replace(b"below", b"above")
            db.execute("UPDATE events SET data = ? WHERE id = ?", (forgery, event))
        db.close()
        store = kedge.open_store(str(forged))
        log = kedge.Log(store)
        for problem in kedge.verify(log).problems:
            say(f"  found: {problem}", "31")
        log.close()
        store.close()
    say("\nNext: README.md says how it is made; docs/ has the events, the format and the errors.", "2")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        write_steps(sys.argv[2])
    else:
        sys.exit(main())
