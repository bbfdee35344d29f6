"""umadctl."""
