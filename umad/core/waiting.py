"""Those who wait: requests that will be answered later, in order, each with a bound.

A waiter is a value in a queue, not a sleeping task: it is granted and answered in one step, so
that nobody can be woken for a grant that has gone to somebody who left.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Waiter:
    """An unanswered request: ``parts`` is what it asks (empty for the init mutex).

    ``ttl_s`` is the life its burst lease shall have; ``since_s`` and ``deadline_s`` are
    monotonic seconds; ``evict`` says whether idle models may be asked to go for it.  The queue
    keeps the rest: ``passed`` is how many that stood behind were served first, ``position`` what
    it was told last, ``reason`` why it waits.
    """

    connection: int
    request: int
    worker: int
    what: str
    since_s: float
    deadline_s: float
    parts: tuple[tuple[str, int], ...] = ()
    ttl_s: float = 0.0
    priority: int = 0
    evict: bool = False
    passed: int = 0
    position: int = 0
    reason: str = ""

    @property
    def bytes(self) -> int:
        """What it asks for in all."""
        return sum(size for _, size in self.parts)


class Queue:
    """By priority, and first come, first served within one.  ``limit`` bounds its length."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters)

    @property
    def full(self) -> bool:
        """No more may wait."""
        return len(self._waiters) >= self.limit

    def add(self, waiter: Waiter) -> int:
        """Join behind those of its priority; returns the position, 0 for the head."""
        insort(self._waiters, waiter, key=lambda one: -one.priority)
        waiter.position = self._waiters.index(waiter)
        return waiter.position

    def head(self) -> Waiter | None:
        """Whose turn it is."""
        return self._waiters[0] if self._waiters else None

    def remove(self, waiter: Waiter) -> None:
        """Leave the queue, served or not."""
        self._waiters.remove(waiter)

    def moved(self) -> Iterator[Waiter]:
        """Those who stand elsewhere than they were told; the caller tells them."""
        for position, waiter in enumerate(self._waiters):
            if waiter.position != position:
                waiter.position = position
                yield waiter

    def pop_worker(self, worker: int) -> list[Waiter]:
        """Remove and return all waiters of a worker that is gone."""
        return self._pop(lambda waiter: waiter.worker == worker)

    def pop_connection(self, connection: int) -> list[Waiter]:
        """Remove and return all waiters of a connection that is gone."""
        return self._pop(lambda waiter: waiter.connection == connection)

    def pop_expired(self, now_s: float) -> list[Waiter]:
        """Remove and return those who waited to their bound."""
        return self._pop(lambda waiter: waiter.deadline_s <= now_s)

    def next_deadline_s(self) -> float | None:
        """The earliest bound."""
        return min((waiter.deadline_s for waiter in self), default=None)

    def _pop(self, leaves: Callable[[Waiter], bool]) -> list[Waiter]:
        leaving = [waiter for waiter in self._waiters if leaves(waiter)]
        if leaving:
            self._waiters = [waiter for waiter in self._waiters if not leaves(waiter)]
        return leaving
