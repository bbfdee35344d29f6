"""Those who wait: requests that will be answered later, in order, each with a bound.

A waiter is a value in a queue, not a sleeping task: it is granted and answered in one step, so
that nobody can be woken for a grant that has gone to somebody who left.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiter:
    """An unanswered request: ``parts`` is what it asks (empty for the init mutex).

    ``ttl_s`` is the life its burst lease shall have; ``since_s`` and ``deadline_s`` are
    monotonic seconds.
    """

    connection: int
    request: int
    worker: int
    what: str
    since_s: float
    deadline_s: float
    parts: tuple[tuple[str, int], ...] = ()
    ttl_s: float = 0.0

    @property
    def bytes(self) -> int:
        """What it asks for in all."""
        return sum(size for _, size in self.parts)


class Queue:
    """First come, first served, with deadlines.  ``limit`` bounds its length."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiters: OrderedDict[tuple[int, int], Waiter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters.values())

    @property
    def full(self) -> bool:
        """No more may wait."""
        return len(self._waiters) >= self.limit

    def add(self, waiter: Waiter) -> int:
        """Join the end; returns the position, 0 for the head."""
        self._waiters[waiter.connection, waiter.request] = waiter
        return len(self._waiters) - 1

    def head(self) -> Waiter | None:
        """Whose turn it is."""
        return next(iter(self._waiters.values()), None)

    def remove(self, waiter: Waiter) -> None:
        """Leave the queue, served or not."""
        del self._waiters[waiter.connection, waiter.request]

    def pop_worker(self, worker: int) -> list[Waiter]:
        """Remove and return all waiters of a worker that is gone."""
        leaving = [waiter for waiter in self if waiter.worker == worker]
        for waiter in leaving:
            self.remove(waiter)
        return leaving

    def pop_expired(self, now_s: float) -> list[Waiter]:
        """Remove and return those who waited to their bound."""
        leaving = [waiter for waiter in self if waiter.deadline_s <= now_s]
        for waiter in leaving:
            self.remove(waiter)
        return leaving

    def next_deadline_s(self) -> float | None:
        """The earliest bound."""
        return min((waiter.deadline_s for waiter in self), default=None)
