"""Runs agent code against a record, with the world shut off."""
