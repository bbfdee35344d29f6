"""The books: who holds how many bytes of which pool.

Owns leases and nothing else; who a worker is, and whether memory is really there, is told from
outside.  Rules:

* A reservation counts at once; one of commit, release, expiry or its owner's death ends it,
  each exactly once.  All parts of a lease are booked, or none.
* Released is a claim: a lease that ends by word goes to RELEASING and stays booked until
  ``settle`` is told how much of it is still there.
* A pool with a parent takes its bytes from the parent too (GTT of an APU is system DRAM).
* Invariants, checked by ``check``: the leases' sum is what each pool has booked; no pool has
  booked less than 0; a pool above its budget got there by ``restore`` or by a budget that
  shrank, never by a grant.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from umad.errors import InvariantBroken
from umad.values import Lease, LeaseKind, LeaseState


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of memory: ``budget`` bytes may be booked; ``parent`` gives the same bytes too."""

    name: str
    budget: int
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Shortage:
    """A refusal: ``pool`` lacks bytes.  ``ever`` is False when it could never give them."""

    pool: str
    asked: int
    free: int
    budget: int
    ever: bool


@dataclass(slots=True)
class Holding:
    """A worker's leases and their sums, kept up to date so that no question walks the leases.

    ``active`` and ``releasing`` are bytes; ``by_pool`` counts parents too.  Only the Ledger
    writes here.
    """

    leases: dict[int, None] = field(default_factory=dict)
    active: int = 0
    releasing: int = 0
    by_pool: dict[str, int] = field(default_factory=dict)

    @property
    def booked(self) -> int:
        """Bytes booked, in any state."""
        return self.active + self.releasing


NOTHING: Final = Holding()


