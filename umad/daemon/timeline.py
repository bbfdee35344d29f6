"""Memory over the last day: who held how much, one sample for each ten seconds.

Owns the ring that ``umadctl report`` draws.  Rules: of each ten seconds the moment is kept when the
workers together held most, so that a short excess is in the picture and the figures of one sample
belong together; a figure that is not known is ``UNKNOWN``, never 0; what is kept is bounded in time
and in bytes, and so is an answer.  It begins anew with every start of the daemon.
"""

import zlib
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from umad.core.report import physical
from umad.core.room import free_now
from umad.core.state import Member, State

SAMPLE_EVERY_S: Final = 10.0
KEPT_S: Final = 24 * 3600.0
# 24 h of a dozen workers; of 64, the most, it is six hours, and less where they come and go.
BYTES_MAX: Final = 1 << 20
WORKERS_MAX: Final = 64
POOLS_MAX: Final = 8
UNKNOWN: Final = -1
# A part is one answer, which must stay below the protocol's 64 KiB: nine bytes each, and names.
PART_FIGURES_MAX: Final = 5000
PART_SAMPLES_MAX: Final = 360

# Beside the figures: the names, the objects.  Source: our measurement (tracemalloc), 2026-11.
_PART_BYTES: Final = 1500
_WORKER_BYTES: Final = 150


class Roster(NamedTuple):
    """Whose figures a sample has."""

    pools: tuple[str, ...]
    workers: tuple[tuple[str, str, int], ...]  # name, pool, quota


@dataclass(slots=True)
class Part:
    """Samples of the same workers that follow each other.

    ``figures`` are one sample after the other, each ``width`` long and in the order that
    PROTOCOL.md tells: when, grants, refusals, four of each pool, two of each worker.  A part that
    gets no further ones is ``packed``: a quarter of the bytes, or less.
    """

    roster: Roster
    last_ms: int
    figures: "array[int]"
    packed: bytes = b""

    @property
    def width(self) -> int:
        """The figures of one sample."""
        return 3 + 4 * len(self.roster.pools) + 2 * len(self.roster.workers)

    @property
    def bytes(self) -> int:
        """What it takes, by estimate."""
        names = _PART_BYTES + _WORKER_BYTES * len(self.roster.workers)
        return names + len(self.packed) + self.figures.itemsize * len(self.figures)

    def takes(self, sample: "Part") -> bool:
        """Whether a further sample belongs here."""
        taken, width = len(self.figures), self.width
        full = taken >= PART_SAMPLES_MAX * width or taken + width > PART_FIGURES_MAX
        return self.roster == sample.roster and not full

    def add(self, sample: "Part") -> None:
        """Take a further sample in."""
        self.figures.extend(sample.figures)
        self.last_ms = sample.last_ms

    def pack(self) -> None:
        """No further one comes."""
        self.packed = zlib.compress(self.figures.tobytes(), 1)
        self.figures = array("q")

    def samples(self, after_ms: int) -> list[list[int]]:
        """Those after a moment."""
        figures = array("q", zlib.decompress(self.packed)) if self.packed else self.figures
        starts = range(0, len(figures), self.width)
        return [figures[at : at + self.width].tolist() for at in starts if figures[at] > after_ms]


class Timeline:
    """See the module.

    Args:
        unix_offset_s: what makes a date of the loop's clock.  It never changes, so that dates
            rise even where the machine's clock is set back.
    """

    def __init__(self, unix_offset_s: float) -> None:
        self._unix_offset_s = unix_offset_s
        self._parts: deque[Part] = deque()
        self._fullest: Part | None = None  # one sample, of the ten seconds that are not over
        self._held = UNKNOWN
        self._ends_s = float("-inf")
        self._counted = (0, 0)  # grants and refusals, until the last sample

    def looked(self, state: State, now_s: float) -> None:
        """The state after a look at memory."""
        grants, refusals = _counted(state)
        head = [grants - self._counted[0], refusals - self._counted[1]]
        if self._fullest is not None:
            self._fullest.figures[1:3] = array("q", head)
        if now_s >= self._ends_s:
            self._keep()
            self._counted, self._ends_s = (grants, refusals), now_s + SAMPLE_EVERY_S
            head = [0, 0]
        held = sum(max(0, _held(state, member)) for member in state.members.values())
        if self._fullest is None or held > self._held:
            self._held = held
            unix_ms = round((now_s + self._unix_offset_s) * 1000)
            self._fullest = _sample(state, [unix_ms, *head])

    def answer(self, since_s: float) -> dict[str, Any]:
        """The answer to ``timeline``.

        Args:
            since_s: only samples after this moment, in seconds since 1970.
        """
        since_ms = round(since_s * 1000)
        newest = () if self._fullest is None else (self._fullest,)
        later = [part for part in (*self._parts, *newest) if part.last_ms > since_ms]
        part = later[0] if later else Part(Roster((), ()), since_ms, array("q"))
        return {
            "pools": list(part.roster.pools),
            "workers": [
                {"name": name, "pool": pool, "quota": quota}
                for name, pool, quota in part.roster.workers
            ],
            "samples": part.samples(since_ms),
            "next": part.last_ms / 1000 if len(later) > 1 else None,
        }

    def _keep(self) -> None:
        """Ten seconds are over: their fullest moment stays, and what is too old or much goes."""
        if self._fullest is None:
            return
        kept, self._fullest, self._held = self._fullest, None, UNKNOWN
        if self._parts and self._parts[-1].takes(kept):
            self._parts[-1].add(kept)
        else:
            if self._parts:
                self._parts[-1].pack()
            self._parts.append(kept)
        oldest_ms = kept.last_ms - round(KEPT_S * 1000)
        while (
            self._parts[0].last_ms < oldest_ms or sum(one.bytes for one in self._parts) > BYTES_MAX
        ):
            self._parts.popleft()


def _sample(state: State, head: list[int]) -> Part:
    """The figures of this moment."""
    pools = [] if state.snapshot is None else list(state.snapshot.pools.values())[:POOLS_MAX]
    members = list(state.members.values())[:WORKERS_MAX]
    workers = [member.worker for member in members]
    roster = Roster(
        tuple(pool.name for pool in pools),
        tuple((worker.name, worker.pool, worker.quota) for worker in workers),
    )
    figures = [*head]
    for reading in pools:
        pool = state.ledger.pools.get(reading.name)
        booked = None if pool is None else state.ledger.booked(pool.name)
        budget = None if pool is None else pool.budget
        of_pool = (reading.used.value, free_now(state, reading)[0], booked, budget)
        figures += map(_figure, of_pool)
    for member in members:
        figures += (_held(state, member), state.ledger.booked_by(member.worker.id))
    return Part(roster, head[0], array("q", figures))


def _counted(state: State) -> tuple[int, int]:
    """Leases that were granted, requests that were refused."""
    refused = (count for name, count in state.counters.items() if name.startswith("refusals_"))
    return state.counters["grants"], sum(refused)


def _held(state: State, member: Member) -> int:
    found = physical(state, member)
    return UNKNOWN if found is None else found[0]


def _figure(value: int | None) -> int:
    return UNKNOWN if value is None else value
