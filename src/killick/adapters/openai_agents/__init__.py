"""The OpenAI Agents SDK on Killick: sessions and run states kept, tools at the gate, models recorded, people asked."""

from killick.adapters.openai_agents.run_states import KillickRunStates
from killick.adapters.openai_agents.runner import KillickRunner
from killick.adapters.openai_agents.sessions import KillickSession
from killick.llm.external import attempt

__all__ = ["KillickRunStates", "KillickRunner", "KillickSession", "attempt"]
