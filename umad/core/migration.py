"""Pages that move behind the books: out to swap, or out of a GPU's own memory.

A model whose pages move is slow, and what it holds is not where it was booked.  Each process is
compared with what was told last; a load may move what it likes.
"""

from collections.abc import Iterator
from typing import Final

from umad.core.actions import Action, Event
from umad.core.state import State
from umad.units import MIB
from umad.values import Moved, Snapshot

# Below this it is the kernel's housekeeping: idle pages of the interpreter go out now and then.
MOVED_MIN_BYTES: Final = 16 * MIB
STOOD_MIN_MS: Final = 100
TOLD_EVERY_S: Final = 60.0


def observe(state: State, snapshot: Snapshot, now_s: float) -> Iterator[Action]:
    """Tell of processes of which more has moved, once a minute at most each."""
    for process in state.processes.values():
        reading = snapshot.processes.get(process.identity)
        if reading is None or not reading.alive:
            continue
        now, told = reading.moved, process.moved
        loading = any(state.members[key].state == "loading" for key in process.members)
        if told is None or loading:
            process.moved = now
            continue
        # What has come back may go out again; time that stood still never comes back.
        process.moved = told = Moved(
            min(told.swapped, now.swapped), min(told.evicted, now.evicted), told.evicted_ms
        )
        grown = max(now.swapped - told.swapped, now.evicted - told.evicted)
        stood_ms = now.evicted_ms - told.evicted_ms
        worth_it = grown >= MOVED_MIN_BYTES or stood_ms >= STOOD_MIN_MS
        if worth_it and now_s >= process.moved_told_s:
            process.moved, process.moved_told_s = now, now_s + TOLD_EVERY_S
            state.counters["migrations"] += 1
            yield Event(
                "migrated",
                "warning",
                {
                    "worker": ",".join(state.names(process)),
                    "pid": process.identity.pid,
                    "swapped_bytes": now.swapped,
                    "evicted_bytes": now.evicted,
                    "stood_still_ms": stood_ms,
                },
            )
