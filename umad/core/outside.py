"""Programs that know nothing of umad: started by ``umadctl run``, or adopted systemd units.

Their workers hang on no connection: they live as long as the program does, and are taken over by
the next daemon (``kept``).  They are never asked to go, only stopped when they break their quota.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from umad.config import Settings
from umad.core import grants, membership, registration
from umad.core.actions import Action, Event, Refuse, Unwatch, Watch
from umad.core.membership import Call, Params
from umad.core.settling import Settling
from umad.core.state import Member, Process, State
from umad.errors import (
    InvalidParams,
    LeaseNotFound,
    MemoryUnknown,
    NameTaken,
    NeverFits,
    QuotaDenied,
    QuotaExceeded,
)
from umad.units import format_bytes
from umad.values import Identity, Outsider, ProcessReading


def adopt(state: State, call: Call) -> Iterator[Action]:
    """Put a running unit under quota, if there is room for it and it is not above it already."""
    params, outsider = call.params, call.outsider
    assert outsider is not None, "the shell has found the unit"
    assert call.process is not None
    peak = membership.peak_of(params)
    membership.check_fits(state, params["pool"], peak)
    held = call.process.bytes.value
    if held is None:
        raise MemoryUnknown(f"what {outsider.unit} holds cannot be read", retry_after_s=1.0)
    if held > peak:
        raise QuotaExceeded(
            f"{outsider.unit} holds {format_bytes(held)} now, more than the {format_bytes(peak)} "
            "it would be allowed: it would be stopped at once; give it more, or stop it first",
            details={"measured_bytes": held, "quota_bytes": peak},
        )
    short = state.ledger.shortage([(params["pool"], peak)])
    if short is not None:
        raise QuotaDenied(
            f"{format_bytes(peak)} asked of pool {short.pool!r}, {format_bytes(short.free)} of its "
            "budget are not booked",
            retry_after_s=1.0,
            details={"asked_bytes": peak, "free_bytes": short.free, "pool": short.pool},
        )
    more = ((params["pool"], peak - held),)
    if peak > held and (error := grants.refusal(state, more, state.next_worker, call.now_s)):
        raise error
    told = list(take_over(state, params, outsider, call.process, call.now_s))
    yield call.reply({"pid": outsider.identity.pid, "held": held, "booked": peak})
    yield from told


def disown(state: State, call: Call) -> Iterator[Action]:
    """Let an adopted unit go: it runs on, and its bytes are nobody's."""
    name = call.params["name"]
    if any(table.name == name for table in state.settings.workers):
        raise InvalidParams(
            f"{name!r} is a [[worker]] of the configuration: take its table out, then "
            "umadctl reload, then disown it"
        )
    for process in state.processes.values():
        for key in process.members if process.unit else ():
            member = state.members[key]
            if member.worker.name != name or process.ended:
                continue
            let_go = _let_go(state, process, member)
            yield call.reply({"freed": let_go.fields["freed_bytes"]})
            yield let_go
            return
    raise LeaseNotFound(f"no adopted unit has the name {name!r}; see umadctl status")


def reconfigured(state: State, old: Settings) -> Iterator[Action]:
    """Go by the [[worker]] tables as they are now, for the units that run."""
    before = {table.unit: table for table in old.workers}
    now = {table.unit: table for table in state.settings.workers}
    for process in state.processes.values():
        was, table = before.get(process.unit), now.get(process.unit)
        if was == table or was is None or process.ended:
            continue
        for member in [state.members[key] for key in process.members]:
            if table is None:
                yield _let_go(state, process, member)
                continue
            quota, peak, worker = table.quota, table.peak_bytes, member.worker
            size = quota if member.settling is None else peak
            for lease in filter(lambda one: one.is_loaded, state.ledger.of_worker(worker.id)):
                state.ledger.resize(lease, size)
            member.worker = replace(worker, quota=quota, peak=peak, priority=table.priority)
            yield membership.event(
                "quota_set", member, "warning", quota_bytes=quota, was_bytes=worker.quota
            )


def unanswered(state: State, process: Process) -> Iterator[Action]:
    """The program has ended while its launcher waits for room; of others nobody is left to."""
    for key in process.members if process.outside else ():
        for queue in state.queues:
            for waiter in queue.pop_worker(key):
                error = LeaseNotFound(f"{process.comm} has ended before it was started")
                yield Refuse(waiter.connection, waiter.request, error)


def _let_go(state: State, process: Process, member: Member) -> Event:
    freed = state.ledger.drop(member.worker.id)
    process.members.discard(member.worker.id)
    del state.members[member.worker.id]
    state.watchdog.close(process.identity)
    return membership.event("disowned", member, freed_bytes=freed)


