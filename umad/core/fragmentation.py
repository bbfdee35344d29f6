"""Whether large blocks of memory can be had: free lists, compaction, device allocators -> a risk.

A risk is ``low``, ``high`` or ``unknown``, always with its reason; unknown is not low.  It tells
how a large load will go, and whether the ladder (``ladder``) is needed.  It refuses nobody:
programs get their memory in single pages too, only slower.

Two ratios, 0 (whole) to 1 (in crumbs):
- of the kernel's free lists: the share of free bytes that lies in blocks too small for the need.
  ``1 - largest / total`` says nothing there, since the kernel keeps no block above a few MiB.
- of a device allocator: ``1 - largest / total`` over its free blocks of at least 4 MiB.

Source of the first: unusable_free_index in the kernel's mm/vmstat.c; of the sums that must agree
in the second: segsum in torch/cuda/_memory_viz.py.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from umad.units import GIB, MIB, format_bytes
from umad.values import Identity, Segments, Zone, Zones

BLOCK_BYTES: Final = 4 * MIB
"""The block to judge by where nobody names another: the largest that Linux keeps on x86."""
LARGE_BYTES: Final = GIB
"""A grant from this size on is judged before; the machine is always judged for one of these."""
RATIO_HIGH: Final = 0.30
RATIO_LOW: Final = 0.25
"""Trouble begins above the one and ends below the other."""
# What is free in large blocks of a device allocator is worth no step below this.
MATERIAL_BYTES: Final = 256 * MIB
WINDOW_S: Final = 60.0
# Of fewer attempts to compact no rate can be told.
ATTEMPTS_MIN: Final = 10


class Level(StrEnum):
    """How likely a need is to meet trouble."""

    LOW = "low"
    HIGH = "high"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Risk:
    """A verdict with its reason; ``ratio`` is None where it cannot be told."""

    level: Level
    reason: str
    ratio: float | None = None

    @property
    def is_trouble(self) -> bool:
        """Bad enough to do something."""
        return self.level is Level.HIGH and self.ratio is not None and self.ratio > RATIO_HIGH

    @property
    def is_over(self) -> bool:
        """Good enough to stop; what is unknown is not."""
        return self.level is Level.LOW or (self.ratio is not None and self.ratio <= RATIO_LOW)


@dataclass(frozen=True, slots=True)
class Need:
    """``bytes`` in blocks of ``block`` bytes."""

    bytes: int
    block: int = BLOCK_BYTES


@dataclass(slots=True)
class Compaction:
    """The kernel's attempts to compact in the last minute, from counters since boot."""

    problem: str = ""
    _readings: deque[tuple[float, int, int]] = field(default_factory=deque)

    def add(self, zones: Zones) -> None:
        """Take a reading in."""
        if zones.counters is None:
            self.problem = "the compaction counters cannot be read"
            self._readings.clear()
            return
        self.problem = ""
        stalls, failed = (zones.counters.get(f"compact_{what}") for what in ("stall", "fail"))
        if stalls is None or failed is None:  # a kernel without compaction
            self._readings.clear()
            return
        if self._readings and (stalls < self._readings[-1][1] or failed < self._readings[-1][2]):
            self._readings.clear()  # a counter since boot that falls is another boot's
        self._readings.append((zones.taken_s, stalls, failed))
        while zones.taken_s - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()

    @property
    def attempts(self) -> tuple[int, int] | None:
        """(attempts, those that failed); None before there are two readings."""
        if len(self._readings) < 2:
            return None
        first, last = self._readings[0], self._readings[-1]
        return last[1] - first[1], last[2] - first[2]


@dataclass(slots=True)
class Climb:
    """Where the ladder stands.

    ``rung`` is None at rest; ``cause`` is the process whose device allocator is in crumbs, None
    for the machine's free lists; ``taken_s`` and ``before`` are when the last step was taken and
    how it stood then, ``scanned`` what the kernel had compacted until then.
    """

    rung: int | None = None
    cause: Identity | None = None
    taken_s: float = 0.0
    before: Risk = Risk(Level.UNKNOWN, "")
    scanned: int | None = None
    trouble_since_s: float | None = None
    rest_until_s: float = 0.0
    rungs_rest_until_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Fragmentation:
    """What is known of it; ``idle`` has each worker's forwards and since when there are no more."""

    zones: Zones | None = None
    compaction: Compaction = field(default_factory=Compaction)
    climb: Climb = field(default_factory=Climb)
    idle: dict[int, tuple[int, float]] = field(default_factory=dict)


