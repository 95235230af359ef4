"""Long sessions of an agent, and what it costs to send them to a model in one way or another."""
