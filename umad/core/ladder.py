"""What is done against fragmentation: a step, a new reading, and only then the next step.

1. release: every client gives back what it keeps warm (``shrink``);
2. compact: the kernel moves pages together;
3. recycle a worker: an idle model is loaded afresh, into memory that lies together;
4. recycle a process: an idle inference process starts afresh.

Runs on the slow readings of the free lists, never for a request.  It begins when the trouble has
lasted, stops at the first step that helped, skips steps that cannot be taken, and rests in
between; a pinned model and one that works are left alone.  Every step is an event.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from umad.core.actions import Action, Compact, Event, Notify
from umad.core.fragmentation import (
    BLOCK_BYTES,
    LARGE_BYTES,
    Level,
    Need,
    Risk,
    judge_segments,
    judge_zones,
    largest_possible,
)
from umad.core.state import Member, State
from umad.core.waiting import Waiter
from umad.settings import RESERVED_NAMES
from umad.values import SYSTEM_POOL, Identity, LeaseKind, Zones

# Trouble that passes by itself needs no step.
DWELL_S: Final = 10.0
REST_S: Final = 600.0
REST_IN_VAIN_S: Final = 3600.0
# No reading that could be believed for so long after a step: nothing is known of what it did.
UNVERIFIED_S: Final = 900.0
# Far beyond what any request may take, so that a long one is not mistaken for idleness.
IDLE_S: Final = 300.0
# A machine that is always short must not load its models afresh every hour.
RECYCLE_REST_S: Final = 86400.0
_TEXT_MAX: Final = 200


def observe(state: State, zones: Zones, now_s: float) -> Iterator[Action]:
    """Take a reading in, if it is a new one, and do what it asks for."""
    known = state.fragmentation
    last, known.zones = known.zones, zones
    if last is not None and last.taken_s == zones.taken_s:
        return
    yield from _oom_kills(state, last, zones)
    known.compaction.add(zones)
    _note_idle(state, now_s)
    if known.climb.rung is None:
        yield from _watch(state, now_s)
    else:
        yield from _verify(state, known.climb.rung, now_s)


def judged(state: State, waiter: Waiter) -> Iterator[Action]:
    """Tell of a large grant that may meet trouble; nothing is read and nobody refused for it."""
    zones = state.fragmentation.zones
    if zones is None or waiter.bytes < LARGE_BYTES or not _of_system(state, waiter):
        return
    risk = judge_zones(zones, state.fragmentation.compaction, _need(zones, waiter.bytes))
    if risk.level is not Level.LOW:
        member = state.members[waiter.worker]
        level = "warning" if risk.level is Level.HIGH else "info"
        fields = {"worker": member.worker.name, "bytes": waiter.bytes, "risk": risk.level.value}
        yield Event("fragmentation_risk", level, {**fields, "reason": risk.reason})


def standing_need(state: State, zones: Zones) -> Need:
    """What the machine is always judged for: the largest load that waits, or a large one."""
    waiting = (waiter.bytes for waiter in state.loads if _of_system(state, waiter))
    return _need(zones, max(LARGE_BYTES, *waiting, 0))


def risk_of(state: State, cause: Identity | None) -> Risk:
    """The risk now: of the machine's free lists, or of one process's device allocator."""
    known = state.fragmentation
    if cause is None:
        if known.zones is None:
            return Risk(Level.UNKNOWN, "the free lists have not been read yet")
        return judge_zones(known.zones, known.compaction, standing_need(state, known.zones))
    process = state.processes.get(cause)
    if process is None or process.segments is None:
        return Risk(Level.LOW, "its process has ended", 0.0)
    return judge_segments(process.segments)


def step_name(state: State) -> str | None:
    """The step that waits for its reading; None at rest."""
    rung = state.fragmentation.climb.rung
    return None if rung is None else _RUNGS[rung].name


def _need(zones: Zones, size: int) -> Need:
    if not zones.zones:
        return Need(size)
    return Need(size, min(BLOCK_BYTES, largest_possible(zones)))


def _of_system(state: State, waiter: Waiter) -> bool:
    """Whether it asks for the machine's own DRAM, which alone has the kernel's free lists."""
    pools = state.ledger.pools
    return all(
        name in pools and any(pool.name == SYSTEM_POOL for pool in state.ledger.chain(name))
        for name, _ in waiter.parts
    )


def _oom_kills(state: State, last: Zones | None, zones: Zones) -> Iterator[Event]:
    before = (last.counters or {}).get("oom_kill") if last is not None else None
    now = (zones.counters or {}).get("oom_kill")
    if before is not None and now is not None and now > before:
        state.counters["oom_kills"] += now - before
        yield Event("oom_kill", "error", {"count": now - before})


def _note_idle(state: State, now_s: float) -> None:
    before = state.fragmentation.idle
    state.fragmentation.idle = {
        key: before[key]
        if key in before and before[key][0] == member.forwards and not _works(state, key, member)
        else (member.forwards, now_s)
        for key, member in state.members.items()
    }


def _works(state: State, key: int, member: Member) -> bool:
    bursts = (lease.kind is LeaseKind.BURST for lease in state.ledger.of_worker(key))
    return member.state != "ready" or any(bursts)


def _watch(state: State, now_s: float) -> Iterator[Action]:
    """At rest: has trouble lasted?"""
    climb = state.fragmentation.climb
    reporting = [one.identity for one in state.processes.values() if one.segments is not None]
    troubled = [cause for cause in (None, *reporting) if risk_of(state, cause).is_trouble]
    if not troubled:
        climb.trouble_since_s = None
        return
    if climb.trouble_since_s is None:
        climb.trouble_since_s = now_s
    if now_s - climb.trouble_since_s >= DWELL_S and now_s >= climb.rest_until_s:
        climb.cause = troubled[0]
        yield from _climb(state, 0, now_s)


def _verify(state: State, rung: int, now_s: float) -> Iterator[Action]:
    """After a step: what has it done?

    1. it has not had its time: wait;
    2. there is no new reading, or none that tells anything: wait, and give up after a while;
    3. the trouble is over: rest;
    4. it is not: the next step.
    """
    climb = state.fragmentation.climb
    waited_s = now_s - climb.taken_s
    if waited_s < _RUNGS[rung].settle_s:
        return  # 1
    risk = risk_of(state, climb.cause)
    if risk.level is Level.UNKNOWN or not _is_new(state):
        if waited_s >= UNVERIFIED_S:
            yield from _rest(state, "fragmentation_unverified", risk, now_s)
        return  # 2
    yield Event(
        "fragmentation_step_seen",
        "info",
        {
            "step": _RUNGS[rung].name,
            "ratio_before": _rounded(climb.before.ratio),
            "ratio_after": _rounded(risk.ratio),
            "risk": risk.level.value,
            "reason": risk.reason,
            "note": _note(state, rung),
        },
    )
    if risk.is_over:
        yield from _rest(state, "fragmentation_over", risk, now_s)  # 3
    else:
        yield from _climb(state, rung + 1, now_s)  # 4


def _is_new(state: State) -> bool:
    climb = state.fragmentation.climb
    process = None if climb.cause is None else state.processes.get(climb.cause)
    return process is None or process.segments is None or process.segments_s > climb.taken_s


def _note(state: State, rung: int) -> str:
    """Whether the kernel has compacted at all, which somebody else was asked for."""
    zones, before = state.fragmentation.zones, state.fragmentation.climb.scanned
    if _RUNGS[rung].take is not _compact or zones is None or before is None:
        return ""
    if (zones.counters or {}).get("compact_migrate_scanned", before) > before:
        return ""
    return "nothing was compacted: is umad-compact.path active?"


def _climb(state: State, first: int, now_s: float) -> Iterator[Action]:
    """Take the first step from ``first`` on that can be taken."""
    climb = state.fragmentation.climb
    risk = risk_of(state, climb.cause)
    for rung in range(first, len(_RUNGS)):
        step = _RUNGS[rung]
        if now_s < climb.rungs_rest_until_s.get(rung, 0.0):
            actions: list[Action] | str = "it was taken within the last day"
        else:
            actions = step.take(state, risk, now_s)
        if isinstance(actions, str):
            yield Event("fragmentation_step_skipped", "info", {"step": step.name, "why": actions})
            continue
        zones = state.fragmentation.zones
        counters = (zones.counters if zones is not None else None) or {}
        climb.rung, climb.taken_s, climb.before = rung, now_s, risk
        climb.rungs_rest_until_s[rung] = now_s + step.rest_s
        climb.scanned = counters.get("compact_migrate_scanned")
        state.counters["fragmentation_steps"] += 1
        yield Event(
            "fragmentation_step", "warning", {"step": step.name, **_told(climb.cause, risk)}
        )
        yield from actions
        return
    yield from _rest(state, "fragmentation_stays", risk, now_s)


def _rest(state: State, event: str, risk: Risk, now_s: float) -> Iterator[Event]:
    climb = state.fragmentation.climb
    over = event == "fragmentation_over"
    yield Event(event, "info" if over else "warning", _told(climb.cause, risk))
    climb.rung, climb.trouble_since_s = None, None
    climb.rest_until_s = now_s + (REST_S if over else REST_IN_VAIN_S)


def _told(cause: Identity | None, risk: Risk) -> dict[str, Any]:
    return {
        "of": "free lists" if cause is None else f"device allocator of pid {cause.pid}",
        "ratio": _rounded(risk.ratio),
        "reason": risk.reason,
    }


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)


# --- the steps: actions, or why there are none ---


def _release(state: State, risk: Risk, _now_s: float) -> list[Action] | str:
    cause = state.fragmentation.climb.cause
    clients = {
        member.client: None  # a dict keeps the order
        for member in state.members.values()
        if member.client is not None and cause in (None, member.worker.identity)
    }
    told = {"reason": risk.reason[:_TEXT_MAX]}
    return [Notify(client, "shrink", told) for client in clients] or "no worker is connected"


def _compact(state: State, _risk: Risk, _now_s: float) -> list[Action] | str:
    if state.fragmentation.climb.cause is not None:
        return "the kernel does not compact what a device allocator has reserved"
    return [Compact()]


def _recycle_worker(state: State, risk: Risk, now_s: float) -> list[Action] | str:
    cause = state.fragmentation.climb.cause
    idle = [
        member
        for member in state.members.values()
        if cause in (None, member.worker.identity) and _may_recycle(state, member, now_s)
    ]
    if not idle:
        return "no worker is idle, unpinned and can be recycled"
    first = max(idle, key=lambda member: (-member.worker.priority, _booked(state, member)))
    return [_recycle(first, risk, process=False)]


def _recycle_process(state: State, risk: Risk, now_s: float) -> list[Action] | str:
    climb = state.fragmentation.climb
    found: list[tuple[int, int]] = []
    for process in state.processes.values():
        models = [
            key for key in process.members if state.members[key].worker.model not in RESERVED_NAMES
        ]
        idle = (_may_recycle(state, state.members[key], now_s) for key in models)
        if models and all(idle) and climb.cause in (None, process.identity):
            found.append((sum(map(state.ledger.booked_by, models)), min(models)))
    if not found:
        return "no process has only workers that are idle, unpinned and can be recycled"
    return [_recycle(state.members[max(found)[1]], risk, process=True)]


def _may_recycle(state: State, member: Member, now_s: float) -> bool:
    key = member.worker.id
    idle_s = now_s - state.fragmentation.idle[key][1]
    return (
        member.recycles
        and member.client is not None
        and not member.worker.pin
        and not member.revoked
        and idle_s >= IDLE_S
    )


def _booked(state: State, member: Member) -> int:
    return state.ledger.booked_by(member.worker.id)


def _recycle(member: Member, risk: Risk, *, process: bool) -> Notify:
    assert member.client is not None
    told = {"worker": member.worker.id, "process": process, "reason": risk.reason[:_TEXT_MAX]}
    return Notify(member.client, "recycle", told)


class _Rung(NamedTuple):
    """A step, how long it takes to show (a model must be loaded again), and until it may return."""

    name: str
    settle_s: float
    rest_s: float
    take: Callable[[State, Risk, float], list[Action] | str]


_RUNGS: Final = (
    _Rung("release", 10.0, 0.0, _release),
    _Rung("compact", 30.0, 0.0, _compact),
    _Rung("recycle_worker", 120.0, RECYCLE_REST_S, _recycle_worker),
    _Rung("recycle_process", 300.0, RECYCLE_REST_S, _recycle_process),
)
