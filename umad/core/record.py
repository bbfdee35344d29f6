"""Everything an engine knows as one value, which can be kept, and made an engine again.

What an engine made so decides is what the first one would have decided.  Left out is what rules
nothing: where a model's files lie, what clients call themselves, who listens to events, how long
waits and loads took, and what models' forwards took before.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from umad.config import Settings
from umad.core.access import Access
from umad.core.engine import Engine
from umad.core.fragmentation import Fragmentation
from umad.core.ledger import Ledger, Pool
from umad.core.mutex import Holder, InitMutex
from umad.core.plain import plain, typed
from umad.core.state import Client, Member, Process, Relief, fence_of
from umad.core.waiting import Queue, Waiter
from umad.core.watchdog import Case
from umad.values import Identity, Lease, PoolReading, Snapshot

_ORDERS_MAX: Final = 64
_PAGE_BYTES_MAX: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """See the module; each field is what the engine or its state calls so."""

    settings: Settings
    access: Access
    generation: int
    recovering_until_s: float
    unix_offset_s: float
    pools: tuple[Pool, ...]
    leases: tuple[Lease, ...]
    next_lease: int
    holder: Holder | None
    token: int
    bursts: tuple[Waiter, ...]
    loads: tuple[Waiter, ...]
    inits: tuple[Waiter, ...]
    cases: tuple[Case, ...]
    clients: dict[int, Client]
    members: dict[int, Member]
    processes: dict[Identity, Process]
    snapshot: Snapshot | None
    fill_rate: int
    pressed: bool
    pressed_s: float
    full_us: int | None
    relief: Relief
    drained: bool
    fragmentation: Fragmentation
    reserves: dict[str, int]
    counters: Counter[str]
    event_seq: int
    next_worker: int


# What State holds by the same name.
_ALIKE: Final = (
    "members",
    "processes",
    "snapshot",
    "fill_rate",
    "pressed",
    "pressed_s",
    "full_us",
    "relief",
    "drained",
    "fragmentation",
    "reserves",
    "counters",
    "event_seq",
    "next_worker",
)
# Not the engine's doing alone: the shell counts there, too.
_NOT_COMPARED: Final = frozenset({"counters"})


def dump(engine: Engine) -> dict[str, Any]:
    """The record of an engine as plain data; about 25 us for each worker."""
    state = engine.state
    models = tuple(replace(model, path="/left-out") for model in state.settings.models)
    record = Record(
        settings=replace(state.settings, models=models),
        access=state.access,
        generation=state.generation,
        recovering_until_s=state.recovering_until_s,
        unix_offset_s=engine.unix_offset_s,
        pools=tuple(state.ledger.pools.values()),
        leases=tuple(state.ledger.leases.values()),
        next_lease=state.ledger.next_id,
        holder=state.mutex.holder,
        token=state.mutex.token,
        bursts=tuple(state.bursts),
        loads=tuple(state.loads),
        inits=tuple(state.inits),
        cases=tuple(state.watchdog.cases),
        clients={
            key: replace(client, name="", listening=False) for key, client in state.clients.items()
        },
        **{name: getattr(state, name) for name in _ALIKE},
    )
    return {one.name: plain(getattr(record, one.name)) for one in fields(Record)}


def rebuild(data: object) -> Engine:
    """The engine that ``dump`` was told of.

    Raises:
        ValueError: the data is no record, or its books contradict themselves.
        InvariantBroken: its books do not add up.
    """
    record: Record = typed(Record, data)
    check_pools({pool.name: pool for pool in record.pools})
    if record.snapshot is not None:
        check_snapshot(record.snapshot)
    engine = Engine(
        record.settings,
        record.access,
        generation=record.generation,
        recovering_until_s=record.recovering_until_s,
        unix_offset_s=record.unix_offset_s,
    )
    state = engine.state
    for name in _ALIKE:
        setattr(state, name, getattr(record, name))
    state.clients = record.clients
    state.ledger = Ledger.of(
        record.pools, record.leases, record.next_lease, fence_of(state.generation)
    )
    state.mutex = InitMutex(record.holder, record.token)
    for queue, waiters in zip(
        state.queues, (record.bursts, record.loads, record.inits), strict=True
    ):
        _fill(queue, waiters)
    for case in record.cases:
        state.watchdog.resume(case)
    state.ledger.check()
    return engine


def _fill(queue: Queue, waiters: Iterable[Waiter]) -> None:
    for waiter in waiters:
        told = waiter.position
        queue.add(waiter)
        waiter.position = told


def size_of(engine: Engine) -> int:
    """How many things a record of this engine would list."""
    state = engine.state
    lists = (state.clients, state.members, state.processes, state.ledger.leases, *state.queues)
    return sum(len(one) for one in lists)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In which fields two dumps differ."""
    return [
        name for name in one if name not in _NOT_COMPARED and one[name] != other.get(name, object)
    ]


def check_snapshot(snapshot: Snapshot) -> None:
    """Refuse a look that no probe makes.

    Raises:
        ValueError: with what is wrong with it.
    """
    check_pools(snapshot.pools)
    zones = snapshot.zones
    if zones is not None and not (
        0 < zones.page_bytes <= _PAGE_BYTES_MAX
        and all(0 < len(zone.free_blocks) <= _ORDERS_MAX for zone in zones.zones)
    ):
        raise ValueError("free lists that no kernel has")


def check_pools(pools: Mapping[str, Pool | PoolReading]) -> None:
    """Refuse pools that are carved from each other in a circle, or from nothing.

    Raises:
        ValueError: with the pool.
    """
    for name, pool in pools.items():
        parent = None if pool.parent is None else pools.get(pool.parent)
        if name != pool.name or (pool.parent is not None and parent is None):
            raise ValueError(f"pool {name[:40]!r} is carved from nothing")
        if parent is not None and parent.parent is not None:
            raise ValueError(f"pool {name[:40]!r} is carved from a part of a pool")
