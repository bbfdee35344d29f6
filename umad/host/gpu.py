"""AMD GPUs: what their memory can still give, and which process holds how much of it.

Rules: a device is known by its PCI address, cardN moves; debugfs is read at the few exact paths
named here and nowhere else, because some of its files act when they are read.
Stays out: makers whose memory is read in other ways (their GPU pool is absent), and decisions.

Source: amdgpu, amdkfd and TTM of Linux 6.12 to 7.1.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from umad.host.drm import DrmClient, DrmScanner, bill
from umad.host.files import (
    KernelFile,
    Unreadable,
    inside,
    parse_decimal,
    parsed,
    read_as,
    read_file,
    read_text,
)
from umad.units import MIB
from umad.values import SYSTEM_POOL, Figure, Identity, PoolReading, Reading

GTT_POOL: Final = "gtt"
VRAM_POOL: Final = "vram"

_AMD: Final = "0x1002"
_DEBUGFS_KFD: Final = "sys/kernel/debug/kfd/mem_limit"
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


@dataclass(frozen=True, slots=True)
class Device:
    """An AMD GPU: PCI address, its folder in sysfs now, KFD's id, and where hipMalloc goes.

    ``prefer_gtt``: an APU whose carve-out is smaller than its GTT; hipMalloc takes system memory.
    """

    pdev: str
    folder: str
    gpu_id: int | None
    prefer_gtt: bool


def find_devices(root: str) -> list[Device]:
    """The AMD GPUs with memory figures, in the order of their PCI addresses."""
    drm = inside(root, "sys/class/drm")
    found: dict[str, Device] = {}
    for card in _names(drm):
        if not re.fullmatch(r"card[0-9]+", card):
            continue
        folder = f"{drm}/{card}/device"
        try:
            if read_text(f"{folder}/vendor") != _AMD:
                continue
            uevent = _pairs(read_file(f"{folder}/uevent"), "=")
        except Unreadable:
            continue
        if not any(Path(f"{folder}/mem_info_{kind}_total").exists() for kind in ("vram", "gtt")):
            continue
        pdev = uevent.get("PCI_SLOT_NAME", "")
        gpu_id, bank = _kfd_node(root, uevent.get("PCI_ID", ""), pdev)
        try:
            prefer_gtt = bank > read_as(f"{folder}/mem_info_vram_total", parse_decimal)
        except Unreadable:  # unknown: promise the smaller pool only, which reads as broken
            prefer_gtt = False
        found[pdev] = Device(pdev, folder, gpu_id, prefer_gtt)
    return [found[pdev] for pdev in sorted(found)]


def _address(folder: str) -> str | None:
    """The PCI address of the device in a sysfs folder now; None when there is none."""
    try:
        return _pairs(read_file(f"{folder}/uevent"), "=").get("PCI_SLOT_NAME")
    except Unreadable:
        return None


def _names(folder: str) -> list[str]:
    """What a folder holds; nothing where the subsystem is not there."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except OSError:
        return []


def _pairs(data: bytes, separator: str) -> dict[str, str]:
    lines = data.decode("ascii", "replace").splitlines()
    return {
        key: value for key, found, value in (line.partition(separator) for line in lines) if found
    }


def _kfd_node(root: str, pci_id: str, pdev: str) -> tuple[int | None, int]:
    """KFD's id of a device and the bytes it hands out as its memory; (None, 0) without KFD.

    An APU that prefers GTT shows the limit of TTM there instead of its carve-out.
    """
    nodes = inside(root, f"{_KFD}/topology/nodes")
    fits: list[tuple[bool, int, int]] = []
    for name in _names(nodes):
        folder = f"{nodes}/{name}"
        try:
            properties = _pairs(read_file(f"{folder}/properties"), " ")
            gpu_id = read_as(f"{folder}/gpu_id", parse_decimal)
            if not gpu_id:
                continue
            path = f"{folder}/mem_banks/0/properties"
            bank = int(_pairs(read_file(path), " ").get("size_in_bytes", "0"))
            vendor, device = int(properties["vendor_id"]), int(properties["device_id"])
            at = int(properties["location_id"])
        except (Unreadable, KeyError, ValueError):
            continue
        if f"{vendor:04X}:{device:04X}" == pci_id.upper():
            fits.append((pdev.endswith(f"{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}"), gpu_id, bank))
    # Two cards of one kind differ by their place on the bus alone.
    exact = [fit for fit in fits if fit[0]] or fits
    return (exact[0][1], exact[0][2]) if len(exact) == 1 else (None, 0)


