"""The state as plain values for ``status``: what people and programs are shown.

A reading that is not known is shown as None with its problem, never as 0.
"""

from dataclasses import asdict, replace
from typing import Any

from umad.core import kin, ladder, switching
from umad.core.audit import ORPHANED
from umad.core.fragmentation import Need, Risk, judge_zones, largest_free
from umad.core.room import free_now
from umad.core.state import Member, Process, State
from umad.core.waiting import Queue
from umad.values import PoolReading, Zones

# An answer must stay below the protocol's 64 KiB: these bounds keep it there.
WORKERS_ANSWERED_MAX = 64
QUEUE_ANSWERED_MAX = 50
HEADS_MAX = 4  # of each line; their reasons are told in full
EVENTS_ANSWERED_MAX = 50
TEXTS_ANSWERED_MAX = 8
ZONES_ANSWERED_MAX = 16


def status(state: State, now_s: float) -> dict[str, Any]:
    """The whole state."""
    snapshot = state.snapshot
    members = sorted(state.members.values(), key=lambda member: member.worker.id)
    return {
        "generation": state.generation,
        "recovering": state.recovering(now_s),
        "sample": None
        if snapshot is None
        else {
            "age_s": round(now_s - snapshot.taken_s, 4),
            "duration_s": round(snapshot.duration_s, 6),
            "anomalies": list(snapshot.anomalies[:TEXTS_ANSWERED_MAX]),
        },
        "pace": None
        if state.pace is None
        else {
            "look_s": round(state.pace.look_s, 4),
            "glance_s": None if state.pace.glance_s is None else round(state.pace.glance_s, 4),
            "reason": state.pace.reason,
        },
        "fill_rate_bytes_per_s": state.fill_rate or None,
        "pressed": state.pressed,
        "closed": state.relief.closed_s is not None,
        "drained": state.drained,
        "pools": []
        if snapshot is None
        else [_pool(state, pool) for pool in snapshot.pools.values()],
        "workers": [_worker(state, member, now_s) for member in members[:WORKERS_ANSWERED_MAX]],
        "workers_total": len(members),
        "processes": [
            _process(state, process)
            for process in list(state.processes.values())[:WORKERS_ANSWERED_MAX]
        ],
        "init": _init(state),
        "queue": [entry for queue in state.queues for entry in _queue(state, queue, now_s)][
            :QUEUE_ANSWERED_MAX
        ],
        "fragmentation": _fragmentation(state, now_s),
        "connections": len(state.clients),
        "counters": dict(state.counters),
    }


def _pool(state: State, reading: PoolReading) -> dict[str, Any]:
    pool = state.ledger.pools.get(reading.name)
    free, binding, problem = free_now(state, reading)
    return {
        "name": reading.name,
        "parent": reading.parent,
        "capacity": reading.capacity.value,
        "used": reading.used.value,
        "reserve": state.reserves.get(reading.name),
        "budget": None if pool is None else pool.budget,
        "booked": None if pool is None else state.ledger.booked(pool.name),
        "free": free,
        "binding": binding,
        "source": reading.safe.source,
        "problem": problem[:200],
    }


def _worker(state: State, member: Member, now_s: float) -> dict[str, Any]:
    worker, draining, account = member.worker, member.draining, member.figures
    loaded = member.state in ("ready", "draining")
    held = physical(state, member)
    rival = None if draining is None else state.members.get(draining.rival or 0)
    return {
        "id": worker.id,
        "name": worker.name,
        "pid": worker.identity.pid,
        "state": worker_state(state, member),
        "stage": member.stage,
        "ratio": member.ratio,
        "pool": worker.pool,
        "quota": worker.quota,
        "peak": worker.peak,
        "booked": state.ledger.booked_by(worker.id),
        "measured": member.measured,
        "holds": None if held is None else held[0],
        "charged": None if account is None else account.used,
        "charged_most": None if account is None else account.peak,
        "priority": worker.priority,
        "pin": worker.pin,
        "idle_s": round(switching.idle_s(member, now_s), 1) if loaded else None,
        "load_s": None if member.load_s is None else round(member.load_s, 3),
        "going_for": None if rival is None else rival.worker.name,
        "forwards": member.forwards,
        "last_forward": dict(member.last_forward),
    }


def worker_state(state: State, member: Member) -> str:
    """The state a worker is shown in, a few words at most."""
    if state.processes[member.worker.identity].ended:
        return ORPHANED
    if member.revoked:
        return "fenced"
    if member.leaking:
        return "leaking"
    if member.cut_off_s and member.state != "leaving":
        return "cut off"
    return "cold" if member.evicts and member.state == "registered" else member.state


