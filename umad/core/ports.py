"""What the shell must bring: the seams between decisions and the machine.

Core never calls these; the daemon's loop does, and the fakes in umad.testing stand in for them.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from umad.values import Identity, Snapshot


class Clock(Protocol):
    """A monotonic clock."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...


class Probe(Protocol):
    """Reads the machine."""

    def sample(self, processes: Collection[Identity], now_s: float) -> Snapshot:
        """One look at the machine and at these processes.

        Never raises for a reading that fails: that reading is broken, the others hold.
        """
        ...

    def confirm(self, snapshot: Snapshot, limits: Mapping[Identity, int]) -> Snapshot:
        """Look closer at the processes that seem to be over their limit (bytes)."""
        ...
