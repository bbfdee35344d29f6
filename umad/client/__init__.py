"""The library that worker code calls."""
