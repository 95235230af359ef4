"""Declarations: tools, agents, schedules, limits. Runs nothing."""
