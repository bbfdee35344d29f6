"""The families of the registered processes, and what becomes of one that outlives its process.

Who is in a family is found outside (a look at all processes).  Here: what is known of them, and
the books of a process that has ended while some of its family live.  Those are kept: the leases
are given back by word alone, the bytes return as they are seen to go, and what is left of the
family is in breach of a limit of 0, which the watchdog deals with as with any other.
"""

from collections.abc import Iterator, Mapping

from umad.core import membership
from umad.core.actions import Action, Event, Kill, Look
from umad.core.state import Process, State
from umad.values import Identity, Kin

PIDS_TOLD_MAX = 8


def known(state: State) -> dict[Identity, Kin]:
    """What a search for families starts from.

    Of a unit whose first process has ended, or is being killed, only who was known is meant: the
    unit may have been started again.
    """
    return {
        identity: Kin(
            process.uid,
            process.family,
            process.launcher,
            "" if process.ended or state.watchdog.killing(identity) else process.cgroup,
        )
        for identity, process in state.processes.items()
    }


def counted(state: State) -> dict[Identity, frozenset[Identity]]:
    """Whose bytes count as those of each registered process, beside its own."""
    return {
        identity: process.family - state.processes.keys()
        for identity, process in state.processes.items()
        if process.family
    }


def urgent(state: State, now_s: float) -> bool:
    """Whether something is to be decided that depends on who is in a family now."""
    if any(case.killed_s is None and case.due_s <= now_s for case in state.watchdog.cases):
        return True
    ended = (identity for identity, process in state.processes.items() if process.ended)
    cases = (state.watchdog.case(identity) for identity in ended)
    return any(case is None or not case.unkillable for case in cases)


def found(state: State, families: Mapping[Identity, frozenset[Identity]]) -> Iterator[Action]:
    """Take over what a search has found; one that was born while its family is killed dies too."""
    for identity, members in families.items():
        process = state.processes.get(identity)
        if process is None:
            continue
        new = members - process.family
        process.family = members
        if new and (why := state.watchdog.killing(identity)):
            for member in sorted(new, key=_pid):
                yield Kill(member, why)


def victims(process: Process) -> list[Identity]:
    """Whom a kill of this process hits: itself first, which then starts no other."""
    own = [] if process.ended else [process.identity]
    return [*own, *sorted(process.family, key=_pid)]


def orphaned(state: State, process: Process, now_s: float) -> Iterator[Action]:
    """The process has ended and some of its family live."""
    names = state.names(process)
    process.ended = True
    process.baseline = 0  # it was the process's own
    for key in process.members:
        member = state.members[key]
        state.watchdog.drop(process.identity, key)
        if member.state != "leaving":
            # What becomes of each worker is told in one event for the process.
            left = membership.leave(state, member, "", now_s)
            yield from (action for action in left if not isinstance(action, Event))
    state.counters["orphaned"] += 1
    yield Event(
        "orphaned",
        "warning",
        {
            "worker": ",".join(names),
            "pid": process.identity.pid,
            "comm": process.comm,
            "pids": pids(process),
            "booked_bytes": sum(state.ledger.booked_by(key) for key in process.members),
        },
    )
    yield Look()


def pids(process: Process) -> list[int]:
    """The first of the family's pids, for people."""
    return sorted(member.pid for member in process.family)[:PIDS_TOLD_MAX]


def _pid(identity: Identity) -> int:
    return identity.pid
