"""Virtual memory for model context: each request is a cache over the full history. Works with any agent loop."""

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
