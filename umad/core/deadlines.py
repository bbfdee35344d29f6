"""What becomes due by time alone, and when that is: one home for both, so that they agree.

Ends here: leases, the init mutex, workers whose connection was lost, waits, and what account pages
keep free for workers that do not come back; bytes that were given back by word alone are told of.
Rules: whatever only a look can show, or one comes in time for, has no moment of its own (leaks,
unclaimed accounts, a pressure that lasts).
Stays out: the watchdog's cases, whose moment asks for a look, and who was asked to go by when
(``core.switching``): their moments are here, for the shell has one timer.
"""

from collections.abc import Iterator

from umad.core import grants, membership, returning
from umad.core.actions import Action, Event
from umad.core.state import State
from umad.core.watchdog import LEAKING_AFTER_S
from umad.values import LeaseKind


def next_s(state: State) -> float | None:
    """When ``Engine.advance`` must be called at the latest."""
    moments = [
        state.watchdog.next_look_s(),
        state.ledger.next_deadline_s(),
        *(queue.next_deadline_s() for queue in state.queues),
        None if state.mutex.holder is None else state.mutex.holder.deadline_s,
        *(
            member.cut_off_s + state.settings.leases.reconnect_grace
            for member in state.members.values()
            if member.cut_off_s is not None and member.state != "leaving"
        ),
        *(
            member.draining.deadline_s
            for member in state.members.values()
            if member.draining is not None
        ),
    ]
    return min((moment for moment in moments if moment is not None), default=None)


def passed(state: State, now_s: float) -> Iterator[Action]:
    """What has become due."""
    for lease in state.ledger.expired(now_s):
        member = state.members[lease.worker]
        membership.end_lease(state, lease)
        state.counters["leases_expired"] += 1
        level = "warning" if lease.kind is LeaseKind.LOAD else "info"
        yield Event(
            "lease_expired",
            level,
            {"worker": member.worker.name, "lease": lease.id, "bytes": lease.bytes},
        )
    yield from _find_leaks(state, now_s)
    for process in state.processes.values():
        if process.unclaimed and process.unclaimed_until_s <= now_s:
            yield from returning.abandon(process)
    holder = state.mutex.holder
    if holder is not None and holder.deadline_s <= now_s:
        state.mutex.take_away(holder.worker)
        name = state.members[holder.worker].worker.name
        yield Event("init_lock_expired", "warning", {"worker": name})
    for member in list(state.members.values()):
        if member.cut_off_s is None or member.state == "leaving":
            continue
        if now_s - member.cut_off_s >= state.settings.leases.reconnect_grace:
            yield from membership.leave(state, member, "connection lost", now_s)
    for queue in state.queues:
        for waiter in queue.pop_expired(now_s):
            grants.waits_no_more(state, waiter.worker)
            yield from grants.give_up(state, waiter, now_s)


def _find_leaks(state: State, now_s: float) -> Iterator[Action]:
    """Workers that said they gave bytes back and still hold them: booked, and told of."""
    for key, member in state.members.items():
        releasing = state.ledger.holding(key).releasing
        if not releasing:
            member.releasing_s, member.leaking = None, False
        elif member.releasing_s is None:
            member.releasing_s = now_s
        elif state.processes[member.worker.identity].ended:
            continue  # its end was no claim of its worker's
        elif not member.leaking and now_s - member.releasing_s >= LEAKING_AFTER_S:
            member.leaking = True
            state.counters["leaks"] += 1
            yield membership.event("leaking", member, "warning", held_bytes=releasing)
