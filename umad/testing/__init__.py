"""Fakes that ship with umad, for the tests of its users and its own."""
