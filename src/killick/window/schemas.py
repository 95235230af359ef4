"""The tools of a request: the caller's, and the window's own tool, which recalls evicted content. Runs no tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from killick.window.messages import Shape, is_map, plain, size_of

_RECALL: Final = "Recalls evicted content. The note in its place names the handle."
_TAKES: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"handle": {"type": "string", "description": "such as m41, m41.2 or m10-m37"}},
    "required": ["handle"],
}


class Schemas:
    """The sent form of a tools array: equal for a whole session, because tools come first in what providers cache."""

    def __init__(self, tools: Sequence[Any], shape: Shape, tokens: Callable[[str], int]) -> None:
        self._given = list(tools)
        said = [_plain(tool) for tool in self._given]
        self.recall_name = "recall"
        while self.recall_name in map(_name, said):
            self.recall_name = f"killick_{self.recall_name}"
        recall = _shaped(self.recall_name, shape)
        self.sent: list[Any] = [*self._given, recall]
        self.tokens_given = sum(size_of(tool, tokens) for tool in said)
        self.tokens_sent = self.tokens_given + size_of(recall, tokens)

    def same(self, tools: Sequence[Any]) -> bool:
        """Returns whether these are the tools that it was built from."""
        return len(tools) == len(self._given) and all(
            one is other or one == other for one, other in zip(tools, self._given, strict=True)
        )


def _plain(tool: Any) -> Any:
    """Returns a tool's wire form: clients also accept objects that describe themselves."""
    describe = None if is_map(tool) else getattr(tool, "to_dict", None)
    return describe() if callable(describe) else plain(tool)


def _name(tool: Any) -> Any:
    if not is_map(tool):
        return None
    return tool["function"].get("name") if is_map(tool.get("function")) else tool.get("name")


def _shaped(name: str, shape: Shape) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": name, "description": _RECALL}
    if shape == "anthropic":
        return fields | {"input_schema": _TAKES}
    if shape == "openai":
        return {"type": "function", "function": fields | {"parameters": _TAKES}}
    # Explicit: the Responses API defaults to strict schemas.
    return {"type": "function"} | fields | {"parameters": _TAKES, "strict": False}
