"""What a log tells: places in time, what changed between them, what happened and why. Appends nothing."""
