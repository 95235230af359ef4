"""DBOS on a PostgreSQL server, as its documentation has it. Asked for steps of one workflow or of many."""

# The peers are a group of their own, so the types are checked with them and without.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from dbos import DBOS

from bench.measure import seconds
from bench.peers import Took, say
from bench.peers.dbos_steps import WARM_STEPS, steps


def one(count: int) -> None:
    steps(WARM_STEPS)
    _say_timed(count, lambda: steps(count))


def many(runs: int, count: int) -> None:
    """In threads: as tasks of a loop DBOS is a little slower."""

    def work() -> None:
        for handle in [DBOS.start_workflow(steps, count) for _ in range(runs)]:
            handle.get_result()

    work()
    _say_timed(runs * count, work)


def _say_timed(count: int, work: Callable[[], object]) -> None:
    cpu = time.process_time()
    took = seconds(work)
    say(Took(took / count, (time.process_time() - cpu) / count, None))


if __name__ == "__main__":
    asked: dict[str, Callable[..., None]] = {"one": one, "many": many}
    DBOS(config={"name": "bench", "system_database_url": sys.argv[2]})
    DBOS.launch()
    asked[sys.argv[1]](*map(int, sys.argv[3:]))
    DBOS.destroy()
