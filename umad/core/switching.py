"""Models go for each other: who is asked, until when, who is spared, and what a waiter is told.

A model that is asked to go is *draining*: nobody revives it, but it may be spared for another
that can go (``keep``), and whoever asked may not need it any more.  Its bytes count when they
are seen to be back.  Who misses the deadline is not asked again for a while, each time for twice
as long: a rival that waits for one who never hears keeps others from the room that is there.
Each is asked for the same rival once within ``leases.rival_rest``, so that no two can chase each
other.
"""

import itertools
from collections.abc import Iterator

from umad.core import eviction, room
from umad.core.actions import Action, Event, Notify
from umad.core.eviction import GUESSED_BYTES_PER_S, Candidate, Plan
from umad.core.state import Draining, Member, State
from umad.core.waiting import Waiter
from umad.errors import QuotaDenied
from umad.settings import RESERVED_NAMES
from umad.units import format_duration

NAMED_MAX = 4
PLANNED_MAX = 4  # a plan takes a look at all books; who stands further behind has time
MISSES_DOUBLE_MAX = 5  # times that the rest after a deadline missed is doubled
RETRY_MAX_S = 10.0  # who is told to come again: others may make room by themselves before


def reconcile(state: State, now_s: float) -> Iterator[Action]:
    """Bring who is asked to go into line with who waits.

    1. who has missed its deadline, or lost its connection, is asked no more;
    2. who was to go for somebody that does not wait any more, or must not load, is let off;
    3. for each of the first loads that wait, in order, as many as it needs are asked; not for
       those behind one that may not be passed.
    """
    waiting = {waiter.worker for waiter in state.loads}
    for member in list(state.members.values()):
        draining = member.draining
        if draining is None:
            continue
        if member.client is None:  # 1
            stay(member)
        elif draining.deadline_s <= now_s:  # 1
            member.missed_s, member.misses = now_s, member.misses + 1
            state.counters["evictions_missed"] += 1
            yield from spare(member, "evict_missed", "warning")
        elif draining.rival is not None and (state.drained or draining.rival not in waiting):  # 2
            yield from spare(member, "evict_cancelled")
    if state.drained or state.recovering(now_s):
        return
    for waiter in itertools.islice(state.loads, PLANNED_MAX):  # 3
        if waiter.evict:
            yield from _make_room(state, waiter, now_s)
        if not may_be_passed(state, waiter, now_s):
            break


def may_be_passed(state: State, waiter: Waiter, now_s: float) -> bool:
    """Bounded in count and time, so that the large are not starved by the small."""
    leases = state.settings.leases
    return waiter.passed < leases.overtake_max and now_s - waiter.since_s < leases.overtake_s


def drain(
    state: State, member: Member, rival: Member | None, reason: str, now_s: float
) -> Iterator[Action]:
    """Ask a model to go."""
    assert member.client is not None
    worker, leases = member.worker, state.settings.leases
    name = "" if rival is None else rival.worker.name
    member.state = "draining"
    member.draining = Draining(
        None if rival is None else rival.worker.id, now_s + leases.evict_timeout, now_s
    )
    recent = {one: at for one, at in member.asked_s.items() if now_s - at < leases.rival_rest}
    member.asked_s = {**recent, name: now_s}
    state.counters["evictions"] += 1
    yield Notify(
        member.client,
        "evict",
        {
            "worker": worker.id,
            "reason": reason[:200],
            "for_worker": name,
            "deadline_s": leases.evict_timeout,
        },
    )
    yield Event(
        "evicting",
        "info",
        {
            "worker": worker.name,
            "pid": worker.identity.pid,
            "for_worker": name,
            "reason": reason,
            "booked_bytes": state.ledger.booked_by(worker.id),
            "idle_s": round(idle_s(member, now_s), 3),
        },
    )


def spare(member: Member, event: str, level: str = "info") -> Iterator[Action]:
    """A model need not go (any more), and is told."""
    stay(member)
    worker = member.worker
    if member.client is not None:
        yield Notify(member.client, "evict_cancelled", {"worker": worker.id})
    yield Event(event, level, {"worker": worker.name, "pid": worker.identity.pid})


def stay(member: Member) -> None:
    """A model that was asked to go is an ordinary one again."""
    member.state, member.draining = "ready", None


def wanted(state: State, member: Member, now_s: float) -> Iterator[Action]:
    """A request came for a model that was asked to go: another goes in its place, or it still does.

    1. who was asked by people, or because the machine is short, has nobody in its place;
    2. who still has to go may be at work, and has as long as a forward may take: let off before
       it is done, it would have to be asked again, and those who went with it went for nothing.
    """
    draining = member.draining
    rival = None if draining is None else draining.rival
    waiter = next((one for one in state.loads if one.worker == rival), None)
    if draining is None or waiter is None:  # 1
        return
    if state.drained:  # nobody loads: nobody has to go for it
        yield from spare(member, "evict_cancelled")
        return
    found = _plan(state, waiter, now_s, spared=member)
    if found is not None and found.at_s <= now_s:
        state.counters["evictions_rescued"] += 1
        yield from spare(member, "evict_cancelled")
        yield from _ask(state, waiter, found, now_s)
    else:  # 2
        until_s = draining.asked_s + state.settings.leases.burst_ttl
        draining.deadline_s = max(draining.deadline_s, until_s)


