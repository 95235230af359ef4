"""Who may call the server: tokens, the owner's key, sessions, and the keys that sign them."""
