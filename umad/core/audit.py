"""The books held against what is physically there.

Pure comparisons of one snapshot with one process's or one pool's books.  Unknown stays unknown:
a broken reading proves no breach, frees no bytes and grants nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from umad.units import GIB, MIB
from umad.values import SYSTEM_POOL, AccountFigures, Identity, PoolReading, ProcessReading, Snapshot


@dataclass(frozen=True, slots=True)
class ProcessBooks:
    """What one process may hold: the sum over its workers, in bytes.

    ``baseline`` is what the process held before its first worker registered: the interpreter and
    its imports, which belong to no worker and which no release gives back.  ``active`` is booked
    and in use, ``releasing`` given back by word only, ``quotas`` the sum of the steady quotas of
    the workers that have not left.  ``limit`` is the most the process may
    hold, baseline included, before it is in breach; None when no worker is left to be judged.
    ``orphaned``: the process has ended, and what is measured is the rest of its family.
    ``limit_released`` is what it may hold once all has gone that was given back by word, where it
    may be killed for less; else None.
    """

    identity: Identity
    baseline: int
    active: int
    releasing: int
    quotas: int
    limit: int | None
    loading: bool
    by_pool: tuple[tuple[str, int], ...]
    orphaned: bool = False
    limit_released: int | None = None


@dataclass(frozen=True, slots=True)
class AccountBooks:
    """What one worker with an account may hold: booked in any state, at least its quota."""

    identity: Identity
    worker: int
    allowed: int
    loading: bool


@dataclass(frozen=True, slots=True)
class Breach:
    """Evidence that a process, or one worker's account in it, holds more than its limit.

    ``worker`` is None when only the process as a whole is to blame.
    """

    identity: Identity
    measured: int
    limit: int
    source: str
    reason: str
    taken_s: float
    worker: int | None = None

    @property
    def key(self) -> "Subject":
        """Whose case this is."""
        return self.identity, self.worker

    @property
    def over(self) -> int:
        """Bytes above the limit."""
        return self.measured - self.limit


# Reasons for a breach beside the quotas.
ORPHANED: Final = "orphaned"
LEAKING: Final = "leaking"

Subject = tuple[Identity, int | None]
"""A process, or one worker of it."""


def breaches(
    books: Iterable[ProcessBooks],
    accounts: Iterable[tuple[AccountBooks, AccountFigures]],
    snapshot: Snapshot,
) -> list[Breach]:
    """Who is over a limit, the one with most bytes over first.

    1. A worker whose account holds more than it may is to blame, and nobody beside it.
    2. A process over the sum of its books is to blame as a whole only when no account of it
       is: what no guard counted has no other owner.
    3. One that keeps what it gave back long ago is in breach where policy says so.
    """
    found = [
        Breach(
            mine.identity,
            figures.held,
            mine.allowed,
            "account page",
            "peak_exceeded" if mine.loading else "quota_exceeded",
            snapshot.taken_s,
            mine.worker,
        )
        for mine, figures in accounts
        if figures.held > mine.allowed  # 1
    ]
    blamed = {breach.identity for breach in found}
    for process in books:
        reading = snapshot.processes.get(process.identity)
        if reading is None or not reading.alive or process.identity in blamed:
            continue
        size = reading.bytes.value
        if size is None:
            continue
        if process.limit is not None and size > process.limit:  # 2
            limit, reason = process.limit, "peak_exceeded" if process.loading else "quota_exceeded"
        elif process.limit_released is not None and size > process.limit_released:  # 3
            limit, reason = process.limit_released, LEAKING
        else:
            continue
        found.append(
            Breach(
                process.identity,
                size,
                limit,
                reading.bytes.source,
                ORPHANED if process.orphaned else reason,
                snapshot.taken_s,
            )
        )
    return sorted(found, key=lambda breach: (-breach.over, breach.identity.pid))


@dataclass(frozen=True, slots=True)
class StillThere:
    """How many of the bytes that were given back by word a process still holds."""

    loads: int
    bursts: int


def still_there(books: ProcessBooks, reading: ProcessReading | None) -> StillThere | None:
    """What is left of the released bytes; None when that is unknown.

    1. what the process holds beyond its baseline and beyond what is in use belongs to a
       released load;
    2. of a released burst only what lies above the quotas too: within its quota a worker may
       hold what it likes;
    3. a remainder of a load that is noise counts as gone: the heap of an interpreter never
       returns to the byte.  Not above the quotas of those that are left: they would be over
       their limit by it, in this very look.
    """
    if reading is None:
        return None
    if not reading.alive:
        return StillThere(0, 0)
    if reading.bytes.value is None:
        return None
    held = reading.bytes.value - books.baseline
    bursts = max(0, held - max(books.active, books.quotas))  # 2
    loads = max(0, held - books.active)  # 1
    noise = max(NOISE_BYTES, int(books.releasing * NOISE_RATIO))  # 3
    forgiven = loads <= noise and (books.limit is None or not bursts)
    return StillThere(0 if forgiven else loads, bursts)


# Source: DESIGN, "unload": at least 98 % of the bytes are back; and our measurement of an idle
# interpreter with the client library, whose heap wanders by 1 to 3 MiB (2026-11).
NOISE_RATIO: Final = 0.02
NOISE_BYTES: Final = 4 * MIB


def reserve_of(capacity: int, pool: str, configured: int | None) -> int:
    """Bytes of a pool that are never granted.

    Source: memory-sources, "Formulas": max(4 GiB, 4 % of MemTotal) for the machine; a device's
    own memory has no system to keep alive, so 4 % there.
    """
    if pool != SYSTEM_POOL:
        return capacity // 25
    return max(4 * GIB, capacity // 25) if configured is None else configured


@dataclass(frozen=True, slots=True)
class Headroom:
    """What a pool can give right now; ``bytes`` is None when it cannot be known.

    Below 0: so much is missing to the reserve, or to what is booked and not yet used.
    """

    bytes: int | None
    binding: str
    problem: str = ""


def headroom(
    pool: PoolReading, reserve: int, books: Iterable[ProcessBooks], snapshot: Snapshot
) -> Headroom:
    """Physical room in a pool after the reserve and after what is booked and not yet used.

    Without the second part two workers could each be granted the same free bytes before either
    has touched them.
    """
    if pool.safe.value is None:
        return Headroom(None, pool.binding, pool.safe.problem or "there is no such pool here")
    unused = 0
    for process in books:
        booked = sum(size for name, size in process.by_pool if name == pool.name)
        if booked:
            unused += max(0, booked - _held(process, pool, snapshot))
    return Headroom(pool.safe.value - reserve - unused, pool.binding)


def _held(books: ProcessBooks, pool: PoolReading, snapshot: Snapshot) -> int:
    """What a process holds in a pool beyond its baseline.

    0 when unknown, which leaves less room, not more.
    """
    reading = snapshot.processes.get(books.identity)
    if reading is None or reading.bytes.value is None:
        return 0
    held = _in_pool(reading, pool, snapshot)
    return max(0, held - books.baseline) if pool.name == SYSTEM_POOL else held


def unattributed(pool: PoolReading, snapshot: Snapshot) -> int | None:
    """Bytes in use of a pool that no worker's process holds.

    They are other programs', the system's, or those of an allocator that nobody knows.  None
    where that is unknown: one process that cannot be read may hold any of them.  What processes
    share counts for each, so that it is too little rather than too much.
    """
    readings = snapshot.processes.values()
    if pool.used.value is None or any(reading.bytes.value is None for reading in readings):
        return None
    return max(0, pool.used.value - sum(_in_pool(one, pool, snapshot) for one in readings))


def _in_pool(reading: ProcessReading, pool: PoolReading, snapshot: Snapshot) -> int:
    if pool.name != SYSTEM_POOL:
        return dict(reading.gpu).get(pool.name, 0)
    # GPU pages of system DRAM, whichever pool they were taken through, are this pool's too.
    return reading.host_bytes + sum(size for name, size in reading.gpu if _dram(name, snapshot))


def _dram(name: str, snapshot: Snapshot) -> bool:
    pool = snapshot.pools.get(name)
    return pool is not None and SYSTEM_POOL in (name, pool.parent)
