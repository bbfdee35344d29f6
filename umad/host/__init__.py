"""Thin readers of this machine around pure parsers."""
