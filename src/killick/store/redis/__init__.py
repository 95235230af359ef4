"""The Redis and Valkey store."""
