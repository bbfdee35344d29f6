"""/proc/meminfo, and the formulas for what may be handed out.

Rules: MemAvailable, never MemFree or SwapFree; a figure that cannot be is refused.

Source of the formulas: Documentation/filesystems/proc.rst of the kernel, and the sizes that
amdgpu, TTM and KFD enforce.
"""

import re
from collections.abc import Mapping
from typing import Final

from umad.host.files import LARGEST

_LINE: Final = re.compile(rb"^([^:\n]+): +([0-9]+)( kB)?$", re.MULTILINE)
_NEEDED: Final = ("MemTotal", "MemFree", "MemAvailable")
_LISTED: Final = (
    "Buffers",
    "Cached",
    "SwapCached",
    "AnonPages",
    "Slab",
    "KernelStack",
    "PageTables",
    "SecPageTables",
    "Percpu",
    "GPUActive",
    "GPUReclaim",
    "Hugetlb",
)
_PARTS: Final = (
    *_LISTED,
    "MemFree",
    "MemAvailable",
    "NvMapMemUsed",
    "CmaFree",
    "Dirty",
    "Writeback",
)
_USED: Final = frozenset({*_NEEDED, *_PARTS, "HugePages_Total", "HugePages_Free", "Hugepagesize"})


def parse_meminfo(data: bytes) -> dict[str, int]:
    """Read /proc/meminfo.

    Returns:
        Bytes by name; the HugePages_* counts stay counts.

    Raises:
        ValueError: a line that is none, or MemTotal, MemFree or MemAvailable missing or absurd.
    """
    lines = _LINE.findall(data)
    if len(lines) != data.count(b"\n") or not data.endswith(b"\n"):
        odd = [line for line in data.splitlines() if not _LINE.match(line)]
        why = (
            f"line {odd[0][:40].decode('ascii', 'replace')!r}"
            if odd
            else "the last line is cut short"
        )
        raise ValueError(why)
    figures = {
        key.decode("ascii", "replace"): int(size) * 1024 if unit else int(size)
        for key, size, unit in lines
    }
    missing = [name for name in _NEEDED if name not in figures]
    if missing:
        raise ValueError(f"no {missing[0]}")
    _check(figures)
    return figures


def _check(figures: Mapping[str, int]) -> None:
    total = figures["MemTotal"]
    if not 0 < total < LARGEST:
        raise ValueError(f"MemTotal is {total} bytes")
    absurd = [key for key in _PARTS if figures.get(key, 0) > total]
    if absurd:
        raise ValueError(f"{absurd[0]} is more than MemTotal")


def system_ceiling(meminfo: Mapping[str, int]) -> int:
    """What the kernel could hand out to a process at most, in bytes >= 0.

    With the GPU pages it can take back, without the CMA pages that few allocations may use.
    """
    return max(
        0,
        meminfo["MemAvailable"] + meminfo.get("GPUReclaim", 0) - meminfo.get("CmaFree", 0),
    )


def system_available(meminfo: Mapping[str, int]) -> int:
    """``system_ceiling`` less the pages that must be written first, in bytes >= 0.

    MemAvailable counts dirty page cache as reclaimable; it is, but not within a tick.
    """
    return max(0, system_ceiling(meminfo) - meminfo.get("Dirty", 0) - meminfo.get("Writeback", 0))


def residual(meminfo: Mapping[str, int]) -> int:
    """Bytes in use that no line of meminfo owns up to (GPU pages before Linux 7.1); signed."""
    listed = sum(meminfo.get(key, 0) for key in _LISTED)
    return meminfo["MemTotal"] - meminfo["MemFree"] - listed


class MeminfoParser:
    """``parse_meminfo`` for a file that is read at every look.

    A kernel shows the same lines in the same order until it is started again, so a pattern that
    is made of the last file fits the next one, and checks every line of it at a third of the cost.
    What does not fit is read anew.  Lines that nobody asks for are checked and left out.
    """

    def __init__(self) -> None:
        self._names: tuple[tuple[str, int], ...] = ()
        self._form: re.Pattern[bytes] | None = None

    def __call__(self, data: bytes) -> dict[str, int]:
        """See ``parse_meminfo``."""
        found = None if self._form is None else self._form.fullmatch(data)
        if found is None:
            figures = parse_meminfo(data)
            self._learn(data)
            return {name: size for name, size in figures.items() if name in _USED}
        figures = {
            name: int(size) * unit
            for (name, unit), size in zip(self._names, found.groups(), strict=True)
        }
        _check(figures)
        return figures

    def _learn(self, data: bytes) -> None:
        names: list[tuple[str, int]] = []
        form = b""
        for key, _, unit in _LINE.findall(data):
            used = (name := key.decode("ascii", "replace")) in _USED
            if used:
                names.append((name, 1024 if unit else 1))
            form += re.escape(key) + (b": +([0-9]+)" if used else b": +[0-9]+") + unit + b"\n"
        self._names, self._form = tuple(names), re.compile(form)
