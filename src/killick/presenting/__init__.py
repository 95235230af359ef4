"""Texts about runs, steps, approvals, previews, triggers and windows, as data. The surfaces lay them out."""
