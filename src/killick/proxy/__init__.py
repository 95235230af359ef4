"""A proxy in front of a model provider: relays and records the calls of any agent without its cooperation."""
