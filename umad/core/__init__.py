"""Decisions.  Values in, values out; no clock, file, socket, thread or log."""
