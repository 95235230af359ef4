"""Engines of others that own the scheduling of runs: who goes on when, and where. Imported by name."""
