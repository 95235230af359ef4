"""Half an emoji in a text: values keep it, errors write its escape, names refuse it, and every surface shows it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import killick
from killick.cli.main import main
from killick.errors import KillickError, ValueRefused
from killick.web.app import asgi

HALF = "\ud83d"
ESCAPED = "\\ud83d"


@killick.agent(name="half_fails")
async def fails(run: killick.Run, text: str) -> str:
    error = ValueError(f"half {text} an emoji")
    error.add_note(f"a note {text}")
    raise error from LookupError(text)


@killick.tool(name="half_reads", effect="reads")
async def reads(text: str) -> str:
    raise ValueError(f"tool {text}")


@killick.agent(name="half_calls")
async def calls(run: killick.Run, text: str) -> str:
    return await run.call(reads, text)


@killick.agent(name="half_asks")
async def asks(run: killick.Run, text: str) -> str:
    await run.note(f"note {text}")
    await run.update(said=text)
    return (await run.ask(f"Pay {text}?", to="managers")).kind


@killick.agent(name="half_names")
async def names(run: killick.Run, text: str) -> str:
    return str(await run.wait(f"name {text}"))


@killick.agent(name="half_echoes")
async def echoes(run: killick.Run, text: str) -> str:
    return text


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "killick.db"


@pytest.fixture
def kd(place: Path) -> Iterator[killick.Client]:
    with killick.open(str(place)) as client:
        yield client


def filled(kd: killick.Client) -> None:
    """One run of each kind, and one that nothing is wrong with."""
    for agent, name in ((fails, "fails"), (calls, "calls")):
        with pytest.raises(killick.RunFailed):
            kd.run(agent, HALF, id=name)
    with pytest.raises(killick.RunWaiting):
        kd.run(asks, HALF, id="asks")
    kd.run(echoes, "fine", id="fine")


def test_an_error_text_is_put_on_record_with_the_half_written_as_its_escape(kd: killick.Client) -> None:
    with pytest.raises(killick.RunFailed, match=r"half \\ud83d an emoji") as raised:
        kd.run(fails, HALF, id="fails")
    failure = raised.value.failure
    assert failure.message == f"half {ESCAPED} an emoji"
    assert failure.notes == (f"a note {ESCAPED}",)
    assert failure.cause is not None
    assert failure.cause.message == ESCAPED


def test_a_value_comes_back_as_it_was(kd: killick.Client) -> None:
    assert kd.run(echoes, HALF, id="echo") == HALF
    assert kd.run(echoes, HALF, id="echo") == HALF  # from the record


def test_a_name_that_cannot_be_stored_fails_the_step_and_says_where(kd: killick.Client) -> None:
    with pytest.raises(killick.RunFailed, match="lone surrogate") as raised:
        kd.run(names, HALF, id="names")
    assert raised.value.failure.is_a("ValueRefused")


@pytest.mark.parametrize(
    "ask",
    [
        lambda kd: kd.run(echoes, "x", id=f"id {HALF}"),
        lambda kd: kd.start(echoes, "x", id=f"id {HALF}"),
        lambda kd: kd.start(echoes, "x", id="tagged", tags=[HALF]),
        lambda kd: kd.info(HALF),
        lambda kd: kd.list(agent=HALF),
        lambda kd: kd.send("asks", HALF, 1),
        lambda kd: kd.send("asks", "name", 1, by=HALF),
        lambda kd: kd.pause("asks", by=HALF),
        lambda kd: kd.answer("asks", "approve", by=HALF),
        lambda kd: kd.edit.prioritize("asks", 3, by=HALF),
    ],
    ids=["run", "start", "tag", "info", "list", "send", "send by", "pause", "answer", "prioritize"],
)
@pytest.mark.parametrize("url", ["memory:", "sqlite"])
def test_a_name_given_from_outside_is_refused_in_one_line(
    ask: Callable[[killick.Client], Any], url: str, place: Path
) -> None:
    with killick.open(url if url == "memory:" else str(place)) as kd:
        with pytest.raises(killick.RunWaiting):
            kd.run(asks, "x", id="asks")
        refused = "nothing"
        try:
            ask(kd)
        except KillickError as error:
            refused = str(error)
        refused.encode()
        assert len(refused.splitlines()) == 1
        assert kd.info("asks").status == "waiting"
        assert kd.store.verify().problems == []


def test_words_of_a_person_are_kept_and_the_run_goes_on(kd: killick.Client) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(asks, "x", id="asks")
    kd.answer("asks", "approve", comment=f"yes {HALF}", by="ann")
    assert kd.run(asks, "x", id="asks") == "approve"


COMMANDS = [
    "ps", "ps --json", "inbox", "inbox --json", "find failures", "find failures --json", "find text emoji",
    "show fails", "show fails --json", "show fails --log", "show fails --state",
    "show fails --state --json", "show fails --log --json",
    "show calls", "show calls --json", "show calls --why 1", "show calls --graph", "show calls --why 1 --json",
    "show asks", "show asks --json", "show asks --state --json", "time diff fails calls",
    "time diff fails calls --json",
    "store verify", "store doctor", "time replay fails", "store export fails", "store export asks",
]  # fmt: skip


class Utf8(io.TextIOWrapper):
    """A strict UTF-8 stream, as a pipe has it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)

    def told(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half") / "killick.db"
    with killick.open(str(path)) as kd:
        filled(kd)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_one_run_with_half_an_emoji_stops_no_command(command: str, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Utf8(), Utf8()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    code = main([*command.split(), "--store", str(full)])
    assert code in (0, 1, 2), err.told()
    if "--json" in command:
        for text in out.told().splitlines() if "--log" in command else [out.told()]:
            json.loads(text)
    if command == "ps":
        assert ESCAPED in out.told()
        assert "fine" in out.told()


def test_an_argument_that_is_no_utf8_is_no_bug(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("show", "ps --agent", "pause", "say asks", "find text"):
        err = Utf8()
        monkeypatch.setattr(sys, "stderr", err)
        assert main([*command.split(), "\udcff", "--store", str(full)]) != 70, (command, err.told())


@pytest.mark.gate(2)
@pytest.mark.parametrize("path", ["/runs", "/inbox", "/runs/fails", "/runs/calls", "/runs/asks", "/find?text=emoji"])
def test_one_run_with_half_an_emoji_stops_no_page(path: str, full: Path) -> None:
    with killick.open(str(full)) as kd, TestClient(asgi(kd, identify=lambda _: "ann")) as http:
        for address in (path, f"/api/v1{path}"):
            response = http.get(address, headers={"accept": "text/html" if address == path else "application/json"})
            assert response.status_code < 500, (address, response.text)
            response.content.decode()


def test_the_reason_says_which_field() -> None:
    with killick.open("memory:") as kd, pytest.raises(ValueRefused, match="lone surrogate"):
        kd.start(echoes, "x", id="tagged", tags=[HALF])


# Contracts ----------------------------------------------------------------------------------------

queries: list[str] = []


@killick.tool(name="half_sql", effect="at_most_once")
async def sql(query: str) -> str:
    queries.append(query)
    return "ok"


GUARD = killick.Contract("guard", [killick.rules.arguments("half_sql", query={"excludes": "(?i)drop table"})])


@killick.agent(name="half_guarded", contract=GUARD)
async def guarded(run: killick.Run, arguments: str) -> str:
    try:
        return await run.call(sql, **json.loads(arguments))
    except killick.Rejected as rejected:
        return f"{rejected.code}: {rejected.message}"


def test_a_contract_lets_no_tool_run_with_half_a_character_from_a_model(kd: killick.Client) -> None:
    queries.clear()
    result = kd.run(guarded, '{"query": "drop table x -- \\ud83d"}', id="guarded")
    assert queries == []
    assert result.startswith("argument_refused: query holds a lone surrogate")
