"""Search across runs: terms of events, their index, queries and results."""