def judge_zones(zones: Zones, compaction: Compaction, need: Need) -> Risk:
    """Whether the kernel has a need's blocks.

    1. the free lists are not known, or hold no blocks of that size: unknown;
    2. the compaction counters cannot be read: unknown;
    3. more than 30 % of at least 10 attempts to compact failed within a minute: high;
    4. enough lies in such blocks, beyond what the kernel keeps back: low;
    5. enough is free, and not in such blocks: high;
    6. otherwise (the rest must be reclaimed, watermarks are not known): unknown.
    """
    if not zones.zones:
        return Risk(Level.UNKNOWN, zones.problem or "the free lists are not known")  # 1
    block = format_bytes(need.block)
    if need.block > largest_possible(zones):
        return Risk(Level.UNKNOWN, f"this kernel keeps no blocks of {block}")  # 1
    ratio = ratio_of(zones.zones, zones.page_bytes, need.block)
    if compaction.problem:
        return Risk(Level.UNKNOWN, compaction.problem, ratio)  # 2
    attempts, failed = compaction.attempts or (0, 0)
    if attempts >= ATTEMPTS_MIN and failed > RATIO_HIGH * attempts:
        text = f"the kernel failed in {failed} of {attempts} attempts to compact"
        return Risk(Level.HIGH, text, ratio)  # 3
    rooms = [_room(zone, zones.page_bytes, need.block) for zone in zones.zones]
    if (sure := sum(room.blocks_sure for room in rooms)) >= need.bytes:
        return Risk(Level.LOW, f"{format_bytes(sure)} free in blocks of {block}", ratio)  # 4
    free = sum(room.free for room in rooms)
    blocks = sum(room.blocks for room in rooms)
    if blocks < need.bytes <= free:
        text = f"of {format_bytes(free)} free only {format_bytes(blocks)} in blocks of {block}"
        return Risk(Level.HIGH, text, ratio)  # 5
    if blocks >= need.bytes:
        return Risk(Level.UNKNOWN, "watermarks are not known or almost reached", ratio)  # 6
    text = f"{format_bytes(free)} free for {format_bytes(need.bytes)}: the rest is to be reclaimed"
    return Risk(Level.UNKNOWN, text, ratio)  # 6


def ratio_of(zones: Iterable[Zone], page_bytes: int, block: int) -> float | None:
    """The share of free bytes in blocks smaller than ``block``; None where nothing is free."""
    free = usable = 0
    for zone in zones:
        for order, count in enumerate(zone.free_blocks):
            size = page_bytes << order
            free += count * size
            usable += count * size if size >= block else 0
    return 1 - usable / free if free else None


def largest_possible(zones: Zones) -> int:
    """The size of the largest blocks that the kernel keeps, in bytes."""
    return zones.page_bytes << (len(zones.zones[0].free_blocks) - 1)


def largest_free(zone: Zone, page_bytes: int) -> int:
    """The largest free block, in bytes; 0 without one."""
    orders = (order for order, count in enumerate(zone.free_blocks) if count)
    return max((page_bytes << order for order in orders), default=0)


@dataclass(frozen=True, slots=True)
class _Room:
    """What a zone can give before it is down at its watermark: at most, and surely in blocks."""

    free: int
    blocks: int
    blocks_sure: int


def _room(zone: Zone, page_bytes: int, block: int) -> _Room:
    sizes = [(page_bytes << order, count) for order, count in enumerate(zone.free_blocks)]
    free = sum(size * count for size, count in sizes)
    blocks = sum(size * count for size, count in sizes if size >= block)
    if zone.marks is None:
        return _Room(free, blocks, 0)
    least = max(0, free - zone.marks.min - zone.marks.protection)
    sure = max(0, free - zone.marks.low - zone.marks.protection)
    return _Room(least, min(blocks, least), min(blocks, sure))


def judge_segments(segments: Segments) -> Risk:
    """Whether a device allocator could serve a large block from what it has reserved.

    1. the report contradicts itself: unknown;
    2. what is free in large blocks is too little to matter: low;
    3. the largest of them is less than 70 % of it: high;
    4. otherwise: low.
    """
    parts = segments.allocated + segments.internal_free + segments.external_free
    if parts != segments.reserved:
        text = f"{format_bytes(parts)} of {format_bytes(segments.reserved)} reserved add up"
        return Risk(Level.UNKNOWN, f"the report contradicts itself: {text}")  # 1
    largest, free = segments.largest_free, segments.blocks_free
    least = BLOCK_BYTES if free else 0
    if not least <= largest <= free <= segments.external_free:
        return Risk(Level.UNKNOWN, "the report contradicts itself: its largest free block")  # 1
    ratio = 1 - largest / free if free else 0.0
    text = f"of {format_bytes(free)} free the largest block has {format_bytes(largest)}"
    if free >= MATERIAL_BYTES and ratio > RATIO_HIGH:
        return Risk(Level.HIGH, text, ratio)  # 3
    return Risk(Level.LOW, text, ratio)  # 2, 4
