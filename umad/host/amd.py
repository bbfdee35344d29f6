"""AMD GPUs: what their memory can still give, and KFD's word on each process.

Rules: where memory comes from (carve-out or system memory) does not change while the machine
runs; a device that vanishes stays known, its readings are broken until it is back.
Stays out: DRM's word on each process (``drm``), and decisions.

Source: amdgpu, amdkfd and TTM of Linux 6.12 to 7.1.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from umad.host.debugfs import DebugFile, debug_path
from umad.host.files import (
    LARGEST,
    KernelFile,
    Unreadable,
    inside,
    parse_line,
    parsed,
    read_as,
    read_file,
)
from umad.host.look import GTT_POOL, VRAM_POOL, Gpu, Look, left, smallest
from umad.host.pci import Card, Place, names, pairs
from umad.units import MIB
from umad.values import SYSTEM_POOL, Figure, PoolReading, Reading

VENDOR: Final = "0x1002"
_KFD: Final = "sys/class/kfd/kfd"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class KfdLimits:
    """KFD's own accounts in bytes: of system memory, and of it the part TTM manages."""

    sys_used: int
    sys_max: int
    ttm_used: int
    ttm_max: int


_KFD_LINE: Final = re.compile(rb"(System|TTM) mem used ([0-9]+)M out of ([0-9]+)M")


def parse_kfd_limits(data: bytes) -> KfdLimits:
    """Read debugfs kfd/mem_limit, which speaks in MiB.

    Raises:
        ValueError: a line is missing.
    """
    lines = {
        name: (int(used) * MIB, int(most) * MIB) for name, used, most in _KFD_LINE.findall(data)
    }
    try:
        return KfdLimits(*lines[b"System"], *lines[b"TTM"])
    except KeyError as error:
        raise ValueError(f"no line for {error}") from error


_PAGE_POOL: Final = re.compile(rb"^total\s*:\s*([0-9]+) of\s+[0-9]+\s*$", re.MULTILINE)


def parse_page_pool(data: bytes) -> int:
    """The idle pages TTM keeps for reuse, in bytes, from debugfs ttm/page_pool.

    Raises:
        ValueError: no line with the total.
    """
    match = _PAGE_POOL.search(data)
    if match is None:
        raise ValueError("no line with the total")
    return int(match[1]) * _PAGE_BYTES


_HSA_PAGES: Final = re.compile(rb"^Pages used: ([0-9]+)\s*$", re.MULTILINE)
_HSA_MEMORY: Final = re.compile(rb"^Used memory: ([0-9]+) MB\s*$", re.MULTILINE)
_HSA_PAGE_BYTES: Final = 4096  # whatever the kernel's page size


def parse_hsa_pages(data: bytes) -> int:
    """Bytes in use as the vendor's ``pages_used`` has them.

    Raises:
        ValueError: not the known layout.
    """
    return _number(_HSA_PAGES, data) * _HSA_PAGE_BYTES


def parse_hsa_memory(data: bytes) -> int:
    """Bytes in use as the vendor's ``mem_info`` has them.

    Raises:
        ValueError: not the known layout.
    """
    return _number(_HSA_MEMORY, data) * MIB


def _number(pattern: re.Pattern[bytes], data: bytes) -> int:
    match = pattern.search(data)
    if match is None:
        raise ValueError("not the known layout")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class Device:
    """An AMD GPU: PCI address, its folder in sysfs now, KFD's id, and where hipMalloc goes.

    ``prefer_gtt``: an APU whose carve-out is smaller than its GTT; hipMalloc takes system memory.
    ``bank`` is what KFD hands out as its memory, ``carve_out`` its own memory, in bytes.
    """

    pdev: str
    folder: str
    gpu_id: int | None
    prefer_gtt: bool
    bank: int = 0
    carve_out: int = 0


def find_device(root: str, card: Card) -> Device | None:
    """The device behind a card; None when it is not AMD's or has no memory figures."""
    if card.vendor != VENDOR:
        return None
    folder = card.folder
    if not any(Path(f"{folder}/mem_info_{kind}_total").exists() for kind in ("vram", "gtt")):
        return None
    gpu_id, bank = _kfd_node(root, card.pci_id, card.pdev)
    try:
        carve_out = read_as(f"{folder}/mem_info_vram_total", parse_line)
    except Unreadable:  # unknown: promise the smaller pool only, which reads as broken
        return Device(card.pdev, folder, gpu_id, prefer_gtt=False, bank=bank)
    return Device(card.pdev, folder, gpu_id, bank > carve_out, bank, carve_out)


