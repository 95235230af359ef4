"""Workers and their background tasks: triggers, hooks, webhooks, tokens."""
