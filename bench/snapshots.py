"""What snapshots add to a file, and that it stays in proportion to the run's length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.measure import Measure
from bench.workload import LONG, long_run


def measure(folder: Path) -> Iterator[Measure]:
    """At half the length and at all of it."""
    plain, shot = (long_run(folder, snapshots=snapshots).bytes_at for snapshots in (False, True))
    added = {events: shot[events] - plain[events] for events in plain}
    for events in plain:
        yield Measure(
            name="snapshots",
            what=f"file with snapshots to file without, {events:,} events",
            figure=shot[events] / plain[events],
            beside=f"{shot[events] / 1e6:.1f} MB to {plain[events] / 1e6:.1f} MB; "
            f"{added[events] / events:.0f} bytes an event",
        )
    yield Measure(
        name="snapshots",
        what="what they add at twice the length (linear: 2)",
        figure=added[LONG] / added[LONG // 2],
        beside=f"{added[LONG] / 1e6:.1f} MB to {added[LONG // 2] / 1e6:.1f} MB",
    )
