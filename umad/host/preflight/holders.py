"""The GPUs of the machine, and who holds their memory before umad has granted any."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umad.host import procs
from umad.host.files import inside
from umad.host.memory import MachineProbe
from umad.host.preflight.finding import Finding, read_fact
from umad.units import MIB, format_bytes

HOLDER_MIN_BYTES: Final = 512 * MIB  # a desktop holds less, a model more


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with memory of a GPU; ``unit`` is its systemd service, "" where it has none."""

    pid: int
    comm: str
    unit: str
    bytes: int


@dataclass(frozen=True, slots=True)
class HolderFacts:
    """Kinds of the GPUs by address; large holders that are not umad's; how many hide."""

    gpus: Mapping[str, str]
    holders: tuple[Holder, ...]
    hidden: int


def read_holders(root: str, probe: MachineProbe, ours: frozenset[int]) -> HolderFacts:
    """Read them below ``root``; never raises.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
        probe: of that root.
        ours: processes that hold GPU memory by umad's leave.
    """
    gpus, _ = probe.gpus(())
    if not gpus:
        return HolderFacts(gpus, (), 0)
    found = (
        procs.process_identity(int(folder.name), root)
        for folder in Path(inside(root, "proc")).glob("[0-9]*")
        if folder.name.isdigit()
    )
    _, readings = probe.gpus([identity for identity in found if identity is not None])
    holders = [
        _holder(root, identity.pid, reading.value)
        for identity, reading in readings.items()
        if reading.value is not None
        and reading.value >= HOLDER_MIN_BYTES
        and identity.pid not in ours
    ]
    hidden = sum(reading.value is None for reading in readings.values())
    return HolderFacts(gpus, tuple(sorted(holders, key=lambda one: -one.bytes)), hidden)


def _holder(root: str, pid: int, size: int) -> Holder:
    cgroup = (read_fact(root, f"proc/{pid}/cgroup").text or "").rpartition("/")[2]
    unit = cgroup if cgroup.endswith(".service") else ""
    return Holder(pid, procs.comm(pid, root), unit, size)


def judge_holders(facts: HolderFacts) -> Iterator[Finding]:
    """The GPUs that are there, and who else holds them."""
    for pdev, kind in facts.gpus.items():
        yield Finding("gpu.device", "ok", f"{pdev}, {kind}")
    if not facts.gpus:
        yield Finding("gpu.device", "ok", "no GPU whose memory umad can read")
        return
    name = "gpu.holders"
    for holder in facts.holders:
        yield Finding(
            name,
            "advice",
            f"{holder.comm} (pid {holder.pid}) holds {format_bytes(holder.bytes)}",
            "a worker of umad, or gone",
            "umad does not know it: its memory is missing to the models, it may grow at any "
            "time, and umad never stops it",
            f"systemctl stop {holder.unit}" if holder.unit else f"kill {holder.pid}",
        )
    if not facts.holders:
        hidden = f" ({facts.hidden} processes could not be seen)" if facts.hidden else ""
        yield Finding(name, "ok", f"nobody else holds much of it{hidden}")
