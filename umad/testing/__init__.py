"""Fakes that ship with umad, for the tests of its users and its own."""

from umad.testing.clock import ManualClock
from umad.testing.pair import MemoryPair

__all__ = ["ManualClock", "MemoryPair"]
