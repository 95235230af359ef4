"""Replays agent code against a recorded log, without I/O."""
