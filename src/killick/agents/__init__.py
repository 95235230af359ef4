"""What agent code is handed: its run."""