def _kfd_node(root: str, pci_id: str, pdev: str) -> tuple[int | None, int]:
    """KFD's id of a device and the bytes it hands out as its memory; (None, 0) without KFD.

    An APU that prefers GTT shows the limit of TTM there instead of its carve-out.
    """
    nodes = inside(root, f"{_KFD}/topology/nodes")
    fits: list[tuple[bool, int, int]] = []
    for name in names(nodes):
        folder = f"{nodes}/{name}"
        try:
            properties = pairs(read_file(f"{folder}/properties"), " ")
            gpu_id = read_as(f"{folder}/gpu_id", parse_line)
            if not gpu_id:
                continue
            path = f"{folder}/mem_banks/0/properties"
            bank = int(pairs(read_file(path), " ").get("size_in_bytes", "0"))
            vendor, device = int(properties["vendor_id"]), int(properties["device_id"])
            at = int(properties["location_id"])
        except (Unreadable, KeyError, ValueError):
            continue
        if bank >= LARGEST:  # a card would pass for an APU
            continue
        if f"{vendor:04X}:{device:04X}" == pci_id.upper():
            fits.append((pdev.endswith(f"{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}"), gpu_id, bank))
    # Two cards of one kind differ by their place on the bus alone.
    exact = [fit for fit in fits if fit[0]] or fits
    return (exact[0][1], exact[0][2]) if len(exact) == 1 else (None, 0)


