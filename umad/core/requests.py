"""What clients ask, one handler a method: (state, client, request, params) -> actions.

Parameters have been checked for shape by wire; meaning is checked here.  A refusal raises a
``RequestRejected`` before anything was changed; the engine turns it into an answer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from umad.core import grants, report
from umad.core.actions import Action, Event, Reply, Watch
from umad.core.state import WORKERS_PER_CONNECTION_MAX, Client, Member, Process, State
from umad.core.waiting import Waiter
from umad.errors import (
    AccessDenied,
    Fenced,
    InvalidParams,
    LeaseNotFound,
    NameTaken,
    NeverFits,
    Overloaded,
    QuotaExceeded,
    WorkerRevoked,
)
from umad.units import format_bytes
from umad.values import SYSTEM_POOL, Lease, LeaseKind, LeaseState, ProcessReading, Worker

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One message to handle; ``request`` is None for a notification.

    ``process`` is a fresh reading of the caller's process, taken for ``register`` alone.
    """

    client: Client
    request: int | None
    params: Params
    now_s: float
    process: ProcessReading | None = None

    def reply(self, result: Params) -> Reply:
        """The answer to it."""
        assert self.request is not None
        return Reply(self.client.id, self.request, result)


Handler = Callable[[State, Call], Iterator[Action]]


def ping(_state: State, call: Call) -> Iterator[Action]:
    """Answer."""
    yield call.reply({})


def status(state: State, call: Call) -> Iterator[Action]:
    """The whole state."""
    yield call.reply(report.status(state, call.now_s))


def events(state: State, call: Call) -> Iterator[Action]:
    """What happened since, and from now on as notifications."""
    since = call.params.get("since", 0)
    call.client.listening = True
    recent = [event for event in state.events if event["seq"] > since]
    yield call.reply({"next": state.event_seq, "events": recent[-report.EVENTS_ANSWERED_MAX :]})


def register(state: State, call: Call) -> Iterator[Action]:
    """Add a worker, or bind one that was cut off to its old books."""
    params, client = call.params, call.client
    quota = params["quota"]
    peak = params.get("peak", quota)
    pool = params.get("pool", SYSTEM_POOL)
    instance = params.get("instance", 0)
    if peak < quota:
        raise InvalidParams(
            f"peak {format_bytes(peak)} is below the quota {format_bytes(quota)}; a load passes "
            "through its quota"
        )
    if len(client.workers) >= WORKERS_PER_CONNECTION_MAX:
        raise Overloaded(f"one connection may register {WORKERS_PER_CONNECTION_MAX} workers")
    _check_fits(state, pool, peak)
    old = _find(state, params["model"], instance)
    identity = client.peer.identity
    if old is not None and old.worker.identity == identity and old.client is None:
        yield from _rejoin(state, call, old)
        return
    if old is not None and old.state != "leaving":
        raise NameTaken(
            f"worker {old.worker.name!r} is registered by pid {old.worker.identity.pid}; "
            "choose another name or instance",
            retry_after_s=1.0,
        )
    worker = Worker(
        state.next_worker,
        params["model"],
        instance,
        identity,
        quota,
        peak,
        pool,
        params.get("priority", 0),
        params.get("pin", False),
        params.get("thread", 0),
    )
    state.next_worker += 1
    member = Member(worker, client.id)
    process = state.processes.get(identity)
    held = params.get("held")
    if process is None:
        process = Process(identity, client.peer.comm, client.peer.uid, _baseline(call))
        state.processes[identity] = process
        yield Watch(identity)
    state.members[worker.id] = member
    process.members.add(worker.id)
    client.workers.add(worker.id)
    answer = {
        "worker": worker.id,
        "generation": state.generation,
        "baseline": process.baseline,
    }
    if held is not None:
        lease = state.ledger.restore(worker.id, pool, quota)
        member.state, member.measured = "ready", held
        answer |= {"lease": lease.id, "token": lease.token}
    yield call.reply(answer)
    yield _event("registered", member, quota_bytes=quota, peak_bytes=peak, held_bytes=held)


