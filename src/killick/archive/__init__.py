"""Runs outside a store: export files, archives of many runs, redaction, pruning."""
