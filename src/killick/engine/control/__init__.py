"""Commands and messages that reach a run from outside."""