def _baseline(call: Call) -> int:
    """What the process holds before its first worker; a returning one knows what it was.

    Its word counts up to what is physically there: more would raise its limit.
    """
    now = call.process.bytes.value if call.process is not None else None
    if now is None:
        return 0
    if "held" in call.params:
        return min(now, int(call.params.get("baseline", max(0, now - call.params["held"]))))
    return now


def unregister(state: State, call: Call) -> Iterator[Action]:
    """A worker leaves by word; its bytes stay booked until they are seen to be gone."""
    member = _own(state, call)
    yield call.reply({})
    yield from leave(state, member, "unregistered", call.now_s)


def reserve(state: State, call: Call) -> Iterator[Action]:
    """Book a load's peak, or queue for it."""
    member = _own(state, call)
    if member.state not in ("registered", "waiting"):
        raise InvalidParams(f"worker {member.worker.name!r} is {member.state} already")
    if "parts" in call.params:
        sizes = call.params["parts"]
    else:
        sizes = [call.params.get("bytes", member.worker.peak)]
    waiter = _waiter(state, call, member, "reserve", sizes)
    if waiter.bytes > member.worker.peak:
        raise QuotaExceeded(
            f"{format_bytes(waiter.bytes)} is above the peak that worker {member.worker.name!r} "
            f"registered with, {format_bytes(member.worker.peak)}"
        )
    member.state = "waiting"
    yield from grants.ask(state, state.loads, waiter, call.now_s)
    if member.state == "waiting" and waiter not in state.loads:
        member.state = "registered"


def commit(state: State, call: Call) -> Iterator[Action]:
    """A load is done: shrink the peak to the steady quota."""
    lease = _lease(state, call)
    member = state.members[lease.worker]
    if lease.kind is not LeaseKind.LOAD or lease.state is not LeaseState.RESERVED:
        raise InvalidParams("this lease is not a load under way")
    quota, measured = member.worker.quota, call.params["measured"]
    if measured > quota:
        raise QuotaExceeded(
            f"worker {member.worker.name!r} measured {format_bytes(measured)} after its load, "
            f"above its quota {format_bytes(quota)}; unload it or raise the quota",
            details={"measured_bytes": measured, "quota_bytes": quota},
        )
    kept = state.ledger.commit(lease, min(quota, lease.bytes))
    member.state, member.measured = "ready", measured
    yield call.reply({"bytes": kept.bytes})
    yield _event("loaded", member, measured_bytes=measured, booked_bytes=kept.bytes)


def release(state: State, call: Call) -> Iterator[Action]:
    """Give a lease back by word: ``release``, ``void``."""
    lease = _lease(state, call)
    member = state.members[lease.worker]
    end_lease(state, lease)
    yield call.reply({"bytes": lease.bytes})
    if call.params.get("leaked", False):
        state.counters["leases_leaked"] += 1
        if lease.kind is LeaseKind.LOAD:
            yield _event("leaked", member, "warning", bytes=lease.bytes)
    if lease.kind is LeaseKind.LOAD:
        yield _event("unloaded", member, bytes=lease.bytes)


def init_lock(state: State, call: Call) -> Iterator[Action]:
    """The device-init mutex, or a place in its line."""
    member = _own(state, call)
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
        yield grants.queued(waiter, state.inits.add(waiter), "another worker initialises")


def init_unlock(state: State, call: Call) -> Iterator[Action]:
    """Give the mutex back."""
    member = _own(state, call)
    if not state.mutex.give_back(member.worker.id, call.params["token"]):
        raise Fenced("this worker does not hold the init mutex (any more)")
    yield call.reply({})


def admit(state: State, call: Call) -> Iterator[Action]:
    """Book one forward's bytes beyond the steady quota."""
    member = _own(state, call)
    if state.watchdog.case(member.worker.identity) is not None:
        raise WorkerRevoked(f"worker {member.worker.name!r} is over its quota and was revoked")
    waiter = _waiter(state, call, member, "admit", [call.params["bytes"]])
    yield from grants.ask(state, state.bursts, waiter, call.now_s)


def forward_done(state: State, call: Call) -> Iterator[Action]:
    """What a forward took; ends its burst lease."""
    member = _own(state, call)
    if "lease" in call.params:
        end_lease(state, _lease(state, call))
    member.forwards += 1
    member.last_forward = {
        key: call.params[key] for key in ("predicted", "peak", "tokens", "batch", "seconds")
    }
    return iter(())


