"""Steps that wait, and what ends a wait."""
