"""What clients ask, one handler a method: (state, call) -> actions.

Parameters have been checked for shape by wire; meaning is checked here.
"""

from collections.abc import Iterator
from typing import Final

from umad.core import admin, grants, ladder, outside, report, switching
from umad.core.actions import Action, Remember, Reply, Reshape
from umad.core.cost import Sample
from umad.core.membership import (
    Call,
    Handler,
    end_lease,
    event,
    own,
    revoked,
    set_quota,
    unregister,
)
from umad.core.registration import register
from umad.core.state import Member, State
from umad.core.waiting import Waiter
from umad.errors import (
    AccessDenied,
    Fenced,
    InvalidParams,
    LeaseNotFound,
    Overloaded,
    QuotaExceeded,
)
from umad.units import format_bytes
from umad.values import Lease, LeaseKind, LeaseState, Segments

EXCESS_TOLD_EVERY_S: Final = 1.0  # and worker: the counter has them all


def ping(_state: State, call: Call) -> Iterator[Action]:
    """Answer."""
    yield call.reply({})


def status(state: State, call: Call) -> Iterator[Action]:
    """The whole state."""
    yield call.reply(report.status(state, call.now_s))


def events(state: State, call: Call) -> Iterator[Action]:
    """What happened since, and from now on as notifications."""
    since, before = call.params["since"], call.params.get("before", state.event_seq + 1)
    call.client.listening = True
    recent = [event for event in state.events if since < event["seq"] < before]
    yield call.reply({"next": state.event_seq, "events": recent[-report.EVENTS_ANSWERED_MAX :]})


def reserve(state: State, call: Call) -> Iterator[Action]:
    """Book a load's peak, or queue for it.

    Never less than the quota, which may have been raised since its client asked for it last: the
    last part grows to it (the rule of ``core.state``).
    """
    member = own(state, call)
    if member.state not in ("registered", "waiting"):
        raise InvalidParams(f"worker {member.worker.name!r} is {member.state} already")
    if "parts" in call.params:
        sizes = call.params["parts"]
    else:
        sizes = [call.params.get("bytes", member.worker.peak)]
    missing = max(0, member.worker.quota - sum(sizes))
    sizes = [*sizes[:-1], sizes[-1] + missing]
    waiter = _waiter(state, call, member, "reserve", sizes)
    waiter.evict = call.params["evict"]
    if waiter.bytes > member.worker.peak:
        raise QuotaExceeded(
            f"{format_bytes(waiter.bytes)} is above the peak that worker {member.worker.name!r} "
            f"registered with, {format_bytes(member.worker.peak)}"
        )
    for older in state.loads.pop_worker(member.worker.id):  # its caller has given up
        yield from grants.give_up(state, older, call.now_s)
    member.state = "waiting"
    yield from grants.ask(state, state.loads, waiter, call.now_s)
    if member.state == "waiting" and waiter not in state.loads:
        member.state = "registered"
    yield from ladder.judged(state, waiter)


def commit(state: State, call: Call) -> Iterator[Action]:
    """A load is done: shrink the peak to the steady quota."""
    lease = _lease(state, call)
    member = state.members[lease.worker]
    if lease.kind is not LeaseKind.LOAD:
        raise InvalidParams("this lease is not a load's")
    if lease.state is LeaseState.COMMITTED:  # said once more, since the answer was lost
        yield call.reply({"bytes": lease.bytes})
        return
    quota, measured = member.worker.quota, call.params["measured"]
    if measured > quota:
        raise QuotaExceeded(
            f"worker {member.worker.name!r} measured {format_bytes(measured)} after its load, "
            f"above its quota {format_bytes(quota)}; unload it or raise the quota",
            details={"measured_bytes": measured, "quota_bytes": quota},
        )
    if state.processes[member.worker.identity].outside:  # it has only been started
        kept = state.ledger.commit(lease, lease.bytes)
        outside.started(state, member, call.now_s)
        yield call.reply({"bytes": kept.bytes})
        yield event("launched", member, lease=kept.id, booked_bytes=kept.bytes)
        return
    kept = state.ledger.commit(lease, quota)
    member.state, member.measured = "ready", measured
    member.ready_s, member.load_s = call.now_s, call.now_s - member.granted_s
    state.load_seconds.observe(member.load_s)
    yield call.reply({"bytes": kept.bytes})
    sizes = {"measured_bytes": measured, "booked_bytes": kept.bytes}
    yield event("loaded", member, lease=kept.id, **sizes)


