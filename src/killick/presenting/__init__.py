"""What a person reads of runs, steps, approvals, previews, triggers and windows, as data. The surfaces lay it out."""
