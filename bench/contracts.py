"""What a contract of twenty rules costs: to judge one intention, on effectful steps, and to judge them all again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import killick
from bench.machine import sync_us
from bench.measure import Measure, interleaved, ratio, seconds
from bench.steps import BARE_ROUNDS, STEPS, WARM_STEPS
from bench.workload import BareTable
from killick import rules
from killick.contracts.contract import Intention, PolicyInput
from killick.history.backtest import rejudge
from killick.model.ledger import Counts
from killick.store import SqliteStore
from killick.store.protocol import raw_store

JUDGED: Final = 2_000
JUDGE_ROUNDS: Final = 15

TWENTY: Final = killick.Contract(
    "twenty",
    [
        rules.allow("transfer", "look_up", "send_letter", "spawn:*"),
        rules.deny("delete_*", "drop_*"),
        rules.arguments("transfer", number={"type": "integer", "min": 0, "max": 1_000_000_000}),
        rules.arguments("transfer", to={"type": "string", "matches": r"customer-\d+"}),
        rules.arguments("transfer", currency={"one_of": ["EUR", "USD"]}),
        rules.arguments("transfer", subject={"length": 200}),
        rules.arguments("look_up", table={"one_of": ["claims", "people"]}),
        rules.arguments("send_*", body={"length": 10_000}),
        rules.arguments("transfer", number={"max": 900_000_000}, name="large sums", ask="managers"),
        rules.paths(["read_file", "write_file"], path=["workspace"]),
        rules.budget(calls=1_000_000, scope="run"),
        rules.budget(tokens=10_000_000, scope="run"),
        rules.budget(money="500 USD", scope="run"),
        rules.budget(time="30d", scope="run"),
        rules.budget("transfer", effects=1_000_000, scope="run"),
        rules.budget("send_letter", effects=3, scope="run"),
        rules.once("close_account", scope="run"),
        rules.after("send_letter", "look_up"),
        rules.context("close_account", approved={"one_of": [True]}),
        rules.arguments("spawn:*", input={"type": "object"}),
    ],
    people={"managers": ["mia", "max"]},
)

DENSE: Final = killick.Contract(
    "dense",
    [
        rules.arguments(
            "transfer",
            number={"type": "integer", "min": 0, "max": 1_000_000 + most},
            to={"type": "string", "length": 80, "matches": r"customer-\d+"},
            name=f"bounds {most}",
        )
        for most in range(10)
    ]
    + [rules.budget("transfer", effects=1_000 + most, scope="run", name=f"few {most}") for most in range(10)],
)
"""Twenty rules that all have to be asked."""

noted: list[int] = []


@killick.tool
async def transfer(number: int, to: str, currency: str, subject: str) -> int:
    """An effect that nobody may repeat."""
    noted.append(number)
    return number


async def _transfers(run: killick.Run, count: int) -> int:
    for number in range(count):
        await run.call(transfer, number, f"customer-{number}", "EUR", "Your claim")
    return count


judged: Final = killick.agent(name="judged_steps", contract=TWENTY)(_transfers)
free: Final = killick.agent(name="free_steps")(_transfers)


def measure(folder: Path) -> Iterator[Measure]:
    """One verdict, then steps that wait for theirs, then all of them again."""
    yield _one_verdict()
    ids = count()
    with killick.open(str(folder / "contracts.db")) as kd:

        def rate(agent: killick.Agent[int, int], steps: int = STEPS) -> float:
            run = f"contracts-{next(ids)}"
            return steps / seconds(lambda: kd.run(agent, steps, id=run))

        store = raw_store(kd.runtime.store)
        assert isinstance(store, SqliteStore)
        rate(free, WARM_STEPS)
        bare = BareTable(folder / "contracts-bare.db", store, "contracts-0")
        bare.insert(WARM_STEPS)
        ours, without, theirs, syncs = interleaved(
            BARE_ROUNDS,
            lambda: rate(judged),
            lambda: rate(free),
            lambda: STEPS / seconds(lambda: bare.insert(STEPS)),
            lambda: sync_us(folder),
        )
        yield Measure(
            name="contracts",
            what=f"effectful steps/s of one run under {len(TWENTY.rules)} rules, to bare one-row commits/s",
            figure=ratio(ours, theirs),
            at_least=0.35,
            beside=f"{median(ours):,.0f}/s to {median(theirs):,.0f}/s; fdatasync {median(syncs):.0f} µs",
        )
        yield Measure(
            name="contracts",
            what="the same steps/s, to those of an agent without a contract",
            figure=ratio(ours, without),
            beside=f"{median(ours):,.0f}/s to {median(without):,.0f}/s",
        )
        run = next(each.id for each in kd.list(agent="judged_steps"))

        def again() -> None:
            assert rejudge(kd.runtime.log, run).agrees

        took = median(seconds(again) for _ in range(3))
        yield Measure(
            name="contracts",
            what=f"intentions/s that are judged again from the record, {STEPS:,} of one run",
            figure=STEPS / took,
            form="{:,.0f}/s",
            beside=f"{took * 1e3:.0f} ms",
        )


def _one_verdict() -> Measure:
    intention = Intention(
        name="transfer",
        sort="tool",
        arguments={"number": 17, "to": "customer-17", "currency": "EUR", "subject": "Your claim"},
        step="17",
        effect="at_most_once",
    )
    counts = Counts(calls={"transfer": 16}, effects={"transfer": 16})
    standing = PolicyInput(
        now_us=1_750_000_000_000_000, started_us=1_750_000_000_000_000, own=counts, context=dict, past=lambda _: ()
    )
    assert TWENTY.judge(intention, standing, frozenset()).ruling == "accept"
    assert DENSE.judge(intention, standing, frozenset()).ruling == "accept"

    def judging(contract: killick.Contract) -> float:
        def judge() -> None:
            for _ in range(JUDGED):
                contract.judge(intention, standing, frozenset())

        return median(seconds(judge) for _ in range(JUDGE_ROUNDS)) / JUDGED * 1e6

    return Measure(
        name="contracts",
        what=f"time to judge one intention by {len(TWENTY.rules)} rules",
        figure=judging(TWENTY),
        form="{:.1f} µs",
        at_most=50,
        beside=f"{judging(DENSE):.1f} µs where all {len(DENSE.rules)} are about the same tool",
    )
