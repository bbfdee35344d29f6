"""Who gets memory now, who waits, who is refused.

A grant needs room twice: in the books (budget of the pool and its parents) and in the machine
(headroom of the last snapshot).  A refusal says what was asked, what is free and who holds it.
"""

from collections.abc import Iterator
from typing import Any

from umad.core import room, switching
from umad.core.actions import Action, Event, Notify, Refuse, Reply
from umad.core.state import LEASES_PER_WORKER_MAX, State
from umad.core.waiting import Queue, Waiter
from umad.errors import (
    Drained,
    MemoryUnknown,
    NeverFits,
    Overloaded,
    QuotaDenied,
    Recovering,
    UmadError,
    WaitedTooLong,
)
from umad.units import format_bytes
from umad.values import SYSTEM_POOL, Lease, LeaseKind, Snapshot

HOLDERS_NAMED_MAX = 8
REASON_MAX = 200
PRESSURE_RETRY_S = 5.0  # an average over 10 s has halved by then
REFUSAL_TOLD_EVERY_S = 10.0  # and worker: who is refused asks again, every second


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


def denied(state: State, waiter: Waiter, now_s: float) -> UmadError | None:
    """Why a request cannot be granted now, or None if it can.

    1. ``refusal``: nothing helps against what can never be;
    2. people have stopped new loads;
    3. a forward waits while room is kept for a load that waits beyond its bound;
    4. a load is told who could go for it.
    """
    error = refusal(state, waiter.parts, waiter.worker, now_s)
    if isinstance(error, NeverFits):
        return error  # 1
    load = waiter.what == "reserve"
    if load and state.drained:  # 2
        return Drained("no load begins: umad was drained; umadctl resume", retry_after_s=5.0)
    if error is None and not load and (first := switching.kept_for(state, waiter, now_s)):  # 3
        name = state.members[first.worker].worker.name
        waited_s = now_s - first.since_s
        return QuotaDenied(
            f"the room is kept for {name}, which has waited {waited_s:.1f} s", retry_after_s=1.0
        )
    if load and isinstance(error, QuotaDenied):
        switching.explain(state, waiter, error, now_s)  # 4
    return error


