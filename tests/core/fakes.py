"""Snapshots and peers for core tests, made in one line."""

from collections.abc import Mapping
from functools import cache

from umad.config import Settings, parse
from umad.core.access import Access
from umad.core.engine import Engine
from umad.units import GIB, MIB
from umad.values import (
    SYSTEM_POOL,
    Identity,
    Peer,
    PoolReading,
    ProcessReading,
    Reading,
    Snapshot,
)


def identity(pid: int) -> Identity:
    return Identity(pid, pid * 100)


def peer(pid: int, uid: int = 0) -> Peer:
    return Peer(identity(pid), uid, uid, frozenset(), f"program{pid}")


def process(pid: int, size: int | None, *, alive: bool = True, gpu: int = 0) -> ProcessReading:
    if size is None:
        return ProcessReading(identity(pid), alive, Reading.broken("status", "garbage"))
    return ProcessReading(
        identity(pid), alive, Reading.of(size + gpu, "status"), host_bytes=size, gpu=(("gtt", gpu),)
    )


def snapshot(
    at_s: float,
    processes: Mapping[int, int | None] | None = None,
    *,
    capacity: int = 16 * GIB,
    safe: int | None = 14 * GIB,
    gone: tuple[int, ...] = (),
) -> Snapshot:
    """A machine with one pool; ``processes`` are bytes by pid, None for a broken reading."""
    readings = [process(pid, size) for pid, size in (processes or {}).items()]
    readings += [process(pid, 0, alive=False) for pid in gone]
    safe_reading = (
        Reading.broken("MemAvailable", "garbage")
        if safe is None
        else Reading.of(safe, "MemAvailable")
    )
    return Snapshot(
        taken_s=at_s,
        duration_s=0.0002,
        pools={
            SYSTEM_POOL: PoolReading(
                SYSTEM_POOL,
                Reading.of(capacity, "MemTotal"),
                Reading.of(capacity - (safe or 0), "MemAvailable"),
                safe_reading,
                "MemAvailable",
            )
        },
        processes={reading.identity: reading for reading in readings},
    )


@cache
def settings(text: str = '[memory]\nreserve = "1GiB"\nbudget = "2GiB"\n') -> Settings:
    return parse(text)


def engine(
    text: str | None = None, *, recovering_until_s: float = 0.0, generation: int = 1
) -> Engine:
    made = Engine(
        settings() if text is None else settings(text),
        Access(uid=990, worker_gid=50, admin_gid=60),
        generation=generation,
        recovering_until_s=recovering_until_s,
    )
    made.observe(snapshot(0.0), 0.0)
    return made


MB = MIB
