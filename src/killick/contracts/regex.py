"""Regular expressions of contracts, matched by RE2 in time linear in the text.

A model chooses the text, so a backtracking engine would let it stall the evaluation of a contract.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from killick.errors import ContractRefused

Match = Callable[[str], bool]

_FOLD_TO_ASCII: Final = frozenset("\u017f\u212a")
"""The long s and the Kelvin sign: RE2 takes them for `s` and `k` where case is ignored."""


@lru_cache(maxsize=1024)
def matcher(pattern: str) -> Match:
    """A function that says whether a whole text matches a pattern. `\\d` and `\\w` are ASCII."""
    if type(pattern) is not str:
        raise ContractRefused("bound", f"matches={pattern!r}; give a regular expression as text")
    re2: Any = importlib.import_module("re2")  # here, because only some contracts have patterns
    options = re2.Options()
    options.log_errors = False
    try:
        full_match = re2.compile(pattern, options).fullmatch
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise ContractRefused(
            "bound",
            f"matches: {pattern} does not compile ({reason}); RE2 has neither backreferences nor lookarounds",
        ) from None

    def matches(text: str) -> bool:
        try:
            return full_match(text) is not None and not ("(?" in pattern and _FOLD_TO_ASCII.intersection(text))
        except UnicodeEncodeError:  # a lone surrogate is no text
            return False

    return matches
