"""What other threads, and finalizers, leave for the client's listener.

Putting takes no lock, because a finalizer may run anywhere, even in the middle of a call of the
same thread that holds one.
"""

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from umad.client.link import Link


class Mailbox:
    """A queue with a file descriptor that is readable when something was put in."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed when nobody can reach us any more, not in close(): another thread may be about
        # to write to it, and the number would by then be somebody else's file.
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._open = True
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Leave an item; after ``close`` it is dropped."""
        if self._open:
            self._items.append(item)
            self.wake()

    def wake(self) -> None:
        """Wake the listener."""
        os.eventfd_write(self.fd, 1)

    def take(self) -> Iterator[Any]:
        """What has been left until now, oldest first; ``fd`` is quiet again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        for _ in range(len(self._items)):
            yield self._items.popleft()

    def close(self) -> None:
        """Drop everything, now and later."""
        self._open = False
        self._items.clear()


@dataclass(slots=True)
class Hold:
    """A lease as a plain token: what a finalizer may know of it, and no more.

    It refers neither to the model nor to the worker or burst, so that it keeps none of them
    alive.  Only the client writes it, under its lock, when a reconnect changes the lease.

    Attributes:
        mailbox: of the client that took it; another one after a fork, so a child ends nothing.
        generation: of the daemon that granted it.
        lease: None while no daemon has booked it.
        token: what fences the lease.
        bytes: what it covers; for a load, what was measured.
        ended: nobody needs it any more.
    """

    mailbox: Mailbox
    generation: int
    lease: int | None
    token: int
    bytes: int
    ended: bool = False

    @property
    def ticket(self) -> dict[str, Any]:
        """What names it in calls."""
        return {"lease": self.lease, "token": self.token}

    def take(self, generation: int, answer: Mapping[str, Any] | None) -> None:
        """It is the lease in this answer now; in one without a lease nobody has booked it."""
        lease = None if answer is None else answer.get("lease")
        self.generation, self.lease = generation, lease
        self.token = 0 if answer is None or lease is None else answer["token"]


@dataclass(frozen=True, slots=True)
class Ended:
    """In the mailbox: this lease is over."""

    hold: Hold
    leaked: bool


@dataclass(frozen=True, slots=True)
class Undo:
    """In the mailbox: give back what an answer granted after its caller had given up."""

    link: Link
    method: str
    params: Mapping[str, Any]

    @classmethod
    def of(
        cls, link: Link, method: str, params: Mapping[str, Any], result: Mapping[str, Any]
    ) -> "Undo | None":
        """What undoes a request that was answered with ``result``; None: nothing to undo."""
        match method:
            case "reserve" | "admit":
                end = "void" if method == "reserve" else "release"
                return cls(link, end, {"lease": result["lease"], "token": result["token"]})
            case "init_lock":
                held = {"worker": params["worker"], "token": result["token"]}
                return cls(link, "init_unlock", held)
            case "register":
                return cls(link, "unregister", {"worker": result["worker"]})
        return None


def leak(hold: Hold) -> None:
    """The finalizer of whatever a lease covers: it was dropped without being released."""
    hold.ended = True
    hold.mailbox.put(Ended(hold, leaked=True))
