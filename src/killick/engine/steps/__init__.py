"""One step: intend, judge, write, apply, write."""
