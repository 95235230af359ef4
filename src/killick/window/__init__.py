"""Context as virtual memory: what a model is sent is a cache of the history. For any agent loop."""

from killick.window.messages import Shape
from killick.window.pages import Page, PageKind, Reads, Tokens, estimate
from killick.window.planner import Decision
from killick.window.policy import Policy, Rates, Situation, WorkingSet
from killick.window.window import Answer, Sent, Window

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
