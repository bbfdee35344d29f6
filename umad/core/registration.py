"""Workers come: new ones, those whose connection was lost, those from before a restart.

Owns who may be registered, under which name and from which process, and what is booked at once:
nothing for a new worker; what is physically there for one that had memory before a restart.
``register`` is a handler as those of ``core.membership``.
Stays out: what workers do and how they go (``core.membership``, ``core.requests``), programs that
know nothing of umad (``core.outside``), and pages that are found before their workers are back
(``core.returning``).
"""

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from umad.core.actions import Action, OpenAccount, Watch
from umad.core.membership import Call, Params, check_fits, event, peak_of
from umad.core.state import (
    ACCOUNTS_MAX,
    OUTSIDE_PER_USER_MAX,
    PROCESSES_MAX,
    WORKERS_PER_CONNECTION_MAX,
    Member,
    Process,
    State,
)
from umad.errors import InvalidParams, MemoryUnknown, NameTaken, Overloaded, WorkerRevoked
from umad.units import format_bytes
from umad.values import SYSTEM_POOL, Identity, LeaseKind, LeaseState, Worker

# What a worker says that had memory before a restart of the daemon; one that is new says neither.
_PHYSICAL = frozenset({"held", "loading"})


def register(state: State, call: Call) -> Iterator[Action]:
    """Add a worker, or bind one that was cut off to its old books."""
    params, client = call.params, call.client
    quota, peak = params["quota"], peak_of(params)
    pool = params.get("pool", SYSTEM_POOL)
    instance = params.get("instance", 0)
    if len(client.workers) >= WORKERS_PER_CONNECTION_MAX:
        raise Overloaded(f"one connection may register {WORKERS_PER_CONNECTION_MAX} workers")
    check_fits(state, pool, peak)
    _check_physical(state, params, peak)
    identity = client.peer.identity if call.outsider is None else call.outsider.identity
    process = state.processes.get(identity)
    old = _fenced(state, process, params.get("account")) or find(state, params["model"], instance)
    if process is not None and params.get("account") in process.fenced:
        raise WorkerRevoked(
            f"worker {params['model']!r} was over its quota and revoked before the daemon restarted"
        )
    mine = old is not None and old.worker.identity == identity and old.client is None
    # A program that others put under quota does not free itself: its launcher speaks for it.
    if old is not None and mine and _speaks_for(call, state.processes[identity]):
        yield from _rejoin(state, call, old)
        return
    if old is not None and old.state != "leaving":
        raise NameTaken(
            f"worker {old.worker.name!r} is registered by pid {old.worker.identity.pid}; "
            "choose another name or instance",
            retry_after_s=1.0,
        )
    _check_outside(call, process)
    _check_crowd(state, call, process)
    worker = new_worker(state, params, identity, peak)
    held = params.get("held")
    process = yield from _entered(state, call, process)
    process.unclaimed_until_s = min(
        process.unclaimed_until_s, call.now_s + state.settings.leases.recovery
    )
    process.guard_off = params.get("guard_off", process.guard_off)
    if params["guard"]:
        worker = replace(worker, account=_account(process, params.get("account")))
    member = Member(
        worker,
        client.id,
        recycles=params["recycle"],
        evicts=params["evict"],
        settle_s=params["settle_s"],
    )
    state.members[worker.id] = member
    process.members.add(worker.id)
    client.workers.add(worker.id)
    answer: dict[str, Any] = {
        "worker": worker.id,
        "generation": state.generation,
        "baseline": process.baseline,
    }
    if held is not None:
        lease = state.ledger.restore(worker.id, pool, quota)
        member.state, member.measured, member.ready_s = "ready", held, call.now_s
        answer |= {"lease": lease.id, "token": lease.token}
        answer["bursts"] = [_burst(state, call, worker, size) for size in params.get("bursts", ())]
    elif "loading" in params:
        answer |= _load_again(state, call, member) | _mutex_again(state, call, member)
    if worker.account is None:
        yield call.reply(answer)
    else:
        member.limit_told = state.ledger.holding(worker.id).active
        again = worker.account == params.get("account")
        yield OpenAccount(identity, worker.account, member.limit_told, again)
        yield replace(call.reply(answer | {"account": worker.account}), page=identity)
    yield event(
        "registered",
        member,
        quota_bytes=quota,
        peak_bytes=peak,
        held_bytes=held,
        loading_bytes=params.get("loading"),
    )


