"""Runs outside of a store: export files, bundles of many runs, redaction, pruning."""
