"""Read-only views of logs: positions, differences, explanations, searches. Appends nothing."""
