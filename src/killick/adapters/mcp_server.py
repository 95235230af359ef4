"""Killick as an MCP server: a model reads runs, and with permission pauses, resumes, forks and answers them.

The answers are the documents of `--json`. A write is a tool only if the operator allows it, and the engine refuses a
model's command where a person is to decide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import anyio.to_thread
import msgspec
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from msgspec.structs import asdict

from killick.client.client import AnyClient, Client
from killick.engine.control.inbox import Verb
from killick.errors import AnswerRefused, KillickError
from killick.history import listing
from killick.history.compare_runs import compare
from killick.history.timeline import timeline
from killick.presenting.documents import Question, open_wait
from killick.presenting.encoder import document
from killick.presenting.runs import run_now, why_now
from killick.store.records import RunQuery

CHARS_MAX: Final = 200_000
"""The longest answer: a model's context is small, and a run's document grows with the run."""

INSTRUCTIONS: Final = (
    "Killick records the runs of LLM agents. Use `list` and `inbox` first, then `why` for a run in words. `show` is a "
    "run's whole record."
)

Kind = Literal["calls", "decisions", "failures", "effects", "answers"]
Write = Literal["answer", "pause", "resume", "fork"]


def server(client: AnyClient, *, allow: Collection[Write] = (), name: str = "mcp") -> MCPServer:
    """Returns an MCP server for a store.

    allow  the writes that are tools: answer, pause, resume, fork
    name   the model's name: it acts as `model:NAME`
    """
    made: MCPServer = MCPServer("killick", instructions=INSTRUCTIONS, log_level="ERROR")
    operator = _Operator(client.as_sync(), f"model:{name}")
    reads: list[Callable[..., Any]] = [
        operator.list, operator.show, operator.why, operator.diff, operator.find, operator.inbox
    ]  # fmt: skip
    for tool in reads:
        made.add_tool(_in_thread(tool), annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
    for write in get_args(Write):
        if write in allow:
            made.add_tool(_in_thread(getattr(operator, write)), structured_output=False)
    return made


def _in_thread(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method as an MCP tool: its document as JSON, its error as one line."""

    @functools.wraps(tool)
    async def called(*args: Any, **given: Any) -> str:
        try:
            found = await anyio.to_thread.run_sync(functools.partial(tool, *args, **given))
        except KillickError as error:
            raise ToolError(str(error)) from error
        text = msgspec.json.encode(document(found)).decode()
        if len(text) > CHARS_MAX:
            raise ToolError(f"the answer has {len(text):,} characters, over {CHARS_MAX:,}; name a step, or a limit")
        return text

    return called


class _Operator:
    """The tools. Their docstrings are what a model reads."""

    def __init__(self, client: Client, by: str) -> None:
        self._client = client
        self._log = client.runtime.log
        self._by = by

    def _now(self) -> int:
        return self._client.runtime.clock.now_us()

    def list(self, status: str = "", agent: str = "", limit: int = 20) -> Any:
        """List runs, newest first. status: running, waiting, paused, failed, completed, cancelled, abandoned."""
        query = RunQuery(status=tuple(filter(None, status.split(","))), agent=agent or None)
        rows = listing.selected(self._log.store, query, limit=limit)
        return listing.Listing(self._log, whole=True).lines(rows, self._now())

    def show(self, run: str, step: str = "") -> Any:
        """Show a run with every step: arguments, attempts, results, errors, waits. With step, that step alone."""
        whole = run_now(self._log, timeline(self._log, run), self._now())
        if not step:
            return whole
        return [entry for entry in whole.entries if getattr(entry, "number", None) == step]

    def why(self, run: str, step: str = "") -> Any:
        """Explain in words why a run is where it is; with step, why that step ended as it did."""
        lines = why_now(self._log, timeline(self._log, run), step or None)
        if not lines:
            raise AnswerRefused(run, f"has no step {step}; `show` lists its steps")
        return {"run": run, "step": step or None, "why": lines}

    def diff(self, run: str, places: Sequence[str] | None = None, against: str = "") -> Any:
        """Show what a step changed (places: ["6"]), what changed between two places (["6:before", "now"]), or where
        a run and another one (against) part, and why."""
        if against and not places:
            return compare(self._log, run, against).document()
        return self._client.diff(run, *(places or ["start", "now"]), against=against or None).patch()

    def find(
        self, kind: Kind, tool: str = "", where: Mapping[str, Any] | None = None, run: str = "", limit: int = 20
    ) -> Any:
        """Find calls, decisions, failures, effects or answers in all runs, newest first. tool and where (arguments by
        dotted path) narrow calls and effects; tool also failures; run any of them."""
        asked: dict[str, Any] = {"run": run or None, "limit": limit}
        if kind in ("calls", "effects", "failures"):
            asked["tool"] = tool or None
        if kind in ("calls", "effects"):
            asked["where"] = where
        found = getattr(self._client.find, kind)(**asked)
        return {"found": list(found), "more": found.more, "scanned": found.scanned, "unread": found.unread}

    def inbox(self, to: str = "", limit: int = 50) -> Any:
        """List the questions that wait for an answer, the most urgent first. `verbs` are the answers each takes."""
        waits = self._client.inbox(to=to or None, limit=limit)
        facts = {wait.run: self._log.state(wait.run).fold.facts for wait in waits}
        return [Question.of(facts[wait.run], **asdict(open_wait(wait))) for wait in waits]

    # writes -----------------------------------------------------------------------------------

    def answer(self, wait: str, verb: Verb, value: Any = None, comment: str = "") -> Any:
        """Answer a question of the inbox by its id. Approvals and doubts of people are refused: ask the person."""
        found = next((each for each in self._client.inbox(limit=10_000) if wait in (each.id, each.run)), None)
        if found is None:
            raise AnswerRefused(wait, "no open question has this id; `inbox` lists them")
        self._client.answer(found, verb, value=value, by=self._by, comment=comment or None)
        return {"wait": found.id, "answer": verb, "by": self._by}

    def pause(self, run: str, because: str) -> Any:
        """Pause a run at its next step, until it is resumed."""
        self._client.pause(run, by=self._by, because=because)
        return self._outcome(run)

    def resume(self, run: str, because: str) -> Any:
        """Resume a run that failed or that a model paused. A worker continues it. What a person or the contract paused,
        stopped or has to look at is refused: ask the person."""
        done = self._client.resume(run, by=self._by, because=because)
        return {**self._outcome(run), "done": done}

    def fork(self, run: str, because: str, at: str = "now", set: Mapping[str, Any] | None = None) -> Any:  # noqa: A002
        """Fork a run at a place ("6:before", "start") into a new one, with other values of its context (set)."""
        made = self._client.fork(run, at, set=set, by=self._by, because=because)
        return {**self._outcome(made.id), "parent": run, "at": at}

    def _outcome(self, run: str) -> dict[str, Any]:
        return {"run": run, "status": self._client.info(run).status, "by": self._by}
