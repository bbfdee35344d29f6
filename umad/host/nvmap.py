"""The buffers of a Jetson's GPU: nvmap's list of its clients.

Rules: SIZE is what a client holds; the PSS column of some kernels counts only what a CPU has
mapped, and is not it.  Thor has the file and nothing in it: there NVML speaks (``nvidia``).
Stays out: how much the GPU uses in all, which is in meminfo (NvMapMemUsed).

Source: nvmap of L4T 35 and 36, both layouts of nvmap/iovmm/clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from umad.host.debugfs import DebugFile, debug_path
from umad.host.files import Unreadable, read_as
from umad.host.paced import Paced
from umad.units import KIB

# Making the list walks every buffer of every client.
_PERIOD_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class NvmapClients:
    """Bytes by pid, and of all clients together."""

    held: Mapping[int, int]
    total: int


def parse_clients(data: bytes) -> NvmapClients | None:
    """Read debugfs nvmap/iovmm/clients; None when it is empty.

    Raises:
        ValueError: not one of the known layouts.
    """
    head, *lines = data.decode("utf-8", "replace").splitlines() or [""]
    if not head.strip():
        return None
    columns = head.split()
    if columns[:3] != ["CLIENT", "PROCESS", "PID"] or columns[-1] != "SIZE":
        raise ValueError(f"head {head[:60]!r}")
    after = len(columns) - 3  # sizes behind the pid: SIZE, or PSS and SIZE
    held: dict[int, int] = {}
    total: int | None = None
    for line in lines:
        # From the right: a process name may hold blanks.
        fields = line.split()
        if fields and fields[0] == "total":
            total = _size(fields[-1])
        elif len(fields) >= after + 2:
            pid = fields[-after - 1]
            if not pid.isdecimal():
                raise ValueError(f"pid {pid[:20]!r}")
            held[int(pid)] = held.get(int(pid), 0) + _size(fields[-1])
        elif fields:
            raise ValueError(f"line {line[:60]!r}")
    if total is None:
        raise ValueError("no total: the list is cut off")
    return NvmapClients(held, total)


def _size(text: str) -> int:
    number = text.removesuffix("K")
    if number == text or not number.isascii() or not number.isdigit():
        raise ValueError(f"size {text[:20]!r}")
    return int(number) * KIB


class Nvmap:
    """The clients of nvmap, read twice a second at most."""

    def __init__(self, root: str) -> None:
        path = self.path = debug_path(root, DebugFile.NVMAP_CLIENTS)
        self._spoke = False
        self._clients = Paced(lambda: read_as(path, parse_clients), _PERIOD_S)

    def clients(self, now_s: float, *, fresh: bool = False) -> NvmapClients | None:
        """The clients now; None where this machine's nvmap lists none.

        Raises:
            Unreadable: it cannot be read, or says nothing any more.
        """
        found = self._clients.get(now_s, fresh=fresh)
        if isinstance(found, NvmapClients):
            self._spoke = True
            return found
        # A fresh error each time: one that is raised again and again would grow.
        why = "empty" if found is None else str(found).removeprefix(f"{self.path}: ")
        if self._spoke:
            raise Unreadable(self.path, f"{why}; it listed clients before")
        if found is not None and not found.absent:
            raise Unreadable(self.path, why, found.code)
        return None

    def age_ms(self, now_s: float) -> int:
        """How old the list is."""
        return self._clients.age_ms(now_s)
