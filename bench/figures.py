"""Writes the figures of README.md and of pages in docs from RESULTS.md, so that no page can claim another number.

`python -m bench.figures` rewrites the tables between the markers; `make bench` does so too after it wrote RESULTS.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BEGIN: Final = "<!-- figures: written by python -m bench.figures from bench/RESULTS.md -->"
END: Final = "<!-- end of figures -->"

PAIR: Final = re.compile(r"([\d,.]+)(?:/s| µs| ms) to ([\d,.]+)")


class Results:
    """The rows of RESULTS.md, found by subject and by how their text begins."""

    def __init__(self, page: str) -> None:
        self.machine = next(line for line in page.splitlines() if " cores, " in line)
        self.rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in page.splitlines()
            if line.startswith("| ") and not line.startswith("| ---")
        ]

    def beside(self, subject: str, *words: str) -> str:
        """The last column of the one row of a subject whose text contains all words."""
        found = [row[-1] for row in self.rows if row[0] == subject and all(word in row[1] for word in words)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} rows of {subject} contain {words}; change bench/figures.py with the bench")
        return found[0]

    def pair(self, subject: str, *words: str) -> tuple[str, str]:
        """What was measured of us and of the peer, as RESULTS.md prints it."""
        text = self.beside(subject, *words)
        match = PAIR.search(text)
        if match is None:
            raise LookupError(f"{subject}: {text!r} compares no two figures; change bench/figures.py with the bench")
        return match[1], match[2]

    def flushes(self, peer: str) -> str:
        """Device flushes a step of the peer that a pattern names, as a whole number."""
        text = self.beside("steps", "device flushes a step")
        match = re.search(rf"{peer} ([\d.]+)", text)
        if match is None:
            raise LookupError(f"steps: no flushes of {peer}; change bench/figures.py with the bench")
        return f"{float(match[1]):.0f}"

    @property
    def named(self) -> dict[str, str]:
        """Every figure that a page uses, by the name that its table gives it."""
        wal = "its file set to WAL first"
        one, one_dbos = self.pair("steps", "steps/s of one run", "as it comes")
        many, many_dbos = self.pair("many_steps", "as it comes")
        cpu, cpu_dbos = self.pair("steps", "processor time", "as it comes")
        recover, recover_dbos = self.pair("recovery", "DBOS")
        one_pg, one_pg_dbos = self.pair("postgres_steps", "one run to DBOS")
        many_pg, many_pg_dbos = self.pair("postgres_steps", "50 runs at once")
        queue = re.search(r"of which ([\d.]+ s)", self.beside("recovery", "DBOS"))
        return {
            "machine": ", ".join(self.machine.split(", ")[:2]),
            "one": one,
            "one_dbos": one_dbos,
            "one_wal": self.pair("steps", "steps/s of one run", wal)[1],
            "one_langgraph": self.pair("steps", "steps/s of one run", "LangGraph")[1],
            "one_pg": one_pg,
            "one_pg_dbos": one_pg_dbos,
            "many": many,
            "many_dbos": many_dbos,
            "many_wal": self.pair("many_steps", "WAL")[1],
            "many_pg": many_pg,
            "many_pg_dbos": many_pg_dbos,
            "cpu": cpu,
            "cpu_dbos": cpu_dbos,
            "cpu_wal": self.pair("steps", "processor time", wal)[1],
            "cpu_langgraph": self.pair("steps", "processor time", "LangGraph")[1],
            "recover": recover,
            "recover_dbos": recover_dbos,
            "recover_queue": queue[1] if queue else "0 s",
            "recover_langgraph": self.pair("recovery", "LangGraph")[1],
            "due_pg": self.pair("crowd", "claiming one", "parked", "PostgreSQL")[0],
            "list_pg": self.pair("crowd", "listing a page", "parked", "PostgreSQL")[0],
            "wake_pg": self.pair("crowd", "waking one", "parked", "PostgreSQL")[0],
            "flushes_dbos": self.flushes("as it comes"),
            "flushes_wal": self.flushes(wal),
            "flushes_langgraph": self.flushes("LangGraph .*"),
        }


README: Final = """\
| {machine} | Killick | DBOS 3.4 | LangGraph 1.2 with SqliteSaver |
|---|---|---|---|
| durable steps a second, one run | {one}; {one_pg} on PostgreSQL | {one_dbos}; {one_wal} with its file set to WAL; \
{one_pg_dbos} on PostgreSQL | {one_langgraph} |
| device flushes a step | 1 | {flushes_dbos}; {flushes_wal} with WAL | {flushes_langgraph} |
| steps a second, 50 runs at once | {many}; {many_pg} on PostgreSQL | {many_dbos}; {many_wal} with WAL; \
{many_pg_dbos} on PostgreSQL | not measured |
| processor time of a step | {cpu} µs | {cpu_dbos} µs; {cpu_wal} µs with WAL | {cpu_langgraph} µs |
| resuming after a kill, 1,000 steps | {recover} ms | {recover_dbos} ms, of which its queue waits {recover_queue} | \
**{recover_langgraph} ms**: it loads a snapshot |"""

COMPARISON: Final = """\
| {machine} | Killick | DBOS | LangGraph | Restate |
|---|---|---|---|---|
| durable steps/s of one run (device flushes a step) | {one} on SQLite, {one_pg} on PostgreSQL (1; 2 when the next \
step does not follow at once) | {one_dbos} on SQLite as it comes ({flushes_dbos}), {one_wal} with WAL ({flushes_wal}), \
{one_pg_dbos} on PostgreSQL (1) | {one_langgraph} on SQLite ({flushes_langgraph}) | 493 (2), measured by hand on arm64 |
| steps/s of 50 runs at once | {many}; {many_pg} on PostgreSQL | {many_dbos}; {many_wal} with WAL; {many_pg_dbos} on \
PostgreSQL | not measured | not measured |
| resuming after a kill at step 1,000 | {recover} ms | {recover_dbos} ms, of which its queue waits {recover_queue} | \
{recover_langgraph} ms | not measured |"""

SCALING: Final = """\
| two cores for PostgreSQL and the workers | measured |
|---|---|
| steps a second of one run | {one_pg} |
| steps a second of 50 runs at once, one process | {many_pg} |
| claim a due run among 100,000 parked runs | {due_pg} µs |
| wake a parked run among 100,000 | {wake_pg} µs |
| list 100 of 100,000 runs | {list_pg} µs |"""

PAGES: Final = {"README.md": README, "docs/comparison.md": COMPARISON, "docs/scaling.md": SCALING}


def written(page: str, template: str, figures: dict[str, str]) -> str:
    """A page with the table between its markers made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise LookupError(f"the page has no {BEGIN!r} … {END!r}; put the markers where the table belongs")
    return f"{before}{BEGIN}\n\n{template.format(**figures)}\n\n{END}{after}"


def write(put: Callable[[Path, str], object]) -> None:
    """Hand each page, as it should be, to `put`."""
    figures = Results((ROOT / "bench/RESULTS.md").read_text(encoding="utf-8")).named
    for name, template in PAGES.items():
        page = ROOT / name
        put(page, written(page.read_text(encoding="utf-8"), template, figures))


def main() -> None:
    """Rewrite the pages."""
    write(lambda page, text: page.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
