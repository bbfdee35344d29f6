"""The machine's memory: meminfo and pressure, and the probe that makes the snapshot.

Owns the formulas for what may be handed out.  Rules: MemAvailable, never MemFree or SwapFree; a
figure that contradicts itself is reported and never enlarges what may be handed out.
Stays out: umad's own reserve (the engine subtracts it), and every decision.

Source of the formulas: Documentation/filesystems/proc.rst of the kernel, and the sizes that
amdgpu, TTM and KFD enforce.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from umad.host.clock import Clock, MonotonicClock
from umad.host.files import KernelFile, Unreadable, inside, parsed, read_file, read_text
from umad.host.gpu import GpuProbe
from umad.host.procs import ProcessTable, with_shared_once
from umad.units import GIB, format_bytes
from umad.values import (
    SYSTEM_POOL,
    Identity,
    PoolReading,
    ProcessReading,
    Reading,
    Snapshot,
)

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


def parse_meminfo(data: bytes) -> dict[str, int]:
    """Read /proc/meminfo.

    Returns:
        Bytes by name; the HugePages_* counts stay counts.

    Raises:
        ValueError: a line that is none, or MemTotal, MemFree or MemAvailable missing or absurd.
    """
    figures: dict[str, int] = {}
    for line in data.splitlines():
        key, colon, rest = line.partition(b":")
        if not colon:
            raise ValueError(f"line {line[:40]!r}")
        if rest.endswith(b" kB"):
            figures[key.decode("ascii", "replace")] = _digits(rest[:-3]) * 1024
        else:
            figures[key.decode("ascii", "replace")] = _digits(rest)
    missing = [name for name in _NEEDED if name not in figures]
    if missing:
        raise ValueError(f"no {missing[0]}")
    total = figures["MemTotal"]
    if total == 0 or figures["MemFree"] > total or figures["MemAvailable"] > total:
        raise ValueError("MemTotal is 0, or less than MemFree or MemAvailable")
    return figures


def _digits(text: bytes) -> int:
    text = text.strip()
    if not text.isdigit():
        raise ValueError(f"figure {text[:40]!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Stalls on memory: shares of the last 10 s (0..1) and totals in microseconds."""

    some_ratio_avg10: float
    full_ratio_avg10: float
    some_us_total: int
    full_us_total: int


def parse_psi(data: bytes) -> Pressure:
    """Read /proc/pressure/memory.

    Raises:
        ValueError: not the known layout.
    """
    shares: dict[bytes, tuple[float, int]] = {}
    for line in data.splitlines():
        kind, *pairs = line.split()
        fields = dict(pair.split(b"=", 1) for pair in pairs)
        try:
            shares[kind] = float(fields[b"avg10"]) / 100, _digits(fields[b"total"])
        except KeyError as error:
            raise ValueError(f"no {error} in {line[:40]!r}") from error
    if b"some" not in shares:
        raise ValueError("no 'some' line")
    some = shares[b"some"]
    full = shares.get(b"full", (0.0, 0))  # systems before 5.13 leave "full" out at times
    if not 0 <= some[0] <= 1 or not 0 <= full[0] <= 1:
        raise ValueError("a share outside 0 to 100 %")
    return Pressure(some[0], full[0], some[1], full[1])


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


