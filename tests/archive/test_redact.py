"""A redacted file shows how a run went and not what about: stand-ins of the same shape, in a chain of their own."""

from __future__ import annotations

import hmac
import json
import random
import sqlite3
import string
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

import killick
from killick.archive.export import export, read
from killick.archive.pseudonyms import Pseudonyms
from killick.archive.redact import Redaction
from killick.errors import FieldUnknown
from killick.log import Log, repair, verify
from killick.model import events as e
from killick.model.codec import Erased
from killick.model.events import from_text, to_text
from killick.store import Store
from killick.testing import call, replay, scripted

KEY = b"k" * 32


@pytest.fixture
def kd(store: Store) -> Iterator[killick.Client]:
    with killick.Client(store, clock=killick.clock.LeapingClock()) as client:
        yield client


# stand-ins ----------------------------------------------------------------------------------------


def test_a_stand_in_has_the_type_and_the_shape_of_what_it_stands_for() -> None:
    shape = Pseudonyms(KEY)
    for value in (
        "Annabel Archer", "ann@example.org", "+44 20 7946 0018", "x", "é ß 漢字", 125093, -7, 2**70, 12.5, -0.25, 1e-9,
        3e300, b"raw", bytearray(b"more"), Decimal("12.50"), UUID(int=5), date(2024, 2, 29), time(9, 30, tzinfo=UTC),
        datetime(2024, 2, 29, 12, tzinfo=UTC), timedelta(days=3), Erased(b"h" * 32),
    ):  # fmt: skip
        found = shape.of(value)
        assert type(found) is type(value)
        assert found != value
        assert shape.of(value) == found
        if isinstance(value, str | bytes | bytearray):
            assert len(found) == len(value)
        if isinstance(value, int):
            assert (len(str(found)), found < 0) == (len(str(value)), value < 0)
    assert shape.of("ann@example.org")[3::8] == "@."
    assert Pseudonyms(b"other" * 8).of("Annabel Archer") != shape.of("Annabel Archer")


def test_what_only_says_that_there_is_something_stands_for_itself() -> None:
    shape = Pseudonyms(KEY)
    for value in (None, True, False, 0, 0.0, "", b"", float("inf")):
        assert shape.of(value) == value


def test_dates_identifiers_and_numbers_that_are_texts_stay_such() -> None:
    shape = Pseudonyms(KEY)
    assert date.fromisoformat(shape.of("1984-02-29"))
    assert datetime.fromisoformat(shape.of("1984-02-29T10:00:00+00:00"))
    assert UUID(shape.of("123e4567-e89b-12d3-a456-426614174000"))
    assert shape.of("125093") == str(shape.of(125093))


def test_different_values_have_different_stand_ins_while_there_are_enough() -> None:
    shape = Pseudonyms(KEY)
    values = [*range(100, 900), *(f"{n:04d}" for n in range(500))]
    assert len({(type(value), shape.of(value)) for value in values}) == len(values)


# a run --------------------------------------------------------------------------------------------


@dataclass
class Customer:
    name: str
    email: str
    born: date


@killick.tool(effect="reads")
async def redact_fetch(number: int) -> dict[str, Any]:
    return {
        "customer": {"name": "Annabel Archer", "email": "ann@example.org"},
        "amount": 125093,
        "notes": "tall " * 2000,
    }


@killick.tool(effect="at_most_once", consumes=("token",), identity=("to", "amount"), compensate=lambda effect: None)
async def redact_pay(to: str, amount: int, token: str, memo: str = "") -> str:
    return f"paid {amount} to {to}"


async def redact_chat(messages: list[Any]) -> dict[str, Any]:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "redact_pay", "arguments": '{"to":"Annabel Archer"}'},
    }
    return {"choices": [{"message": {"role": "assistant", "content": "Pay Annabel Archer.", "tool_calls": [call]}}]}


@killick.agent
async def redact_child(run: killick.Run, customer: Customer) -> str:
    await run.note(f"{customer.name} was born on {customer.born}")
    return customer.email