def progress(state: State, call: Call) -> Iterator[Action]:
    """How far a load has come."""
    member = _own(state, call)
    member.stage, member.ratio = call.params["stage"], call.params["ratio"]
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
    "forward_done": forward_done,
    "progress": progress,
}


def leave(state: State, member: Member, why: str, now_s: float) -> Iterator[Action]:
    """End a worker whose process lives on: what it holds goes to releasing."""
    member.state = "leaving"
    member.cut_off_s = now_s
    state.mutex.take_away(member.worker.id)
    for queue in state.queues:
        for waiter in queue.pop_worker(member.worker.id):
            yield from grants.give_up(state, waiter, now_s)
    for lease in state.ledger.of_worker(member.worker.id):
        if lease.state is not LeaseState.RELEASING:
            end_lease(state, lease)
    if member.client is not None and member.client in state.clients:
        state.clients[member.client].workers.discard(member.worker.id)
    member.client = None
    yield _event("left", member, why=why, booked_bytes=state.ledger.booked_by(member.worker.id))


def end_lease(state: State, lease: Lease) -> None:
    """A lease ends by word; a worker without a load can load again."""
    state.ledger.release(lease)
    member = state.members[lease.worker]
    if lease.kind is LeaseKind.LOAD and member.state in ("loading", "ready"):
        member.state, member.measured = "registered", None


def lock_granted(state: State, waiter: Waiter, now_s: float) -> Reply:
    """Hand the free mutex to a waiter."""
    timeout_s = state.settings.leases.init_timeout
    holder = state.mutex.take(waiter.worker, now_s + timeout_s)
    assert holder is not None, "only a free mutex is handed on"
    return Reply(
        waiter.connection,
        waiter.request,
        {"token": holder.token, "deadline_s": timeout_s, "position": 0},
    )


def _rejoin(state: State, call: Call, member: Member) -> Iterator[Action]:
    """A worker of this daemon's own life that lost its connection for a moment."""
    member.client, member.cut_off_s = call.client.id, None
    call.client.workers.add(member.worker.id)
    answer = {
        "worker": member.worker.id,
        "generation": state.generation,
        "baseline": state.processes[member.worker.identity].baseline,
    }
    held = [
        lease
        for lease in state.ledger.of_worker(member.worker.id)
        if lease.state is LeaseState.COMMITTED
    ]
    if held:
        answer |= {"lease": held[0].id, "token": held[0].token}
    yield call.reply(answer)
    yield _event("rejoined", member)


def _own(state: State, call: Call) -> Member:
    """The worker named in the call, which must be the caller's."""
    member = state.members.get(call.params["worker"])
    if member is None:
        raise LeaseNotFound(f"there is no worker {call.params['worker']}; register again")
    if member.client != call.client.id:
        raise AccessDenied(f"worker {member.worker.name!r} belongs to another connection")
    return member


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


def _find(state: State, model: str, instance: int) -> Member | None:
    return next(
        (
            member
            for member in state.members.values()
            if (member.worker.model, member.worker.instance) == (model, instance)
            and member.state != "leaving"
        ),
        None,
    )


def _check_fits(state: State, pool: str, peak: int) -> None:
    if not state.ledger.pools:
        return  # memory was never read: nothing is granted either
    if pool not in state.ledger.pools:
        known = ", ".join(sorted(state.ledger.pools))
        raise NeverFits(f"there is no pool {pool!r} on this machine; it has: {known}")
    short = state.ledger.shortage([(pool, peak)])
    if short is not None and not short.ever:
        raise NeverFits(
            f"{format_bytes(peak)} can never fit: the whole budget of pool {short.pool!r} is "
            f"{format_bytes(short.budget)}",
            details={"asked_bytes": peak, "budget_bytes": short.budget, "pool": short.pool},
        )


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
    )


def _event(name: str, member: Member, level: str = "info", **fields: Any) -> Event:
    worker = member.worker
    return Event(name, level, {"worker": worker.name, "pid": worker.identity.pid, **fields})