def reserve_default(mem_total: int) -> int:
    """What umad leaves to the system unless told otherwise, in bytes: 4 GiB or 4 % of memory."""
    return max(4 * GIB, mem_total * 4 // 100)


def machine_mismatch(
    mem_total: int, gtt_total: int | None, container: str | None, *, meminfo_mounted: bool
) -> str | None:
    """Whether meminfo and the GPU describe different machines.

    Args:
        mem_total: MemTotal, bytes.
        gtt_total: the GPU's limit on system memory, bytes; None without such a GPU.
        container: the kind of container we are in, None outside.
        meminfo_mounted: something is mounted over /proc/meminfo (lxcfs does that).

    Returns:
        What does not fit together, for a person; None when nothing contradicts.
    """
    inside = f" inside a container ({container})" if container else ""
    if gtt_total is not None and mem_total < (gtt_total if container else gtt_total // 2):
        return (
            f"/proc/meminfo shows {format_bytes(mem_total)}{inside}, but the GPU may use "
            f"{format_bytes(gtt_total)} of system memory (gtt_total): they describe different "
            "machines. Run umad on the host, or give the container the host's /proc/meminfo"
        )
    if meminfo_mounted:
        return (
            f"/proc/meminfo is replaced by another view of memory{inside}: what it shows is not "
            "the machine. Run umad on the host, or mount the host's /proc/meminfo"
        )
    return None


class MachineProbe:
    """``umad.core.ports.Probe`` on the real files.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
        gpu: a PCI address, ``"auto"`` for the first usable GPU, ``"none"`` for no GPU at all.
        clock: only measures how long a look takes.
    """

    def __init__(self, root: str = "/", gpu: str = "auto", clock: Clock | None = None) -> None:
        self._root = root
        self._clock = clock or MonotonicClock()
        keep = root == "/"
        self._meminfo = KernelFile(inside(root, "proc/meminfo"), keep=keep)
        self._psi = KernelFile(inside(root, "proc/pressure/memory"), keep=keep)
        self._table = ProcessTable(root)
        self._gpu = GpuProbe(root, gpu)

    def sample(self, processes: Collection[Identity], now_s: float) -> Snapshot:
        """One look at the machine and at these processes; never raises for a failed reading.

        Args:
            processes: the registered processes.
            now_s: monotonic seconds, becomes ``taken_s``.
        """
        started_s = self._clock.now_s()
        wanted = frozenset(processes)
        anomalies: list[str] = []
        info: dict[str, int | str] = {}
        pools = {SYSTEM_POOL: self._system(info, anomalies)}
        self._pressure(info, anomalies)
        pools.update(self._gpu.pools(pools[SYSTEM_POOL], info, anomalies, now_s))
        self._table.keep_only(wanted)
        readings = {identity: self._table.read(identity) for identity in wanted}
        gpu_bytes = self._gpu.bytes_by_process(
            [identity for identity, reading in readings.items() if reading.alive],
            anomalies,
            now_s,
        )
        for identity, gpu in gpu_bytes.items():
            readings[identity] = _with_gpu(readings[identity], gpu)
        return Snapshot(
            taken_s=now_s,
            duration_s=self._clock.now_s() - started_s,
            pools=pools,
            processes=readings,
            anomalies=tuple(anomalies),
            info=info,
        )

    def confirm(self, snapshot: Snapshot, limits: Mapping[Identity, int]) -> Snapshot:
        """Count shared memory once in those processes whose breach depends on it.

        Args:
            snapshot: of this moment.
            limits: what each process may hold, in bytes.
        """
        doubtful = {
            identity: with_shared_once(reading, self._root)
            for identity, reading in snapshot.processes.items()
            if reading.bytes.value is not None
            and identity in limits
            and reading.bytes.value - reading.shmem_bytes <= limits[identity] < reading.bytes.value
        }
        if not doubtful:
            return snapshot
        return replace(snapshot, processes={**snapshot.processes, **doubtful})

    def check(self) -> list[str]:
        """What keeps umad from starting on this machine, one text each; empty when nothing."""
        faults: list[str] = []
        try:
            meminfo = parsed(self._meminfo.path, self._meminfo.read(), parse_meminfo)
        except Unreadable as error:
            return [f"memory cannot be read: {error}"]
        gtt_total, problem = self._gpu.check()
        if problem:
            faults.append(problem)
        mismatch = machine_mismatch(
            meminfo["MemTotal"],
            gtt_total,
            container_kind(self._root),
            meminfo_mounted=_meminfo_mounted(self._root),
        )
        if mismatch:
            faults.append(mismatch)
        return faults

    def close(self) -> None:
        """Give every kept descriptor back."""
        self._meminfo.close()
        self._psi.close()
        self._table.close()
        self._gpu.close()

    def _system(self, info: dict[str, int | str], anomalies: list[str]) -> PoolReading:
        try:
            meminfo = parsed(self._meminfo.path, self._meminfo.read(), parse_meminfo)
        except Unreadable as error:
            # A machine without memory figures is no machine we know: missing is broken, too.
            broken = Reading.broken("meminfo", str(error))
            return PoolReading(SYSTEM_POOL, broken, broken, broken, "MemAvailable")
        total = meminfo["MemTotal"]
        unlisted = residual(meminfo)
        if unlisted < 0:
            # A few pages of per-CPU drift are normal, a hundredth of memory is not.
            if -unlisted > total // 100:
                anomalies.append(f"meminfo lists {format_bytes(-unlisted)} more than it has in use")
            unlisted = 0
        info["mem_total"] = total
        info["mem_free"] = meminfo["MemFree"]
        info["mem_available"] = meminfo["MemAvailable"]
        info["mem_residual"] = unlisted
        info["limit_sys"] = system_ceiling(meminfo)
        for key, name in (("GPUActive", "gpu_active"), ("GPUReclaim", "gpu_reclaim")):
            if key in meminfo:
                info[name] = meminfo[key]
        return PoolReading(
            SYSTEM_POOL,
            Reading.of(total, "MemTotal"),
            Reading.of(total - meminfo["MemAvailable"], "MemTotal-MemAvailable"),
            Reading.of(min(total, system_available(meminfo)), "MemAvailable"),
            "MemAvailable",
        )

    def _pressure(self, info: dict[str, int | str], anomalies: list[str]) -> None:
        try:
            pressure = parsed(self._psi.path, self._psi.read(), parse_psi)
        except Unreadable as error:
            if not error.absent:
                anomalies.append(str(error))
            return
        info["psi_some_permille_avg10"] = round(pressure.some_ratio_avg10 * 1000)
        info["psi_full_permille_avg10"] = round(pressure.full_ratio_avg10 * 1000)
        info["psi_some_us_total"] = pressure.some_us_total
        info["psi_full_us_total"] = pressure.full_us_total


def _with_gpu(process: ProcessReading, gpu: Reading) -> ProcessReading:
    """Host plus GPU bytes; GPU pages are in no RSS, so that each page counts once."""
    if gpu.value is None:
        return ProcessReading(process.identity, process.alive, gpu, process.host_bytes)
    if process.bytes.value is None:
        total = process.bytes
    else:
        source = f"{process.bytes.source}+{gpu.source}"
        total = Reading.of(process.bytes.value + gpu.value, source)
    return ProcessReading(process.identity, process.alive, total, process.host_bytes, gpu.value)


def container_kind(root: str = "/") -> str | None:
    """The kind of container that ``root`` belongs to (``"lxc"``, ``"docker"``); None outside."""
    try:
        return read_text(inside(root, "run/systemd/container")) or "unknown"
    except Unreadable:
        return "docker" if Path(inside(root, ".dockerenv")).exists() else None


def _meminfo_mounted(root: str) -> bool:
    try:
        mounts = read_file(inside(root, "proc/self/mounts"))
    except Unreadable:
        return False
    return any(line.split()[1:2] == [b"/proc/meminfo"] for line in mounts.splitlines())
