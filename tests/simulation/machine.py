"""The machine that is simulated: who physically holds how many bytes, at any moment.

Bytes move in straight lines between moments (a load fills memory, an unload gives it back), so
that nothing has to be computed until somebody looks.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from umad.units import GIB
from umad.values import SYSTEM_POOL, Identity, PoolReading, ProcessReading, Reading, Snapshot

CAPACITY: Final = 128 * GIB


class Bytes:
    """One block of memory on its way from one size to another."""

    __slots__ = ("_from", "_since_s", "_to", "until_s")

    def __init__(self, size: int = 0) -> None:
        self._from = self._to = size
        self._since_s = self.until_s = 0.0

    @property
    def goal(self) -> int:
        """What it will be in the end."""
        return self._to

    def move(self, size: int, now_s: float, over_s: float) -> None:
        """From what it is now to ``size``, within ``over_s`` seconds."""
        self._from, self._to = self.at(now_s), size
        self._since_s, self.until_s = now_s, now_s + over_s

    def at(self, now_s: float) -> int:
        """Bytes at a moment."""
        if now_s >= self.until_s:
            return self._to
        share = (now_s - self._since_s) / (self.until_s - self._since_s)
        return self._from + int((self._to - self._from) * share)


class Body:
    """One process and its family: what each of its models holds, and the rest."""

    __slots__ = ("baseline", "blocks", "broken_until_s", "family", "identity", "killed", "own")

    def __init__(self, identity: Identity, baseline: int) -> None:
        self.identity = identity
        self.own = True  # the process itself lives
        self.baseline = baseline
        self.blocks: list[Bytes] = []
        self.family: dict[Identity, Bytes] = {}
        self.broken_until_s = 0.0
        self.killed = False

    def at(self, now_s: float) -> int:
        """What all of it holds."""
        held = sum(block.at(now_s) for block in self.family.values())
        if self.own:
            held += self.baseline + sum(block.at(now_s) for block in self.blocks)
        return held

    def until_s(self) -> float:
        """When all that moves has come to rest."""
        moving = [block.until_s for block in (*self.blocks, *self.family.values())]
        return max(moving, default=0.0)


class Machine:
    """All bodies, other tenants of the machine, and readings that may be broken."""

    def __init__(self) -> None:
        self.capacity = CAPACITY
        self.tenants = Bytes(6 * GIB)
        self.bodies: dict[Identity, Body] = {}
        self.broken_until_s = 0.0

    def used(self, now_s: float) -> int:
        """What everybody holds."""
        return self.tenants.at(now_s) + sum(body.at(now_s) for body in self.bodies.values())

    def reading(self, identity: Identity, now_s: float) -> ProcessReading:
        """One process's bytes."""
        body = self.bodies.get(identity)
        if body is None:
            return ProcessReading(identity, False, Reading.of(0, "status"))
        if now_s < body.broken_until_s:
            return ProcessReading(identity, True, Reading.broken("status", "garbage"))
        held = body.at(now_s)
        return ProcessReading(identity, True, Reading.of(held, "status"), host_bytes=held)

    def snapshot(self, wanted: Iterable[Identity], now_s: float) -> Snapshot:
        """One look."""
        used = self.used(now_s)
        if now_s < self.broken_until_s:
            safe = Reading.broken("MemAvailable", "garbage")
        else:
            safe = Reading.of(max(0, self.capacity - used), "MemAvailable")
        system = PoolReading(
            SYSTEM_POOL,
            Reading.of(self.capacity, "MemTotal"),
            Reading.of(used, "MemAvailable"),
            safe,
            "MemAvailable",
        )
        processes = {identity: self.reading(identity, now_s) for identity in wanted}
        return Snapshot(now_s, 0.0002, {SYSTEM_POOL: system}, processes)

    def families(self, wanted: Iterable[Identity]) -> Mapping[Identity, frozenset[Identity]]:
        """Who belongs to whom."""
        return {
            identity: frozenset(body.family) if body is not None else frozenset()
            for identity in wanted
            for body in [self.bodies.get(identity)]
        }
