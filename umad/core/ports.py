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

    def sample(
        self,
        processes: Collection[Identity],
        now_s: float,
        families: Mapping[Identity, Collection[Identity]],
    ) -> Snapshot:
        """One look at the machine and at these processes; ``families`` count as theirs.

        Never raises for a reading that fails: that reading is broken, the others hold.
        """
        ...

    def glance(self, wanted: Collection[Identity | None]) -> Mapping[Identity | None, int]:
        """One cheap figure of each of these processes, and of the machine (None), in bytes.

        Of a process with its family of the last sample.  It grows with the memory they take and
        is good for differences only.  Who cannot be read is left out.
        """
        ...

    def confirm(self, snapshot: Snapshot, limits: Mapping[Identity, int]) -> Snapshot:
        """Look closer at the processes that seem to be over their limit (bytes)."""
        ...
