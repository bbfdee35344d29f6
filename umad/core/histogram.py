"""Counts of durations by upper bound: how long things took, in few numbers that never grow."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values up to each bound; ``observe`` costs a bisection.

    Args:
        bounds: upper bounds, rising; beyond them lies one bucket more.

    Attributes:
        sum: of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), the last without a bound."""
        total = 0
        found = []
        for bound, count in zip([*self._bounds, "+Inf"], self._counts, strict=True):
            total += count
            found.append((str(bound), float(total)))
        return found