class Ledger:
    """Leases against pools.  Mutable, single owner; every method leaves the books whole.

    Args:
        fence: tokens are above this, and so never those of a daemon that had a smaller one.
    """

    def __init__(self, fence: int = 0) -> None:
        self._fence = fence
        self._pools: dict[str, Pool] = {}
        self._booked: dict[str, int] = {}
        self._chains: dict[str, tuple[Pool, ...]] = {}  # as asked for since a pool was set
        self._leases: dict[int, Lease] = {}
        self._of_worker: dict[int, Holding] = {}
        self._next = 1

    @classmethod
    def of(
        cls, pools: Iterable[Pool], leases: Iterable[Lease], next_id: int, fence: int = 0
    ) -> "Ledger":
        """The books as they were at some time; ``next_id`` is that of the lease to come."""
        books = cls(fence)
        for pool in pools:
            books.set_pool(pool)
        for lease in leases:
            books._add(lease)
        books._next = next_id
        return books

    @property
    def next_id(self) -> int:
        """The id of the lease to come."""
        return self._next

    # ------------------------------------------------------------------ pools

    def set_pool(self, pool: Pool) -> None:
        """Add a pool or change its budget; what is booked stays booked."""
        self._pools[pool.name] = pool
        self._booked.setdefault(pool.name, 0)
        self._chains.clear()

    @property
    def pools(self) -> Mapping[str, Pool]:
        """All pools by name."""
        return self._pools

    def booked(self, pool: str) -> int:
        """Bytes booked in a pool, those of pools carved from it included."""
        return self._booked[pool]

    def chain(self, pool: str) -> tuple[Pool, ...]:
        """The pool and its parents."""
        known = self._chains.get(pool)
        if known is None:
            found = self._pools[pool]
            above = () if found.parent is None else self.chain(found.parent)
            known = self._chains[pool] = (found, *above)
        return known

    def shortage(self, parts: Iterable[tuple[str, int]]) -> Shortage | None:
        """The first pool that lacks room for all parts together, or None if they fit."""
        wanted: dict[str, int] = {}
        for name, size in parts:
            for pool in self.chain(name):
                wanted[pool.name] = wanted.get(pool.name, 0) + size
        for name, size in wanted.items():
            budget = self._pools[name].budget
            free = budget - self._booked[name]
            if size > free:
                return Shortage(name, size, max(0, free), budget, ever=size <= budget)
        return None

    # ----------------------------------------------------------------- leases

    @property
    def leases(self) -> Mapping[int, Lease]:
        """All leases by id, the releasing ones included."""
        return self._leases

    def of_worker(self, worker: int) -> list[Lease]:
        """The worker's leases, oldest first."""
        return [self._leases[key] for key in self.holding(worker).leases]

    def holding(self, worker: int) -> Holding:
        """The worker's sums; to be read, not written."""
        return self._of_worker.get(worker, NOTHING)

    def booked_by(self, worker: int) -> int:
        """Bytes booked by a worker, in any state."""
        return self.holding(worker).booked

    def reserve(
        self,
        worker: int,
        kind: LeaseKind,
        parts: tuple[tuple[str, int], ...],
        deadline_s: float | None,
    ) -> Lease | Shortage:
        """Book all parts at once, or nothing and say what is short."""
        short = self.shortage(parts)
        if short is not None:
            return short
        return self._book(worker, kind, LeaseState.RESERVED, parts, deadline_s)

    def restore(
        self,
        worker: int,
        pool: str,
        size: int,
        until_s: float | None = None,
        kind: LeaseKind = LeaseKind.LOAD,
    ) -> Lease:
        """Book bytes that already exist physically, whatever the budget says.

        For workers that come back after a restart of the daemon: their memory is a fact, that of
        a model, or of a load or a forward that is at work until ``until_s``.
        """
        state = LeaseState.COMMITTED if until_s is None else LeaseState.RESERVED
        return self._book(worker, kind, state, ((pool, size),), until_s)

    def commit(self, lease: Lease, size: int) -> Lease:
        """Shrink a reserved lease to ``size`` bytes and end its deadline."""
        if lease.state is not LeaseState.RESERVED or not 0 < size <= lease.bytes:
            raise InvariantBroken(f"commit of {lease} to {size} bytes")
        return self._resize(replace(lease, state=LeaseState.COMMITTED, deadline_s=None), size)

    def extend(self, lease: Lease, deadline_s: float) -> None:
        """Give a reserved lease another deadline; no bytes move."""
        if lease.state is not LeaseState.RESERVED:
            raise InvariantBroken(f"{lease} has no deadline to extend")
        self._leases[lease.id] = replace(lease, deadline_s=deadline_s)

    def resize(self, lease: Lease, size: int) -> Lease:
        """Make a committed lease of one part larger or smaller; that more fits was asked before."""
        if lease.state is not LeaseState.COMMITTED or size <= 0:
            raise InvariantBroken(f"resize of {lease} to {size} bytes")
        changed = replace(lease, parts=((lease.parts[0][0], size),))
        self._count(lease, -1)
        self._count(changed, +1)
        self._leases[lease.id] = changed
        return changed

    def release(self, lease: Lease) -> Lease:
        """End a lease by word: it stays booked as RELEASING until settled."""
        if lease.state is LeaseState.RELEASING:
            raise InvariantBroken(f"{lease} was released before")
        ended = replace(lease, state=LeaseState.RELEASING, deadline_s=None)
        self._count(lease, -1)
        self._count(ended, +1)
        self._leases[lease.id] = ended
        return ended

    def reclaim(self, worker: int, size: int, deadline_s: float | None) -> Lease | None:
        """Turn bytes the worker gave back a moment ago into a burst lease again.

        They are still booked to it, so nobody else is short; None when they do not suffice.
        """
        holding = self.holding(worker)
        if holding.releasing < size:
            return None
        leases = (self._leases[key] for key in holding.leases)
        fitting = next(
            (
                lease
                for lease in leases
                if lease.state is LeaseState.RELEASING
                and lease.kind is LeaseKind.BURST
                and lease.bytes >= size
            ),
            None,
        )
        if fitting is None:
            return None
        pool = fitting.parts[0][0]
        self._resize(fitting, fitting.bytes - size)
        return self._book(worker, LeaseKind.BURST, LeaseState.RESERVED, ((pool, size),), deadline_s)

    def settle(self, workers: Iterable[int], kind: LeaseKind, still_there: int) -> list[Lease]:
        """Free what these workers released of a kind, down to ``still_there`` bytes, oldest first.

        Returns:
            The leases that ended or shrank, as they were before.
        """
        releasing = sorted(
            (
                lease
                for worker in workers
                for lease in self.of_worker(worker)
                if lease.state is LeaseState.RELEASING and lease.kind is kind
            ),
            key=lambda lease: lease.id,
        )
        gone = sum(lease.bytes for lease in releasing) - max(0, still_there)
        changed: list[Lease] = []
        for lease in releasing:
            if gone <= 0:
                break
            freed = min(gone, lease.bytes)
            self._resize(lease, lease.bytes - freed)
            gone -= freed
            changed.append(lease)
        return changed

    def drop(self, worker: int) -> int:
        """Free everything of a worker whose process is gone; returns the bytes."""
        leases = self.of_worker(worker)
        for lease in leases:
            self._resize(lease, 0)
        return sum(lease.bytes for lease in leases)

    def expired(self, now_s: float) -> list[Lease]:
        """Leases past their deadline."""
        return [
            lease
            for lease in self._leases.values()
            if lease.deadline_s is not None and lease.deadline_s <= now_s
        ]

    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a lease."""
        deadlines = (lease.deadline_s for lease in self._leases.values())
        return min((at for at in deadlines if at is not None), default=None)

    # ------------------------------------------------------------- invariants

    def check(self) -> None:
        """Compare the books with themselves.

        Raises:
            InvariantBroken: they contradict each other; a bug of ours.
        """
        sums = dict.fromkeys(self._pools, 0)
        owned = 0
        for lease in self._leases.values():
            for name, size in lease.parts:
                if size <= 0:
                    raise InvariantBroken(f"{lease} holds {size} bytes of {name}")
                for pool in self.chain(name):
                    sums[pool.name] += size
        for worker, holding in self._of_worker.items():
            mine = [self._leases[key] for key in holding.leases]
            owned += len(mine)
            if any(lease.worker != worker for lease in mine):
                raise InvariantBroken(f"worker {worker} lists a lease of somebody else")
            if sum(lease.bytes for lease in mine) != holding.booked:
                raise InvariantBroken(f"worker {worker} holds {mine}, its sum is {holding.booked}")
        if owned != len(self._leases):
            raise InvariantBroken(f"{owned} leases have an owner, {len(self._leases)} exist")
        if sums != self._booked:
            raise InvariantBroken(f"leases sum to {sums}, the pools have booked {self._booked}")

    # ---------------------------------------------------------------- private

    def _book(
        self,
        worker: int,
        kind: LeaseKind,
        state: LeaseState,
        parts: tuple[tuple[str, int], ...],
        deadline_s: float | None,
    ) -> Lease:
        # The token rises with every grant and never comes back, not from an earlier daemon either.
        token = self._fence + self._next
        lease = Lease(self._next, worker, kind, state, parts, token, deadline_s)
        self._next += 1
        self._add(lease)
        return lease

    def _add(self, lease: Lease) -> None:
        self._leases[lease.id] = lease
        self._of_worker.setdefault(lease.worker, Holding()).leases[lease.id] = None
        self._count(lease, +1)

    def _resize(self, lease: Lease, size: int) -> Lease:
        """Cut a lease to ``size`` bytes, from its first part on; 0 ends it."""
        parts: list[tuple[str, int]] = []
        left = size
        for name, had in lease.parts:
            keep = min(had, left)
            left -= keep
            if keep:
                parts.append((name, keep))
        changed = replace(lease, parts=tuple(parts))
        self._count(lease, -1)
        self._count(changed, +1)
        if parts:
            self._leases[lease.id] = changed
        else:
            del self._leases[lease.id]
            holding = self._of_worker[lease.worker]
            del holding.leases[lease.id]
            if not holding.leases:
                del self._of_worker[lease.worker]
        return changed

    def _count(self, lease: Lease, sign: int) -> None:
        """Add a lease to all sums, or take it out."""
        holding = self._of_worker[lease.worker]
        for name, size in lease.parts:
            for pool in self.chain(name):
                self._booked[pool.name] += sign * size
                holding.by_pool[pool.name] = holding.by_pool.get(pool.name, 0) + sign * size
        if lease.state is LeaseState.RELEASING:
            holding.releasing += sign * lease.bytes
        else:
            holding.active += sign * lease.bytes
