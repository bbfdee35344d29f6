"""From a verdict to deeds: who is told, what is closed, who is killed, and the one event after.

Also keeps the guard's limits equal to the books.  State is changed here only where a worker is
fenced.
"""

from collections.abc import Iterator
from typing import Any, Final

from umad.core import grants, kin, membership
from umad.core.actions import Action, CloseAccount, Event, Kill, Notify, Refuse, SetLimit
from umad.core.audit import ORPHANED, Breach
from umad.core.state import Member, State
from umad.core.watchdog import Case, Complied, KillNow, Revoke, Unkillable, Verdict
from umad.units import format_bytes, format_excess

# How a stop can end: told to, the guard took the bytes, killed; an orphan that went by itself.
FENCES: Final = ("revoke", "return", "sigkill", "exit")


def limits(state: State) -> list[Action]:
    """Limits that have changed since the guard was told: what is booked and not given back."""
    told: list[Action] = []
    for key, member in state.members.items():
        account = member.worker.account
        if account is None or member.revoked:
            continue
        limit = state.ledger.holding(key).active
        if limit != member.limit_told:
            member.limit_told = limit
            told.append(SetLimit(member.worker.identity, account, limit))
    return told


def blamed(state: State, breach: Breach) -> tuple[str, ...]:
    """The names of the workers a breach is put to: one, or all of the process."""
    if breach.worker is not None:
        return (state.members[breach.worker].worker.name,)
    return state.names(state.processes[breach.identity])


def carry_out(state: State, verdict: Verdict, now_s: float) -> Iterator[Action]:
    """What follows from a verdict."""
    case = verdict.case
    if isinstance(verdict, Revoke) and case.breach.reason == ORPHANED:
        return  # nobody is there to be told; people were, at the end of the process
    if isinstance(verdict, Revoke):
        state.counters["revocations"] += 1
        yield from _fence(state, case)
        yield _case_event(
            "revoked", "warning", case, grace_s=state.watchdog.deadline_s(case.breach)
        )
    elif isinstance(verdict, Complied) and case.worker is None:
        after_s = round(now_s - case.breach.taken_s, 6)
        yield _case_event("complied", "info", case, after_s=after_s)
    elif isinstance(verdict, Complied):
        yield from _returned(state, case, now_s)
    elif isinstance(verdict, KillNow):
        state.counters["kills"] += 1
        for victim in kin.victims(state.processes[case.identity]):
            yield Kill(victim, case.breach.reason)
    elif isinstance(verdict, Unkillable):
        state.counters["unkillable"] += 1
        yield _case_event("unkillable", "error", case, after_s=now_s - (case.killed_s or now_s))


def stopped(state: State, case: Case, freed: int, now_s: float, fence: str = "") -> Event:
    """The one event that tells a stop from evidence to bytes back; times count from the sample."""
    seen_s = case.breach.taken_s
    snapshot = state.snapshot
    reading = None if snapshot is None else snapshot.processes.get(case.identity)
    return _case_event(
        "stopped",
        "warning",
        case,
        fence=fence or _fence_of(case),
        seen_to_revoke_s=round(case.revoked_s - seen_s, 6),
        seen_to_kill_s=None if case.killed_s is None else round(case.killed_s - seen_s, 6),
        seen_to_gone_s=round(now_s - seen_s, 6),
        measured_at_kill_bytes=case.measured_at_kill,
        freed_bytes=freed,
        left_bytes=0 if not fence or reading is None else reading.bytes.value,
    )


def _fence_of(case: Case) -> str:
    if case.killed_s is not None:
        return "sigkill"
    return "exit" if case.breach.reason == ORPHANED else "revoke"


def _fence(state: State, case: Case) -> Iterator[Action]:
    """Close the account of who is to blame, and tell its workers to stop."""
    breach = case.breach
    holds = format_bytes(breach.measured) + format_excess(breach.measured, breach.limit)
    if case.worker is None:
        members = [state.members[key] for key in state.processes[case.identity].members]
        what = "the process"
    else:
        members = [state.members[case.worker]]
        what = "the worker"
    for member in members:
        worker = member.worker
        if case.worker is not None and worker.account is not None:
            member.revoked = True
            yield CloseAccount(worker.identity, worker.account)
            yield from _refuse_waiting(state, member)
        if member.client is not None:
            yield Notify(
                member.client,
                "revoke",
                {
                    "worker": worker.id,
                    "reason": f"{breach.reason}: {what} holds {holds}, its limit is "
                    f"{format_bytes(breach.limit)}",
                    "quota": worker.quota,
                    "measured": breach.measured,
                    "source": breach.source,
                    "grace_s": state.watchdog.deadline_s(breach),
                },
            )


def _refuse_waiting(state: State, member: Member) -> Iterator[Action]:
    """Nothing more is granted to who has to give back."""
    for queue in state.queues:
        for waiter in queue.pop_worker(member.worker.id):
            grants.waits_no_more(state, member.worker.id)
            yield Refuse(waiter.connection, waiter.request, membership.revoked(member))


def _returned(state: State, case: Case, now_s: float) -> Iterator[Action]:
    """The guard took a fenced worker's bytes: its leases end, its place is free."""
    assert case.worker is not None
    member: Member = state.members[case.worker]
    state.counters["returns"] += 1
    freed = state.ledger.booked_by(case.worker)
    yield from membership.leave(state, member, "revoked", now_s)
    yield stopped(state, case, freed, now_s, fence="return")


def _case_event(name: str, level: str, case: Case, **more: Any) -> Event:
    breach = case.breach
    return Event(
        name,
        level,
        {
            "worker": ",".join(case.workers),
            "pid": case.identity.pid,
            "comm": case.comm,
            "reason": breach.reason,
            "limit_bytes": breach.limit,
            "measured_bytes": breach.measured,
            "source": breach.source,
            **more,
        },
    )
