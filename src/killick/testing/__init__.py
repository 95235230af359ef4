"""Test tools for agents: played runs, scripted models, processes that crash anywhere.

An agent of your own: `play`, with `scripted` for its model, and `interrupt_everywhere`. A production run: `replay`.

Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from killick.check.checker import Case, check, interrupt_everywhere
    from killick.check.fakes import always, in_order
    from killick.check.samples import sample
    from killick.replay.result import Replayed
    from killick.testing.player import BlockingPlay, Play, play, replay
    from killick.testing.scripted_model import ScriptedModel, call, refusal, scripted, turn

__all__ = [
    "BlockingPlay", "Case", "Play", "Replayed", "ScriptedModel", "always", "call", "check", "in_order",
    "interrupt_everywhere", "play", "refusal", "replay", "sample", "scripted", "turn",
]  # fmt: skip

_HOMES: Final = {
    "killick.check.checker": ("Case", "check", "interrupt_everywhere"),
    "killick.check.fakes": ("always", "in_order"),
    "killick.check.samples": ("sample",),
    "killick.testing.player": ("BlockingPlay", "Play", "play", "replay"),
    "killick.replay.result": ("Replayed",),
    "killick.testing.scripted_model": ("ScriptedModel", "call", "refusal", "scripted", "turn"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
