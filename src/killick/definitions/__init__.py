"""What authors declare: tools, agents, triggers, schedules, limits. Runs nothing."""
