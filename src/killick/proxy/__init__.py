"""A proxy before a model provider: pages, relays and records the calls of any agent, which need not know of it."""
