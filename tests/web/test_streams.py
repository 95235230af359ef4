"""Streams: a run's events as they are committed, and hints that something moved."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

import killick
from killick.web import hub, streams
from killick.web.app_context import AppContext
from killick.web.endpoints import Endpoints
from killick.web.hub import Hub
from killick.web.problems import Problem
from killick.web.routes import Person, routes_of


@killick.tool(effect="reads")
async def looked(number: int) -> dict[str, int]:
    return {"number": number}


@killick.agent(name="following.looker")
async def looker(run: killick.Run, count: int) -> int:
    for number in range(count):
        await run.call(looked, number)
    return count


@killick.agent(name="following.asker")
async def asker(run: killick.Run) -> str:
    return str((await run.wait("word")).body)


@killick.agent(name="following.renewer")
async def renewer(run: killick.Run, left: int) -> int:
    if left:
        await run.renew(left - 1)
    return left


class Anybody:
    """Everybody may."""

    login = None
    person: Person | None = Person("ada", "admin")

    async def identify(self, request: Request) -> Person | None:
        return self.person

    def refuse_forged(self, request: Request) -> None: ...

    def csrf(self, request: Request) -> str:
        return ""

    def set_cookies(self, request: Request, response: Response) -> None: ...


class Listener:
    """A client of a stream that takes what it is sent when it likes."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.text = ""
        self.over = False
        self.takes = asyncio.Event()
        self.takes.set()
        self._gone = asyncio.Event()
        self._news = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.text += message["body"].decode()
            self.over = not message.get("more_body", False)
        self._news.set()

    def leave(self) -> None:
        self._gone.set()

    @property
    def heard(self) -> list[tuple[str, str | None, Any]]:
        """The events so far: kind, id, data."""
        found: list[tuple[str, str | None, Any]] = []
        for block in self.text.split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
            if "event" in lines:
                found.append((lines["event"], lines.get("id"), msgspec.json.decode(lines["data"])))
        return found

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not holds():
                self._news.clear()
                await self._news.wait()


class Server:
    """An app of the streams alone, over a client."""

    def __init__(self, client: killick.Client, **options: Any) -> None:
        self.access = Anybody()
        self.context = AppContext(client, access=self.access)
        self.hub = self.context.hub = Hub(client, **options)
        self.app = Starlette(routes=Endpoints(self.context).table(routes_of(streams)))
        self.tasks: list[asyncio.Task[None]] = []

    def listen(self, path: str, query: str = "", **headers: str) -> Listener:
        listener = Listener()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
            "path": f"/api/v1{path}", "raw_path": b"", "root_path": "", "query_string": query.encode(),
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        serving: Awaitable[None] = self.app(scope, listener.receive, listener.send)
        self.tasks.append(asyncio.ensure_future(serving))  # type: ignore[arg-type]
        return listener


@contextlib.asynccontextmanager
async def served(client: killick.Client, **options: Any) -> AsyncGenerator[Server]:
    server = Server(client, **options)
    yield server
    await server.hub.close()
    await asyncio.gather(*server.tasks)


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    with killick.open("memory:") as kd:
        yield kd


