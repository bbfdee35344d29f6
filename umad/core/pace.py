"""How soon memory is looked at again, and what is glanced at meanwhile.

A look reads and judges everything.  A glance reads one figure of those that could pass their
limit before the next look, and only decides whether that look comes now.  Both follow the *fill
rate*: the fastest that memory can be taken on this machine.  Rules:

1. who has more room than can be filled until the next look needs no glance;
2. nobody is glanced at before they could be there at the fill rate;
3. nearer than that, every ``GLANCE_S``, and at the slope just seen in the moment of the crossing:
   a look before it would prove nothing, one long after it is late;
4. what no glance sees (GPU pages) is looked at by its slope, four times before the limit.

The accounts of a guarded process are not glanced at: the guard refuses in the call what would
pass them, and what it does not count shows in the process.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from umad.core.audit import ProcessBooks
from umad.values import SYSTEM_POOL, Identity, Reading, Snapshot

FAST_PACE_S: Final = 0.01
"""The shortest time between two looks that nobody asked for."""

GLANCE_S: Final = 0.02
"""Between two glances at rest.  Source: issue "the truth about memory": seen within 25 ms."""

GLANCE_MIN_S: Final = 0.002
"""Between two glances at a crossing.  A glance costs a thirtieth of that."""

# What lowers a limit, or makes one, in the middle of an interval.  A lease that was released, too:
# it stays booked until a look has seen its bytes go.  One that ends with its forward can wait.
MOVES_A_LIMIT: Final = frozenset({"register", "commit", "set_quota", "release"})

Watched = Identity | None
"""A process; None is the machine."""


@dataclass(frozen=True, slots=True)
class Pace:
    """From one look to the next.

    ``look_s`` is when that comes at the latest, ``glance_s`` when the first glance does, None
    where nobody needs one.  ``rooms`` is what each of the watched may grow from now on, in bytes.
    ``reason``: ``ease``; ``returning``, bytes are on their way back; ``growing``, the slope leads
    past a limit; ``near_limit``, a process could pass its limit before the next look;
    ``short_memory``, the machine could fall below its reserve before it.
    """

    look_s: float
    glance_s: float | None = None
    reason: str = "ease"
    fill_rate: float = 0.0
    rooms: Mapping[Watched, int] = field(default_factory=dict)


def pace(
    books: Iterable[ProcessBooks],
    earlier: Snapshot | None,
    now: Snapshot,
    *,
    interval_s: float,
    fill_rate: float,
    reserve: int,
    returning: bool,
) -> Pace:
    """The pace after a look.

    Args:
        books: of every process.
        earlier: the look before, for the slope; None after the first.
        now: the look.
        interval_s: seconds between two looks at ease.
        fill_rate: bytes a second that the machine can be filled with.
        reserve: bytes of the machine that are never handed out.
        returning: bytes are on their way back: a look costs less than waiting for them.
    """
    rooms: dict[Watched, int] = {}
    to_limit_s = math.inf
    for mine in books:
        reading = now.processes.get(mine.identity)
        if reading is None or reading.bytes.value is None or mine.limit is None:
            continue
        room = mine.limit - reading.bytes.value
        if room <= 0:
            continue  # its case has a pace of its own
        rooms[mine.identity] = room
        if earlier is not None and mine.identity in earlier.processes:
            before = earlier.processes[mine.identity].bytes
            rate = _rate(before, reading.bytes, now.taken_s - earlier.taken_s)
            to_limit_s = min(to_limit_s, room / rate if rate > 0 else math.inf)
    system = now.pools.get(SYSTEM_POOL)
    if system is not None and system.safe.value is not None and system.safe.value > reserve:
        rooms[None] = system.safe.value - reserve
    look_s, reason = interval_s, "ease"
    if returning:
        look_s, reason = min(FAST_PACE_S, interval_s), "returning"
    elif to_limit_s / 4 < interval_s:  # 4
        look_s, reason = max(FAST_PACE_S, to_limit_s / 4), "growing"
    rooms = {who: room for who, room in rooms.items() if room < fill_rate * look_s}  # 1
    glance_s = min((max(GLANCE_S, room / fill_rate) for room in rooms.values()), default=math.inf)
    if glance_s >= look_s:
        return Pace(look_s, None, reason, fill_rate)
    if reason == "ease":
        reason = "short_memory" if None in rooms else "near_limit"
    return Pace(look_s, glance_s, reason, fill_rate, rooms)


def next_glance_s(
    current: Pace,
    first: Mapping[Watched, int],
    before: Mapping[Watched, int],
    now: Mapping[Watched, int],
    passed_s: float,
) -> float:
    """Seconds to the next glance; 0 when it has to be a look.

    Args:
        current: what the last look set.
        first: bytes held by each of the watched right after that look; who cannot be read is
            missing and left to the looks.
        before: the same at the glance before this one.
        now: the same at this one.
        passed_s: seconds between the two, > 0.
    """
    soonest_s = math.inf
    for who, room in current.rooms.items():
        if who not in first or who not in before or who not in now:
            continue
        left = room - (now[who] - first[who])
        if left <= 0:
            return 0.0
        rate = (now[who] - before[who]) / passed_s
        crossing_s = max(GLANCE_MIN_S, left / rate) if rate > 0 else math.inf  # 3
        soonest_s = min(soonest_s, max(left / current.fill_rate, min(GLANCE_S, crossing_s)))  # 2
    return soonest_s


def fastest(earlier: Snapshot, now: Snapshot) -> float:
    """Bytes a second: the highest rate between two looks at which anybody took memory.

    Figures of different sources are not compared, nor looks in the same moment: they would show
    growth where nobody has taken anything.
    """
    passed_s = now.taken_s - earlier.taken_s
    if passed_s < FAST_PACE_S / 2:
        return 0.0
    pairs = [
        (earlier.processes[identity].bytes, after.bytes)
        for identity, after in now.processes.items()
        if identity in earlier.processes
    ]
    if SYSTEM_POOL in earlier.pools and SYSTEM_POOL in now.pools:
        pairs.append((earlier.pools[SYSTEM_POOL].used, now.pools[SYSTEM_POOL].used))
    alike = [(before, after) for before, after in pairs if before.source == after.source]
    return max((_rate(before, after, passed_s) for before, after in alike), default=0.0)


def _rate(before: Reading, after: Reading, passed_s: float) -> float:
    """Bytes a second from one reading to the next; 0 where that is not known."""
    if before.value is None or after.value is None or passed_s <= 0:
        return 0.0
    return (after.value - before.value) / passed_s
