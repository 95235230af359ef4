"""Real processes that die around a payment: a plain MCP client pays again, one with Killick does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from mcp import Client

import killick
from killick.adapters.mcp import Server
from neighbours.killed import KILLED, die, ended
from neighbours.mcp.banks import free_port, served
from neighbours.results import result


class Bank(NamedTuple):
    ledger: Path
    url: str

    def paid(self, to: str) -> int:
        return self.ledger.read_text().count(f"to {to} ")

    def slow(self, to: str) -> Path:
        """While it is there, a payment is made and not answered."""
        return self.ledger.with_name(f"slow {to}")


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    ledger, port = tmp_path_factory.mktemp("crashes") / "ledger", free_port()
    ledger.touch()
    running = served(ledger, port)
    yield Bank(ledger, f"http://127.0.0.1:{port}/mcp")
    running.kill()
    running.wait()


def pays_alone(bank: Bank, to: str, dies: bool) -> str:
    async def pay() -> str:
        async with Client(bank.url) as client:
            paid = await client.call_tool("pay", {"to": to, "amount": 5})
            await client.call_tool("balance", {})
            if dies:
                die()
            return str(paid.structured_content)

    return asyncio.run(pay())


def pays_with_killick(bank: Bank, to: str, dies: str) -> str:
    def die_when_paid() -> None:
        while not bank.paid(to):
            time.sleep(0.005)
        die()

    @killick.agent
    async def pays(run: killick.Run) -> str:
        tools = {each.name: each for each in await server.offered(run)}
        paid: str = await run.call(tools["pay"], to=to, amount=5)
        await run.call(tools["balance"])
        if dies == "after":
            die()
        return paid

    if dies == "within":
        threading.Thread(target=die_when_paid, daemon=True).start()
    with killick.open(bank.ledger.with_name("killick.db")) as kd, Server(bank.url) as server:
        said: str = kd.run(pays, id=to)
        return said


def test_killed_after_a_payment_a_plain_client_pays_twice_and_one_with_killick_once(bank: Bank) -> None:
    assert ended(pays_alone, bank, "ann", True) == KILLED
    assert ended(pays_alone, bank, "ann", False) == "{'result': 'paid 5 to ann'}"
    assert ended(pays_with_killick, bank, "bob", "after") == KILLED
    assert ended(pays_with_killick, bank, "bob", "") == "paid 5 to bob"
    plain, kept = bank.paid("ann"), bank.paid("bob")
    result("mcp", killed="after a payment", alone=f"{plain} payments", ours=f"{kept} payment")
    assert (plain, kept) == (2, 1)


def test_killed_while_a_payment_is_on_its_way_a_person_is_asked_and_it_is_not_paid_again(bank: Bank) -> None:
    bank.slow("cyd").touch()
    assert ended(pays_with_killick, bank, "cyd", "within") == KILLED
    bank.slow("cyd").unlink()
    assert "Did it happen?" in ended(pays_with_killick, bank, "cyd", "")
    with killick.open(bank.ledger.with_name("killick.db")) as kd:
        kd.answer("cyd", "happened", value="paid, as eve saw", by="eve")
    assert ended(pays_with_killick, bank, "cyd", "") == "paid, as eve saw"
    assert bank.paid("cyd") == 1
