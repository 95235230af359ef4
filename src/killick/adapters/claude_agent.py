"""The Claude Agent SDK: its transcripts in any store, and user tools as recorded steps.

Treats transcript entries as opaque, and leaves Claude Code's own tools to Claude Code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, is_typeddict
from urllib.parse import quote, unquote

from claude_agent_sdk import (
    SdkMcpTool,
    SessionKey,
    SessionListSubkeysKey,
    SessionStore,
    SessionStoreEntry,
    SessionStoreListEntry,
    SessionSummaryEntry,
    fold_session_summary,
)

from killick.adapters.framework_state import FrameworkState, Place, StateEntry, StateOwner, in_thread
from killick.adapters.tool_gate import Errors, ToolFailed, ToolOptions, called, declared, hinted, hosted
from killick.definitions.tools import AnyTool
from killick.errors import HeadMoved, Rejected, RunWaiting
from killick.ids import RandomIds
from killick.llm.external import Host, attempt

__all__ = ["KillickSessionStore", "attempt", "gated"]

SPACE: Final = "claude-agent"
"""The name prefix of this adapter's logs in a store."""

_SUMMARY: Final = "summary"
_ENTRY: Final = "entry:"


class KillickSessionStore(StateOwner, SessionStore):
    """A `SessionStore`: transcripts outlive their machine, and can be resumed on another.

    Each transcript, and each subagent's, has its own log. A batch is stored atomically with its summary. An entry with
    a known uuid is not stored again, from any process.
    """

    def __init__(self, store: Place, *, space: str = SPACE) -> None:
        """Takes an open client, which stays open, or a store's location, which `close` closes."""
        self._shelf = FrameworkState(store, space)
        self._projects: dict[str, FrameworkState] = {}

    def _of(self, project: str) -> FrameworkState:
        """Returns the transcripts of one project, separately listed."""
        if project not in self._projects:
            space = f"{self._shelf.space}.{quote(project, safe='')}"
            self._projects.setdefault(project, FrameworkState(self._shelf.client, space))
        return self._projects[project]

    @in_thread
    def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Stores a batch of a transcript."""
        shelf, id = self._of(key["project_key"]), _id(key)  # noqa: A001
        while True:
            head = shelf.head(id)  # read before the entries: an append in between moves it
            known = {kept.name: kept for kept in shelf.entries(id)}
            fresh: dict[str, SessionStoreEntry] = {}
            for entry in entries:
                name = _ENTRY + (entry.get("uuid") or RandomIds().new("line"))
                if name not in known:
                    fresh.setdefault(name, entry)
            if not fresh:
                return
            kept = [StateEntry(name, entry) for name, entry in fresh.items()]
            if not key.get("subpath"):
                before = known.get(_SUMMARY)
                summary = fold_session_summary(_summary(key, before), key, list(fresh.values()))
                kept.append(StateEntry(_SUMMARY, summary["data"]))
            try:
                shelf.put(id, *kept, expect=head)
            except HeadMoved:
                continue  # another process appended first: compare again
            return

    @in_thread
    def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Returns a whole transcript; None if there is none."""
        shelf, id = self._of(key["project_key"]), _id(key)  # noqa: A001
        return shelf.values(id, lambda entries: [each for each in entries if each.name != _SUMMARY]) or None

    @in_thread
    def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """Returns a project's sessions, with the time of their last addition."""
        return [{"session_id": session, "mtime": kept.at_us // 1000} for session, kept in self._mains(project_key)]

    @in_thread
    def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """Returns the summaries of a project's sessions, as the SDK made them."""
        return [
            {"session_id": session, "mtime": kept.at_us // 1000, "data": kept.value}
            for session, kept in self._mains(project_key)
        ]

    def _mains(self, project: str) -> Iterator[tuple[str, StateEntry]]:
        """Returns a project's sessions with their summaries, which are as new as the last addition."""
        shelf = self._of(project)
        for id in shelf.ids():  # noqa: A001
            summary = shelf.get(id, _SUMMARY) if "/" not in id else None
            if summary is not None:
                yield unquote(id), summary

    @in_thread
    def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """Returns the subagent transcripts of a session."""
        return self._subkeys(key["project_key"], key["session_id"])

    def _subkeys(self, project: str, session: str) -> list[str]:
        of = f"{quote(session, safe='')}/"
        return [each.removeprefix(of) for each in self._of(project).ids() if each.startswith(of)]

    @in_thread
    def delete(self, key: SessionKey) -> None:
        """Deletes a session and its subagents, or one subagent's transcript."""
        shelf, below = self._of(key["project_key"]), list[str]()
        if not key.get("subpath"):
            below = [f"{_id(key)}/{each}" for each in self._subkeys(key["project_key"], key["session_id"])]
        shelf.forget(*below, _id(key))


def _id(key: SessionKey) -> str:
    """Returns a transcript's id within its project; a slash separates the session from its subagents."""
    session = quote(key["session_id"], safe="")
    return f"{session}/{key['subpath']}" if key.get("subpath") else session


def _summary(key: SessionKey, kept: StateEntry | None) -> SessionSummaryEntry | None:
    if kept is None:
        return None
    data: dict[str, Any] = kept.value
    return {"session_id": key["session_id"], "mtime": kept.at_us // 1000, "data": data}


# tools --------------------------------------------------------------------------------------------


def gated(
    offered: Sequence[SdkMcpTool[Any]], *, tools: ToolOptions | None = None, host: Host | None = None,
    errors: Errors = "answer",
) -> list[SdkMcpTool[Any]]:  # fmt: skip
    """Returns tools for `create_sdk_mcp_server` whose calls go through the current host's gate.

        tools    each tool's effect, by name: {"look_up": "reads"}, or options of `killick.tool`, or a `killick.Tool`.
                 Others follow their hints, and without hints run at most once
        errors   what an error of a tool that runs at most once becomes: its answer, or a question to a person

    A call is matched by its arguments, because Claude gives it another id when asked again. Use one host for one
    message, so that an equal call in the next message is another. Claude is informed why a call failed.
    """
    said = dict(tools or {})
    return [_gated(each, said.get(each.name, hinted(each.annotations)), host, errors) for each in offered]


def _gated(
    offered: SdkMcpTool[Any], said: AnyTool | Mapping[str, Any] | str, host: Host | None, errors: Errors
) -> SdkMcpTool[Any]:
    tool = declared(offered.name, said, schema=_schema(offered.input_schema), doc=offered.description)

    async def handler(**arguments: Any) -> Any:
        return await offered.handler(arguments)

    async def through(arguments: Any) -> dict[str, Any]:
        own = None if tool is said else handler
        try:
            answer = await called(hosted(host, offered.name), tool, dict(arguments), own, errors=errors)
        except (Rejected, ToolFailed) as failed:
            return _text_result(str(failed), is_error=True)
        except RunWaiting as waiting:
            return _text_result(f"It is not done yet: {waiting}. Do not try again before that.", is_error=True)
        return answer if isinstance(answer, dict) and "content" in answer else _text_result(str(answer))

    return replace(offered, handler=through)


def _text_result(text: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], **({"is_error": True} if is_error else {})}


def _schema(given: Any) -> dict[str, Any]:
    """Returns a tool's parameter names, in any declared form."""
    if is_typeddict(given):
        return {"type": "object", "properties": {name: {} for name in given.__annotations__}}
    if "properties" in given:
        return dict(given)
    return {"type": "object", "properties": {name: {} for name in given}}
