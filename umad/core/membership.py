"""Workers change and go: quotas, leaving, what is forgotten at last; and what handlers share.

Owns the end of a worker in its two steps: it leaves, and what it holds goes to releasing; it is
removed when nothing of it is left.  Stays out: how workers come (``core.registration``).

A handler is (state, call) -> actions.  It raises a ``RequestRejected`` before anything was
changed; the engine turns that into an answer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from umad.core import grants
from umad.core.actions import Action, Event, Reply, Unwatch
from umad.core.state import Client, Member, State
from umad.errors import (
    AccessDenied,
    InvalidParams,
    LeaseNotFound,
    NeverFits,
    Overloaded,
    WorkerRevoked,
)
from umad.units import format_bytes
from umad.values import Lease, LeaseKind, LeaseState, Outsider, ProcessReading

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One message to handle; ``request`` is None for a notification.

    ``process`` is a fresh reading of the process to be registered, taken for that alone;
    ``outsider`` is who that is, where it is not the caller.
    """

    client: Client
    request: int | None
    params: Params
    now_s: float
    process: ProcessReading | None = None
    outsider: Outsider | None = None

    def reply(self, result: Params) -> Reply:
        """The answer to it."""
        assert self.request is not None
        return Reply(self.client.id, self.request, result)


Handler = Callable[[State, Call], Iterator[Action]]


def unregister(state: State, call: Call) -> Iterator[Action]:
    """A worker leaves by word; its bytes stay booked until they are seen to be gone."""
    member = state.members.get(call.params["worker"])
    if member is not None and member.revoked and _same_process(member, call):
        # Its thread has unwound: from now on its slot can be another's.
        member.revoked = False
        yield call.reply({})
        if member.state != "leaving":
            yield from leave(state, member, "unregistered", call.now_s)
        return
    member = own(state, call)
    yield call.reply({})
    yield from leave(state, member, "unregistered", call.now_s)


def set_quota(state: State, call: Call) -> Iterator[Action]:
    """Change a worker's steady quota; a loaded model's booking follows at once.

    More must fit; less may put the worker in breach, and the next look judges it by that.  Without
    a model nothing is booked: its next load books the new quota (``requests.reserve``).
    """
    member = _named(state, call)
    quota, worker = call.params["quota"], member.worker
    peak = peak_of({"peak": max(quota, worker.peak), **call.params})
    check_fits(state, worker.pool, call.params.get("peak", quota))
    under_way = [
        *(waiter.bytes for waiter in state.loads if waiter.worker == worker.id),
        *(
            lease.bytes
            for lease in state.ledger.of_worker(worker.id)
            if lease.kind is LeaseKind.LOAD and lease.state is LeaseState.RESERVED
        ),
    ]
    if any(quota > size for size in under_way):  # what is booked for it would be too little
        raise Overloaded(
            f"worker {worker.name!r} is being loaded within {format_bytes(min(under_way))}; ask "
            "again when it has loaded",
            retry_after_s=1.0,
        )
    for lease in state.ledger.of_worker(worker.id):
        if member.settling is not None and quota <= lease.bytes:
            continue  # its peak counts still
        if lease.is_loaded:
            more = ((worker.pool, quota - lease.bytes),)
            error = None
            if quota > lease.bytes:
                error = grants.refusal(state, more, worker.id, call.now_s)
            if error is not None:
                error.message = (
                    f"a quota of {format_bytes(quota)} for {worker.name} takes "
                    f"{format_bytes(quota - lease.bytes)} more: {error.message}"
                )
                error.details["quota_bytes"] = quota
                raise error
            state.ledger.resize(lease, quota)
    member.worker = replace(worker, quota=quota, peak=peak)
    yield call.reply({"quota": quota})
    yield event("quota_set", member, "warning", quota_bytes=quota, was_bytes=worker.quota)


def _named(state: State, call: Call) -> Member:
    """The worker that people mean: by its number or its name, exactly one of them."""
    if ("worker" in call.params) == ("name" in call.params):
        raise InvalidParams("set_quota: give either worker, a number, or name")
    name = call.params.get("name")
    member = state.members.get(call.params["worker"]) if name is None else state.named(name)
    if member is None or member.state == "leaving":
        raise LeaseNotFound(f"there is no worker {name or call.params['worker']}")
    return member


def leave(state: State, member: Member, why: str, now_s: float) -> Iterator[Action]:
    """End a worker whose process lives on: what it holds goes to releasing."""
    member.state, member.draining = "leaving", None
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
    yield event("left", member, why=why, booked_bytes=state.ledger.booked_by(member.worker.id))


def end_lease(state: State, lease: Lease) -> None:
    """A lease ends by word; a worker without a load can load again."""
    state.ledger.release(lease)
    member = state.members[lease.worker]
    if lease.kind is LeaseKind.LOAD:
        member.settling = None
    if lease.kind is LeaseKind.LOAD and member.state in ("loading", "ready", "draining"):
        member.state, member.measured, member.draining = "registered", None, None


def forget_left(state: State) -> None:
    """Workers that left and hold nothing any more."""
    for process in state.processes.values():
        for key in () if process.ended else list(process.members):
            member = state.members[key]
            if member.revoked:
                continue  # its thread may live on, and its slot with it
            if member.state == "leaving" and not state.ledger.booked_by(key):
                remove(state, key)
                process.members.discard(key)
                if member.worker.account is not None:
                    process.accounts.discard(member.worker.account)


def forget_processes(state: State) -> Iterator[Action]:
    """Processes without a worker are nobody's business."""
    for identity, process in list(state.processes.items()):
        if process.members or process.unclaimed:
            continue
        if state.watchdog.case(identity) is None:
            del state.processes[identity]
            yield Unwatch(identity)


def remove(state: State, key: int) -> None:
    """A worker of which nothing is left, but for its place in its process and in the books."""
    member = state.members.pop(key)
    state.watchdog.drop(member.worker.identity, key)
    state.mutex.take_away(key)
    for queue in state.queues:
        queue.pop_worker(key)
    if member.client is not None and member.client in state.clients:
        state.clients[member.client].workers.discard(key)


def own(state: State, call: Call) -> Member:
    """The worker named in the call, which must be the caller's."""
    member = state.members.get(call.params["worker"])
    if member is None:
        raise LeaseNotFound(f"there is no worker {call.params['worker']}; register again")
    if member.revoked and _same_process(member, call):
        raise revoked(member)
    if member.client != call.client.id:
        raise AccessDenied(f"worker {member.worker.name!r} belongs to another connection")
    return member


def event(name: str, member: Member, level: str = "info", **fields: Any) -> Event:
    """An event about a worker."""
    worker = member.worker
    return Event(name, level, {"worker": worker.name, "pid": worker.identity.pid, **fields})


def revoked(member: Member) -> WorkerRevoked:
    """What a fenced worker hears from now on."""
    return WorkerRevoked(f"worker {member.worker.name!r} is over its quota and was revoked")


def _same_process(member: Member, call: Call) -> bool:
    return member.worker.identity == call.client.peer.identity


def peak_of(params: Params) -> int:
    """The load peak that was asked for: the quota where none was.

    Raises:
        InvalidParams: it is below the quota.
    """
    quota: int = params["quota"]
    peak: int = params.get("peak", quota)
    if peak < quota:
        raise InvalidParams(
            f"peak {format_bytes(peak)} is below the quota {format_bytes(quota)}; a load passes "
            "through its quota"
        )
    return peak


def check_fits(state: State, pool: str, peak: int) -> None:
    """Refuse what can never be granted.

    Raises:
        NeverFits: there is no such pool, or it is smaller than that.
    """
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
