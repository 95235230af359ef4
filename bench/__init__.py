"""Measures Kedge side by side with raw stores, in one run: `make bench`, or `python -m bench NAME…`."""
