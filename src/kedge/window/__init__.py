"""Context as virtual memory: what a model is sent is a cache of the history. For any agent loop."""

from kedge.window.pages import Page, PageKind, Reads, Tokens, estimate
from kedge.window.planning import Decision
from kedge.window.policy import Policy, Rates, Situation, WorkingSet
from kedge.window.shapes import Shape
from kedge.window.window import Answer, Sent, Window

__all__ = [
    "Answer",
    "Decision",
    "Page",
    "PageKind",
    "Policy",
    "Rates",
    "Reads",
    "Sent",
    "Shape",
    "Situation",
    "Tokens",
    "Window",
    "WorkingSet",
    "estimate",
]