def kept_for(state: State, waiter: Waiter, now_s: float) -> Waiter | None:
    """The load for which this forward's room is kept, or None.

    1. a load that waits beyond its bound, at the head of its line, of at least this priority;
    2. that fits as soon as the forwards at work have ended: else it would be kept for nothing;
    3. a model that was asked to go finishes what it does.
    """
    first = state.loads.head()
    overdue = first is not None and now_s - first.since_s >= state.settings.leases.overtake_s
    if first is None or not overdue or waiter.what != "admit" or state.drained:
        return None
    if waiter.priority > first.priority or state.snapshot is None:
        return None  # 1
    if state.members[waiter.worker].draining is not None:
        return None  # 3
    back = room.returning(state, bursts=True)
    lacks = room.shortfall(state, state.snapshot, first.parts, back)
    return first if lacks == {} else None  # 2


def explain(state: State, waiter: Waiter, error: QuotaDenied, now_s: float) -> None:
    """Say in a refusal who is going, who would have to go, and when somebody could."""
    going = [one.worker.name for one in state.members.values() if _is_going(state, one)]
    found = _plan(state, waiter, now_s) if waiter.evict else None
    names = [state.members[key].worker.name for key in found.victims] if found else []
    error.details |= {"going": going[:NAMED_MAX], "would_go": names[:NAMED_MAX]}
    if found is None:
        told = "no idle model can make room" if waiter.evict else "no other model goes for it"
    elif not names:
        told = f"{_listed(going)} on the way out" if going else "enough is on its way back"
    elif found.at_s > now_s:
        left_s = found.at_s - now_s
        error.retry_after_s = round(min(left_s, RETRY_MAX_S), 3)
        told = f"{_listed(names)} can go in {format_duration(left_s)}"
    else:
        told = f"{_listed(names)} would have to go"
    error.message = f"{told}: {error.message}"


def _is_going(state: State, member: Member) -> bool:
    holding = state.ledger.holding(member.worker.id)
    left = bool(holding.releasing) and not holding.active and not member.leaking
    return member.draining is not None or left


def idle_s(member: Member, now_s: float) -> float:
    """For how long a loaded model has done nothing; from the end of its last forward."""
    return now_s - max(member.ready_s, member.worked_s)


def candidates(state: State, rival: Member | None, now_s: float) -> list[Candidate]:
    """Whoever may be asked to go, now or later; for a rival, or for the machine (None).

    1. it can: it is loaded, its worker is connected, carries that out and is not being stopped;
    2. it may: not pinned, none of umad-serve's own, and no more important than the rival, unless
       nobody has wanted it for ``rival_rest``: else it would hold its memory for ever, unused;
    3. it is idle: no forward at work, and none that waits for room.
    """
    leases = state.settings.leases
    name = "" if rival is None else rival.worker.name
    busy = {waiter.worker for waiter in state.bursts}
    found: list[Candidate] = []
    for key, member in state.members.items():
        worker = member.worker
        able = member.evicts and member.client is not None and not member.revoked  # 1
        able = able and member.state == "ready"  # 1
        able = able and not worker.pin and worker.model not in RESERVED_NAMES  # 2
        rested = idle_s(member, now_s) >= leases.rival_rest
        if rival is not None and worker.priority > rival.worker.priority and not rested:
            continue  # 2
        if not able or key in busy or state.bursting(key):
            continue  # 3
        gives = state.ledger.holding(key).active
        from_s = max(
            member.ready_s + leases.residence_min,
            member.asked_s.get(name, -leases.rival_rest) + leases.rival_rest,
            _trusted_s(state, member),
        )
        found.append(
            Candidate(
                key,
                idle_s(member, now_s),
                member.load_s or gives / GUESSED_BYTES_PER_S,
                worker.priority,
                {pool.name: gives for pool in state.ledger.chain(worker.pool)},
                from_s,
            )
        )
    return found


def _trusted_s(state: State, member: Member) -> float:
    """From when on a model may be asked that was asked and did not go."""
    if member.missed_s is None:
        return 0.0
    doubled = 2.0 ** min(member.misses - 1, MISSES_DOUBLE_MAX)
    return member.missed_s + state.settings.leases.rival_rest * doubled


def _plan(state: State, waiter: Waiter, now_s: float, spared: Member | None = None) -> Plan | None:
    """Who goes for a load beside those who do already; None: nobody helps, or it is not known."""
    if state.snapshot is None:
        return None
    back = room.returning(state, spared=spared)
    lacks = room.shortfall(state, state.snapshot, waiter.parts, back)
    if lacks is None:
        return None
    rival = state.members[waiter.worker]
    return eviction.plan(candidates(state, rival, now_s), lacks, now_s)


def _make_room(state: State, waiter: Waiter, now_s: float) -> Iterator[Action]:
    found = _plan(state, waiter, now_s)
    if found is not None and found.at_s <= now_s:
        yield from _ask(state, waiter, found, now_s)


def _ask(state: State, waiter: Waiter, found: Plan, now_s: float) -> Iterator[Action]:
    rival = state.members[waiter.worker]
    for key in found.victims:
        reason = f"{rival.worker.name} waits for room"
        yield from drain(state, state.members[key], rival, reason, now_s)


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