def take_over(
    state: State, params: Params, outsider: Outsider, reading: ProcessReading, now_s: float
) -> Iterator[Action]:
    """Make a worker of a program that runs: its bytes are a fact, whatever the books say.

    Raises:
        NameTaken: another worker has the name.
        InvalidParams: one of its processes has registered by itself.
        NeverFits: there is no such pool.
        MemoryUnknown: nothing has been read yet.
    """
    if not state.ledger.pools:
        raise MemoryUnknown("memory has not been read yet", retry_after_s=0.5)
    if params["pool"] not in state.ledger.pools:
        raise NeverFits(f"there is no pool {params['pool']!r} on this machine")
    peak = membership.peak_of(params)
    old = registration.find(state, params["model"], 0)
    if old is not None:
        raise NameTaken(f"worker {old.worker.name!r} is pid {old.worker.identity.pid} already")
    ours = [one for one in (outsider.identity, *outsider.others) if one in state.processes]
    if ours:
        raise InvalidParams(
            f"process {ours[0].pid} of {outsider.unit or outsider.comm} is a worker of umad already"
        )
    worker = registration.new_worker(state, params, outsider.identity, peak)
    process = Process.of(outsider)
    process.members.add(worker.id)
    state.processes[outsider.identity] = process
    lease = state.ledger.restore(worker.id, worker.pool, peak)
    member = Member(worker, None, measured=reading.bytes.value)
    state.members[worker.id] = member
    member.settle_s = params["settle_s"]
    started(state, member, now_s)
    yield Watch(outsider.identity)
    yield membership.event(
        "adopted",
        member,
        unit=outsider.unit,
        lease=lease.id,
        booked_bytes=lease.bytes,
        held_bytes=reading.bytes.value,
    )


def started(state: State, member: Member, now_s: float) -> None:
    """The program runs from now on; the peak counts until it has settled."""
    worker = member.worker
    if worker.peak > worker.quota:
        member.state = "loading"
        timeout_s = state.settings.leases.load_timeout
        member.settling = Settling(member.settle_s, now_s + timeout_s, now_s)
    else:
        member.state = "ready"


def settle(state: State, now_s: float) -> Iterator[Action]:
    """What a look shows of the programs; who has loaded keeps its quota and gives the rest back."""
    snapshot = state.snapshot
    assert snapshot is not None, "a look comes first"
    for process in state.processes.values():
        reading = snapshot.processes.get(process.identity)
        held = None if reading is None else reading.bytes.value
        for key in process.members if process.outside and not process.ended else ():
            member = state.members[key]
            member.measured = held
            if member.settling is None:
                continue
            if member.settling.seen(held, member.worker.quota, now_s):
                member.settling, member.state = None, "ready"
                [lease] = (one for one in state.ledger.of_worker(key) if one.is_loaded)
                kept = state.ledger.resize(lease, member.worker.quota)
                yield membership.event(
                    "loaded",
                    member,
                    lease=kept.id,
                    measured_bytes=held,
                    booked_bytes=kept.bytes,
                )


def succeeded(state: State, process: Process, _now_s: float) -> Iterator[Action]:
    """The unit's first process has ended and others live: the oldest of them stands for it now.

    How a unit starts, forks and restarts is systemd's business; who is in it is what counts.
    """
    heir = min(process.family, key=lambda one: (one.start_ticks, one.pid))
    state.watchdog.close(process.identity)  # the next look judges anew
    del state.processes[process.identity]
    state.processes[heir] = process
    yield Unwatch(process.identity)
    process.identity, process.family = heir, process.family - {heir}
    for key in process.members:
        member = state.members[key]
        member.worker = replace(member.worker, identity=heir)
    yield Watch(heir)


def kept(state: State) -> list[dict[str, Any]]:
    """What the next daemon must know of the programs that were started, as plain values.

    A unit is found again by its name.
    """
    return [
        plain(process.identity, process.launcher, _params(state.members[key]))
        for process in state.processes.values()
        if process.launcher is not None and not process.ended
        for key in sorted(process.members)
        if state.ledger.booked_by(key)
    ]


def plain(identity: Identity, launcher: Identity, params: Params) -> dict[str, Any]:
    """One program as plain values."""
    return {
        "pid": identity.pid,
        "start_ticks": identity.start_ticks,
        "launcher": [launcher.pid, launcher.start_ticks],
        "params": dict(params),
    }


def _params(member: Member) -> Mapping[str, Any]:
    worker = member.worker
    return {
        "model": worker.model,
        "quota": worker.quota,
        "peak": worker.peak if member.state == "loading" else worker.quota,
        "pool": worker.pool,
        "priority": worker.priority,
        "settle_s": member.settle_s,
    }