def release(state: State, call: Call) -> Iterator[Action]:
    """Give a lease back by word: ``release``, ``void``."""
    lease = _lease(state, call)
    member = state.members[lease.worker]
    end_lease(state, lease)
    yield call.reply({"bytes": lease.bytes})
    if call.params.get("leaked", False):
        state.counters["leases_leaked"] += 1
        if lease.kind is LeaseKind.LOAD:
            yield event("leaked", member, "warning", lease=lease.id, bytes=lease.bytes)
    if lease.kind is LeaseKind.LOAD:
        member.misses = 0
        yield event("unloaded", member, lease=lease.id, bytes=lease.bytes)


def init_lock(state: State, call: Call) -> Iterator[Action]:
    """The device-init mutex, or a place in its line."""
    member = own(state, call)
    holder = state.mutex.holder
    if holder is not None and holder.worker == member.worker.id:
        raise InvalidParams("this worker holds the init mutex already")
    waiter = _waiter(state, call, member, "init_lock", [])
    if holder is None and len(state.inits) == 0 and not state.recovering(call.now_s):
        yield lock_granted(state, waiter, call.now_s)
    elif waiter.deadline_s <= call.now_s:
        yield from grants.give_up(state, waiter, call.now_s)
    elif state.inits.full:
        raise Overloaded("too many wait for the init mutex", retry_after_s=1.0)
    else:
        yield grants.queued(waiter, state.inits.add(waiter), _initialises(state))


def _initialises(state: State) -> str:
    holder = state.mutex.holder
    if holder is None:
        return "the daemon waits for its former workers"
    return f"{state.members[holder.worker].worker.name} loads; one at a time"


def init_unlock(state: State, call: Call) -> Iterator[Action]:
    """Give the mutex back."""
    member = own(state, call)
    if not state.mutex.give_back(member.worker.id, call.params["token"]):
        raise Fenced("this worker does not hold the init mutex (any more)")
    yield call.reply({})


def admit(state: State, call: Call) -> Iterator[Action]:
    """Book one forward's bytes beyond the steady quota."""
    member = own(state, call)
    if state.watchdog.case(member.worker.identity) is not None:
        raise revoked(member)
    waiter = _waiter(state, call, member, "admit", [call.params["bytes"]])
    yield from grants.ask(state, state.bursts, waiter, call.now_s)


def extend(state: State, call: Call) -> Iterator[Action]:
    """A forward is still at work, step by step: its burst lasts longer."""
    lease = _lease(state, call)
    if lease.kind is not LeaseKind.BURST:
        raise InvalidParams("only a burst lease is extended; a load commits in time")
    ttl_s = state.settings.leases.burst_ttl
    state.ledger.extend(lease, call.now_s + ttl_s)
    yield call.reply({"deadline_s": ttl_s})


def forward_done(state: State, call: Call) -> Iterator[Action]:
    """What a forward took; ends its burst lease."""
    member = own(state, call)
    if "lease" in call.params:
        end_lease(state, _lease(state, call))
    member.forwards += 1
    member.worked_s = call.now_s
    member.last_forward = {
        key: call.params[key] for key in ("predicted", "peak", "tokens", "batch", "seconds")
    }
    params, model = call.params, member.worker.model
    sample = Sample(
        params["tokens"], params["batch"], params["peak"], params["predicted"], params["exact"]
    )
    if sample.exceeded:
        yield from _told_of_excess(state, member, sample, call.now_s)
    if sample.exact or sample.exceeded:
        state.history.observe(model, sample)
        yield Remember(model, sample)


