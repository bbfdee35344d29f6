"""Readings that cost too much for every look: made again when they are old, with their age.

Stays out: readings that may block, which have a thread (``nvml``).
"""

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from umad.host.files import Unreadable

T = TypeVar("T")


class Paced(Generic[T]):
    """The last result of a reading, or the error it ended with.

    Args:
        read: makes it; raises ``Unreadable``.
        period_s: how old a result may be when it is used.
    """

    def __init__(self, read: Callable[[], T], period_s: float) -> None:
        self._read = read
        self._period_s = period_s
        self._read_s = -math.inf
        self._last: T | Unreadable | None = None

    def get(self, now_s: float, *, fresh: bool = False) -> T | Unreadable:
        """The result; ``fresh`` makes it anew whatever its age."""
        # A clock that went back would otherwise keep an old result for ever.
        young = 0 <= now_s - self._read_s < self._period_s
        if self._last is None or fresh or not young:
            try:
                self._last = self._read()
            except Unreadable as error:
                self._last = error
            self._read_s = now_s
        return self._last

    def age_ms(self, now_s: float) -> int:
        """How old the result is."""
        return round((now_s - self._read_s) * 1000)
