"""LangGraph on Kedge: `KedgeSaver`, a checkpointer on any store, and `Gate`, by which tools are called once.

`KedgeMiddleware`, the gate for `create_agent`, is in `kedge.adapters.langgraph.middleware`: it needs LangChain.
"""

from kedge.adapters.gated import Stopped, ToolFailed, Waiting
from kedge.adapters.langgraph.gate import Gate
from kedge.adapters.langgraph.saver import KedgeSaver

__all__ = ["Gate", "KedgeSaver", "Stopped", "ToolFailed", "Waiting"]