def new_worker(state: State, params: Params, identity: Identity, peak: int) -> Worker:
    """A worker with the next number."""
    state.next_worker += 1
    return Worker(
        state.next_worker - 1,
        params["model"],
        params.get("instance", 0),
        identity,
        params["quota"],
        peak,
        params.get("pool", SYSTEM_POOL),
        params.get("priority", 0),
        params.get("pin", False),
        params.get("thread", 0),
    )


def find(state: State, model: str, instance: int) -> Member | None:
    """The worker of this model and instance, unless it is on its way out."""
    return next(
        (
            member
            for member in state.members.values()
            if (member.worker.model, member.worker.instance) == (model, instance)
            and member.state != "leaving"
        ),
        None,
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
    if member.worker.account is not None:
        answer["account"] = member.worker.account  # its process has the page
    held = [
        lease
        for lease in state.ledger.of_worker(member.worker.id)
        if lease.state is LeaseState.COMMITTED
    ]
    if held:
        answer |= {"lease": held[0].id, "token": held[0].token}
    if "loading" in call.params and member.state == "loading":
        answer |= _mutex_again(state, call, member)
    yield call.reply(answer)
    yield event("rejoined", member)


def _entered(state: State, call: Call, process: Process | None) -> Generator[Action, None, Process]:
    """The process of a new worker, known from now on."""
    if process is None:
        peer = call.client.peer
        if call.outsider is not None:
            process = Process.of(call.outsider)
        else:
            process = Process(peer.identity, peer.comm, peer.uid, _baseline(call))
        state.processes[process.identity] = process
        yield Watch(process.identity)
    elif not process.members:  # its page was found before it came back
        process.baseline = _baseline(call)
    elif not _PHYSICAL.isdisjoint(
        call.params
    ):  # one without a model came first, and this one's bytes looked old
        said = _baseline(call)
        process.baseline = min(process.baseline or said, said)  # 0: it could not be read
    return process


def _baseline(call: Call) -> int:
    """What the process holds before its first worker; a returning one knows what it was.

    Its word counts up to what is physically there: more would raise its limit.  Where that cannot
    be read its word is all there is: with none at all it would soon be over its limit.
    """
    now = call.process.bytes.value if call.process is not None else None
    if now is None:
        return int(call.params.get("baseline", 0))
    if _PHYSICAL.isdisjoint(call.params):
        return now
    said = call.params.get("baseline", max(0, now - call.params.get("held", 0)))
    return min(now, int(said))


def _account(process: Process, wanted: int | None) -> int | None:
    """A free slot of the process's account page; the one it had before, where it names it.

    None when all are taken: the worker is then judged by its process, as without a guard.
    """
    taken = process.accounts | process.unclaimed.keys()
    free = (slot for slot in range(ACCOUNTS_MAX) if slot not in taken)
    slot = wanted if wanted is not None and wanted not in process.accounts else next(free, None)
    if slot is not None:
        process.accounts.add(slot)
        process.unclaimed.pop(slot, None)
    return slot


def _load_again(state: State, call: Call, member: Member) -> dict[str, int]:
    """Book a load that is under way since before a restart.

    It was granted, and a part of it is there: its guard must not refuse it the rest.  Like every
    load it books the quota at least.
    """
    worker, until_s = member.worker, call.now_s + state.settings.leases.load_timeout
    size = max(call.params["loading"], worker.quota)
    lease = state.ledger.restore(worker.id, worker.pool, size, until_s)
    member.state, member.granted_s = "loading", call.now_s
    return {"lease": lease.id, "token": lease.token}


def _mutex_again(state: State, call: Call, member: Member) -> dict[str, int]:
    """The init mutex for who had it when the connection was lost, unless somebody has it now."""
    until_s = call.now_s + state.settings.leases.init_timeout
    holder = state.mutex.take(member.worker.id, until_s)
    return {} if holder is None else {"init_token": holder.token}


def _burst(state: State, call: Call, worker: Worker, size: int) -> dict[str, int] | None:
    """Book a forward that is at work since before a restart; None for more than there ever is.

    Its bytes are a fact like those of the model, whatever the budget says by now: a worker that
    only did what it was granted must not be over its limit.  One that says more than is true
    could as well have registered with a larger quota.
    """
    if state.ledger.holding(worker.id).active + size > state.ledger.pools[worker.pool].budget:
        return None
    until_s = call.now_s + state.settings.leases.burst_ttl
    lease = state.ledger.restore(worker.id, worker.pool, size, until_s, LeaseKind.BURST)
    return {"lease": lease.id, "token": lease.token}


def _check_physical(state: State, params: Params, peak: int) -> None:
    """What a worker says it has from before a restart must be possible, and the machine known."""
    if _PHYSICAL.isdisjoint(params):
        return
    if params.keys() >= _PHYSICAL or params.get("loading", 0) > peak:
        raise InvalidParams(
            "register: a worker has a model (held), or loads one within its peak of "
            f"{format_bytes(peak)} (loading), not both"
        )
    if not state.ledger.pools:
        raise MemoryUnknown("memory has not been read yet; register again", retry_after_s=0.5)


def _check_crowd(state: State, call: Call, process: Process | None) -> None:
    """Bounds on processes, each of which costs descriptors; and a model has one user's instances.

    What its forwards took is kept by the model's name: nobody else may add to that.
    """
    uid, model = call.client.peer.uid, call.params["model"]
    if process is None and len(state.processes) >= PROCESSES_MAX:
        raise Overloaded(f"{PROCESSES_MAX} processes are registered, as many as can be; end some")
    if call.outsider is not None:
        outside = sum(one.outside and one.uid == uid for one in state.processes.values())
        if outside >= OUTSIDE_PER_USER_MAX:
            raise Overloaded(
                f"{outside} programs of uid {uid} run under quota by another's word, as many as "
                "one user may have; end some"
            )
    for member in state.members.values():
        theirs = state.processes[member.worker.identity].uid
        if member.worker.model == model and member.state != "leaving" and uid not in (0, theirs):
            raise NameTaken(f"model {model!r} is registered by uid {theirs}; choose another name")


def _check_outside(call: Call, process: Process | None) -> None:
    """A program that is registered by another has one worker, and no books of its own."""
    own = call.params["guard"] or not _PHYSICAL.isdisjoint(call.params)
    if call.outsider is not None and own:
        raise InvalidParams("another process is registered without held, loading and guard")
    if process is not None and (call.outsider is not None or process.outside):
        pid = process.identity.pid
        raise NameTaken(f"process {pid} has a worker already, by another's word")


def _fenced(state: State, process: Process | None, slot: int | None) -> Member | None:
    """The worker that was revoked and has this slot until its thread has unwound.

    When its connection was lost it comes back as the one it is, though it has no name any more:
    as another one it could not give the slot back.
    """
    members = () if process is None or slot is None else process.members
    own = (one for one in map(state.members.__getitem__, members) if one.worker.account == slot)
    return next((one for one in own if one.revoked), None)


def _speaks_for(call: Call, process: Process) -> bool:
    """Its own process, or the one whose child it is: the shell has proved that."""
    return call.outsider is not None or not process.outside
