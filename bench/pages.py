"""Pages over a hundred thousand runs and one of twenty thousand steps, by a real server in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Final
from urllib.parse import urlsplit

import killick
from bench.measure import Measure, seconds
from bench.population import LONG_RUN, fill
from killick.store.records import RunQuery

RUNS: Final = 100_000
STEPS: Final = 20_000
TIMES: Final = 15
BAR_MS: Final = 200.0

PAGES: Final[dict[str, str]] = {
    "the first page of runs": "/",
    "runs that wait": "/runs?status=waiting",
    "runs of two statuses of one agent": "/runs?status=failed&status=paused&agent=claims.review",
    "runs with a tag": "/runs?tag=vip",
    "a page far down": "/runs?cursor=5000",
    "a search that finds few": "/runs?q=-099",
    "a search that finds nothing": "/runs?q=nobody",
    "one run with the counts of all": "/api/v1/runs?limit=1",
    "the inbox": "/inbox",
    "the overview of a day": "/overview",
    "the overview of 28 days": "/overview?period=28d",
    f"a run of {STEPS:,} steps": f"/runs/{LONG_RUN}",
    "its latest steps": f"/api/v1/runs/{LONG_RUN}/steps",
}


def measure(folder: Path) -> Iterator[Measure]:
    """Each page as the one who asks waits for it: the median, and the first time beside it."""
    url = f"sqlite:///{folder}/pages.db"
    with killick.open(url, durability="process") as client:
        fill(client, runs=RUNS, steps=STEPS)
        counting = median(seconds(partial(client.runtime.store.counts, RunQuery())) for _ in range(TIMES))
        finding = median(seconds(partial(client.runtime.store.runs, RunQuery(contains="nobody"))) for _ in range(TIMES))
    yield _ms("counting them by status in the store", counting, 10.0)
    yield _ms("finding no id that has a part, in the store", finding, 50.0)
    with serving(url) as connection:
        for what, path in PAGES.items():
            first, *rest = [seconds(partial(_ask, connection, path)) for _ in range(TIMES)]
            yield _ms(what, median(rest), BAR_MS, beside=f"{first * 1_000:.0f} ms the first time")


def _ms(what: str, took: float, bar: float, beside: str = "") -> Measure:
    told = f"{what}, among {RUNS:,} runs on SQLite"
    return Measure(name="pages", what=told, figure=took * 1_000, form="{:.0f} ms", at_most=bar, beside=beside)


_COOKIE: dict[str, str] = {}


def _sign_in(connection: HTTPConnection, link: str) -> None:
    connection.request("GET", link)
    answer = connection.getresponse()
    answer.read()
    _COOKIE["Cookie"] = str(answer.getheader("Set-Cookie")).partition(";")[0]


def _ask(connection: HTTPConnection, path: str) -> None:
    connection.request("GET", path, headers=_COOKIE)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, f"{path}: {answer.status} {body[:300]!r}"


@contextmanager
def serving(url: str) -> Iterator[HTTPConnection]:
    """A server of its own over a store, and a connection to it."""
    command = [sys.executable, "-m", "killick", "serve", "--store", url, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = ""
        while (found := re.search(r"http://\S+key=\S+", said)) is None:
            line = process.stdout.readline()
            assert line, f"the server did not begin: {said}"
            said += line
        place = urlsplit(found[0])
        connection = HTTPConnection(place.hostname or "", place.port, timeout=60)
        _sign_in(connection, f"{place.path}?{place.query}")
        yield connection
        connection.close()
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
