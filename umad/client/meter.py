"""What one forward of a worker really took: the high-water mark of its account.

Rules: a figure is exact only where no other forward of the worker ran meanwhile, since they share
the account, and nothing was refused to it; everything else is a lower bound and says so.  The first
forward of its size after a load builds caches that stay (a third of its bytes and more, measured
with a small Llama): it shows nothing about the next ones.
"""

import threading
from dataclasses import dataclass, replace

from umad.client.accounts import process_page
from umad.client.memory import process_bytes
from umad.guard import account


@dataclass(frozen=True, slots=True)
class Took:
    """Bytes held at most beyond what was held before; ``exact``, or that many at least.

    ``refused``: it asked for more than it was given, whatever ``bytes`` says: freed blocks take
    room, too, while they share a huge page with live ones.
    """

    bytes: int
    exact: bool
    refused: bool = False

    def then(self, more: "Took") -> "Took":
        """Of two parts of one forward."""
        most = max(self.bytes, more.bytes)
        return Took(most, self.exact and more.exact, self.refused or more.refused)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a forward began: its account, what that or the process held, and its turn."""

    slot: int | None
    held: int | None
    refused: int
    turn: int
    alone: bool


class Meter:
    """Measures the forwards of one loaded model; thread-safe.

    Attributes:
        warmed: the work (tokens of all rows) of the largest forward that went well.
    """

    def __init__(self) -> None:
        self.warmed = 0
        self._lock = threading.Lock()
        self._running = 0
        self._turn = 0

    def begin(self, slot: int | None, *, coarse: bool) -> Start:
        """A forward begins.

        Args:
            slot: the worker's account; None where no guard counts.
            coarse: without an account, read what the process holds: a forward that asked nobody
                is not worth the read.
        """
        with self._lock:
            self._running += 1
            self._turn += 1
            turn, alone = self._turn, self._running == 1
        if slot is not None:
            return Start(slot, account.mark(slot), process_page.refused(slot), turn, alone)
        return Start(None, process_bytes() if coarse else None, 0, turn, alone)

    def end(self, start: Start) -> Took:
        """The forward that began there has ended."""
        with self._lock:
            self._running -= 1
            alone = start.alone and self._turn == start.turn
        if start.held is None:
            return Took(0, exact=False)
        if start.slot is None:
            return Took(max(process_bytes() - start.held, 0), exact=False)
        grown = max(account.high(start.slot) - start.held, 0)
        if process_page.refused(start.slot) != start.refused:  # it needed this, too
            wanted = grown + process_page.requested(start.slot)
            return Took(wanted, exact=False, refused=True)
        return Took(grown, exact=alone)

    def again(self, start: Start) -> tuple[Took, Start]:
        """What a forward that goes on took until now; it is measured anew from here.

        Still against what was held before it began.
        """
        took, fresh = self.end(start), self.begin(start.slot, coarse=False)
        return took, replace(fresh, held=start.held)

    def is_first(self, work: int) -> bool:
        """Whether a forward of so much work that went well was the first so large; once."""
        with self._lock:
            first, self.warmed = work > self.warmed, max(work, self.warmed)
        return first
