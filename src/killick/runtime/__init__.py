"""The runtime: runs agents on the log, so that every step holds before the next one starts."""
