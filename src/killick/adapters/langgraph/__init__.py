"""LangGraph on Killick: `KillickSaver`, a checkpointer on any store, and `Gate`, by which tools are called once.

`KillickMiddleware`, the gate for `create_agent`, is in `killick.adapters.langgraph.middleware`: it needs LangChain.
"""

from killick.adapters.langgraph.gate import Gate
from killick.adapters.langgraph.saver import KillickSaver
from killick.adapters.tool_gate import Stopped, ToolFailed, Waiting

__all__ = ["Gate", "KillickSaver", "Stopped", "ToolFailed", "Waiting"]
