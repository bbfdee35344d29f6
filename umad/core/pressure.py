"""The machine is below its reserve: step by step, from the mildest on.

1. admission closes: nothing is granted of the machine's memory until a little more than the
   reserve is free again, or the reserve has been for a while: a machine that has settled there
   does not flutter, and would stay closed for ever.  For who waits meanwhile idle models go as
   ever, which makes room sooner;
2. every client gives back what it keeps warm (``shrink``), again and again while it lasts;
3. an idle model is asked to go, one at a time, where a quarter of the reserve is gone as well and
   the step before has not helped.

Killing is not a step: it needs evidence against somebody, and that is the watchdog's.
"""

from collections.abc import Iterator
from typing import Final

from umad.core import room, switching
from umad.core.actions import Action, Event, Notify
from umad.core.state import State
from umad.units import format_bytes
from umad.values import SYSTEM_POOL

OPEN_AFTER_S: Final = 10.0
SHRINK_AFTER_S: Final = 1.0
SHRINK_EVERY_S: Final = 30.0
# What was shrunk must have had the time to show.
EVICT_AFTER_S: Final = 5.0
EVICT_EVERY_S: Final = 10.0


def observe(state: State, now_s: float) -> Iterator[Action]:
    """One look's steps; a reading that is broken changes nothing, and grants nothing either."""
    assert state.snapshot is not None, "a look comes first"
    reading = state.snapshot.pools.get(SYSTEM_POOL)
    free, relief = None if reading is None else reading.safe.value, state.relief
    reserve = state.reserves.get(SYSTEM_POOL, 0)
    if free is None:
        relief.above_s = None  # nobody knows where it was meanwhile
        return
    if relief.closed_s is None:
        if free < reserve:
            relief.closed_s, relief.shrunk_s, relief.above_s = now_s, None, None  # 1
            yield _event("admission_closed", "warning", free, reserve)
        return
    if free < reserve:
        relief.above_s = None
    elif relief.above_s is None:
        relief.above_s = now_s
    settled = relief.above_s is not None and now_s - relief.above_s >= OPEN_AFTER_S
    if settled or free >= room.reopening(reserve):
        relief.closed_s = None
        yield _event("admission_opened", "info", free, reserve)
        return
    if free >= reserve:
        return  # neither: it stays closed, and nobody is bothered
    if relief.shrunk_s is None or now_s - relief.shrunk_s >= SHRINK_EVERY_S:
        if now_s - relief.closed_s >= SHRINK_AFTER_S:
            relief.shrunk_s = now_s
            yield from _shrink(state, free, reserve)  # 2
    elif free * 4 < reserve * 3 and now_s - relief.shrunk_s >= EVICT_AFTER_S:
        yield from _evict(state, now_s)  # 3


def _shrink(state: State, free: int, reserve: int) -> Iterator[Action]:
    reason = f"{format_bytes(free)} are free, below the reserve of {format_bytes(reserve)}"
    clients = dict.fromkeys(member.client for member in state.members.values())
    for client in clients:
        if client is not None:
            yield Notify(client, "shrink", {"reason": reason})
    yield _event("shrinking", "warning", free, reserve)


def _evict(state: State, now_s: float) -> Iterator[Action]:
    relief = state.relief
    if relief.evicted_s is not None and now_s - relief.evicted_s < EVICT_EVERY_S:
        return
    if any(member.draining is not None for member in state.members.values()):
        return
    able = [one for one in switching.candidates(state, None, now_s) if one.from_s <= now_s]
    if able:
        relief.evicted_s = now_s
        first = max(able, key=lambda one: (one.score, -one.worker))
        reason = "the machine is short of memory"
        yield from switching.drain(state, state.members[first.worker], None, reason, now_s)


def _event(name: str, level: str, free: int, reserve: int) -> Event:
    return Event(name, level, {"free_bytes": free, "reserve_bytes": reserve})
