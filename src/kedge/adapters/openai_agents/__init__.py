"""The OpenAI Agents SDK on Kedge: sessions and run states kept, tools at the gate, models recorded, people asked."""

from kedge.adapters.openai_agents.runner import KedgeRunner
from kedge.adapters.openai_agents.sessions import KedgeSession
from kedge.adapters.openai_agents.states import KedgeRunStates
from kedge.runtime.hosting import attempt

__all__ = ["KedgeRunStates", "KedgeRunner", "KedgeSession", "attempt"]
