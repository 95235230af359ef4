"""Interrupts an agent in every way there is, on a store in memory, and says what it found."""
