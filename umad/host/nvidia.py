"""NVIDIA GPUs, with memory of their own or with the system's (GB10, Jetson).

The order of sources: for the bytes of a process nvmap's clients, then NVML, then that it has no
NVIDIA device open, which proves 0 bytes; for what a unified GPU uses in all NvMapMemUsed, then
the sum of its processes.
Rules: a GPU whose driver names no memory of its own, or about all of the system's, shares it.
Stays out: asking NVML (``nvml``) and reading nvmap (``nvmap``).
"""

import math
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from umad.host.clock import Clock
from umad.host.drm import links_to
from umad.host.files import Unreadable, inside, read_text
from umad.host.look import UNIFIED_POOL, VRAM_POOL, Gpu, Look, Tally, left, unified_pool
from umad.host.nvmap import Nvmap, NvmapClients
from umad.host.nvml import SOURCE, NvmlDevice, NvmlReader, NvmlSample
from umad.values import SYSTEM_POOL, Figure, Identity, PoolReading, Reading

TEGRA: Final = "tegra"
"""What stands for a PCI address where the GPU of a Jetson is meant."""

FIRST_ANSWER_S: Final = 2.0
"""The first look waits this long for NVML: its start may take a second on an idle GPU."""
FRESH_ANSWER_S: Final = 0.02
"""A look that would stop a process waits this long for a new answer."""

_DRIVER: Final = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
_NVMAP: Final = ("dev/nvmap", "sys/kernel/debug/nvmap")
_DEVICES: Final = ("/dev/nvidia", "/dev/nvmap", "/dev/nvhost", "/dev/dxg")
_OPEN_S: Final = 1.0  # how old the answer may be whether a process has a device open


class NvidiaGpu(Gpu):
    """One GPU that NVML shows, or a Jetson's."""

    def __init__(self, pdev: str, own_bytes: int, *, unified: bool) -> None:
        kind = "jetson" if pdev == TEGRA else "nvidia-uma" if unified else "nvidia-dgpu"
        super().__init__(pdev, kind, own_bytes, drm=False)
        self.unified = unified
        self.memory: NvmlDevice | None = None
        self.total_used = Reading.absent(SOURCE)  # of a unified one
        self.problem = ""

    @property
    def dram_pool(self) -> str:
        """See ``Gpu``."""
        return self.name(UNIFIED_POOL) if self.unified else SYSTEM_POOL

    def pools(self, look: Look) -> list[PoolReading]:
        """See ``Gpu``: vram, or what the system has left."""
        if not self.unified:
            return [self._vram(look)]
        look.unlisted(self.total_used)
        pool = unified_pool(self, look, self.total_used)
        if look.meminfo.get("HugePages_Total", 0):
            # Source: NVIDIA's DGX Spark porting guide: with a pool of huge pages configured, the
            # driver takes from that pool.
            pool = replace(pool, safe=_huge_pages(look.meminfo), binding="HugePages_Free")
        return [pool]

    def _vram(self, look: Look) -> PoolReading:
        if self.memory is None:
            broken = Reading.broken(SOURCE, self.problem)
            return PoolReading(self.own_pool, broken, broken, broken, VRAM_POOL)
        total, used = (
            reading
            if reading.state is not Figure.ABSENT
            else Reading.broken(SOURCE, f"{self.pdev}: NVML names its memory no longer")
            for reading in (self.memory.total, self.memory.used)
        )
        safe = left(total, used, f"{self.pdev}: vram", look.anomalies)
        if safe.value is not None:
            look.info[self.name("limit_vram")] = safe.value
        return PoolReading(self.own_pool, total, used, safe, VRAM_POOL)


def _huge_pages(meminfo: Mapping[str, int]) -> Reading:
    try:
        free, size = meminfo["HugePages_Free"], meminfo["Hugepagesize"]
    except KeyError as error:
        return Reading.broken("HugePages_Free", f"meminfo has no {error}")
    if free > meminfo["HugePages_Total"] or free * size > meminfo["MemTotal"]:
        return Reading.broken("HugePages_Free", f"{free} huge pages are more than there can be")
    return Reading.of(free * size, "HugePages_Free")


def is_unified(total: Reading, mem_total: int | None, *, x86: bool) -> bool | None:
    """Whether a GPU has no memory of its own; None when that cannot be told now.

    Args:
        total: the memory NVML names.
        mem_total: MemTotal in bytes.
        x86: no NVIDIA GPU of an x86 machine shares its memory, and there a card as large as the
            machine's memory is common.
    """
    if total.state is Figure.BROKEN:
        return None
    if not total.value:  # not supported, or zero
        return True
    if x86:
        return False
    return None if mem_total is None else total.value >= mem_total * 9 // 10


