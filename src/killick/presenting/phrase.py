"""A line for a person: text in parts, each with roles. A surface decides how a role looks."""

from __future__ import annotations

from typing import Any, Protocol

from killick.history.phrasing import arguments, brief


class Phrase:
    """Parts of text with their roles, several of one part separated by spaces. `str` gives the text alone."""

    __slots__ = ("parts",)

    def __init__(self, text: str = "", role: str = "") -> None:
        self.parts: list[tuple[str, str]] = [(text, role)] if text else []

    def add(self, text: str, role: str = "") -> Phrase:
        """Append a part, and return the phrase."""
        if text:
            self.parts.append((text, role))
        return self

    def join(self, other: Phrase) -> Phrase:
        """Append the parts of another phrase, and return this one."""
        self.parts += other.parts
        return self

    def __str__(self) -> str:
        return "".join(text for text, _ in self.parts)

    def __bool__(self) -> bool:
        return bool(self.parts)


class Shows(Protocol):
    """How a surface shows the values of a run."""

    def value(self, value: Any) -> str: ...

    def arguments(self, given: Any) -> str: ...

    def after(self, seq: int) -> str:
        """The step that an event follows, as in " after step 3"; nothing where the surface does not say so."""
        ...


class Briefly:
    """Shows each value on one line of at most so many characters."""

    def __init__(self, chars: int) -> None:
        self.chars = chars

    def value(self, value: Any) -> str:
        return "" if value is None else brief(value, self.chars)

    def arguments(self, given: Any) -> str:
        return "" if given is None else arguments(given, self.chars)

    def after(self, seq: int) -> str:
        return ""


def remark(comment: Any) -> str:
    """A person's comment in quotes, after a space; nothing where there is none."""
    return f" “{comment}”" if comment else ""
