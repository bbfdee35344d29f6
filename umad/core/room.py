"""How much room there is: what may be booked, what the machine has, what is on its way back.

Both views count, the books (budget of the pool and its parents) and the machine (headroom of the
last snapshot); the smaller one binds.
"""

from collections.abc import Mapping

from umad.core.audit import ProcessBooks, headroom, reserve_of
from umad.core.ledger import Pool
from umad.core.state import Member, State
from umad.values import SYSTEM_POOL, PoolReading, Snapshot


def take_budgets(state: State, snapshot: Snapshot) -> None:
    """Set the pools' budgets from what the machine has; a broken capacity keeps the last one."""
    for reading in sorted(snapshot.pools.values(), key=lambda pool: pool.parent is not None):
        capacity = reading.capacity.value
        if capacity is None:
            continue
        if state.settings.memory.conservative:
            capacity //= 2  # what is shown may not be there: half of it is promised
        reserve = reserve_of(capacity, reading.name, state.settings.memory.reserve)
        budget = max(0, capacity - reserve)
        if reading.parent is not None:
            reserve, budget = state.reserves.get(reading.parent, reserve), capacity
        elif reading.name == SYSTEM_POOL and state.settings.memory.budget is not None:
            budget = min(budget, state.settings.memory.budget)
        state.reserves[reading.name] = reserve
        state.ledger.set_pool(Pool(reading.name, budget, reading.parent))


def take_pressure(state: State, snapshot: Snapshot) -> None:
    """Note whether tasks stall on memory.

    1. some of them for more than a tenth of the last 10 s, or all at once since the last look;
    2. no longer once that is 2 s ago and less than a twentieth stalls, so that it does not flutter;
    3. figures that cannot be read change nothing; a machine without them is judged by bytes alone.

    Source: memory-sources, "Formulas".
    """
    some = snapshot.info.get("psi_some_permille_avg10")
    full_us = snapshot.info.get("psi_full_us_total")
    if not isinstance(some, int) or not isinstance(full_us, int):
        return  # 3
    risen = state.full_us is not None and full_us > state.full_us
    state.full_us = full_us
    if some > 100 or risen:  # 1
        state.pressed, state.pressed_s = True, snapshot.taken_s
    elif some < 50 and snapshot.taken_s - state.pressed_s >= 2.0:  # 2
        state.pressed = False


def take_overdrawn(state: State, books: list[ProcessBooks]) -> None:
    """Note the pools that have less than nothing, once a look: no grant makes one so."""
    assert state.snapshot is not None, "a look comes first"
    short: list[str] = []
    for reading in state.snapshot.pools.values():
        free = headroom(reading, reserve_now(state, reading.name), books, state.snapshot).bytes
        if free is None or free < 0:
            short.append(reading.name)
    state.relief.overdrawn = tuple(short)


def overdrawn(state: State, pool: str) -> bool:
    """Whether a pool, or one that it is carved from, has less than nothing, or nobody knows."""
    return state.snapshot is None or any(
        one.name in state.relief.overdrawn or state.ledger.booked(one.name) > one.budget
        for one in state.ledger.chain(pool)
    )


def reserve_now(state: State, pool: str) -> int:
    """What is kept free of a pool at this moment.

    1. Stalls alone refuse nothing: one container that thrashes makes them, with memory in plenty.
       They say that the last of what seems available comes slowly: so twice the reserve is kept.
    2. Once the machine was below its reserve, a little more than that must be free again, or
       admission would open and close with every page.
    """
    reserve = state.reserves.get(pool, 0)
    if pool != SYSTEM_POOL:
        return reserve
    if state.pressed:
        return reserve * 2  # 1
    return reopening(reserve) if state.relief.closed_s is not None else reserve  # 2


def reopening(reserve: int) -> int:
    """What must be free for admission to open again."""
    return reserve + reserve // 8


def free_now(state: State, reading: PoolReading) -> tuple[int | None, str, str]:
    """What a pool can give at this moment: (bytes or None, binding limit, problem)."""
    free, binding, problem = _room(state, reading)
    return None if free is None else max(0, free), binding, problem


def shortfall(
    state: State,
    snapshot: Snapshot,
    parts: tuple[tuple[str, int], ...],
    returning: Mapping[str, int],
) -> dict[str, int] | None:
    """What each pool lacks for these parts once ``returning`` is back, by pool; None: unknown."""
    lacks: dict[str, int] = {}
    for name, size in wanted(state, parts).items():
        reading = snapshot.pools.get(name)
        free = None if reading is None else _room(state, reading)[0]
        if free is None:
            return None
        if (lack := size - free - returning.get(name, 0)) > 0:
            lacks[name] = lack
    return lacks


def wanted(state: State, parts: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """What the parts ask of each pool, parents included."""
    asked: dict[str, int] = {}
    for name, size in parts:
        for pool in state.ledger.chain(name):
            asked[pool.name] = asked.get(pool.name, 0) + size
    return asked


def returning(
    state: State, *, bursts: bool = False, spared: Member | None = None
) -> dict[str, int]:
    """Bytes by pool that are on their way back: given back by word, or of models asked to go.

    What somebody keeps for too long is not: nobody knows whether it ever comes.

    Args:
        state: of the daemon.
        bursts: those of forwards at work count too, which end by themselves.
        spared: a model that was asked to go and shall stay.
    """
    back: dict[str, int] = {}
    for key, member in state.members.items():
        holding = state.ledger.holding(key)
        size = 0 if member.leaking else holding.releasing
        if member.draining is not None and member is not spared:
            size += holding.active
        elif bursts:
            size += state.bursting(key)
        for pool in state.ledger.chain(member.worker.pool) if size else ():
            back[pool.name] = back.get(pool.name, 0) + size
    return back


def _room(state: State, reading: PoolReading) -> tuple[int | None, str, str]:
    """As ``free_now``; below 0 where more is booked or used than may be."""
    assert state.snapshot is not None
    room = headroom(reading, reserve_now(state, reading.name), state.books(), state.snapshot)
    if room.bytes is None or reading.name not in state.ledger.pools:
        return None, room.binding, room.problem or "its capacity is unknown"
    in_books = min(
        pool.budget - state.ledger.booked(pool.name) for pool in state.ledger.chain(reading.name)
    )
    in_books -= state.unclaimed()
    if in_books < room.bytes:
        return in_books, "budget", ""
    if reading.name == SYSTEM_POOL and (state.pressed or state.relief.closed_s is not None):
        return room.bytes, "psi" if state.pressed else "pressure", ""
    return room.bytes, room.binding, ""