class GpuProbe:
    """Pools and per-process bytes of one AMD GPU; nothing at all where there is none.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
        wanted: a PCI address, ``"auto"`` for the first, ``"none"``.
    """

    def __init__(self, root: str, wanted: str) -> None:
        self._root = root
        self._wanted = wanted.lower()
        self._scanner = DrmScanner(root)
        self._files: dict[str, KernelFile] = {}
        self._seen: set[str] = set()  # limits that were there once: missing later is broken
        self._device: Device | None = None
        self._lost = False
        self._search_s = -math.inf

    def check(self) -> tuple[int | None, str | None]:
        """gtt_total in bytes (None without a GPU), and what keeps this GPU from being used."""
        device = self._find()
        if device is None:
            if self._wanted in ("auto", "none"):
                return None, None
            return None, f"memory.gpu: no AMD GPU with memory figures at {self._wanted}"
        try:
            return self._figure(device, "mem_info_gtt_total"), None
        except Unreadable as error:
            return None, f"GPU memory cannot be read: {error}"

    def pools(
        self,
        system: PoolReading,
        info: dict[str, int | str],
        anomalies: list[str],
        now_s: float,
    ) -> dict[str, PoolReading]:
        """The pools of the GPU now; ``info`` and ``anomalies`` are added to."""
        if self._wanted == "none":
            return {}
        if self._lost or self._device is None:
            # Without a GPU so far, look at times for a driver that comes late.
            if not self._lost and now_s < self._search_s:
                return {}
            self._search_s = now_s + 10
            self._adopt(self._find(), anomalies)
        elif _address(self._device.folder) != self._device.pdev:
            self._adopt(self._find(), anomalies)
        if (device := self._device) is None:
            return {}
        info["gpu"] = device.pdev
        made = {VRAM_POOL: self._vram(device, info, anomalies)}
        if device.prefer_gtt:
            made[GTT_POOL] = self._gtt(device, system, info, anomalies)
        return {name: pool for name, pool in made.items() if pool.capacity.value != 0}

    def bytes_by_process(
        self, identities: Sequence[Identity], anomalies: list[str], now_s: float
    ) -> dict[Identity, Reading]:
        """GPU bytes of each process; empty where there is no GPU."""
        self._scanner.keep_only(frozenset(identities))
        if (device := self._device) is None:
            return {}
        readings: dict[Identity, Reading] = {}
        held: dict[Identity, list[DrmClient]] = {}
        for identity in identities:
            try:
                held[identity] = self._scanner.clients(identity, now_s)
            except Unreadable as error:
                readings[identity] = Reading.broken("fdinfo", str(error))
        billed, odd = bill(held)
        anomalies.extend(odd)
        for identity, size in billed.items():
            try:
                kfd = self._kfd_bytes(device, identity.pid)
            except Unreadable as error:
                readings[identity] = Reading.broken("kfd", str(error))
                continue
            readings[identity] = Reading.of(max(size, kfd), "kfd" if kfd > size else "fdinfo")
        return readings

    def close(self) -> None:
        """Give every kept descriptor back."""
        for file in self._files.values():
            file.close()

    def _find(self) -> Device | None:
        wanted = self._device.pdev if self._device else self._wanted
        devices = [] if wanted == "none" else find_devices(self._root)
        return next((each for each in devices if wanted in ("auto", each.pdev)), None)

    def _adopt(self, found: Device | None, anomalies: list[str]) -> None:
        """Take over what a search found; a device that was known stays known."""
        self.close()
        self._files.clear()
        old = self._device
        self._lost = found is None and old is not None
        if found is None:
            if old is not None:
                anomalies.append(f"GPU {old.pdev} is gone from sysfs")
            return
        if old is not None:  # where memory comes from does not change while the machine runs
            found = replace(
                found,
                prefer_gtt=old.prefer_gtt or found.prefer_gtt,
                gpu_id=found.gpu_id or old.gpu_id,
            )
        self._device = found

    def _vram(
        self, device: Device, info: dict[str, int | str], anomalies: list[str]
    ) -> PoolReading:
        total = self._reading(device, "mem_info_vram_total")
        used = self._reading(device, "mem_info_vram_used")
        safe = _left(total, used, f"{device.pdev}: vram", anomalies)
        if safe.value is not None:
            info["limit_vram"] = safe.value
        return PoolReading(VRAM_POOL, total, used, safe, "vram")

    def _gtt(
        self,
        device: Device,
        system: PoolReading,
        info: dict[str, int | str],
        anomalies: list[str],
    ) -> PoolReading:
        total = self._reading(device, "mem_info_gtt_total")
        used = self._reading(device, "mem_info_gtt_used")
        name = f"{device.pdev}: "
        limits = {"gtt": _left(total, used, name + "gtt", anomalies)}
        pages = self._pages_limit()
        limits["ttm"] = _left(pages, used, name + "ttm", anomalies)
        limits.update(self._kfd_limits(name, system.capacity, pages, anomalies))
        for key, limit in limits.items():
            if limit.value is not None:
                info[f"limit_{key}"] = limit.value
        limits["MemAvailable"] = system.safe
        safe, binding = _smallest(limits)
        # gtt_total is what the driver would allow; there is never more than TTM's limit and DRAM.
        capacity, _ = _smallest({"gtt": total, "ttm": pages, "DRAM": system.capacity})
        return PoolReading(GTT_POOL, capacity, used, safe, binding, SYSTEM_POOL)

    def _pages_limit(self) -> Reading:
        for module in ("ttm", "amdttm"):
            place = f"sys/module/{module}/parameters/pages_limit"
            path = inside(self._root, place)
            try:
                pages = parsed(path, self._file(path).read(), parse_decimal)
            except Unreadable as error:
                reading = self._missing(place, error)
                if reading.state is Figure.BROKEN:
                    return reading
            else:
                self._seen.add(place)
                return Reading.of(pages * _PAGE_BYTES, place)
        return Reading.absent("pages_limit")

    def _kfd_limits(
        self, name: str, dram: Reading, pages: Reading, anomalies: list[str]
    ) -> dict[str, Reading]:
        path = inside(self._root, _DEBUGFS_KFD)
        try:
            limits = parsed(path, self._file(path).read(), parse_kfd_limits)
        except Unreadable as error:
            reading = self._missing(_DEBUGFS_KFD, error)
            return {"kfd_sys": reading, "kfd_ttm": reading}
        self._seen.add(_DEBUGFS_KFD)
        left: dict[str, Reading] = {}
        for key, most, exact, used in (
            ("kfd_sys", limits.sys_max, kfd_system_max(dram.value), limits.sys_used),
            ("kfd_ttm", limits.ttm_max, pages.value, limits.ttm_used),
        ):
            total = Reading.of(_exact(most, exact), key)
            left[key] = _left(total, Reading.of(used, key), name + key, anomalies)
        return left

    def _kfd_bytes(self, device: Device, pid: int) -> int:
        if device.gpu_id is None:
            return 0
        path = inside(self._root, f"{_KFD}/proc/{pid}/vram_{device.gpu_id}")
        try:
            return read_as(path, parse_decimal)
        except Unreadable as error:
            if error.absent or error.gone:  # a process without KFD
                return 0
            raise

    def _missing(self, place: str, error: Unreadable) -> Reading:
        if error.absent and place in self._seen:
            return Reading.broken(place, f"{error}; it was there before")
        return error.reading(place)

    def _reading(self, device: Device, name: str) -> Reading:
        try:
            return Reading.of(self._figure(device, name), name)
        except Unreadable as error:
            # The driver makes all of these files or none: a missing one is broken.
            return Reading.broken(name, str(error))

    def _figure(self, device: Device, name: str) -> int:
        if self._lost:  # its old folder may be another card's by now
            raise Unreadable(device.folder, f"GPU {device.pdev} is gone")
        path = f"{device.folder}/{name}"
        return parsed(path, self._file(path).read(), parse_decimal)

    def _file(self, path: str) -> KernelFile:
        if path not in self._files:
            self._files[path] = KernelFile(path, keep=self._root == "/")
        return self._files[path]


