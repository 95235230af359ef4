"""What the adapters of engines share: turns of runs, wake-ups, commands."""
