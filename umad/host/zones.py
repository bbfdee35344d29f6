"""How free memory lies: the kernel's free lists, its watermarks, and how often it had to compact.

Owns the readers of /proc/buddyinfo, /proc/zoneinfo and /proc/vmstat.  Read every 2 s, kept in
between: what they tell of changes slowly, and all three together cost a tenth of a millisecond.
/proc/pagetypeinfo says more, takes the zones' locks for a millisecond and is root's: never here.
Also asks for compaction, which the hardened daemon may not do itself.
Stays out: what the figures mean (``umad.core.fragmentation``).

Source of the formats: frag_show_print, zoneinfo_show_print and vmstat_text in the kernel's
mm/vmstat.c.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from umad.host.files import KernelFile, Unreadable, inside, parsed
from umad.values import Watermarks, Zone, Zones

INTERVAL_S: Final = 2.0
REQUEST: Final = "compact"
"""The file in the runtime folder that umad-compact.path watches."""

# Longer numbers of pages are damage: 10^15 pages of 4 KiB are 4 EiB.
_DIGITS_MAX: Final = 15
_ORDERS_MAX: Final = 32
_ZONES_MAX: Final = 1024
_COUNTED: Final = (
    "compact_stall",
    "compact_fail",
    "compact_success",
    "compact_migrate_scanned",
    "pgscan_direct",
    "pgsteal_direct",
    "oom_kill",
)
_STALLS: Final = "allocstall"  # one counter a zone since 4.10, a single one before
_MARKS: Final = {b"min": "min", b"low": "low", b"high": "high", b"managed": "managed"}
_T = TypeVar("_T")


def parse_buddyinfo(data: bytes) -> tuple[Zone, ...]:
    """Read /proc/buddyinfo; any number of orders, which every zone of a machine shares.

    Raises:
        ValueError: not the known layout, or a count that cannot be.
    """
    zones: list[Zone] = []
    for line in data.splitlines():
        head, comma, rest = line.partition(b",")
        words = rest.split()
        if not comma or not head.startswith(b"Node ") or len(words) < 3 or words[0] != b"zone":
            raise ValueError(f"line {line[:40]!r}")
        counts = tuple(_count(word) for word in words[2:])
        zones.append(Zone(_count(head[5:]), words[1].decode("ascii", "replace"), counts))
    if not zones or len(zones) > _ZONES_MAX:
        raise ValueError(f"{len(zones)} zones")
    orders = {len(zone.free_blocks) for zone in zones}
    if len(orders) != 1 or max(orders) > _ORDERS_MAX:
        raise ValueError(f"lines of {sorted(orders)} orders")
    if len({(zone.node, zone.name) for zone in zones}) != len(zones):
        raise ValueError("a zone twice")
    return tuple(zones)


def parse_zoneinfo(data: bytes, page_bytes: int) -> dict[tuple[int, str], Watermarks]:
    """Read /proc/zoneinfo: the watermarks by (node, zone).

    Raises:
        ValueError: not the known layout, or marks out of order.
    """
    found: dict[tuple[int, str], dict[str, int]] = {}
    figures: dict[str, int] = {}
    for line in data.splitlines():
        if line.startswith(b"Node "):
            head, _, rest = line.partition(b",")
            words = rest.split()
            if len(words) != 2 or words[0] != b"zone":
                raise ValueError(f"line {line[:40]!r}")
            figures = found[_count(head[5:]), words[1].decode("ascii", "replace")] = {}
            continue
        key, _, value = line.strip().partition(b" ")
        # The sets of pages per CPU that follow have a "high" of their own: the first one counts.
        if (name := _MARKS.get(key)) is not None and name not in figures:
            figures[name] = _count(value) * page_bytes
        elif key == b"protection:":
            figures["protection"] = max(map(_count, value.strip(b" ()").split(b","))) * page_bytes
    if not found:
        raise ValueError("no zone")
    # A zone without memory has a protection and no more.
    return {zone: _marks(zone, f) for zone, f in found.items() if f.get("managed")}


def _marks(zone: tuple[int, str], figures: Mapping[str, int]) -> Watermarks:
    try:
        marks = Watermarks(**figures)
    except TypeError as error:
        raise ValueError(f"node {zone[0]}, zone {zone[1]}: a watermark is missing") from error
    if not marks.min <= marks.low <= marks.high <= marks.managed:
        raise ValueError(f"node {zone[0]}, zone {zone[1]}: watermarks out of order")
    return marks


def parse_vmstat(data: bytes) -> dict[str, int]:
    """Read those counters of /proc/vmstat that tell of reclaim and compaction.

    Returns:
        Counts since boot by name, ``allocstall`` summed over the zones; what this kernel does
        not count is missing.

    Raises:
        ValueError: not pairs of a name and a number.
    """
    words = data.decode("ascii", "replace").split()
    if not words or len(words) % 2:
        raise ValueError("no pairs of name and number")
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    found: dict[str, int] = {
        name: _count(pairs[name].encode()) for name in _COUNTED if name in pairs
    }
    stalls = [_count(text.encode()) for name, text in pairs.items() if name.startswith(_STALLS)]
    if stalls:
        found[_STALLS] = sum(stalls)
    return found


def _count(text: bytes) -> int:
    text = text.strip()
    if not text.isdigit() or len(text) > _DIGITS_MAX:
        raise ValueError(f"count {text[:40]!r}")
    return int(text)


class ZoneProbe:
    """Reads the three files at its own slow pace; never raises for one that fails.

    Args:
        root: the folder that holds ``proc/``.
        page_bytes: the size of a page on that machine; this one's where None.
    """

    def __init__(self, root: str = "/", page_bytes: int | None = None) -> None:
        self._page_bytes = page_bytes or os.sysconf("SC_PAGE_SIZE")
        self._buddy, self._marks, self._counters = (
            KernelFile(inside(root, f"proc/{name}"), keep=root == "/", parts=True)
            for name in ("buddyinfo", "zoneinfo", "vmstat")
        )
        self._last: Zones | None = None

    def read(self, now_s: float) -> Zones:
        """The last reading, or a new one where that is older than ``INTERVAL_S``."""
        last = self._last
        if last is None or not 0 <= now_s - last.taken_s < INTERVAL_S:
            last = self._last = self._read(now_s)
        return last

    def close(self) -> None:
        """Give the kept descriptors back."""
        for file in (self._buddy, self._marks, self._counters):
            file.close()

    def _read(self, now_s: float) -> Zones:
        broken: list[str] = []
        counters, why = _of(self._counters, parse_vmstat, broken)
        lost = counters is None and why in broken
        new = Zones(
            now_s, self._page_bytes, counters=None if lost else counters or {}, anomalies=()
        )
        zones, why = _of(self._buddy, parse_buddyinfo, broken)
        if zones is not None:
            marks, _ = _of(self._marks, lambda data: parse_zoneinfo(data, new.page_bytes), broken)
            marked = (
                replace(zone, marks=(marks or {}).get((zone.node, zone.name))) for zone in zones
            )
            zones = tuple(marked)
            why = next(filter(None, map(self._absurd, zones)), "")
            if why:
                broken.append(why)
        return replace(new, zones=() if why else zones or (), problem=why, anomalies=tuple(broken))

    def _absurd(self, zone: Zone) -> str:
        """A zone cannot have more free than it has."""
        free = sum(count << order for order, count in enumerate(zone.free_blocks))
        if zone.marks is None or free * self._page_bytes <= zone.marks.managed:
            return ""
        return f"{self._buddy.path}: node {zone.node}, zone {zone.name}: more free than there is"


def _of(file: KernelFile, parse: Callable[[bytes], _T], broken: list[str]) -> tuple[_T | None, str]:
    """The figures, or why there are none; what exists and fails is noted in ``broken``."""
    try:
        return parsed(file.path, file.read(), parse), ""
    except Unreadable as error:
        if not error.absent:
            broken.append(str(error))
        return None, str(error)


def ask_for_compaction(runtime_dir: Path) -> str:
    """Have umad-compact.service write to vm.compact_memory, where its path unit is active.

    The daemon's own unit keeps /proc/sys read-only, and the write lasts as long as the compaction
    does, seconds on a large machine: it is no deed for the loop.

    Returns:
        Why it could not be asked for, or nothing; whether it was done, the counters tell.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(runtime_dir / REQUEST, flags, 0o600)
    except OSError as error:
        return f"cannot write {runtime_dir / REQUEST}: {error.strerror}"
    os.close(fd)  # systemd looks for the close of a file that was open for writing
    return ""
