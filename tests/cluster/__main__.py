"""`python -m cluster [SEED …]`: tells stories of a cluster by seed, and prints the shortest form of one that breaks."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from itertools import count

from cluster.simulator import Broken, Plan, Story, Told, drawn_fleet, drawn_plan, rule_of, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, help="tell these, in this process; a debugger may look on")
    parser.add_argument("--first", type=int, default=0, help="the first seed, without seeds given")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on with new seeds")
    parser.add_argument("--workers", type=int, help="how many workers each cluster has, in place of a drawn number")
    parser.add_argument(
        "--minutes", type=float, help="the virtual minutes that faults go on, in place of a drawn number"
    )
    parser.add_argument("--fleet", action="store_true", help="200 workers with little work for two hours")
    parser.add_argument("--failover", action="store_true", help="the store fails over to a replica that is behind")
    parser.add_argument("--called", action="store_true", help="runs renew while callers send, command and vote")
    parser.add_argument("--leaps", action="store_true", help="wall clocks are wrong for a moment, by hours or years")
    parser.add_argument("--whole", action="store_true", help="do not shrink a story that breaks")
    asked = parser.parse_args()
    began, hours, cpu, told = time.monotonic(), 0.0, 0.0, 0
    for seed in asked.seeds or count(asked.first):
        if not asked.seeds and time.monotonic() - began > asked.seconds:
            break
        drawn = partial(
            drawn_plan, workers=asked.workers, minutes=asked.minutes, failover=asked.failover, called=asked.called
        )
        plan = (drawn_fleet if asked.fleet else drawn)(seed)
        found = tell(plan, loud=bool(asked.seeds))
        if not isinstance(found, Told):
            explain(plan, found, shrinks=not asked.whole)
            return 1
        told, hours, cpu = told + 1, hours + found.worker_hours, cpu + found.cpu_seconds
    rate = hours / max(cpu, 1e-9)
    sys.stdout.write(f"{told} stories hold: {hours:.1f} worker-hours in {cpu:.1f} s of CPU, {rate:.1f} a second\n")
    return 0


def tell(plan: Plan, *, loud: bool) -> Told | Exception:
    try:
        found = Story(plan).tell()
    except Exception as error:
        return error
    if loud:
        sys.stdout.write(
            f"seed {plan.seed}: {plan.workers} workers, {len(plan.faults)} faults, {found.runs} runs, "
            f"{found.effects} requests to the external system, {found.operations} operations of the store in "
            f"{found.virtual_seconds:.0f} s; trace {found.trace}\n"
        )
    return found


def explain(plan: Plan, error: Exception, *, shrinks: bool) -> None:
    """Prints what broke, the faults that it takes, and the last operations of the store."""
    if shrinks:
        plan = shrunk(plan, str(rule_of(error)))
    story = Story(plan)
    try:
        story.tell()
    except Exception as again:
        error = again
    out = sys.stdout.write
    out(f"seed {plan.seed} breaks: {error}\n\n{plan.workers} workers, leases of {plan.lease_seconds:g} s, ")
    out(f"polls of {plan.poll_seconds:g} s, latency {plan.latency_us} µs, time limit {plan.timeout_us / 1e6:g} s\n")
    out("".join(f"  {fault}\n" for fault in plan.faults) or "  no fault\n")
    out("the last operations:\n")
    out("".join(f"  {line}\n" for line in (story.network.tail if story.network is not None else ())))
    if not isinstance(error, Broken):
        raise error


if __name__ == "__main__":
    sys.exit(main())
