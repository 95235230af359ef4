"""The seed of what tests draw: the same each time in the gate, a new one with `KILLICK_SEED=random` (`make soak`)."""

from __future__ import annotations

import os
import random
from typing import Final

ASKED: Final = os.environ.get("KILLICK_SEED", "")
FIXED: Final = ASKED != "random"


def repeats(here: int, soak: int) -> int:
    """How often a test repeats itself: more often in `make soak`, and where a seed of it is tried again."""
    return soak if ASKED else here


def draw_seed() -> int:
    """`KILLICK_SEED`, or 1; a new one each time for `random`. A test prints it when it fails."""
    return int(ASKED or 1) if FIXED else random.randrange(10**9)
