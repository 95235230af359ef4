"""LangGraph: `KillickSaver`, a checkpointer on any store, and `Gate`, which makes tool calls recorded steps.

`KillickMiddleware`, the gate for `create_agent`, is in `killick.adapters.langgraph.middleware`: it needs LangChain.
"""

from killick.adapters.langgraph.gate import Gate
from killick.adapters.langgraph.saver import KillickSaver
from killick.adapters.tool_gate import Stopped, ToolFailed, Waiting

__all__ = ["Gate", "KillickSaver", "Stopped", "ToolFailed", "Waiting"]
