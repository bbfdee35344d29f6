"""Who gets memory now, who waits, who is refused.

A grant needs room twice: in the books (budget of the pool and its parents) and in the machine
(headroom of the last snapshot).  A refusal says what was asked, what is free and who holds it.
"""

from collections.abc import Iterator
from typing import Any

from umad.core.actions import Action, Notify, Refuse, Reply
from umad.core.audit import headroom, reserve_of
from umad.core.ledger import Pool
from umad.core.state import LEASES_PER_WORKER_MAX, State
from umad.core.waiting import Queue, Waiter
from umad.errors import (
    MemoryUnknown,
    NeverFits,
    Overloaded,
    QuotaDenied,
    Recovering,
    UmadError,
    WaitedTooLong,
)
from umad.units import format_bytes
from umad.values import SYSTEM_POOL, Lease, LeaseKind, PoolReading, Snapshot

HOLDERS_NAMED_MAX = 8
PRESSURE_RETRY_S = 5.0  # an average over 10 s has halved by then


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


def free_now(state: State, reading: PoolReading) -> tuple[int | None, str, str]:
    """What a pool can give at this moment: (bytes or None, binding limit, problem)."""
    assert state.snapshot is not None
    reserve = state.reserves.get(reading.name, 0)
    # Stalls alone refuse nothing: one container that thrashes makes them, with memory in plenty.
    # They say that the last of what seems available comes slowly: so twice the reserve is kept.
    pressed = state.pressed and reading.name == SYSTEM_POOL
    room = headroom(reading, reserve * 2 if pressed else reserve, state.books(), state.snapshot)
    if room.bytes is None or reading.name not in state.ledger.pools:
        return None, room.binding, room.problem or "its capacity is unknown"
    in_books = min(
        pool.budget - state.ledger.booked(pool.name) for pool in state.ledger.chain(reading.name)
    )
    in_books -= state.unclaimed()
    if in_books < room.bytes:
        return max(0, in_books), "budget", ""
    return room.bytes, "psi" if pressed else room.binding, ""


def refusal(
    state: State, parts: tuple[tuple[str, int], ...], worker: int, now_s: float
) -> UmadError | None:
    """Why these bytes cannot be granted now, or None if they can.

    1. a pool that does not exist or can never give that much: NeverFits;
    2. the daemon still lets former workers come back: Recovering;
    3. too many leases of one worker: Overloaded;
    4. memory cannot be read: MemoryUnknown;
    5. no room in the books or in the machine: QuotaDenied.
    """
    if state.snapshot is None or not state.ledger.pools:
        return MemoryUnknown("memory has not been read yet", retry_after_s=0.2)  # 4
    asked = sum(size for _, size in parts)
    for name, _ in parts:
        if name not in state.ledger.pools:
            known = ", ".join(sorted(state.ledger.pools))
            return NeverFits(  # 1
                f"there is no pool {name!r} on this machine; it has: {known}",
                details={"asked_bytes": asked, "pool": name},
            )
    short = state.ledger.shortage(parts)
    if short is not None and not short.ever:
        return NeverFits(  # 1
            f"{format_bytes(short.asked)} asked of pool {short.pool!r} can never fit: its whole "
            f"budget is {format_bytes(short.budget)}",
            details={
                "asked_bytes": short.asked,
                "budget_bytes": short.budget,
                "pool": short.pool,
            },
        )
    if state.recovering(now_s):
        wait_s = round(state.recovering_until_s - now_s, 3)
        return Recovering(  # 2
            "the daemon has just started and waits for its former workers",
            retry_after_s=wait_s,
        )
    if len(state.ledger.holding(worker).leases) >= LEASES_PER_WORKER_MAX:
        return Overloaded(f"this worker holds {LEASES_PER_WORKER_MAX} leases already")  # 3
    return _no_room(state, state.snapshot, parts)


def _no_room(
    state: State, snapshot: Snapshot, parts: tuple[tuple[str, int], ...]
) -> UmadError | None:
    wanted: dict[str, int] = {}
    for name, size in parts:
        for pool in state.ledger.chain(name):
            wanted[pool.name] = wanted.get(pool.name, 0) + size
    for name, size in wanted.items():
        reading = snapshot.pools.get(name)
        if reading is None:
            return MemoryUnknown(f"pool {name!r} cannot be read", retry_after_s=1.0)  # 4
        free, binding, problem = free_now(state, reading)
        if free is None:
            return MemoryUnknown(  # 4
                f"pool {name!r} cannot be read: {problem}", retry_after_s=1.0
            )
        if size > free:
            return QuotaDenied(  # 5
                f"{format_bytes(size)} asked of pool {name!r}, {format_bytes(free)} free "
                f"(bound by {binding}); {_holders_text(state)}",
                retry_after_s=PRESSURE_RETRY_S if binding == "psi" else 1.0,
                details={
                    "asked_bytes": size,
                    "free_bytes": free,
                    "pool": name,
                    "binding": binding,
                    "holders": _holders(state),
                },
            )
    return None


