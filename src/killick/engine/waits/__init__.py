"""Steps that wait, and the events that end a wait."""
