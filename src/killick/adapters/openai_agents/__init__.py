"""The OpenAI Agents SDK: sessions in a store, tools and models as recorded steps, approvals."""

from killick.adapters.openai_agents.runner import KillickRunner
from killick.adapters.openai_agents.sessions import KillickSession
from killick.llm.external import attempt

__all__ = ["KillickRunner", "KillickSession", "attempt"]