def kfd_system_max(dram: int | None) -> int | None:
    """The system memory that KFD allows itself at its start, in bytes."""
    return None if dram is None else dram - (dram >> 6) - 1536 * MIB


def _exact(printed: int, exact: int | None) -> int:
    """``exact`` where KFD prints just that in whole MiB; what it prints where they differ.

    They differ when a limit was moved after KFD started, which KFD does not follow.
    """
    return exact if exact is not None and exact // MIB * MIB == printed else printed


def _left(total: Reading, used: Reading, what: str, anomalies: list[str]) -> Reading:
    """``total - used``, 0 and an anomaly where that is negative, unknown where a part is."""
    if total.value is None:
        return total
    if used.value is None:
        return used
    if used.value > total.value:
        anomalies.append(f"{what}: {used.value} bytes used of {total.value}")
    return Reading.of(max(0, total.value - used.value), what)


def _smallest(limits: Mapping[str, Reading]) -> tuple[Reading, str]:
    """The smallest limit and its name; broken when one is broken; absent limits do not count."""
    for name, limit in limits.items():
        if limit.state is Figure.BROKEN:
            return limit, name
    values = {name: limit.value for name, limit in limits.items() if limit.value is not None}
    name = min(values, key=lambda key: values[key])
    return Reading.of(values[name], name), name
