"""Model calls: providers, tools as a model sees them, the tool loop, recording clients, external sessions."""
