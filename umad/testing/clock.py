"""A clock that moves only when told."""


class ManualClock:
    """Stands in for ``host.clock`` in tests.

    Args:
        start_s: what ``now_s`` says first, in seconds.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds; the same until ``advance`` is called."""
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Let time pass and return the new ``now_s``.

        Raises:
            ValueError: ``seconds`` is negative; a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
        return self._now_s