def _told_of_excess(state: State, member: Member, sample: Sample, now_s: float) -> Iterator[Action]:
    state.counters["prediction_exceeded"] += 1
    if member.exceeded_s is None or now_s - member.exceeded_s >= EXCESS_TOLD_EVERY_S:
        member.exceeded_s = now_s
        yield event(
            "prediction_exceeded",
            member,
            "warning",
            predicted_bytes=sample.predicted,
            took_bytes=sample.bytes,
            tokens=sample.tokens,
            rows=sample.rows,
        )


def cost(state: State, call: Call) -> Iterator[Action]:
    """What a model's forwards took; its worker says of which shape the model is."""
    model, shape = call.params["model"], call.params.get("shape")
    if shape is not None:
        if model not in {state.members[key].worker.model for key in call.client.workers}:
            raise AccessDenied(f"only a worker of {model!r} may say of which shape it is")
        state.history.reshape(model, shape)
        yield Reshape(model, shape)
    yield call.reply(state.history.answer(model))


def progress(state: State, call: Call) -> Iterator[Action]:
    """How far a load has come; of a loaded model: it is at work, and not the one to go."""
    member = own(state, call)
    member.stage, member.ratio = call.params["stage"], call.params["ratio"]
    if member.state in ("ready", "draining"):
        member.worked_s = call.now_s
    return iter(())


def keep(state: State, call: Call) -> Iterator[Action]:
    """Somebody wants a model that was asked to go."""
    yield from switching.wanted(state, own(state, call), call.now_s)


def segments(state: State, call: Call) -> Iterator[Action]:
    """How the memory of the caller's device allocator lies; of the whole process."""
    process = state.processes.get(call.client.peer.identity)
    if process is None:
        raise LeaseNotFound("this process has no worker; register one")
    process.segments, process.segments_s = Segments(**call.params), call.now_s
    return iter(())


HANDLERS: Final[dict[str, Handler]] = {
    "ping": ping,
    "status": status,
    "events": events,
    "register": register,
    "unregister": unregister,
    "reserve": reserve,
    "commit": commit,
    "void": release,
    "release": release,
    "init_lock": init_lock,
    "init_unlock": init_unlock,
    "admit": admit,
    "extend": extend,
    "forward_done": forward_done,
    "progress": progress,
    "segments": segments,
    "keep": keep,
    "evict": admin.evict,
    "load": admin.load,
    "pin": admin.pin,
    "drain": admin.drain,
    "resume": admin.resume,
    "reload": admin.reload,
    "set_quota": set_quota,
    "adopt": outside.adopt,
    "disown": outside.disown,
    "cost": cost,
}


def lock_granted(state: State, waiter: Waiter, now_s: float) -> Reply:
    """Hand the free mutex to a waiter."""
    timeout_s = state.settings.leases.init_timeout
    holder = state.mutex.take(waiter.worker, now_s + timeout_s)
    assert holder is not None, "only a free mutex is handed on"
    state.members[waiter.worker].granted_s = now_s  # its wait is no part of what its load costs
    state.waits[waiter.what].observe(now_s - waiter.since_s)
    return Reply(
        waiter.connection,
        waiter.request,
        {"token": holder.token, "deadline_s": timeout_s, "position": 0},
    )


def _lease(state: State, call: Call) -> Lease:
    """The lease named in the call, which must be the caller's and shown with its token."""
    lease = state.ledger.leases.get(call.params["lease"])
    if lease is None or lease.state is LeaseState.RELEASING:
        raise LeaseNotFound(f"there is no lease {call.params['lease']} (any more)")
    if lease.worker not in call.client.workers:
        raise AccessDenied("this lease belongs to another connection")
    if lease.token != call.params.get("token"):
        raise Fenced("the token is not this lease's")
    return lease


def _waiter(state: State, call: Call, member: Member, what: str, sizes: list[int]) -> Waiter:
    leases = state.settings.leases
    wait_s = min(call.params.get("wait_s", 0.0), leases.wait_max)
    assert call.request is not None
    return Waiter(
        call.client.id,
        call.request,
        member.worker.id,
        what,
        call.now_s,
        call.now_s + wait_s,
        tuple((member.worker.pool, size) for size in sizes),
        min(call.params.get("ttl_s", leases.burst_ttl), leases.burst_ttl),
        member.worker.priority,
    )