@killick.agent(on_failure="compensate")
async def redact_agent(run: killick.Run, customer: Customer) -> str:
    docs = await run.call(redact_fetch, 17)
    await run.update(customer=customer.name)
    reply = await run.model(redact_chat, messages=[{"role": "user", "content": f"Pay {customer.name}?"}])
    await run.decided("Which way?", "transfer", options=["transfer", "cheque"], because=f"{customer.name} likes it")
    answer = await run.ask(f"Pay {docs['amount']} to {customer.name}?", to="boss@corp.example", returns=str)
    child = await run.spawn(redact_child, customer)
    mail = await child.result()
    heard = await run.wait("word")
    paid = await run.call(redact_pay, docs["customer"]["email"], docs["amount"], "token-4711")
    if heard == "stop now":
        raise ValueError(f"nothing for {customer.name}")
    content = reply["choices"][0]["message"]["content"]
    return f"{paid}; {mail}; {answer.value}; {content}"


PRIVATE = (
    "Annabel", "Archer", "example.org", "125093", "1984-02-29", "tall tall", "boss@corp", "Robert", "transfer",
    "likes it", "token-4711", "green light", "word by word",
)  # fmt: skip


def reviewed(kd: killick.Client, *, word: str = "word by word") -> str:
    ann = Customer("Annabel Archer", "ann@example.org", date(1984, 2, 29))
    with pytest.raises(killick.RunWaiting):
        kd.run(redact_agent, ann, id="r")
    kd.answer("r", "respond", value="green light", by="Robert Boss", comment="Annabel Archer is fine")
    with pytest.raises(killick.RunWaiting):
        kd.run(redact_agent, ann, id="r")
    kd.send("r", "word", word, by="Robert Boss")
    try:
        return str(kd.run(redact_agent, ann, id="r"))
    except killick.RunFailed as failed:
        return str(failed)


def test_nothing_that_was_said_is_in_the_file_and_its_chain_holds(kd: killick.Client) -> None:
    reviewed(kd)
    plain = kd.store.export("r")
    assert all(word.encode() in plain for word in PRIVATE)
    data = kd.store.export("r", redact=True)
    for word in PRIVATE:
        assert word.encode() not in data, word
    header = json.loads(data.splitlines()[0])
    assert header["run"] == "r"
    original = json.loads(plain.splitlines()[0])["hash"]
    assert header["redacted"] == to_text(hmac.digest(kd.runtime.store.secret_key, from_text(original), "sha256"))
    assert original.encode() not in data, "the hash would confirm a guess of what is hidden"
    report = verify(Log(read(data).loaded()))
    assert (report.problems, report.runs) == ([], 1)


def test_what_happened_is_all_there(kd: killick.Client) -> None:
    reviewed(kd)
    before, after = (
        Log(read(kd.store.export("r", redact=redact)).loaded()).read("r", limit=500) for redact in (False, True)
    )
    for was, now in zip(before, after, strict=True):
        assert (was.seq, type(was.event), was.event.at) == (now.seq, type(now.event), now.event.at)
        for name in ("step", "sort", "name", "effect", "attempt", "outcome", "agent", "waits_for", "how"):
            assert getattr(was.event, name, None) == getattr(now.event, name, None)
    keys = [record.event.key for record in after if isinstance(record.event, e.Started)]
    assert keys[-1].startswith("r:step_8:redact_pay:")
    assert keys != [record.event.key for record in before if isinstance(record.event, e.Started)]


def test_the_same_value_has_the_same_stand_in_wherever_it_flows(kd: killick.Client) -> None:
    reviewed(kd)
    log = Log(read(kd.store.export("r", redact=True)).loaded())
    state = log.state("r")
    fetched = state.outputs["1"]
    assert set(fetched) == {"customer", "amount", "notes"}
    [paid] = [traced for traced in state.trace if traced.step == "8"]
    assert paid.input["to"] == fetched["customer"]["email"] == state.input["email"]
    assert paid.input["amount"] == fetched["amount"]
    assert state.input["name"] == state.context.document["customer"]


def test_code_follows_a_file_that_is_redacted_throughout(kd: killick.Client) -> None:
    reviewed(kd)
    data = kd.store.export("r", redact=True)
    assert replay(data, redact_agent).status == "completed"
    assert replay(kd.store.export("r/5", redact=True), redact_child).status == "completed"


