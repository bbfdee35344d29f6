"""How short memory is in the kernel's own words, and how fast it can be filled.

Owns /proc/pressure/memory, values and alarm, and the measurement of the fill rate.  Rules: a
machine without pressure figures has none, and works; the measurement leaves nothing behind.
Stays out: what follows from either.

Source: Documentation/accounting/psi.rst of the kernel.
"""

import mmap
import os
import re
import select
import time
from dataclasses import dataclass
from typing import Final

from umad.host.files import Unreadable
from umad.units import GIB, MIB

PRESSURE: Final = "/proc/pressure/memory"


@dataclass(frozen=True, slots=True)
class Pressure:
    """Stalls on memory: shares of the last 10 s (0..1) and totals in microseconds."""

    some_ratio_avg10: float
    full_ratio_avg10: float
    some_us_total: int
    full_us_total: int


_LINE: Final = re.compile(rb"^(\w+) avg10=([0-9.]+) .*\btotal=([0-9]+)$", re.MULTILINE)


def parse_psi(data: bytes) -> Pressure:
    """Read /proc/pressure/memory.

    Raises:
        ValueError: not the known layout.
    """
    shares = {kind: (float(avg10) / 100, int(us)) for kind, avg10, us in _LINE.findall(data)}
    if len(shares) != data.count(b"\n") or b"some" not in shares:
        raise ValueError(f"lines {data[:80]!r}")
    some = shares[b"some"]
    full = shares.get(b"full", (0.0, 0))  # systems before 5.13 leave "full" out at times
    if not 0 <= some[0] <= 1 or not 0 <= full[0] <= 1:
        raise ValueError("a share outside 0 to 100 %")
    return Pressure(some[0], full[0], some[1], full[1])


# Stall and window in microseconds.  The kernel checks ten times a window: the short one wakes us
# within 50 ms, and needs CAP_SYS_RESOURCE; without it a window is a multiple of 2 s.
ALARMS: Final = (b"some 50000 500000", b"some 100000 2000000")


class PressureAlarm:
    """Tells when tasks stall on memory; readable (``fileno``) when they have.

    The kernel tells by POLLPRI, and says POLLIN all the time; the alarm's own epoll is readable
    for the first alone, so that any loop can wait for it.

    Args:
        path: /proc/pressure/memory.

    Raises:
        Unreadable: there is no such file, or no alarm is to be had from it.
    """

    def __init__(self, path: str) -> None:
        self._epoll = select.epoll(1)
        self._fd = -1
        for alarm in ALARMS:
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                os.write(self._fd, alarm + b"\0")
                self._epoll.register(self._fd, select.EPOLLPRI)
            except OSError as error:
                refused = Unreadable.from_os(path, error)
                self._close_file()
            else:
                return
        self._epoll.close()
        raise refused

    def fileno(self) -> int:
        """For the loop's reader."""
        return self._epoll.fileno()

    def take(self) -> None:
        """The alarm was heard; the next one will be told again."""
        self._epoll.poll(0)

    def close(self) -> None:
        """Stop listening."""
        self._epoll.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_CHUNK_BYTES: Final = 8 * MIB  # what the daemon grows by while it measures
_MEASURE_S: Final = 0.02
_CHUNKS: Final = 8
# Where every page is a huge one the chunk stays in the caches and shows their rate, not memory's.
_CORE_BYTES_PER_S_MAX: Final = 24 * GIB
# More cores do not fill memory faster in proportion: zeroing pages is bound by the bus.
_CORES_MAX: Final = 8


def measure_fill_rate() -> int:
    """Bytes a second that processes could take at most, measured by touching fresh pages.

    The best of several chunks, each freed before the next, times the cores that can touch at
    once.  Takes 20 ms or one chunk, whichever is longer; counts its own CPU time, since a busy
    machine is no slow one.  With the pages that a process gets
    unless it asks for huge ones, which fill seven times faster (512 MiB: 3.0 and 22 GiB/s on one
    core, our measurement): who does so is known by its growth.
    """
    best = 0.0
    started_s = time.perf_counter()
    touch = bytes(_CHUNK_BYTES // mmap.PAGESIZE)
    for _ in range(_CHUNKS):
        with mmap.mmap(-1, _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as chunk:
            before_s = time.thread_time()
            chunk[:: mmap.PAGESIZE] = touch
            best = max(best, _CHUNK_BYTES / max(time.thread_time() - before_s, 1e-6))
        if time.perf_counter() - started_s > _MEASURE_S:
            break
    return min(int(best), _CORE_BYTES_PER_S_MAX) * min(os.cpu_count() or 1, _CORES_MAX)
