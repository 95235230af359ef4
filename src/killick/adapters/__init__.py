"""Integrations with agent frameworks: each is imported by its own name, and imports no other."""
