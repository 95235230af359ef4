"""Runs the subjects and writes their table: all of them into RESULTS.md, some of them to the screen alone, or, with
`--write`, into their place in it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench import (
    checking,
    checkpoints,
    contracts,
    conversation,
    crowd,
    encryption,
    figures,
    find,
    folding,
    followers,
    length,
    many_runs,
    many_steps,
    one_run,
    pages,
    parked,
    postgres_steps,
    recovery,
    sessions,
    snapshots,
    steps,
    time_travel,
    waking,
    window,
    workers,
    workspace,
    workspace_session,
)
from bench.machine import description, sync_us
from bench.measure import Measure, table

HERE: Final = Path(__file__).parent

SUBJECTS: Final[dict[str, Callable[[Path], Iterator[Measure]]]] = {
    "one_run": one_run.measure,
    "many_runs": many_runs.measure,
    "length": length.measure,
    "folding": folding.measure,
    "conversation": conversation.measure,
    "checkpoints": checkpoints.measure,
    "sessions": sessions.measure,
    "snapshots": snapshots.measure,
    "steps": steps.measure,
    "many_steps": many_steps.measure,
    "recovery": recovery.measure,
    "parked": parked.measure,
    "crowd": crowd.measure,
    "waking": waking.measure,
    "workers": workers.measure,
    "postgres_steps": postgres_steps.measure,
    "find": find.measure,
    "check": checking.measure,
    "time_travel": time_travel.measure,
    "contracts": contracts.measure,
    "encryption": encryption.measure,
    "pages": pages.measure,
    "followers": followers.measure,
    "window": window.measure,
    "paging": window.paging,
    "workspace": workspace.measure,
    "workspace_session": workspace_session.measure,
}

PREFACE: Final = """\
# Measured

By `make bench`, which writes this page. Speed is a ratio to a raw store that was measured in the same rounds,
in turn (A B, B A, A B …): the median of the rounds' ratios. "Bare" is Python's own `sqlite3` and one table:
the same rows under the same PRAGMAs (page size, WAL, `synchronous = FULL`), one INSERT a commit. Rows beside
peers are the best of three rounds, taken in turn, each peer in a process and a file of its own. PostgreSQL is one
server on the same disk, started for a subject; its clients reach it by TCP on the same machine.
"""


def main(names: list[str]) -> int:
    """Measure and print; the verdicts are for people, so the exit code does not depend on them."""
    writes = "--write" in names
    names = [name for name in names if name != "--write"]
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        print(f"bench: no subject {', '.join(unknown)}; there are {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    # Beside the code, because the system's own folder for such things is often not on a disk.
    with TemporaryDirectory(prefix="work-", dir=HERE) as name:
        folder = Path(name)
        syncs, measures = [sync_us(folder)], list[Measure]()
        for subject in names or SUBJECTS:
            for measure in SUBJECTS[subject](folder):
                measures.append(measure)
                print(" | ".join(cell for cell in measure.cells if cell), flush=True)
        syncs.append(sync_us(folder))
        machine = (
            f"{description(folder)}. Its disk: 4 KiB append and fdatasync in "
            f"{syncs[0]:.0f} µs before and {syncs[1]:.0f} µs after. "
            f"{datetime.now(UTC):%Y-%m-%d}, {time.monotonic() - began:.0f} s."
        )
    print(machine)
    if not names:
        (HERE / "RESULTS.md").write_text(f"{PREFACE}\n{machine}\n\n{table(measures)}\n", encoding="utf-8")
        print(f"written to {HERE / 'RESULTS.md'}")
    elif writes:
        replace(measures, names, machine)
    if writes or not names:
        figures.main()
    return 0


APART: Final = "Measured later, apart from the others: "


def replace(measures: list[Measure], names: list[str], machine: str) -> None:
    """Some subjects' rows in RESULTS.md anew, with where and when; the others stay as they were measured."""
    page = HERE / "RESULTS.md"
    head, _, rows = page.read_text(encoding="utf-8").partition("| --- |")
    *text, columns = head.rstrip().splitlines()
    later = [line.removeprefix(APART).partition(". ") for line in text if line.startswith(APART)]
    left = [(", ".join(name for name in each.split(", ") if name not in names), where) for each, _, where in later]
    told = [f"{APART}{each}. {where}" for each, where in [*left, (", ".join(names), machine)] if each]
    text = "\n".join(line for line in text if not line.startswith(APART)).rstrip().splitlines()
    head = "\n".join([*text, *(line for each in told for line in ("", each)), "", columns, ""])
    first, *old = rows.splitlines()
    kept = [row for row in old if row.startswith("| ") and row.split(" | ")[0].removeprefix("| ") not in names]
    new = table(measures).splitlines()[2:]
    order = list(SUBJECTS)
    every = sorted([*kept, *new], key=lambda row: order.index(row.split(" | ")[0].removeprefix("| ")))
    page.write_text("\n".join([f"{head}| --- |{first}", *every]) + "\n", encoding="utf-8")
    print(f"written to {page}: the rows of {', '.join(names)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
