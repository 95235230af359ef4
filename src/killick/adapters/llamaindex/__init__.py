"""LlamaIndex: the models and tools of agents and workflows as recorded steps, and workflows that survive their process.

`gated` puts models and tools through the gate. `KillickRuntime` runs workflows: it stores the context of a run before
each of its steps starts, and names the calls of a step by the run and the number of the step's work in it.
"""

from killick.adapters.llamaindex.gate import gated
from killick.adapters.llamaindex.runtime import KillickRuntime

__all__ = ["KillickRuntime", "gated"]
