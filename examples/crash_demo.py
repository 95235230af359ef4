"""An agent with 9 steps, 4 tools and a flaky API is killed in step 6, and another process goes on at step 6.

The kill is real, and comes at the worst moment: the invite is out, and nobody has heard so yet. The second
process repeats nothing that is on record, and settles the one thing that is in doubt.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import kedge
from kedge.model.events import RunTaken

RUN = "launch_meeting"
OUTBOX = Path("outbox.jsonl")  # stands for the mail company: what is in here has reached people
log = logging.getLogger("demo")  # silent while agent code is replayed


def shade(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


class ApiError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"the calendar API answered {status}")
        self.status_code, self.body = status, body


@kedge.tool(effect="reads")
def find_people(topic: str) -> list[str]:
    log.info("find_people   who works on %s? ann, bob and cyd", topic)
    return ["ann", "bob", "cyd"]


@kedge.tool(effect="reads", retry=kedge.Retry(attempts=4, first="200ms"))
def free_slots(people: list[str], step: kedge.ToolStep = kedge.STEP) -> list[str]:
    if step.attempt < 3:
        log.info(shade("free_slots    the API is overloaded: back off, try again", "33"))
        raise ApiError(503, f'{{"error": "overloaded", "queue": {90 - 20 * step.attempt}}}')
    log.info("free_slots    the API answers: Tue 10:00, Wed 15:00")
    return ["Tue 10:00", "Wed 15:00"]


@kedge.tool(effect="idempotent")
def book_room(slot: str, key: kedge.Key = kedge.KEY) -> str:
    log.info("book_room     the harbour room, %s", slot)
    return "harbour room"


def find_invite(effect: kedge.Effect) -> kedge.Happened | kedge.DidNotHappen:
    """Was it sent? The far side knows, by the key that the attempt carried."""
    is_out = effect.key in OUTBOX.read_text()
    log.info(shade("send_invite   in doubt, so look first: it %s", "32"), "is out" if is_out else "never left")
    return kedge.Happened("sent") if is_out else kedge.DidNotHappen()


@kedge.tool(effect="at_most_once", reconcile=find_invite)
def send_invite(to: str, slot: str, room: str, key: kedge.Key = kedge.KEY) -> str:
    with OUTBOX.open("a") as outbox:
        outbox.write(f"{to}: {slot}, {room} [{key}]\n")
    log.info("send_invite   to %s", to)
    if "dies" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return "sent"


def model(prompt: str) -> dict[str, str]:
    """Stands for a real one. What is asked through `run.model` is asked once; the reply is on record."""
    log.info("model         %s", prompt)
    return {"slot": "Wed 15:00", "why": "bob is on the ferry until Tuesday noon"}


@kedge.agent
async def arrange(run: kedge.Run, topic: str) -> str:
    await run.plan(["look", "choose", "invite"])
    await run.at("look")
    people = await run.call(find_people, topic)
    slots = await run.call(free_slots, people)
    await run.at("choose")
    reply = await run.model(model, f"which slot, {' or '.join(slots)}?")
    log.info("decision      %s", reply["slot"])
    slot = await run.decided("Which slot?", reply["slot"], options=slots, because=reply["why"], by="model")
    room = await run.call(book_room, slot)
    await run.at("invite")
    for person in people:
        await run.call(send_invite, person, slot, room)
    await run.model(model, "is anything left to do?")
    return f"{len(people)} people meet on {slot} in the {room}"


def work(folder: str) -> None:
    os.chdir(folder)
    logging.basicConfig(format="  %(kedge_step)s  %(message)s", level=logging.INFO, stream=sys.stdout)
    with kedge.open("kedge.db") as kd:
        print(shade(f"  =  {kd.run(arrange, 'the launch', id=RUN)}", "32"))


def tell(kd: kedge.Client, sent: list[str]) -> None:
    taken = [each.seq for each in kd.events(RUN) if isinstance(each.event, RunTaken)]
    then, state = kd.state(RUN, at=taken[1] - 1), kd.state(RUN)
    where = then.position
    assert where.step == "6"
    print(f"  where it was    step {where.step}, stage {where.stage!r}; done: {', '.join(where.committed)}")
    for retry in state.retries:
        print(f"  what it tried   step {retry.step}, {retry.name}: {retry.attempts} attempts")
        for error in retry.errors:
            print(f"                  {error['message']}: {error['details']['body']}")
    for decision in state.decisions:
        print(f"  what it chose   step {decision.step}, {decision.question} {decision.choice}, of {decision.options}")
        print(f"                  because {decision.because} (says the {decision.by})")
    for effect in state.effects:
        times = sum(effect.key in line for line in sent)
        if times != (effect.tool == "send_invite"):
            sys.exit(f"{effect.key} is in the outbox {times} times")
        print(f"  what it did     {effect.key}{'  once in the outbox' * times}")
    report = kd.verify()
    assert report.holds
    print(shade(f"  the record      {report.events} events, every hash as written: it verifies", "32"))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kedge-") as folder:
        start = [sys.executable, __file__, folder]
        print(shade("A process runs an agent", "1"), flush=True)
        died = subprocess.run([*start, "dies"], check=False).returncode
        assert died == -signal.SIGKILL
        print(shade("  x  killed (signal 9): the invite is out, but the agent never heard so", "31"))
        print(shade("\nAnother process goes on: steps 1 to 5 are on record, so nobody is asked again", "1"), flush=True)
        subprocess.run(start, check=True)
        print(shade("\nWhat the record says", "1"))
        with kedge.open(f"{folder}/kedge.db") as kd:
            tell(kd, (Path(folder) / OUTBOX).read_text().splitlines())
    print(shade("\nNext: delete `reconcile=find_invite` here, and you are asked what became of the invite.", "2"))
    print(shade("      examples/approval.py waits for a person; examples/tool_loop.py lets a model choose.", "2"))


if __name__ == "__main__":
    work(sys.argv[1]) if sys.argv[1:] else main()
