"""The agents, workers, callers and keepers of an audit: see `soak.audit`, which kills them and judges their book.

Runs renew while callers send to them, pause, resume and cancel them; three people answer one question at once; events
are published, triggers fired, runs pruned, subjects erased, the store sealed, its hook paused, and its health looked at
in the very processes that hold it. Processes name a SQLite store in several ways, and tools change their folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import killick
from killick.clock import SystemClock
from killick.errors import AnswerRefused, KillickError, RunUnknown
from killick.model import crash_loop
from killick.store.records import ENDED
from soak import stories
from soak.acknowledgements import Book

LEASE_SECONDS: Final = 2.0
LOGS_MAX: Final = 40
"""After so many renewals a poller is over."""

KEY: Final = bytes(range(32))
BOOK: Final[dict[str, Book]] = {}
REFUSALS: Final = (AnswerRefused, RunUnknown)
BOXES: Final = tuple(f"box-{number}" for number in range(4))
HOOK: Final = "callers"


class Scene(NamedTuple):
    """Where a story takes place: its folder, the URL of its store, and what it has."""

    folder: Path
    url: str
    seed: int
    is_encrypted: bool = False
    jumps: bool = False
    """Whether wall clocks jump, there and back."""
    is_renamed: bool = True
    """Whether processes know the store by different names."""
    looks_seconds: float = 0.5
    """How often each worker looks at the store's health, or 0."""

    @property
    def is_file(self) -> bool:
        return "://" not in self.url

    @property
    def book(self) -> Path:
        return self.folder / "book"

    def spelling(self, chance: random.Random) -> str:
        """One of the names by which a process knows the store."""
        if not self.is_file or not self.is_renamed:
            return self.url
        path = Path(self.url)
        name = chance.choice((str(path), f"{self.folder}/link.db", f"{self.folder}/alias/k.db", "relative"))
        if name == "relative":
            os.chdir(path.parent)
            return path.name
        return name

    def lay_out(self) -> None:
        if self.is_file:
            path = Path(self.url)
            path.parent.mkdir(exist_ok=True)
            (self.folder / "link.db").symlink_to(path)
            (self.folder / "alias").symlink_to(path.parent)
        (self.folder / "clock").write_text("0")


