"""The SQLite store: one file in WAL mode."""
