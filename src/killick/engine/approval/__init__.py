"""Judges intentions by the contracts in force, and asks approvers."""