class AmdGpu(Gpu):
    """Pools and KFD's per-process bytes of one AMD GPU."""

    def __init__(self, root: str, device: Device) -> None:
        own_bytes = 0 if device.prefer_gtt else device.carve_out
        super().__init__(device.pdev, _kind(device), own_bytes, drm=True)
        self.device = device
        self._root = root
        self._place = Place(device.pdev, device.folder, keep=root == "/")
        self._files: dict[str, KernelFile] = {}
        self._seen: set[str] = set()  # limits that were there once: missing later is broken
        self._sizes: dict[str, int] = {}  # what never changes, as it was first read
        self._lost = False

    @property
    def dram_pool(self) -> str:
        """See ``Gpu``."""
        return self.name(GTT_POOL) if self.device.prefer_gtt else SYSTEM_POOL

    @property
    def moved(self) -> bool:
        """Its folder in sysfs is another card's by now, or gone."""
        return self._lost or not self._place.still()

    def adopt(self, found: Device | None) -> None:
        """Take over what a new search found of this device; None when it found nothing."""
        self.close()
        self._files.clear()
        self._sizes.clear()
        self._lost = found is None
        if found is not None:
            self._place = Place(found.pdev, found.folder, keep=self._root == "/")
            old = self.device
            self.device = replace(
                found,
                prefer_gtt=old.prefer_gtt or found.prefer_gtt,
                gpu_id=found.gpu_id or old.gpu_id,
                bank=found.bank or old.bank,
            )
            self.kind = _kind(self.device)

    def problem(self) -> str:
        """Why its memory cannot be read now; "" when it can."""
        return self._reading("mem_info_gtt_total").problem

    def pools(self, look: Look) -> list[PoolReading]:
        """See ``Gpu``: vram, and gtt where hipMalloc takes system memory."""
        if self._lost:
            look.anomalies.append(f"GPU {self.pdev} is gone from sysfs")
        gtt_used, gtt_total = (
            self._reading("mem_info_gtt_used"),
            self._reading("mem_info_gtt_total"),
        )
        self._note(look, gtt_used, gtt_total)
        if "GPUActive" not in look.meminfo:
            look.unlisted(gtt_used)
        made = [self._vram(look)]
        if self.device.prefer_gtt:
            made.append(self._gtt(gtt_total, gtt_used, look))
        return [pool for pool in made if pool.capacity.value != 0]

    def kfd_bytes(self, pid: int) -> int:
        """What KFD handed out to a process as this GPU's memory; 0 for one without KFD.

        Raises:
            Unreadable: it cannot be read.
        """
        if self.device.gpu_id is None:
            return 0
        path = inside(self._root, f"{_KFD}/proc/{pid}/vram_{self.device.gpu_id}")
        try:
            return read_as(path, parse_line)
        except Unreadable as error:
            if error.absent or error.gone:
                return 0
            raise

    def evicted_ms(self, pid: int) -> int:
        """For how long KFD has stopped a process's queues to move its memory; 0 without KFD.

        Raises:
            Unreadable: it cannot be read.
        """
        if self.device.gpu_id is None:
            return 0
        stats = f"{_KFD}/proc/{pid}/stats_{self.device.gpu_id}/evicted_ms"
        try:
            return read_as(inside(self._root, stats), parse_line)
        except Unreadable as error:
            if error.absent or error.gone:
                return 0
            raise

    def close(self) -> None:
        """Give every kept descriptor back."""
        self._place.close()
        for file in self._files.values():
            file.close()

    def _vram(self, look: Look) -> PoolReading:
        total = self._reading("mem_info_vram_total")
        used = self._reading("mem_info_vram_used")
        safe = left(total, used, f"{self.pdev}: vram", look.anomalies)
        if safe.value is not None:
            look.info[self.name("limit_vram")] = safe.value
        return PoolReading(self.own_pool, total, used, safe, VRAM_POOL)

    def _note(self, look: Look, gtt_used: Reading, gtt_total: Reading) -> None:
        """Figures for people: those of a discrete card's GTT are in no pool."""
        for name, figure in (
            ("gtt_used", gtt_used.value),
            ("gtt_total", gtt_total.value),
            ("kfd_mem_bank", self.device.bank),
            ("kfd_gpu_id", self.device.gpu_id),
        ):
            if figure is not None:
                look.info[self.name(name)] = figure

    def _gtt(self, total: Reading, used: Reading, look: Look) -> PoolReading:
        name = f"{self.pdev}: "
        limits = {"gtt": left(total, used, name + "gtt", look.anomalies)}
        pages = self._pages_limit()
        limits["ttm"] = left(pages, used, name + "ttm", look.anomalies)
        limits.update(self._kfd_limits(look, pages))
        for key, limit in limits.items():
            if limit.value is not None:
                look.info[self.name(f"limit_{key}")] = limit.value
        limits["MemAvailable"] = look.system.safe
        safe, binding = smallest(limits)
        # gtt_total is what the driver would allow; there is never more than TTM's limit and DRAM.
        capacity, _ = smallest({"gtt": total, "ttm": pages, "DRAM": look.system.capacity})
        return PoolReading(self.dram_pool, capacity, used, safe, binding, SYSTEM_POOL)

    def _pages_limit(self) -> Reading:
        for module in ("ttm", "amdttm"):
            place = f"sys/module/{module}/parameters/pages_limit"
            path = inside(self._root, place)
            try:
                pages = parsed(path, self._file(path).read(), parse_line)
            except Unreadable as error:
                reading = self._missing(place, error)
                if reading.state is Figure.BROKEN:
                    return reading
            else:
                self._seen.add(place)
                return Reading.of(pages * _PAGE_BYTES, place)
        return Reading.absent("pages_limit")

    def _kfd_limits(self, look: Look, pages: Reading) -> dict[str, Reading]:
        path = debug_path(self._root, DebugFile.KFD_LIMITS)
        try:
            limits = parsed(path, self._file(path).read(), parse_kfd_limits)
        except Unreadable as error:
            reading = self._missing(DebugFile.KFD_LIMITS, error)
            return {"kfd_sys": reading, "kfd_ttm": reading}
        self._seen.add(DebugFile.KFD_LIMITS)
        found: dict[str, Reading] = {}
        for key, most, exact, used in (
            (
                "kfd_sys",
                limits.sys_max,
                kfd_system_max(look.system.capacity.value),
                limits.sys_used,
            ),
            ("kfd_ttm", limits.ttm_max, pages.value, limits.ttm_used),
        ):
            total = Reading.of(_exact(most, exact), key)
            what = f"{self.pdev}: {key}"
            found[key] = left(total, Reading.of(used, key), what, look.anomalies)
        return found

    def _missing(self, place: str, error: Unreadable) -> Reading:
        if error.absent and place in self._seen:
            return Reading.broken(place, f"{error}; it was there before")
        return error.reading(place)

    def _reading(self, name: str) -> Reading:
        """A figure of sysfs; the driver makes all of them or none, so a missing one is broken."""
        if self._lost:  # its old folder may be another card's by now
            return Reading.broken(name, f"{self.device.folder}: GPU {self.pdev} is gone")
        path = f"{self.device.folder}/{name}"
        try:
            value = parsed(path, self._file(path).read(), parse_line)
        except Unreadable as error:
            return Reading.broken(name, str(error))
        if name.endswith("_total") and (size := self._sizes.setdefault(name, value)) != value:
            return Reading.broken(name, f"{path}: {value}; it was {size}, and a size stays")
        return Reading.of(value, name)

    def _file(self, path: str) -> KernelFile:
        if path not in self._files:
            self._files[path] = KernelFile(path, keep=self._root == "/")
        return self._files[path]


def _kind(device: Device) -> str:
    return "amd-apu" if device.prefer_gtt else "amd-dgpu"


def kfd_system_max(dram: int | None) -> int | None:
    """The system memory that KFD allows itself at its start, in bytes."""
    return None if dram is None else dram - (dram >> 6) - 1536 * MIB


def _exact(printed: int, exact: int | None) -> int:
    """``exact`` where KFD prints just that in whole MiB; what it prints where they differ.

    They differ when a limit was moved after KFD started, which KFD does not follow.
    """
    return exact if exact is not None and exact // MIB * MIB == printed else printed
