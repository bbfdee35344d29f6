"""The raw files that umad reads, gathered for a bug report into a tree that a probe can read.

Every path is named here: nothing is found by walking, so nothing else can come along.  Never
among them: environments, command lines, maps, names of files that a process has open.  A
descriptor of a GPU becomes an empty file, which a probe takes for a link to the GPU.
Stays out: what NVML says, which is no file.
"""

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from umad.host.debugfs import DebugFile, debug_path
from umad.host.drm import links_to
from umad.host.files import Unreadable, inside, read_file
from umad.host.pci import cards, names
from umad.units import MIB

FILES_MAX: Final = 4000
TOTAL_BYTES_MAX: Final = 16 * MIB
PROCESSES_MAX: Final = 128

_MACHINE: Final = (
    "proc/meminfo",
    "proc/vmstat",
    "proc/buddyinfo",
    "proc/zoneinfo",
    "proc/pressure/memory",
    "proc/sys/kernel/osrelease",
    "proc/sys/vm/overcommit_memory",
    "proc/sys/vm/swappiness",
    "proc/sys/vm/vfs_cache_pressure",
    "run/systemd/container",
    "sys/kernel/mm/transparent_hugepage/enabled",
    "sys/kernel/security/lockdown",
    "sys/module/amdgpu/parameters/gttsize",
    "sys/module/amdttm/parameters/pages_limit",
    "sys/module/ttm/parameters/pages_limit",
)
_CARD: Final = (
    "vendor",
    "uevent",
    "mem_info_gtt_total",
    "mem_info_gtt_used",
    "mem_info_vram_total",
    "mem_info_vram_used",
)
_KFD: Final = "sys/class/kfd/kfd"
_KFD_NODE: Final = ("gpu_id", "properties", "mem_banks/0/properties")
_PROCESS: Final = ("status", "stat", "statm", "smaps_rollup", "cgroup", "comm")


@dataclass(frozen=True, slots=True)
class Taken:
    """One file: its place below the root, and its content, None where ``problem`` says why not."""

    place: str
    data: bytes | None
    problem: str = ""


def readings(root: str, pids: Collection[int]) -> Iterator[Taken]:
    """The files there are, with this process's rights; those that are missing are left out.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
        pids: the processes to look at beside the machine.
    """
    taken = 0
    files = _files(root, sorted(pids)[:PROCESSES_MAX])
    for number, one in enumerate(files):
        taken += len(one.data or b"")
        if number >= FILES_MAX or taken > TOTAL_BYTES_MAX:
            yield Taken(one.place, None, "there is too much to take; this and the rest is left out")
            return
        yield one


def _files(root: str, pids: Collection[int]) -> Iterator[Taken]:
    for place in (*_MACHINE, *_devices(root), *_kfd(root, pids)):
        yield from _read(root, place)
    for mounts in _read(root, "proc/self/mounts"):
        if lines := _meminfo_lines(mounts.data or b""):
            yield replace(mounts, data=lines)
    for pid in pids:
        for name in _PROCESS:
            yield from _read(root, f"proc/{pid}/{name}")
        yield from _gpu_files(root, pid)


def _read(root: str, place: str) -> Iterator[Taken]:
    """A file; nothing where there is none."""
    try:
        yield Taken(place, read_file(inside(root, place)))
    except Unreadable as error:
        if not (error.absent or error.gone):
            yield Taken(place, None, str(error))


def _devices(root: str) -> Iterator[str]:
    """GPUs, the drivers' own accounts of them, and KFD's."""
    for file in (DebugFile.KFD_LIMITS, DebugFile.TTM_PAGE_POOL, DebugFile.NVMAP_CLIENTS):
        yield _below(root, debug_path(root, file))
    for card in cards(root):
        for name in _CARD:
            yield _below(root, f"{card.folder}/{name}")
        for file in (DebugFile.HSA_PAGES, DebugFile.HSA_MEMORY):
            yield _below(root, debug_path(root, file, card.pdev))
    for node in names(inside(root, f"{_KFD}/topology/nodes")):
        for name in _KFD_NODE if node.isdigit() else ():
            yield f"{_KFD}/topology/nodes/{node}/{name}"


def _kfd(root: str, pids: Collection[int]) -> Iterator[str]:
    """What KFD says of each process."""
    for pid in pids:
        for name in names(inside(root, f"{_KFD}/proc/{pid}")):
            if re.fullmatch(r"vram_[0-9]+", name):
                yield f"{_KFD}/proc/{pid}/{name}"


def _gpu_files(root: str, pid: int) -> Iterator[Taken]:
    """A process's descriptors of GPUs, each as an empty file, and what fdinfo says of them."""
    place = f"proc/{pid}/fd"
    try:
        with os.scandir(inside(root, place)) as entries:
            found = sorted(entry.name for entry in entries if entry.name.isdigit())
    except OSError as error:
        problem = Unreadable.from_os(inside(root, place), error)
        if not (problem.absent or problem.gone):
            yield Taken(place, None, f"{problem}; its GPU memory cannot be told from these files")
        return
    for name in found:
        if links_to(inside(root, f"{place}/{name}"), ("/dev/dri/",)):
            for info in _read(root, f"proc/{pid}/fdinfo/{name}"):
                yield Taken(f"{place}/{name}", b"")
                yield replace(info, data=info.data and _figures(info.data))


def _figures(fdinfo: bytes) -> bytes:
    """Without the name that a program gave its client."""
    lines = fdinfo.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"drm-client-name"))


def _meminfo_lines(mounts: bytes) -> bytes:
    """What is mounted over /proc/meminfo, and nothing else."""
    lines = mounts.splitlines(keepends=True)
    return b"".join(line for line in lines if line.split()[1:2] == [b"/proc/meminfo"])


def _below(root: str, path: str) -> str:
    return path.removeprefix(inside(root, ""))