def test_code_that_branches_on_what_is_redacted_parts_and_is_told_that_it_is(kd: killick.Client) -> None:
    told = reviewed(kd, word="stop now")
    assert "nothing for Annabel Archer" in told
    assert replay(kd.store.export("r"), redact_agent).status == "failed"
    parted = replay(kd.store.export("r", redact=True), redact_agent, check=False).divergence
    assert "the file is redacted, and its pseudonyms may be the cause" in str(parted)
    replayed = replay(kd.store.export("r", redact=["name", "email"]), redact_agent)
    assert replayed.failure is not None
    assert "Annabel" not in replayed.failure.message


def test_fields_that_are_named_are_redacted_wherever_their_values_stand_and_nothing_else(kd: killick.Client) -> None:
    result = reviewed(kd)
    data = kd.store.export("r", redact=["name", "email"])
    for word in ("Annabel", "Archer", "example.org"):
        assert word.encode() not in data, word
    for word in ("125093", "1984-02-29", "green light", "boss@corp", "tall tall", "transfer"):
        assert word.encode() in data, word
    assert verify(Log(read(data).loaded())).problems == []
    replayed = replay(data, redact_agent)
    assert replayed.result.startswith("paid 125093 to ")
    assert replayed.result != result
    assert replay(kd.store.export("r/5", redact=["name", "email"]), redact_child).outcome == "agrees"


@pytest.mark.parametrize("field", ["customer.name", "input.email", "messages.content", "notes"])
def test_a_field_is_named_by_the_way_to_it_or_by_its_last_part(kd: killick.Client, field: str) -> None:
    reviewed(kd)
    data = kd.store.export("r", redact=[field])
    assert json.loads(data.splitlines()[0])["fields"] == [field]
    assert replay(data, redact_agent).outcome == "agrees"


def test_a_field_that_is_nowhere_is_refused_for_nothing_would_be_redacted(kd: killick.Client) -> None:
    reviewed(kd)
    with pytest.raises(FieldUnknown, match=r"emial: no recorded value has this field.*did you mean email\?"):
        kd.store.export("r", redact=["name", "emial"])


def test_the_tool_calls_of_a_model_keep_their_form(kd: killick.Client) -> None:
    reviewed(kd)
    state = Log(read(kd.store.export("r", redact=True)).loaded()).state("r")
    message = state.outputs["2"]["choices"][0]["message"]
    call = message["tool_calls"][0]
    assert (message["role"], call["id"], call["type"], call["function"]["name"]) == (
        "assistant", "call_1", "function", "redact_pay",
    )  # fmt: skip
    assert json.loads(call["function"]["arguments"]) == {"to": state.input["name"]}


@killick.tool(effect="reads")
async def redact_search(name: str) -> dict[str, Any]:
    """Look somebody up."""
    return {"name": name, "status": "wanted", "kind": "thief"}


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("redact", [True, ["name"]])
def test_a_loop_of_model_and_tools_is_followed_with_its_values_gone(
    kd: killick.Client, provider: Any, redact: Any
) -> None:
    model = scripted(
        "I look.", call("redact_search", name="Annabel Archer"), "Found Annabel Archer.", provider=provider
    )

    @killick.agent
    async def redact_loop(run: killick.Run, name: str) -> str:
        return (await killick.loop(run, model, [redact_search], messages=f"Who is {name}?")).text

    kd.run(redact_loop, "Annabel Archer", id="l")
    data = kd.store.export("l", redact=redact)
    assert b"Annabel" not in data
    assert b"Archer" not in data
    assert (b"thief" in data, b"wanted" in data) == (redact is not True, redact is not True)
    replayed = replay(data, redact_loop)
    assert [step.name for step in replayed.played if step.sort == "tool"] == ["redact_search"]


def test_what_people_answer_is_redacted_below_the_kind_of_answer(kd: killick.Client) -> None:
    @killick.agent
    async def redact_asks(run: killick.Run) -> Any:
        return (await run.ask("Who?")).value

    with pytest.raises(killick.RunWaiting):
        kd.run(redact_asks, id="a")
    kd.answer("a", "respond", value={"kind": "Annabel Archer", "status": {"digest": "Annabel Archer"}})
    kd.run(redact_asks, id="a")
    data = kd.store.export("a", redact=True)
    assert b"Annabel" not in data
    assert replay(data, redact_asks).played[0].output["kind"] == "respond"