def test_a_run_that_is_over_is_told_whole_and_then_the_stream_ends(kd: killick.Client) -> None:
    kd.run(looker, 150, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listener = server.listen("/runs/r/follow")
            await listener.until(lambda: listener.over)
        assert listener.status == 200
        assert listener.headers["content-type"].startswith("text/event-stream")
        assert listener.headers["cache-control"] == "no-store"
        *events, (kind, _, end) = listener.heard
        recorded = kd.events("r")
        assert [int(str(seq)) for _, seq, _ in events] == [each.seq for each in recorded]
        assert [name for name, _, _ in events] == [str(each.event.__struct_config__.tag) for each in recorded]
        assert events[0][2]["data"] == {"input": 150}
        assert (kind, end) == ("end", {"run": "r", "seq": len(events), "status": "completed", "renewed_as": None})

    asyncio.run(story())


@pytest.mark.parametrize("by", ["query", "header"])
def test_whoever_comes_back_reads_on_from_where_they_were(kd: killick.Client, by: str) -> None:
    kd.run(looker, 3, id="r")

    async def story() -> None:
        async with served(kd) as server:
            if by == "query":
                listener = server.listen("/runs/r/follow", "after=5")
            else:
                listener = server.listen("/runs/r/follow", "after=1", last_event_id="5")
            await listener.until(lambda: listener.over)
        assert listener.heard[0][1] == "6"

    asyncio.run(story())


def test_events_are_told_as_they_are_committed_in_order_without_gaps(kd: killick.Client) -> None:
    handle = kd.start(looker, 300, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listeners = [server.listen("/runs/r/follow") for _ in range(5)]
            await listeners[0].until(lambda: len(listeners[0].heard) == 1)
            await asyncio.to_thread(kd.run, looker, 300, id=handle.id)
            for listener in listeners:
                await listener.until(lambda listener=listener: listener.over)
                seqs = [int(str(seq)) for kind, seq, _ in listener.heard if kind != "end"]
                assert seqs == list(range(1, kd.runtime.log.head("r").seq + 1))

    asyncio.run(story())


def test_a_run_that_goes_on_as_another_says_as_which(kd: killick.Client) -> None:
    kd.run(renewer, 1, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listener = server.listen("/runs/r/follow")
            await listener.until(lambda: listener.over)
        assert listener.heard[-1][2]["renewed_as"] == "r+2"

    asyncio.run(story())


def test_those_at_the_same_place_share_one_reading(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    kd.run(looker, 120, id="r")
    reads: list[int] = []
    paged = Hub._paged
    monkeypatch.setattr(Hub, "_paged", lambda hub, run, after: reads.append(after) or paged(hub, run, after))

    async def story() -> None:
        async with served(kd) as server:
            listeners = [server.listen("/runs/r/follow") for _ in range(20)]
            for listener in listeners:
                await listener.until(lambda listener=listener: listener.over)
        assert reads == sorted(set(reads))

    asyncio.run(story())


def test_a_slow_follower_holds_nobody_up_and_misses_nothing(kd: killick.Client) -> None:
    kd.run(looker, 150, id="r")

    async def story() -> None:
        async with served(kd) as server:
            slow, quick = server.listen("/runs/r/follow"), server.listen("/runs/r/follow")
            slow.takes.clear()
            await quick.until(lambda: quick.over)
            assert not slow.over
            slow.takes.set()
            await slow.until(lambda: slow.over)
            assert slow.text == quick.text

    asyncio.run(story())


def test_a_follower_that_takes_nothing_any_more_is_let_go(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SEND_SECONDS", 0.01)
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listener = server.listen("/runs/r/follow")
            await listener.until(lambda: bool(listener.heard))
            listener.takes.clear()
            kd.pause("r")
            async with asyncio.timeout(300):
                while server.hub.followers:
                    await asyncio.sleep(0.01)
            listener.takes.set()

    asyncio.run(story())


def test_a_follower_that_goes_away_is_noticed(kd: killick.Client) -> None:
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listener = server.listen("/runs/r/follow")
            await listener.until(lambda: bool(listener.heard))
            assert server.hub.followers == 1
            listener.leave()
            await asyncio.wait_for(server.tasks[0], 300)
            assert server.hub.followers == 0

    asyncio.run(story())


def test_a_stream_ends_when_whoever_follows_may_no_longer(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "KNOWN_SECONDS", 0.01)
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listeners = [server.listen("/runs/r/follow"), server.listen("/live", "run=r")]
            for listener in listeners:
                await listener.until(lambda listener=listener: bool(listener.heard))
            server.access.person = None
            for listener in listeners:
                await listener.until(lambda listener=listener: listener.over)
            await asyncio.wait_for(asyncio.gather(*server.tasks), 300)
            assert server.hub.followers == 0

    asyncio.run(story())


def test_closing_ends_every_stream_at_once_and_lets_no_other_begin(kd: killick.Client) -> None:
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listeners = [server.listen("/runs/r/follow"), server.listen("/live", "run=r&counts=true")]
            for listener in listeners:
                await listener.until(lambda listener=listener: bool(listener.heard))
            await server.hub.close()
            await asyncio.wait_for(asyncio.gather(*server.tasks), 300)
            assert all(listener.over for listener in listeners)
            assert "event: end" not in listeners[0].text
            late = server.listen("/live")
            await late.until(lambda: late.over)
            assert late.status == 503

    asyncio.run(story())


def test_one_person_cannot_take_every_stream(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FOLLOWERS_EACH_MAX", 2)
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            with server.hub.following("r", by="mallory"), server.hub.following("r", by="mallory"):
                with pytest.raises(Problem, match="2 streams open"), server.hub.following("r", by="mallory"):
                    pass
                with server.hub.following("r", by="ann"):
                    pass
            with server.hub.following("r", by="mallory"):
                pass

    asyncio.run(story())


def test_there_are_only_so_many_followers(kd: killick.Client) -> None:
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd, followers_max=2) as server:
            taken = [server.listen("/runs/r/follow"), server.listen("/live", "run=r")]
            for listener in taken:
                await listener.until(lambda listener=listener: bool(listener.heard))
            refused = server.listen("/runs/r/follow")
            await refused.until(lambda: refused.over)
            assert (refused.status, refused.headers["retry-after"]) == (503, "10")
            assert msgspec.json.decode(refused.text)["code"] == "too_many_followers"
            taken[0].leave()
            await asyncio.wait_for(server.tasks[0], 300)
            again = server.listen("/runs/r/follow")
            await again.until(lambda: bool(again.heard))

    asyncio.run(story())


def test_a_silent_stream_says_that_it_is_still_there(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.01)
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            for listener in (server.listen("/runs/r/follow"), server.listen("/live")):
                await listener.until(lambda listener=listener: listener.text.count(": still here\n\n") > 2)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "query", "headers", "status"),
    [
        ("/runs/nobody/follow", "", {}, 404),
        ("/runs/r/follow", "after=-1", {}, 400),
        ("/runs/r/follow", "", {"last_event_id": "x"}, 400),
        ("/runs/r/follow", "since=1", {}, 400),
        ("/live", "&".join("run=r" for _ in range(201)), {}, 400),
    ],
)
def test_what_cannot_be_followed_is_a_problem_and_no_stream(
    kd: killick.Client, path: str, query: str, headers: dict[str, str], status: int
) -> None:
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listener = server.listen(path, query, **headers)
            await listener.until(lambda: listener.over)
            assert listener.status == status
            assert listener.headers["content-type"] == "application/problem+json"

    asyncio.run(story())


def test_values_that_were_erased_are_told_as_erased(kd: killick.Client) -> None:
    kd.run(looker, 1, id="r")
    kd.runtime.log.erase(kd.runtime.log.open("r"), at=kd.runtime.clock.now_us(), reason="asked", seqs=(1,))

    async def story() -> None:
        async with served(kd) as server:
            listener = server.listen("/runs/r/follow")
            await listener.until(lambda: listener.over)
            told = listener.heard[0][2]
            assert (told["erased"], told["data"]) == (True, None)

    asyncio.run(story())


@pytest.mark.parametrize("clock", [killick.clock.SystemClock(), killick.clock.ManualClock()], ids=["goes", "stands"])
def test_a_page_hears_that_a_run_moved_and_how_many_there_are(clock: killick.clock.Clock) -> None:
    kd = killick.open("memory:", clock=clock)
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listener = server.listen("/live", "run=r&run=nobody&counts=true")

            def said(name: str, status: str) -> bool:
                told = [data for kind, _, data in listener.heard if kind == "changed" and name in data]
                if name == "counts":
                    return bool(told) and told[-1]["counts"].get(status) == 1
                return bool(told) and told[-1]["runs"][0]["status"] == status

            await listener.until(lambda: said("runs", "queued") and said("counts", "queued"))
            kd.pause("r")
            await listener.until(lambda: said("runs", "paused") and said("counts", "paused"))
            runs = {each["run"] for _, _, data in listener.heard for each in data.get("runs", ())}
            assert runs == {"r"}

    with kd:
        asyncio.run(story())


def test_a_page_hears_of_a_message_that_no_worker_has_taken(kd: killick.Client) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listener = server.listen("/live", "run=r")
            await listener.until(lambda: len(listener.heard) == 1)
            kd.send("r", "word", "hello")
            await listener.until(lambda: len(listener.heard) == 2)
            before, after = (data["runs"] for _, _, data in listener.heard)
            assert before == after, "only its inbox changed"

    asyncio.run(story())


def test_a_run_that_moves_all_the_time_gives_a_few_hints_a_second(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HINT_SECONDS", 30.0)
    kd.start(asker, id="r")

    async def story() -> None:
        async with served(kd) as server:
            listener, watcher = server.listen("/live", "run=r"), server.listen("/runs/r/follow")
            await listener.until(lambda: len(listener.heard) == 1)
            for _ in range(5):
                kd.pause("r")
                kd.resume("r")
                await watcher.until(lambda: len(watcher.heard) == kd.runtime.log.head("r").seq)
            assert len(listener.heard) == 1

    asyncio.run(story())


def test_fields_that_are_not_to_be_seen_are_hidden(kd: killick.Client) -> None:
    kd.run(looker, 1, id="r")

    class Veil:
        fields = ("number",)

        def over(self, document: Any, *, run: str | None = None) -> Any:
            return {**document, "data": {"hidden in": run}}

    async def story() -> None:
        async with served(kd, mask=Veil()) as server:
            listener = server.listen("/runs/r/follow")
            await listener.until(lambda: listener.over)
            assert all(data["data"] == {"hidden in": "r"} for kind, _, data in listener.heard if kind != "end")

    asyncio.run(story())
