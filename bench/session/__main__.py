"""One session under each strategy, a line each: `python -m bench.session --seed 1 --budget 60000 --strategy
killick`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from bench.session import traces
from bench.session.meter import OPENAI
from bench.session.oracle import floor, played
from bench.session.play import Outcome, Player
from bench.session.recording import kept
from bench.session.script import Session
from bench.session.strategies import Everything, Killick, Masking, MaskingInBatches, masked


def line(outcome: Outcome, base: Outcome | None, took: float) -> str:
    bill = outcome.bill
    fewer = f"{1 - bill.sent / base.bill.sent:6.1%}" if base else ""
    return (
        f"{outcome.strategy:28} calls {bill.calls:4} sent {bill.sent / 1e6:6.2f}M {fewer} "
        f"cost {bill.cost() / 1e3:7.0f}K openai {bill.cost(OPENAI) / 1e3:7.0f}K written {bill.written / 1e3:6.0f}K "
        f"batches {bill.breaks:3} evicted {outcome.evicted:3} "
        f"faults {len(outcome.faults):3} = {outcome.fault_rate:.1%} largest {bill.largest:6} "
        f"over {bill.over} lost {outcome.lost} {took:.1f}s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.session")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--budget", type=int, default=60_000)
    parser.add_argument("--strategy", nargs="*", default=[])
    parser.add_argument("--trace", choices=("airline", "coding"), help="real traces instead")
    parser.add_argument("--faults", action="store_true", help="say which pages were missing")
    given = parser.parse_args()
    sessions = getattr(traces, given.trace)() if given.trace else map(kept, given.seed)
    for session in sessions:
        print(session.name)
        _show(session, given.budget, set(given.strategy), given.faults)


def _show(session: Session, budget: int, chosen: set[str], faults: bool) -> None:
    ways: dict[str, Callable[[], Outcome]] = {
        "everything": Player(session, Everything()).play,
        "masking": lambda: masked(session, budget, Masking),
        "batches": lambda: masked(session, budget, lambda keep: MaskingInBatches(keep, budget)),
        "killick": Player(session, Killick(budget), budget).play,
        "oracle": lambda: played(session, budget),
        "deep": lambda: played(session, budget, deepest=0.3),
    }
    base: Outcome | None = None
    for name, way in ways.items():
        if chosen and name not in chosen | {"everything"}:
            continue
        began = time.monotonic()
        outcome = way()
        base = base or outcome
        print(line(outcome, base, time.monotonic() - began), flush=True)
        for fault in outcome.faults if faults else ():
            print(f"    move {fault.move:3} {fault.how:6} age {fault.age:3} {fault.chars:6} chars {fault.key[:100]}")
    print(f"no strategy can cost less than {floor(session) / 1e3:.0f}K")


if __name__ == "__main__":
    main()
