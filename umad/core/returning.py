"""Account pages that are found after a restart of the daemon, until their workers are back.

What an open account may hold stays kept free: its guard goes on handing it out.  Workers take
theirs back one by one (``registration.register``); what nobody comes for is taken away.
"""

from collections.abc import Iterator

from umad.core.actions import Action, Event, SetLimit, Watch
from umad.core.state import Process, State
from umad.values import Identity, PageFigures, ProcessReading

# A client comes back within a second; only a call that keeps the interpreter lock delays it.
UNCLAIMED_MAX_S = 60.0


def found(
    state: State,
    identity: Identity,
    comm: str,
    uid: int | None,
    page: PageFigures,
    reading: ProcessReading,
    now_s: float,
) -> Iterator[Action]:
    """Take over a process's accounts from before a restart, whose workers are not back yet.

    What an open account may hold stays kept free for its worker: the guard goes on handing it
    out.  A closed one stays closed, and its slot its own.
    """
    if identity in state.processes:
        return  # its workers came first, and their books are what counts
    held = reading.bytes.value
    baseline = 0 if held is None else max(0, held - page.used)  # until its workers tell better
    process = Process(identity, comm, uid, baseline, accounts=set(page.fenced), fenced=page.fenced)
    process.unclaimed = {slot: limit for slot, limit in page.limits.items() if limit}
    process.unclaimed_until_s = now_s + UNCLAIMED_MAX_S
    state.processes[identity] = process
    yield Watch(identity)
    yield Event(
        "page_found",
        "info",
        {
            "pid": identity.pid,
            "accounts": len(process.unclaimed),
            "fenced": len(process.fenced),
            "limit_bytes": sum(process.unclaimed.values()),
        },
    )


def abandon(process: Process) -> Iterator[Action]:
    """Nobody came for these accounts: they get nothing more, and what they held back is free.

    1. the process is back without them for as long as former workers are waited for, or
    2. the process has not come back at all within ``UNCLAIMED_MAX_S``.
    What they still hold is physically there, and so is nobody's to be granted.
    """
    freed = sum(process.unclaimed.values())
    for slot in process.unclaimed:
        yield SetLimit(process.identity, slot, 0)
    process.unclaimed.clear()
    yield Event(
        "accounts_abandoned", "warning", {"pid": process.identity.pid, "limit_bytes": freed}
    )
