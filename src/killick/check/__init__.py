"""Interrupts an agent at every possible point, on an in-memory store, and reports its findings."""
