"""Tamper evidence: seals over every log, signed checkpoints, proofs of single events."""
