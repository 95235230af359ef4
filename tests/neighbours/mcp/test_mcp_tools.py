"""The tools of a real MCP server, over stdio and over HTTP, as Killick's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.adapters.mcp import Server
from killick.errors import DeclarationRefused, StepFailed
from killick.testing import call, scripted
from neighbours.mcp.bank import made
from neighbours.mcp.banks import BANK, free_port, served


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bank") / "ledger"


@pytest.fixture(scope="module")
def bank(ledger: Path) -> Iterator[Server]:
    """One server in this process, for all that do it no harm."""
    with Server(made(ledger)) as server:
        yield server


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


def by_name(tools: list[Any]) -> dict[str, Any]:
    return {each.name: each for each in tools}


# what is declared ---------------------------------------------------------------------------------


def test_what_a_server_says_of_its_tools_is_what_they_do_to_the_world(bank: Server) -> None:
    effects = {each.name: each.policy.effect for each in bank.tools()}
    assert effects == {
        "balance": "reads",
        "set_limit": "idempotent",
        "pay": "at_most_once",
        "transfer_many": "at_most_once",  # as models may call it
        "statement": "at_most_once",
    }


def test_a_server_that_is_not_believed_has_only_tools_that_are_done_at_most_once(ledger: Path) -> None:
    with Server(made(ledger), hints=False) as bank:
        assert {each.policy.effect for each in bank.tools()} == {"at_most_once"}


def test_models_are_shown_the_schema_that_the_server_wrote(bank: Server) -> None:
    shown = {each["function"]["name"]: each["function"] for each in killick.Toolset(*bank.tools()).schemas("openai")}
    assert shown["pay"]["description"] == "Pay somebody."
    assert shown["pay"]["parameters"]["properties"]["amount"]["description"] == "In euros."
    assert shown["pay"]["parameters"]["required"] == ["to", "amount"]
    many = shown["transfer_many"]["parameters"]
    assert many["$defs"]["Line"]["required"] == ["to", "amount"]
    assert many["properties"]["lines"]["items"] == {"$ref": "#/$defs/Line"}


def test_people_say_more_of_a_tool_and_choose_which_are_offered(ledger: Path) -> None:
    options = {"pay": {"effect": "idempotent", "identity": ["to"]}, "transfer.many": {"key": "request_id"}}
    with Server(made(ledger), prefix="bank_", tools=options, only=list(options)) as server:
        tools = by_name(server.tools())
        assert list(tools) == ["bank_pay", "bank_transfer_many"]
        assert tools["bank_pay"].policy.identity == ("to",)
        many = killick.Toolset(tools["bank_transfer_many"]).schemas("anthropic")[0]["input_schema"]
        assert list(many["properties"]) == ["lines"]

        @killick.agent
        async def transfers(run: killick.Run) -> Any:
            return await run.call(tools["bank_transfer_many"], lines=[{"to": "ann", "amount": 5}])

        with killick.open("memory:") as kd:
            assert kd.run(transfers, id="keyed") == {"ann": 5}
    assert "transferred under keyed:step_1:bank_transfer_many:" in ledger.read_text()


def test_an_option_for_a_tool_that_is_not_there_is_refused_by_name(ledger: Path) -> None:
    refused = pytest.raises(DeclarationRefused, match=r"pey.*bank offers no such tool; it has: balance, pay")
    with Server(made(ledger), tools={"pey": {"effect": "reads"}}) as bank, refused:
        bank.tools()


# what comes back ----------------------------------------------------------------------------------


def test_answers_come_back_as_data_as_text_or_as_blocks_and_errors_as_answers(
    bank: Server, kd: killick.Client, ledger: Path
) -> None:
    tools = by_name(bank.tools())

    @killick.agent
    async def asks(run: killick.Run) -> list[Any]:
        return [
            await run.call(tools["set_limit"], amount=7),
            await run.call(tools["transfer_many"], lines=[{"to": "ann", "amount": 5}]),
            await run.call(tools["statement"]),
            await run.call(tools["pay"], to="ann", amount=500),
            await run.call(tools["pay"], to="ann"),
        ]

    text, data, blocks, refused, misfit = kd.run(asks, id="asks")
    assert text == "at most 7"
    assert data == {"ann": 5}
    assert blocks == [
        {"type": "text", "text": "as of today"},
        {"type": "image", "data": "iVBORw==", "mimeType": "image/png"},
    ]
    assert refused == "error: Error executing tool pay: 500 is more than there is"
    assert misfit.startswith("error: ")
    assert [each.status for each in kd.state("asks").trace] == ["done"] * 5


def test_where_an_error_means_that_nothing_happened_the_step_fails(ledger: Path, kd: killick.Client) -> None:
    once = {"pay": {"retry": killick.Retry(attempts=1)}}
    with Server(made(ledger), tools=once, errors="refused") as bank:
        pay = by_name(bank.tools())["pay"]

        @killick.agent
        async def overdraws(run: killick.Run) -> str:
            try:
                await run.call(pay, to="ann", amount=500)
            except StepFailed as failed:
                return str(failed.failure)
            return "paid"

        assert "500 is more than there is" in kd.run(overdraws, id="over")


# in agents ----------------------------------------------------------------------------------------


def test_a_model_calls_a_servers_tools_in_a_loop_and_its_key_reaches_the_server(
    bank: Server, kd: killick.Client, ledger: Path
) -> None:
    model = scripted(call("balance"), call("pay", to="bob", amount=3), "Paid.")

    @killick.agent
    async def pays(run: killick.Run, wish: str) -> str:
        result = await killick.loop(run, model, await bank.offered(run), messages=wish, provider="openai")
        return result.text

    assert kd.run(pays, "Pay bob 3.", id="loop") == "Paid."
    (line,) = [line for line in ledger.read_text().splitlines() if "to bob" in line]
    assert line.startswith("paid 3 to bob under loop:step_")
    assert ":pay:" in line


def test_a_plain_def_agent_is_offered_them_too(bank: Server, kd: killick.Client) -> None:
    @killick.agent
    def limits(run: killick.SyncRun) -> str:
        tools = by_name(bank.offered_sync(run))
        limit: str = run.call(tools["set_limit"], amount=9)
        return limit

    assert kd.run(limits, id="sync") == "at most 9"


def test_what_was_offered_is_on_record_so_that_a_replay_needs_no_server(
    bank: Server, kd: killick.Client, tmp_path: Path
) -> None:
    @killick.agent
    async def waits(run: killick.Run) -> str:
        tools = by_name(await bank.offered(run))
        limit = await run.call(tools["set_limit"], amount=4)
        answer = await run.ask("Go on?")
        return f"{limit}, {answer.approved}"

    with pytest.raises(killick.RunWaiting):
        kd.run(waits, id="w")
    kd.answer("w", "approve", by="eve")
    kd.close()
    bank = Server(["no-such-command"])
    with killick.open(tmp_path / "killick.db") as other:
        assert other.run(waits, id="w") == "at most 4, True"


# the connection -----------------------------------------------------------------------------------


def test_a_server_that_died_is_started_again_and_only_what_it_may_have_done_is_left_to_a_person(
    tmp_path: Path, kd: killick.Client
) -> None:
    ledger = tmp_path / "ledger"
    deaths = iter(["in balance", "after pay"])
    with Server([sys.executable, str(BANK), str(ledger)]) as server:
        tools = by_name(server.tools())

        @killick.tool
        def kill() -> None:
            link = server._link
            assert link is not None
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            while link.is_up:  # until its end has been heard of
                time.sleep(0.01)

        @killick.tool(effect="idempotent")
        def will_die() -> None:
            (tmp_path / "die").write_text(next(deaths))

        @killick.agent
        async def pays(run: killick.Run) -> list[Any]:
            told = [await run.call(tools["pay"], to="ann", amount=1)]
            await run.call(kill)
            told.append(await run.call(tools["pay"], to="bob", amount=2))
            await run.call(will_die)
            told.append(await run.call(tools["balance"]))
            await run.call(will_die)
            told.append(await run.call(tools["pay"], to="cyd", amount=3))
            return told

        with pytest.raises(killick.RunWaiting) as waiting:
            kd.run(pays, id="r")
        (asked,) = waiting.value.waits
        assert "was lost while it was at pay" in str(asked)
        assert asked.verbs == ("happened", "not", "stop")
        assert ledger.read_text().count("balance") == 2
        kd.answer("r", "happened", value="paid 3 to cyd", by="eve")
        assert kd.run(pays, id="r") == ["paid 1 to ann", "paid 2 to bob", 98, "paid 3 to cyd"]
    assert ledger.read_text().count("paid") == 3


def test_over_http_a_server_that_is_away_was_sent_nothing_and_one_that_is_back_is_found(
    tmp_path: Path, kd: killick.Client
) -> None:
    ledger, port = tmp_path / "ledger", free_port()
    running = served(ledger, port)
    at_once = {"pay": {"retry": killick.Retry(attempts=2, first=0)}}
    bank, old = (Server(f"http://127.0.0.1:{port}/mcp", tools=at_once, mode=mode) for mode in ("auto", "legacy"))
    try:
        pay, pay_in_session = (by_name(each.tools())["pay"] for each in (bank, old))

        @killick.tool(effect="idempotent")
        def stop() -> None:
            running.kill()
            running.wait()

        @killick.agent
        async def pays(run: killick.Run) -> list[str]:
            told = [await run.call(pay, to="ann", amount=1)]
            await run.call(stop)
            try:
                await run.call(pay, to="bob", amount=2)
            except StepFailed as failed:
                told.append(str(failed.failure.message))
            return told

        paid, failed = kd.run(pays, id="away")
        assert paid == "paid 1 to ann"
        assert "cannot be reached" in failed

        running = served(ledger, port)

        @killick.agent
        async def pays_again(run: killick.Run) -> list[str]:
            # The second one still has the session of the server that is gone.
            return [await run.call(pay, to="bob", amount=2), await run.call(pay_in_session, to="cyd", amount=3)]

        assert kd.run(pays_again, id="back") == ["paid 2 to bob", "paid 3 to cyd"]

        (tmp_path / "die").write_text("after pay")

        @killick.agent
        async def pays_dan(run: killick.Run) -> str:
            told: str = await run.call(pay, to="dan", amount=4)
            return told

        with pytest.raises(killick.RunWaiting):
            kd.run(pays_dan, id="lost")
        assert ledger.read_text().count("to dan") == 1
    finally:
        running.kill()
        running.wait()
        bank.close()
        old.close()


def test_a_server_that_cannot_be_started_is_named_and_was_sent_nothing() -> None:
    with (
        Server(["no-such-command"]) as server,
        pytest.raises(killick.NotDone, match="no-such-command cannot be reached"),
    ):
        server.tools()


def test_calls_at_once_share_one_connection(bank: Server) -> None:
    tools = by_name(bank.tools())

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(tools["set_limit"](amount=n) for n in range(20)))

    assert asyncio.run(all_at_once()) == [f"at most {n}" for n in range(20)]
