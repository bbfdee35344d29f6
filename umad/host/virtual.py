"""Whether what this machine calls memory is memory: containers, WSL2, views laid over meminfo.

Rule: two figures that describe different machines are never made into one; who starts umad says
which way out to take.
Source: lxcfs mounts its own /proc/meminfo; WSL2 shows the GPU as /dev/dxg, and Windows (WDDM) may
take that GPU's memory back at any time.
"""

from dataclasses import dataclass
from pathlib import Path

from umad.host.files import Unreadable, inside, read_file, read_text
from umad.units import format_bytes


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What umad runs in.

    ``container``: its kind, None outside; ``wsl``: a GPU that Windows owns; ``meminfo_mounted``:
    something is mounted over /proc/meminfo.
    """

    container: str | None = None
    wsl: bool = False
    meminfo_mounted: bool = False


def read_surroundings(root: str = "/") -> Surroundings:
    """What the files below ``root`` say; never raises."""
    return Surroundings(
        container=container_kind(root),
        wsl=Path(inside(root, "dev/dxg")).exists(),
        meminfo_mounted=_meminfo_mounted(root),
    )


def container_kind(root: str = "/") -> str | None:
    """The kind of container that ``root`` belongs to (``"lxc"``, ``"docker"``); None outside."""
    try:
        return read_text(inside(root, "run/systemd/container")) or "unknown"
    except Unreadable:
        for kind, place in (("docker", ".dockerenv"), ("podman", "run/.containerenv")):
            if Path(inside(root, place)).exists():
                return kind
        return None


def _meminfo_mounted(root: str) -> bool:
    try:
        mounts = read_file(inside(root, "proc/self/mounts"))
    except Unreadable:
        return False
    return any(line.split()[1:2] == [b"/proc/meminfo"] for line in mounts.splitlines())


def virtual_memory(
    around: Surroundings, mem_total: int | None, gtt_total: int | None
) -> str | None:
    """Why the figures here are not those of a real machine; None when nothing speaks against them.

    Args:
        around: what umad runs in.
        mem_total: MemTotal, bytes; None when it cannot be read.
        gtt_total: the GPU's limit on system memory, bytes; None without such a GPU.
    """
    inside_it = f" inside a container ({around.container})" if around.container else ""
    if around.wsl:
        return "the GPU is Windows's (/dev/dxg, WSL2), which may take its memory back at any time"
    if mem_total is not None and gtt_total is not None:
        # In a container the two must fit; outside, firmware and old drivers set odd limits.
        least = gtt_total if around.container else gtt_total // 2
        if mem_total < least:
            return (
                f"/proc/meminfo shows {format_bytes(mem_total)}{inside_it}, but the GPU may use "
                f"{format_bytes(gtt_total)} of system memory (gtt_total): they describe "
                "different machines"
            )
    if around.meminfo_mounted:
        return (
            f"/proc/meminfo is replaced by another view of memory{inside_it}: what it shows is "
            "not the machine"
        )
    return None
