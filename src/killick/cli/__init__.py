"""The command line. Each module holds the commands of one group; `main` finds them, `shell` is their shared context."""