def _no_room(
    state: State, snapshot: Snapshot, parts: tuple[tuple[str, int], ...]
) -> UmadError | None:
    for name, size in room.wanted(state, parts).items():
        reading = snapshot.pools.get(name)
        if reading is None:
            return MemoryUnknown(f"pool {name!r} cannot be read", retry_after_s=1.0)  # 4
        free, binding, problem = room.free_now(state, reading)
        if free is None:
            return MemoryUnknown(  # 4
                f"pool {name!r} cannot be read: {problem}", retry_after_s=1.0
            )
        if size > free:
            return QuotaDenied(  # 5
                f"{format_bytes(size)} asked of pool {name!r}, {format_bytes(free)} free "
                f"(bound by {binding}); {_holders_text(state)}",
                retry_after_s=PRESSURE_RETRY_S if binding in ("psi", "pressure") else 1.0,
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
    """Grant at once if there is room and nobody minds; else queue or refuse."""
    if switching.kept_for(state, waiter, now_s) is None:
        again = _reclaim(state, waiter, now_s)
        if again is not None:
            yield _granted(state, waiter, again, now_s)
            return
    error = denied(state, waiter, now_s)
    before = [one for one in queue if one.priority >= waiter.priority]
    if error is None and all(switching.may_be_passed(state, one, now_s) for one in before):
        yield _pass(state, waiter, before, now_s)
        return
    if error is None:
        error = QuotaDenied(f"{_first(state, before)} waits before it", retry_after_s=1.0)
    if isinstance(error, NeverFits) or waiter.deadline_s <= now_s:
        yield from _refuse(state, waiter, error, now_s)
    elif queue.full:
        yield from _refuse(state, waiter, Overloaded("the queue is full", retry_after_s=1.0), now_s)
    else:
        yield queued(waiter, queue.add(waiter), error.message)


def pump(state: State, now_s: float) -> Iterator[Action]:
    """Grant whatever there is room for, in order; who cannot be served may be passed, in bounds."""
    for queue in (state.bursts, state.loads):
        before: list[Waiter] = []
        least: dict[str, int] = {}  # what did not fit: nor does more of the same pool
        for waiter in list(queue):
            if not all(switching.may_be_passed(state, one, now_s) for one in before):
                break
            pool = waiter.parts[0][0]
            if waiter.bytes >= least.get(pool, waiter.bytes + 1):
                before.append(waiter)
                continue
            error = denied(state, waiter, now_s)
            if error is None:
                queue.remove(waiter)
                yield _pass(state, waiter, before, now_s)
            elif isinstance(error, NeverFits):  # the budget shrank meanwhile
                queue.remove(waiter)
                waits_no_more(state, waiter.worker)
                yield from _refuse(state, waiter, error, now_s)
            else:
                before.append(waiter)
                waiter.reason = error.message[:REASON_MAX]
                if "free_bytes" in error.details:
                    least[pool] = waiter.bytes


def waits_no_more(state: State, worker: int) -> None:
    """A worker has left the line without a grant."""
    member = state.members[worker]
    if member.state == "waiting":
        member.state = "registered"


def _pass(state: State, waiter: Waiter, before: list[Waiter], now_s: float) -> Reply:
    """Serve one before those who stand before it."""
    for one in before:
        one.passed += 1
    return _grant(state, waiter, now_s)


def _first(state: State, before: list[Waiter]) -> str:
    return state.members[before[0].worker].worker.name


def give_up(state: State, waiter: Waiter, now_s: float) -> Iterator[Action]:
    """Answer a waiter whose bound has come.

    With the reason it could not be served, which tells a machine that is short of memory (503 to
    an HTTP client) from a line that is long (429).
    """
    waited_s = now_s - waiter.since_s
    error = denied(state, waiter, now_s) if waiter.parts else None
    if error is None:
        error = WaitedTooLong("its turn did not come", retry_after_s=1.0)
    error.message = f"waited {waited_s:.1f} s for {waiter.what}: {error.message}"
    error.details["waited_s"] = round(waited_s, 3)
    yield from _refuse(state, waiter, error, now_s)


def queued(waiter: Waiter, position: int, reason: str) -> Notify:
    """Tell a waiter where it stands, and why."""
    waiter.reason = reason[:REASON_MAX]
    return Notify(
        waiter.connection,
        "queued",
        {
            "worker": waiter.worker,
            "what": waiter.what,
            "position": position,
            "reason": waiter.reason,
        },
    )


def moved(state: State) -> Iterator[Action]:
    """Tell those who wait for long where they stand now; a burst's wait is over too soon for it."""
    for queue in (state.loads, state.inits):
        for waiter in queue.moved():
            yield queued(waiter, waiter.position, waiter.reason)


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
        member = state.members[waiter.worker]
        member.state, member.granted_s = "loading", now_s
    if not load or not state.settings.memory.conservative:
        return _granted(state, waiter, lease, now_s)
    # Only the machine's own memory can be touched from here, by whatever pool it is booked.
    chain = state.ledger.chain(waiter.parts[0][0])
    in_dram = any(pool.name == SYSTEM_POOL for pool in chain)
    return _granted(state, waiter, lease, now_s, prefault=in_dram)


def _granted(
    state: State, waiter: Waiter, lease: Lease, now_s: float, *, prefault: bool = False
) -> Reply:
    assert lease.deadline_s is not None
    state.waits[waiter.what].observe(now_s - waiter.since_s)
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
    """A burst out of what the same worker has just given back: nobody else is short by it.

    Unless more is used or booked than may be, or nobody knows yet: then what comes back is not
    handed out again.
    """
    if waiter.what != "admit" or state.ledger.holding(waiter.worker).releasing < waiter.bytes:
        return None
    if state.recovering(now_s) or any(room.overdrawn(state, pool) for pool, _ in waiter.parts):
        return None
    return state.ledger.reclaim(waiter.worker, waiter.bytes, now_s + waiter.ttl_s)


def _refuse(state: State, waiter: Waiter, error: UmadError, now_s: float) -> Iterator[Action]:
    state.counters["refusals_" + error.code] += 1
    yield Refuse(waiter.connection, waiter.request, error)
    member = state.members[waiter.worker]
    member.refusals += 1
    if member.refused_s is not None and now_s - member.refused_s < REFUSAL_TOLD_EVERY_S:
        return
    told = {
        "worker": member.worker.name,
        "pid": member.worker.identity.pid,
        "what": waiter.what,
        "asked_bytes": waiter.bytes,
        "times": member.refusals,
        "why": error.message[:REASON_MAX],
    }
    yield Event("refused", "info", told)
    member.refusals, member.refused_s = 0, now_s


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