class Nvidia:
    """All NVIDIA GPUs of the machine, and what each process holds of them."""

    def __init__(self, root: str, clock: Clock) -> None:
        self._root = root
        self._reader = NvmlReader(clock)
        self._nvmap = Nvmap(root)
        self._gpus: dict[str, NvidiaGpu] = {}
        self._tegra = ""  # the address NVML has for the GPU of a Jetson
        self._open: dict[Identity, tuple[float, bool]] = {}
        self._sample = NvmlSample(0, -math.inf, problem="")
        self._clients: NvmapClients | None = None
        self._clients_problem = ""
        self._unanswered = -1  # the answer that a hurried question did not better
        self._host_pids = _host_pids(root)

    @property
    def gpus(self) -> list[NvidiaGpu]:
        """The GPUs seen so far, whether they are there now or not."""
        return list(self._gpus.values())

    @property
    def asking(self) -> bool:
        """Whether there is a driver of NVIDIA's, be its GPUs known or not."""
        return self._reader.started

    def search(self, look: Look) -> None:
        """Look for what came since the last time: a Jetson's nvmap, NVIDIA's driver."""
        jetson = "NvMapMemUsed" in look.meminfo or _exists(self._root, _NVMAP)
        if jetson and TEGRA not in self._gpus:
            self._gpus[TEGRA] = NvidiaGpu(TEGRA, 0, unified=True)
        if not self._reader.started and self._has_driver(look):
            self._reader.start()
            self._reader.fresh(FIRST_ANSWER_S)

    def read(self, look: Look, *, fresh: bool = False) -> None:
        """Take over the latest answers; ``fresh`` asks for new ones."""
        self._read_nvmap(look, fresh=fresh)
        if not self._reader.started:
            return
        self._sample = self._asked_anew() if fresh else self._reader.latest()
        for device in self._sample.devices:
            self._adopt(device, look)
        shown = {device.pdev: device for device in self._sample.devices}
        for gpu in self._gpus.values():
            gpu.memory = shown.get(gpu.pdev)
            gpu.problem = self._sample.problem or f"NVML does not show GPU {gpu.pdev}"

    def note(self, look: Look) -> None:
        """What the GPUs use in all, and how old the answers are."""
        if self._reader.started:
            look.info["nvml_age_ms"] = self._reader.age_ms()
            if self._sample.driver:
                look.info["nvidia_driver"] = self._sample.driver
            if self._sample.problem:
                look.anomalies.append(self._sample.problem)
                look.gpu_unlisted = None
            look.anomalies += [
                f"GPU {device.pdev} is not used: "
                + (device.total.problem or look.system.capacity.problem)
                for device in self._sample.devices
                if self._gpu(device) is None
            ]
        if TEGRA in self._gpus:
            look.info["nvmap_age_ms"] = self._nvmap.age_ms(look.now_s)
        for gpu in self._gpus.values():
            if gpu.unified:
                gpu.total_used = self._used(gpu, look)

    def tally(
        self, identities: Iterable[Identity], tallies: Mapping[Identity, Tally], look: Look
    ) -> None:
        """Add what each process holds."""
        for identity in identities:
            self._count(identity, tallies[identity], look)

    def keep_only(self, identities: frozenset[Identity]) -> None:
        """Forget processes that nobody asks for any more."""
        for identity in self._open.keys() - identities:
            del self._open[identity]

    def close(self) -> None:
        """Stop asking NVML."""
        self._reader.close()

    def _has_driver(self, look: Look) -> bool:
        if _exists(self._root, _DRIVER):
            return True
        if TEGRA not in self._gpus:
            return False
        self._read_nvmap(look, fresh=False)  # Thor: nvmap is there and lists nobody
        return self._clients is None and not self._clients_problem

    def _adopt(self, device: NvmlDevice, look: Look) -> None:
        """Remember a GPU; what it once was it stays while the machine runs."""
        if self._gpu(device) is not None:
            return
        unified = is_unified(device.total, look.meminfo.get("MemTotal"), x86=_x86(self._root))
        if unified and TEGRA in self._gpus:
            self._tegra = device.pdev
        elif unified is not None:
            own = 0 if unified else device.total.value or 0
            self._gpus[device.pdev] = NvidiaGpu(device.pdev, own, unified=unified)

    def _gpu(self, device: NvmlDevice) -> NvidiaGpu | None:
        """The GPU that NVML speaks of; None while its kind is not known."""
        return self._gpus.get(TEGRA if device.pdev == self._tegra else device.pdev)

    def _read_nvmap(self, look: Look, *, fresh: bool) -> None:
        self._clients, self._clients_problem = None, ""
        if TEGRA not in self._gpus:
            return
        try:
            self._clients = self._nvmap.clients(look.now_s, fresh=fresh)
        except Unreadable as error:
            self._clients_problem = str(error)

    def _asked_anew(self) -> NvmlSample:
        latest = self._reader.latest()
        if latest.problem:
            return latest
        if latest.number != self._unanswered:  # one that is stuck is waited for once
            answer = self._reader.fresh(FRESH_ANSWER_S)
            if answer is not None:
                return answer
            self._unanswered = latest.number
        why = "NVML's last answer is too old to stop a process by"
        return NvmlSample(latest.number, latest.taken_s, problem=why)

    def _used(self, gpu: NvidiaGpu, look: Look) -> Reading:
        nvmap = look.meminfo.get("NvMapMemUsed")
        if gpu.pdev == TEGRA and (self._clients is not None or self._clients_problem):
            if nvmap is not None:
                return Reading.of(nvmap, "NvMapMemUsed")
            if self._clients is None:
                return Reading.broken("nvmap", self._clients_problem)
            return Reading.of(self._clients.total, "nvmap")
        devices = [device for device in self._sample.devices if self._gpu(device) is gpu]
        problem = self._sample.problem or next((each.problem for each in devices), "")
        if not devices or problem:
            if nvmap is not None:
                return Reading.of(nvmap, "NvMapMemUsed")
            return Reading.broken(SOURCE, problem or gpu.problem or "NVML names no GPU")
        sizes = [size for device in devices for size in device.held.values()]
        if None in sizes:
            return Reading.broken(SOURCE, "NVML does not tell the bytes of every process")
        total = sum(size for size in sizes if size is not None)
        return Reading.of(max(total, nvmap or 0), SOURCE)

    def _count(self, identity: Identity, tally: Tally, look: Look) -> None:
        unknown = ""
        tegra = self._gpus.get(TEGRA)
        if tegra is not None and self._clients is not None:
            if size := self._clients.held.get(identity.pid, 0):
                tally.add(tegra.dram_pool, size, "nvmap")
        elif tegra is not None and self._clients_problem:
            unknown = self._clients_problem
        if self._reader.started:
            unknown = self._count_nvml(identity, tally, look) or unknown
        elif tegra is not None and self._clients is None and not unknown:
            unknown = "there is no NVML"
        if unknown and tegra is not None and self._clients is None and not self._clients_problem:
            unknown = f"{self._nvmap.path} lists nobody, and {unknown}"
        if unknown and self._may_hold(identity, look.now_s):
            tally.fail(SOURCE if self._reader.started else "nvmap", unknown)

    def _count_nvml(self, identity: Identity, tally: Tally, look: Look) -> str:
        """Add NVML's figures; returns why they are not all known."""
        needed = [pdev for pdev in self._gpus if pdev != TEGRA or self._clients is None]
        if self._sample.problem:
            return self._sample.problem if needed or not self._gpus else ""
        for device in self._sample.devices:
            gpu = self._gpu(device)
            if gpu is None:
                return device.total.problem or look.system.capacity.problem
            if gpu.pdev == TEGRA and self._clients is not None:
                continue  # nvmap has counted it
            if device.problem:
                return device.problem
            size = device.held.get(identity.pid, 0)
            if size is None:
                return f"NVML does not tell what process {identity.pid} holds of {device.pdev}"
            if size:
                tally.add(gpu.dram_pool if gpu.unified else gpu.own_pool, size, SOURCE)
            if identity.pid not in device.held and not self._host_pids:
                return (
                    f"NVML does not list process {identity.pid}, but umad runs in a PID namespace "
                    "where it would not: run it in the host's"
                )
        shown = [self._gpu(device) for device in self._sample.devices]
        missing = [pdev for pdev in needed if self._gpus[pdev] not in shown]
        return f"NVML does not show GPU {missing[0]}" if missing else ""

    def _may_hold(self, identity: Identity, now_s: float) -> bool:
        """Whether a process has a device of NVIDIA's open; without one it holds nothing."""
        until_s, may = self._open.get(identity, (-math.inf, True))
        if not now_s < until_s <= now_s + _OPEN_S:
            may = _opens_device(inside(self._root, f"proc/{identity.pid}/fd"))
            self._open[identity] = now_s + _OPEN_S, may
        return may


def _opens_device(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(links_to(entry.path, _DEVICES) for entry in entries)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to see


def _exists(root: str, places: Iterable[str]) -> bool:
    for place in places:
        try:
            Path(inside(root, place)).stat()
        except OSError:  # not there, or not ours to see
            continue
        return True
    return False


def _x86(root: str) -> bool:
    """Whether NVIDIA's driver says that this is an x86 machine."""
    try:
        return "x86_64" in read_text(inside(root, _DRIVER[0]))
    except Unreadable:
        return root == "/" and platform.machine() == "x86_64"


_HOST_PID_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel, the same everywhere


def _host_pids(root: str) -> bool:
    """Whether pids here are the machine's; True where that cannot be told."""
    try:
        return Path(inside(root, "proc/self/ns/pid")).stat().st_ino == _HOST_PID_NAMESPACE
    except OSError:
        return True
