"""Executes one run: replay, steps, waits, leases, completion."""
