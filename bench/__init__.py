"""Measures Killick side by side with raw stores and peers, in one run: `make bench`, or `python -m bench NAME…`."""