class JumpingClock(SystemClock):
    """The machine's clock, whose wall time is wrong by as many seconds as a file says."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def now_us(self) -> int:
        return super().now_us() + int(self._file.read_text() or 0) * 1_000_000


def opened(scene: Scene, chance: random.Random) -> killick.Client:
    options: dict[str, Any] = {"clock": JumpingClock(scene.folder / "clock")} if scene.jumps else {}
    if scene.is_file:
        options["durability"] = "process"
    if scene.is_encrypted:
        options["keys"] = KEY
    return killick.open(scene.spelling(chance), grace_seconds=0.3, **options)


# what runs do -------------------------------------------------------------------------------------


@killick.tool(name="callers_perform", reconcile=stories.settle, retry=killick.Retry(attempts=100))
async def perform(order: str, step: killick.ToolStep = killick.STEP) -> int:
    dated = time.monotonic_ns()
    await asyncio.sleep(0.02 * random.random())
    return stories.perform(order, step.key, dated, honours=False)


@killick.tool(name="callers_poll", effect="idempotent")
async def poll(number: int) -> int:
    await asyncio.sleep(0.01 * random.random())
    return number


@killick.tool(name="callers_wander", effect="reads")
def wander(number: int) -> str:
    """Coding agents change their folder."""
    folder = Path(stories.FOLDER["path"]) / f"elsewhere-{number % 3}"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    return str(folder)


@killick.tool(
    name="callers_pay", reconcile=stories.settle, approve=killick.Approval(to=["callers"], need=2)
)  # fmt: skip
async def pay(what: str, step: killick.ToolStep = killick.STEP) -> int:
    return stories.perform(what, step.key, time.monotonic_ns(), honours=False)


@killick.agent(name="callers_box")
async def box(run: killick.Run, number: int) -> int:
    """Performs the orders that it is sent, and renews after each few of them."""
    for _ in range(1 + number % 3):
        await run.call(perform, await run.wait("order"))
    return await run.renew(number + 1)


@killick.agent(name="callers_poller")
async def poller(run: killick.Run, number: int) -> int:
    for _ in range(2):
        await run.call(poll, number)
    if number >= LOGS_MAX:
        return number
    return await run.renew(number + 1)


@killick.agent(name="callers_customer")
async def customer(run: killick.Run, boxes: list[str]) -> None:
    for number, to in enumerate(boxes):
        await run.send(to, "order", f"{run.id}/{number}")
        await run.call(poll, number)
    await run.call(wander, len(boxes))


@killick.agent(name="callers_payment")
async def payment(run: killick.Run, what: str) -> str:
    try:
        return f"receipt {await run.call(pay, what)}"
    except killick.Rejected:
        return "rejected"


@killick.agent(name="callers_patient")
async def patient(run: killick.Run, what: str) -> str:
    """Asks a question that nobody answers before all is calm."""
    answer = await run.ask(f"{what}?", timeout="72h", default="nobody said a word")
    return f"{answer.value} {answer.expired}"


@killick.agent(name="callers_order")
async def order(run: killick.Run, body: Any) -> int:
    return await run.call(poll, 1)


@killick.agent(name="callers_tick")
async def tick(run: killick.Run) -> int:
    return await run.call(poll, 2)


@killick.on("run.completed", "run.failed", "run.cancelled", name=HOOK, retry=killick.Retry(attempts=100, first=0.1))
async def hear(event: Any) -> None:
    book().heard(event.run, event.seq, event.kind)


def declare() -> None:
    """Triggers of a story: declared in the process that tells it, and not for whoever imports this."""
    killick.triggers.on_event("order.placed", order, name="callers-order")
    killick.triggers.every(0.7, tick, name="callers-tick", overlap="allow", input=None)


def book() -> Book:
    return BOOK["book"]


def begin(scene: Scene) -> None:
    """What every process of a story does first."""
    stories.FOLDER["path"] = scene.folder
    stories.SEED["seed"] = scene.seed
    stories._begin()
    crash_loop.BACKOFF_SECONDS = (0.05, 0.3)  # type: ignore[misc]
    BOOK["book"] = Book(scene.book)
    declare()


# a worker -----------------------------------------------------------------------------------------


def work(scene: Scene, seed: int) -> None:
    """Be a worker until told to drain, with one who looks at everything beside it."""
    begin(scene)
    chance, over = random.Random(seed), threading.Event()

    async def serve() -> None:
        kd = opened(scene, chance)
        worker = kd.worker(concurrency=6, lease_seconds=LEASE_SECONDS)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
        if scene.looks_seconds:
            threading.Thread(target=look_on, args=(scene, kd, over), daemon=True).start()
        try:
            await worker.serve()
        finally:
            over.set()
        await kd.as_async().close()

    asyncio.run(serve())


def look_on(scene: Scene, kd: killick.Client, over: threading.Event) -> None:
    """Health, doctor and ps, in the process that holds the store, until it is over: what they find is not judged."""
    from starlette.testclient import TestClient

    from killick.cli.main import main
    from killick.web.app import asgi

    web = TestClient(asgi(kd), base_url="http://localhost")
    commands = (["store", "doctor"], ["ps"], ["ps", "--json"])
    while not over.wait(scene.looks_seconds):
        with contextlib.suppress(KillickError, OSError):
            web.get("/health")
        if not scene.is_file:
            continue
        for words in commands:
            with (
                open(os.devnull, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out),
                contextlib.suppress(SystemExit, KillickError, OSError),
            ):  # fmt: skip
                main([*words, "--store", scene.url])


# callers ------------------------------------------------------------------------------------------


class Caller:
    """One that calls anything, at random, with a client of their own, and enters it."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene = scene
        self._chance = random.Random(seed)
        self.kd = opened(scene, self._chance)
        self._others: list[killick.Client] = []
        self._runs: list[str] = []

    def close(self) -> None:
        for each in (self.kd, *self._others):
            each.close()

    def enter(self, kind: str, run: str, verb: str, call: Callable[[str], Any], **more: Any) -> Any:
        return book().enter(kind, run, verb, call, refusals=REFUSALS, unsure=(KillickError,), **more)

    def act(self) -> None:
        kind = self._chance.random()
        if kind < 0.35:
            self.send(self._chance.choice(BOXES))
        elif kind < 0.45:
            self.start()
        elif kind < 0.75:
            self.command()
        elif kind < 0.88:
            self.vote()
        elif kind < 0.94:
            self.publish()
        else:
            self.late()

    def send(self, run: str, name: str = "order") -> None:
        message = f"m{os.urandom(6).hex()}"
        for _ in range(self._chance.choice((1, 1, 2))):  # one that is sent again counts once
            self.enter("message", run, "send", lambda _: self.kd.send(run, name, message, id=message), id=message)

    def start(self) -> None:
        chance, name = self._chance, os.urandom(4).hex()
        agent, value, more = chance.choice((
            (poller, 1, {}), (poller, 1, {}), (payment, name, {}), (payment, name, {}),
            (customer, chance.choices(BOXES, k=3), {}), (patient, name, {}), (customer, [], {"subject": "ann"}),
        ))  # fmt: skip
        run = f"{agent.name.rpartition('_')[2]}-{name}"
        if more and not self._scene.is_encrypted:
            return
        self.enter("start", run, "start", lambda _: self.kd.start(agent, value, id=run, **more), agent=agent.name)

    def command(self) -> None:
        found = [row.id for row in self.kd.list(agent="callers_poller", limit=40)]
        if not found:
            return
        run = self._chance.choice(found).partition("+")[0]
        verb = self._chance.choice(("pause", "resume", "resume", "resume", "cancel", "note", "set", "prioritize"))
        made = {
            "pause": lambda by: self.kd.pause(run, by=by),
            "resume": lambda by: self.kd.resume(run, by=by),
            "cancel": lambda by: self.kd.cancel(run, by=by),
            "note": lambda by: self.kd.edit.note(run, by, by=by),
            "set": lambda by: self.kd.edit.set(run, by=by, mood=by),
            "prioritize": lambda by: self.kd.edit.prioritize(run, 3, by=by),
        }[verb]
        self.enter("command", run, verb, made)
        if self._chance.random() < 0.3:
            self.send(run, "nudge")  # it waits for none

    def vote(self) -> None:
        """Three people answer the same question at the same time."""
        for row in self.kd.list(agent="callers_payment", status="waiting", limit=5):
            for wait in self.kd.info(row.id).waits:
                if wait.waits_for == "answer":
                    self._voted(wait)
                    return

    def _voted(self, wait: Any) -> None:
        while len(self._others) < 3:
            self._others.append(opened(self._scene, self._chance))
        verbs = ["approve", "approve", self._chance.choice(("approve", "reject"))]
        self._chance.shuffle(verbs)
        together = threading.Barrier(len(verbs))

        def answer(kd: killick.Client, verb: Any) -> None:
            together.wait()
            self.answer(kd, wait, verb)

        threads = [threading.Thread(target=answer, args=each) for each in zip(self._others, verbs, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def answer(self, kd: killick.Client, wait: Any, verb: Any) -> None:
        self.enter(
            "answer", wait.run, verb, lambda by: kd.answer(wait, verb, by=by), step=wait.step, digest=wait.digest,
            need=wait.need,
        )  # fmt: skip

    def publish(self) -> None:
        if self._chance.random() < 0.5:
            publish = self.kd.triggers.publish
            self.enter(
                "publish", "trigger:callers-order", "publish", lambda name: publish("order.placed", name, id=name)
            )
        else:
            self.enter("fire", "trigger:callers-tick", "fire", lambda by: self.kd.triggers.fire("callers-tick", by=by))

    def late(self) -> None:
        """A message and a command to a run that is over, after its caller saw so."""
        done = [row for row in self.kd.list(limit=60) if row.status in ENDED and row.agent == "callers_poller"]
        if not done:
            return
        run = self._chance.choice(done).id
        if self.kd.state(run).fold.facts.renewed_as is None:
            self.enter("look", run, "look", lambda _: "ended")
            self.enter("message", run, "send", lambda ticket: self.kd.send(run, "nudge", ticket, id=ticket))
            self.enter("command", run, "note", lambda by: self.kd.edit.note(run, by, by=by))


def call(scene: Scene, seed: int) -> None:
    """Be a caller until killed, with a new client now and then."""
    begin(scene)
    chance = random.Random(seed)
    while True:
        with contextlib.closing(Caller(scene, chance.randrange(10**9))) as caller:
            for _ in range(chance.randrange(20, 60)):
                with contextlib.suppress(KillickError):
                    caller.act()
                time.sleep(0.02 * chance.random())


# the keeper ---------------------------------------------------------------------------------------


def keep(scene: Scene, seed: int) -> None:
    """Be the one who prunes, erases, seals and verifies the store, and pauses its hook, until killed."""
    begin(scene)
    chance = random.Random(seed)
    caller = Caller(scene, seed)
    while True:
        time.sleep(0.3 * chance.random())
        with contextlib.suppress(KillickError):
            _kept(scene, caller, chance)


def _kept(scene: Scene, caller: Caller, chance: random.Random) -> None:
    kd, act, hook = caller.kd, chance.random(), f"hook:{HOOK}"
    if act < 0.3:
        kd.store.prune(older=chance.choice((0, 0.5)), to=scene.folder / f"archive-{os.urandom(4).hex()}.killick")
    elif act < 0.45:
        caller.enter("command", hook, "pause", lambda by: kd.pause(hook, by=by))
    elif act < 0.75:
        caller.enter("command", hook, "resume", lambda by: kd.resume(hook, by=by))
    elif act < 0.8:
        kd.store.verify()
    elif act < 0.9:
        kd.store.seal(seal_key())
    elif scene.is_encrypted:
        kd.store.erase("ann", by="keeper")


def seal_key() -> bytes:
    """The same key in every process."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(KEY).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
