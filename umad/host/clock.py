"""The one real clock: monotonic seconds for every deadline and age.

Stays out: wall-clock time, which belongs to records only.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """The shape of ``umad.core.ports.Clock``, which host may not import."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC: stands still while the machine sleeps."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        return time.monotonic()
