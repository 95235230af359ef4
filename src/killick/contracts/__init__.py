"""Contracts: rules over intentions, and their evaluation. Pure: no I/O, no clock, no chance."""