def ask(state: State, queue: Queue, waiter: Waiter, now_s: float) -> Iterator[Action]:
    """Grant at once if nobody waits before and there is room; else queue or refuse."""
    again = _reclaim(state, waiter, now_s)
    if again is not None:
        yield _granted(waiter, again, now_s)
        return
    error = refusal(state, waiter.parts, waiter.worker, now_s)
    if error is None and len(queue) == 0:
        yield _grant(state, waiter, now_s)
    elif isinstance(error, NeverFits):
        yield from _refuse(state, waiter, error)
    elif waiter.deadline_s <= now_s:
        error = error or QuotaDenied("others wait before you", retry_after_s=1.0)
        yield from _refuse(state, waiter, error)
    elif queue.full:
        yield from _refuse(state, waiter, Overloaded("the queue is full", retry_after_s=1.0))
    else:
        position = queue.add(waiter)
        reason = error.message if error is not None else "others wait before you"
        yield queued(waiter, position, reason)


def pump(state: State, now_s: float) -> Iterator[Action]:
    """Grant to the heads of the queues as long as there is room."""
    for queue in (state.bursts, state.loads):
        while (waiter := queue.head()) is not None:
            error = refusal(state, waiter.parts, waiter.worker, now_s)
            if isinstance(error, NeverFits):  # the budget shrank meanwhile
                queue.remove(waiter)
                yield from _refuse(state, waiter, error)
                continue
            if error is not None:
                break
            queue.remove(waiter)
            yield _grant(state, waiter, now_s)


def give_up(state: State, waiter: Waiter, now_s: float) -> Iterator[Action]:
    """Answer a waiter whose bound has come.

    With the reason it could not be served, which tells a machine that is short of memory (503 to
    an HTTP client) from a line that is long (429).
    """
    waited_s = now_s - waiter.since_s
    error = refusal(state, waiter.parts, waiter.worker, now_s) if waiter.parts else None
    if error is None:
        error = WaitedTooLong("its turn did not come", retry_after_s=1.0)
    error.message = f"waited {waited_s:.1f} s for {waiter.what}: {error.message}"
    error.details["waited_s"] = round(waited_s, 3)
    yield from _refuse(state, waiter, error)


def queued(waiter: Waiter, position: int, reason: str) -> Notify:
    """Tell a waiter where it stands."""
    return Notify(
        waiter.connection,
        "queued",
        {
            "worker": waiter.worker,
            "what": waiter.what,
            "position": position,
            "reason": reason[:200],
        },
    )


def _grant(state: State, waiter: Waiter, now_s: float) -> Reply:
    load = waiter.what == "reserve"
    lifetime_s = state.settings.leases.load_timeout if load else waiter.ttl_s
    lease = state.ledger.reserve(
        waiter.worker,
        LeaseKind.LOAD if load else LeaseKind.BURST,
        waiter.parts,
        now_s + lifetime_s,
    )
    assert isinstance(lease, Lease), "refusal() has looked at the same books"
    state.counters["grants"] += 1
    if load:
        state.members[waiter.worker].state = "loading"
    if not load or not state.settings.memory.conservative:
        return _granted(waiter, lease, now_s)
    # Only the machine's own memory can be touched from here, by whatever pool it is booked.
    chain = state.ledger.chain(waiter.parts[0][0])
    in_dram = any(pool.name == SYSTEM_POOL for pool in chain)
    return _granted(waiter, lease, now_s, prefault=in_dram)


def _granted(waiter: Waiter, lease: Lease, now_s: float, *, prefault: bool = False) -> Reply:
    assert lease.deadline_s is not None
    answer = {
        "lease": lease.id,
        "token": lease.token,
        "bytes": lease.bytes,
        "deadline_s": round(lease.deadline_s - now_s, 3),
    }
    return Reply(
        waiter.connection, waiter.request, {**answer, "prefault": True} if prefault else answer
    )


def _reclaim(state: State, waiter: Waiter, now_s: float) -> Lease | None:
    """A burst out of what the same worker has just given back: nobody else is short by it."""
    if waiter.what != "admit":
        return None
    return state.ledger.reclaim(waiter.worker, waiter.bytes, now_s + waiter.ttl_s)


def _refuse(state: State, waiter: Waiter, error: UmadError) -> Iterator[Action]:
    state.counters["refusals_" + error.code] += 1
    yield Refuse(waiter.connection, waiter.request, error)


def _holders(state: State) -> list[dict[str, Any]]:
    booked = [
        {"worker": member.worker.name, "bytes": state.ledger.booked_by(key)}
        for key, member in state.members.items()
    ]
    booked = [entry for entry in booked if entry["bytes"]]
    booked.sort(key=lambda entry: (-int(str(entry["bytes"])), str(entry["worker"])))
    return booked[:HOLDERS_NAMED_MAX]


def _holders_text(state: State) -> str:
    named = [f"{entry['worker']} {format_bytes(entry['bytes'])}" for entry in _holders(state)]
    return "held by " + ", ".join(named) if named else "nobody holds any"
