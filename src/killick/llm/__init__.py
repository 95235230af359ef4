"""Model calls: tools as a model sees them, the tool loop, the context window, external sessions."""