def verdict(state: State, process: Process) -> str:
    """What is being done about a process: ok, revoked, killed, unkillable, orphaned."""
    case = state.watchdog.case(process.identity)
    if case is None or (process.ended and case.killed_s is None):
        return ORPHANED if process.ended else "ok"
    if case.unkillable:
        return "unkillable"
    return "revoked" if case.killed_s is None else "killed"


def _process(state: State, process: Process) -> dict[str, Any]:
    books = state.books_of(process)
    reading = state.snapshot.processes.get(process.identity) if state.snapshot else None
    return {
        "pid": process.identity.pid,
        "family": kin.pids(process),
        "family_total": len(process.family),
        "comm": process.comm,
        "uid": process.uid,
        "workers": len(process.members),
        "bytes": None if reading is None else reading.bytes.value,
        "source": "" if reading is None else reading.bytes.source,
        "locked": 0 if reading is None else reading.locked_bytes,
        "moved": {} if reading is None else asdict(reading.moved),
        "problem": "" if reading is None else reading.bytes.problem[:200],
        "baseline": process.baseline,
        "booked": books.active + books.releasing,
        "releasing": books.releasing,
        "limit": books.limit,
        "unclaimed": sum(process.unclaimed.values()),
        "verdict": verdict(state, process),
        "guard_off": process.guard_off[:80],
    }


def physical(state: State, member: Member) -> tuple[int, str] | None:
    """What a worker physically holds, in bytes, and which source says so; None: nobody knows.

    1. its account, where a guard counts for it;
    2. its process, less what that held before, where the worker is the only one in it.
    """
    if member.figures is not None:
        return member.figures.held, "account page"  # 1
    process = state.processes[member.worker.identity]
    reading = None if state.snapshot is None else state.snapshot.processes.get(process.identity)
    if reading is None or reading.bytes.value is None or len(process.members) != 1:
        return None
    return max(0, reading.bytes.value - process.baseline), reading.bytes.source  # 2


def _init(state: State) -> dict[str, Any]:
    holder = state.mutex.holder
    member = None if holder is None else state.members.get(holder.worker)
    return {
        "holder": None if member is None else member.worker.name,
        "waiting": len(state.inits),
    }


def _queue(state: State, queue: Queue, now_s: float) -> list[dict[str, Any]]:
    return [
        {
            "worker": state.members[waiter.worker].worker.name,
            "what": waiter.what,
            "position": position,
            "bytes": waiter.bytes,
            "waited_s": round(now_s - waiter.since_s, 3),
            "left_s": round(waiter.deadline_s - now_s, 3),
            "priority": waiter.priority,
            "passed": waiter.passed,
            "reason": waiter.reason[: 200 if position < HEADS_MAX else 80],
        }
        for position, waiter in enumerate(queue)
    ]


def _fragmentation(state: State, now_s: float) -> dict[str, Any]:
    known = state.fragmentation
    zones = known.zones
    attempts = known.compaction.attempts
    devices = [one for one in state.processes.values() if one.segments is not None]
    shown: dict[str, Any] = {"age_s": None, "need_bytes": None, "block_bytes": None, "zones": []}
    if zones is not None:
        need = ladder.standing_need(state, zones)
        shown = {
            "age_s": round(now_s - zones.taken_s, 3),
            "need_bytes": need.bytes,
            "block_bytes": need.block,
            "zones": _zones(state, zones, need.block),
        }
    return {
        **_risk(ladder.risk_of(state, None)),
        **shown,
        "compaction": None
        if attempts is None
        else {"attempts": attempts[0], "failed": attempts[1]},
        "devices": [
            {"pid": one.identity.pid, **_risk(ladder.risk_of(state, one.identity))}
            for one in devices[:ZONES_ANSWERED_MAX]
        ],
        "step": ladder.step_name(state),
    }


def _zones(state: State, zones: Zones, block: int) -> list[dict[str, Any]]:
    """Each zone, judged for one block."""
    return [
        {
            "node": zone.node,
            "zone": zone.name[:32],
            "largest": largest_free(zone, zones.page_bytes),
            **_risk(
                judge_zones(
                    replace(zones, zones=(zone,)),
                    state.fragmentation.compaction,
                    Need(block, block),
                )
            ),
        }
        for zone in zones.zones[:ZONES_ANSWERED_MAX]
    ]


def _risk(risk: Risk) -> dict[str, Any]:
    return {
        "risk": risk.level.value,
        "reason": risk.reason[:200],
        "ratio": None if risk.ratio is None else round(risk.ratio, 3),
    }
