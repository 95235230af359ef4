"""The API of agent code: `Run`, and the clients that record model calls."""
