"""A process that is killed, and the one that goes on: what is done once is seen once, in one trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from neighbours.trying import try_example, try_page

HERE = Path(__file__).parent


def twice(folder: Path, how: str) -> tuple[int, list[dict[str, Any]]]:
    """How often it paid, and the spans of both processes."""
    program = [sys.executable, str(HERE / "crashing_traced.py"), str(folder), how]
    first = subprocess.run(program, timeout=600, check=False)
    assert first.returncode == -9
    subprocess.run(program, timeout=600, check=True)
    spans = [json.loads(line) for line in (folder / f"{how}.jsonl").read_text().splitlines()]
    return len((folder / f"{how}.paid").read_text().splitlines()), spans


def test_a_run_that_goes_on_in_another_process_repeats_no_span_and_stays_in_its_trace(tmp_path: Path) -> None:
    paid_alone, alone = twice(tmp_path, "alone")
    paid, spans = twice(tmp_path, "killick")
    names = [span["name"] for span in spans]
    print(
        f"paid: alone {paid_alone} times, with Killick {paid}; "
        f"spans of it: alone {[span['name'] for span in alone].count('execute_tool pay')}, "
        f"with Killick {names.count('execute_tool pay')}"
    )
    assert (paid_alone, paid) == (2, 1)
    assert names == ["execute_tool pay", "execute_tool look", "invoke_agent pays"]
    pay, look, agent = spans
    assert agent["attributes"]["killick.replayed.steps"] == 1
    assert look["attributes"]["killick.attempt.number"] == 2, "the attempt that died is on record"
    assert len({span["context"]["trace_id"] for span in spans}) == 1, "one trace over both processes"
    assert agent["parent_id"] == pay["parent_id"], "under the span of the process that died"
    assert len({span["context"]["trace_id"] for span in alone}) == 2


def test_the_example_runs(tmp_path: Path) -> None:
    try_example("opentelemetry_traces", tmp_path)


def test_the_page_is_so(tmp_path: Path) -> None:
    try_page("opentelemetry", tmp_path)
