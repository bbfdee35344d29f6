"""The inference front and the engine behind it."""
