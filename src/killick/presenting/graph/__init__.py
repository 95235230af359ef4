"""A run, its forks and its children as a graph, and its drawings."""