def test_two_files_of_one_run_have_stand_ins_that_cannot_be_compared(kd: killick.Client) -> None:
    reviewed(kd)
    first, second = (Log(read(kd.store.export("r", redact=True)).loaded()).state("r") for _ in range(2))
    assert first.input["name"] != second.input["name"]
    once, twice = (export(kd.runtime.log, "r", redaction=Redaction(KEY)) for _ in range(2))
    assert once == twice


def test_what_was_erased_stays_erased(kd: killick.Client) -> None:
    reviewed(kd)
    seq = next(r.seq for r in kd.events("r") if isinstance(r.event, e.AttemptEnded))
    kd.runtime.log.erase(kd.runtime.log.open("r"), at=1, reason="Annabel asked for it", seqs=[seq])
    data = kd.store.export("r", redact=True)
    assert b"Annabel" not in data
    report = verify(Log(read(data).loaded()))
    assert (report.problems, report.erased) == ([], 1)


def test_a_run_that_was_repaired_is_redacted_with_its_repair(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    with killick.open(str(path), clock=killick.clock.LeapingClock()) as kd:
        reviewed(kd)
    db = sqlite3.connect(path)
    with db:
        where = "id = (SELECT (number << 32) + 20 FROM heads WHERE run = 'r')"
        db.execute(f"UPDATE events SET body = CAST('{{}}' AS BLOB) WHERE {where}")
    db.close()
    with killick.open(str(path)) as kd:
        assert not kd.store.verify("r").holds
        repair(kd.runtime.log, "r", at=kd.runtime.clock.now_us(), reason="Annabel said so", by="Robert")
        data = kd.store.export("r", redact=True)
    assert b"Annabel" not in data
    assert b"Robert" not in data
    report = verify(Log(read(data).loaded()))
    assert [problem for problem in report.problems if problem.where != "aside"] == []
    assert report.repaired == 1


def test_a_file_without_children_and_as_it_is_has_not_changed(kd: killick.Client) -> None:
    reviewed(kd)
    header = json.loads(kd.store.export("r").splitlines()[0])
    assert set(header) == {
        "is", "version", "format", "store", "run", "lineage", "hash", "events", "messages", "values",
    }  # fmt: skip
    assert header["version"] == 1


def test_any_document_is_redacted_to_one_of_the_same_form(kd: killick.Client) -> None:
    seed = 20
    chance = random.Random(seed)

    def leaf() -> Any:
        return chance.choice([
            lambda: "".join(chance.choices(string.ascii_letters + " .@-1", k=chance.randint(0, 40))),
            lambda: chance.randint(-(10**12), 10**12), chance.random, lambda: chance.randbytes(chance.randint(0, 30)),
            lambda: None, lambda: chance.random() < 0.5, lambda: Decimal(chance.randint(1, 10**6)).scaleb(-2),
        ])()  # fmt: skip

    def document(depth: int = 0) -> Any:
        kind = chance.random()
        if depth > 3 or kind < 0.4:
            return leaf()
        if kind < 0.7:
            return {f"k{n}": document(depth + 1) for n in range(chance.randint(0, 4))}
        return [document(depth + 1) for _ in range(chance.randint(0, 4))]

    def form(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: form(part) for name, part in node.items()}
        return [form(part) for part in node] if isinstance(node, list) else type(node)

    @killick.agent
    async def redact_echo(run: killick.Run, given: Any) -> Any:
        await run.note(given)
        return given

    for number in range(25):
        given = document()
        kd.run(redact_echo, given, id=f"d{number}")
        data = kd.store.export(f"d{number}", redact=True)
        state = Log(read(data).loaded()).state(f"d{number}")
        assert form(state.input) == form(given), (seed, number)
        assert state.input == state.result, (seed, number)
        assert read(data).header.redacted
        assert replay(data, redact_echo).outcome == "agrees"
        long = [text for text in _texts(given) if len(text) > 8 and any(map(str.isalpha, text))]
        assert not [text for text in long if msgspec.json.encode(text)[1:-1] in data], (seed, number)


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _texts(part)
