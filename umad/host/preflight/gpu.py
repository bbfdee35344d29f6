"""AMD GPUs: limits of the drivers that contradict each other, and a carve-out that binds.

Source: amdgpu, amdkfd and TTM of Linux 6.12 to 7.1.  The drivers take their limits when they
load; what is written to the parameters later is shown there and rules nothing.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umad.host.amd import Device, KfdLimits, find_device, parse_kfd_limits
from umad.host.debugfs import DebugFile
from umad.host.files import Unreadable, inside, parse_decimal, read_as, read_file, read_text
from umad.host.pci import cards, normal, pairs
from umad.host.preflight.finding import Fact, Finding, Keep, Severity, read_fact
from umad.units import GIB, MIB, format_bytes

MODPROBE_DROP_IN: Final = "/etc/modprobe.d/umad.conf"
CARVE_OUT_MAX_BYTES: Final = 2 * GIB  # screens and video need no more
_KFD: Final = "sys/class/kfd/kfd"
_DEBUGFS: Final = "sys/kernel/debug"
# Those with the CPU on one die, so that their memory is the machine's.
# Source: LLVM, "User Guide for AMDGPU Backend", processors of type APU; as KFD writes them.
_APUS: Final = frozenset(
    str(version)
    for version in (90002, 90012, 100303, 100305, 100306, 110003, 110500, 110501, 110502, 110503)
)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the rules below judge; sizes in bytes, None where they cannot be read.

    ``limits`` is KFD's own account; None: not readable, ``mem_limit`` says why.
    """

    pdev: str
    apu: bool
    prefer_gtt: bool
    vram_total: int | None
    gtt_total: int | None
    gttsize: Fact
    pages_limit: Fact
    mem_limit: Fact
    limits: KfdLimits | None
    debugfs_mounted: bool
    lockdown: Fact
    page_bytes: int
    initramfs: str

    @property
    def pages_bytes(self) -> int | None:
        """TTM's limit on all pages."""
        pages = self.pages_limit.number
        return None if pages is None else pages * self.page_bytes


def read_gpu(root: str, wanted: str) -> GpuFacts | None:
    """Read them below ``root``; None where no AMD GPU is wanted.  Never raises.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
        wanted: a PCI address, ``"auto"`` for an APU or else the first, ``"none"``.
    """
    device = None if wanted == "none" else _find(root, wanted)
    if device is None:
        return None
    mem_limit = read_fact(root, f"{_DEBUGFS}/{DebugFile.KFD_LIMITS}")
    return GpuFacts(
        pdev=device.pdev,
        apu=_is_apu(root, device),
        prefer_gtt=device.prefer_gtt,
        vram_total=_figure(f"{device.folder}/mem_info_vram_total"),
        gtt_total=_figure(f"{device.folder}/mem_info_gtt_total"),
        gttsize=read_fact(root, "sys/module/amdgpu/parameters/gttsize"),
        pages_limit=_pages_limit(root),
        mem_limit=mem_limit,
        limits=_kfd_limits(mem_limit),
        debugfs_mounted=_is_filled(inside(root, _DEBUGFS)),
        lockdown=read_fact(root, "sys/kernel/security/lockdown"),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        initramfs=_initramfs(root),
    )


def _find(root: str, wanted: str) -> Device | None:
    found = [find_device(root, card) for card in cards(root)]
    only = None if wanted == "auto" else _address(wanted)
    fits = [one for one in found if one is not None and only in (None, one.pdev)]
    return min(fits, key=lambda one: (not one.prefer_gtt, one.pdev), default=None)


def _address(wanted: str) -> str:
    try:
        return normal(wanted)
    except ValueError:  # "tegra", or what the probe's check complains about
        return wanted


def _figure(path: str) -> int | None:
    try:
        return read_as(path, parse_decimal)
    except Unreadable:
        return None


def _pages_limit(root: str) -> Fact:
    for module in ("ttm", "amdttm"):  # AMD's own package calls it so
        fact = read_fact(root, f"sys/module/{module}/parameters/pages_limit")
        if fact.text is not None or fact.problem:
            return fact
    return fact


def _kfd_limits(fact: Fact) -> KfdLimits | None:
    try:
        return None if fact.text is None else parse_kfd_limits(fact.text.encode())
    except ValueError:
        return None


def _is_filled(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except PermissionError:
        return True
    except OSError:
        return False


def _is_apu(root: str, device: Device) -> bool:
    """By its instruction set as KFD names it; without KFD, by where its memory comes from."""
    version = None
    for folder in Path(inside(root, f"{_KFD}/topology/nodes")).glob("*"):
        try:
            if read_text(f"{folder}/gpu_id") == str(device.gpu_id):
                found = pairs(read_file(f"{folder}/properties"), " ")
                version = found.get("gfx_target_version")
        except Unreadable:
            continue
    return device.prefer_gtt or version in _APUS


def _initramfs(root: str) -> str:
    """The command by which a line of modprobe.d reaches the image that loads the driver."""
    dracut = any(Path(inside(root, place)).exists() for place in ("usr/bin/dracut", "sbin/dracut"))
    return "dracut --force" if dracut else "update-initramfs -u"


# ------------------------------------------------------------------- rules


def pages_limit_advised(mem_total: int, page_bytes: int = 4096) -> int:
    """TTM's limit for a machine that serves models, in pages.

    Five sixths of memory in whole GiB: the rest is umad's reserve and room for the system, the
    models' host side and page cache.
    """
    return mem_total * 5 // 6 // GIB * GIB // page_bytes


def judge_gpu(facts: GpuFacts | None, mem_total: int | None) -> Iterator[Finding]:
    """Every check of the GPU.

    Args:
        facts: what was read; None without an AMD GPU.
        mem_total: MemTotal, bytes; None when it cannot be read.
    """
    if facts is None:
        return
    yield from _limits(facts)
    yield from _frozen(facts)
    if facts.apu:
        yield from _pages(facts, mem_total)
        yield from _carve_out(facts)
    yield _debugfs(facts)


def _limits(facts: GpuFacts) -> Iterator[Finding]:
    name, pages, set_mib = "gpu.limits", facts.pages_bytes, facts.gttsize.number
    severity: Severity
    if pages is None:
        if facts.apu:
            why = facts.pages_limit.problem or "TTM shows no limit here, so none can be checked"
            yield Finding(name, "advice", facts.pages_limit.shown, "a readable pages_limit", why)
        return
    if set_mib is not None and set_mib >= 0 and abs(set_mib * MIB - pages) > MIB:
        gtt, severity = set_mib * MIB, "hard"  # somebody's choice, which is not in force
    elif facts.gtt_total is not None and abs(facts.gtt_total - pages) > MIB:
        gtt, severity = facts.gtt_total, "advice"  # older drivers' own default
    else:
        yield Finding(name, "ok", f"GTT and TTM agree, {format_bytes(pages)}")
        return
    yield Finding(
        name,
        severity,
        f"GTT (gttsize) allows {format_bytes(gtt)}, TTM (pages_limit) {format_bytes(pages)}",
        "one limit: pages_limit, with gttsize=-1",
        f"the smaller one rules: no more than {format_bytes(min(gtt, pages))} can be had, while "
        "tools and ROCm show the other, and allocations fail far below it",
        f"{facts.initramfs} && reboot",
        Keep(MODPROBE_DROP_IN, "options amdgpu gttsize=-1"),
    )


def _frozen(facts: GpuFacts) -> Iterator[Finding]:
    pages, limits = facts.pages_bytes, facts.limits
    if pages is None or limits is None:
        return
    if abs(limits.ttm_max - pages) <= MIB:
        yield Finding("gpu.frozen", "ok", "KFD took the limits that are shown")
        return
    yield Finding(
        "gpu.frozen",
        "hard",
        f"KFD goes by {format_bytes(limits.ttm_max)}, pages_limit shows {format_bytes(pages)}",
        "the same",
        "KFD took its limit when it was loaded and does not follow a change: hipMalloc fails at "
        "the old one, and no tool shows it",
        f"{facts.initramfs} && reboot",
        Keep(MODPROBE_DROP_IN, f"options ttm pages_limit={pages // facts.page_bytes}"),
    )


def _pages(facts: GpuFacts, mem_total: int | None) -> Iterator[Finding]:
    pages = facts.pages_bytes
    if pages is None or mem_total is None or not facts.prefer_gtt:
        return
    name, advised = "gpu.pages_limit", pages_limit_advised(mem_total, facts.page_bytes)
    if pages * 100 > mem_total * 51:
        yield Finding(name, "ok", f"{format_bytes(pages)} of {format_bytes(mem_total)}")
        return
    yield Finding(
        name,
        "advice",
        f"{format_bytes(pages)} of {format_bytes(mem_total)}",
        format_bytes(advised * facts.page_bytes),
        "half of the memory is the drivers' default: models cannot use the rest",
        f"{facts.initramfs} && reboot",
        Keep(MODPROBE_DROP_IN, f"options ttm pages_limit={advised}"),
    )


def _carve_out(facts: GpuFacts) -> Iterator[Finding]:
    name, vram, gtt = "gpu.carve_out", facts.vram_total, facts.gtt_total
    if vram is None or gtt is None:
        return
    shown = f"{format_bytes(vram)} beside a GTT of {format_bytes(gtt)}"
    if facts.prefer_gtt and vram <= CARVE_OUT_MAX_BYTES:
        yield Finding(name, "ok", f"{format_bytes(vram)}; models live in system memory (GTT)")
        return
    if facts.prefer_gtt:
        why = "models live in system memory (GTT) then, and the carve-out is lost to everybody"
    else:
        why = (
            "a carve-out that is not smaller than GTT makes hipMalloc take the carve-out only: "
            f"the GPU's whole budget is {format_bytes(vram)}, and GTT is not added to it"
        )
    yield Finding(
        name,
        "advice",
        shown,
        "the smallest that the firmware offers (512 MiB)",
        why + ". It is the firmware's setting, often called UMA frame buffer size",
        "systemctl reboot --firmware-setup",
    )


def _debugfs(facts: GpuFacts) -> Finding:
    name = "gpu.debugfs"
    if facts.limits is not None:
        return Finding(name, "ok", "KFD's own limits are readable")
    lockdown = facts.lockdown.text or ""
    should = "readable (kfd/mem_limit)"
    fix, keep = "", None
    if facts.mem_limit.text is not None:
        found, why = "kfd/mem_limit is not understood", "its layout is not the one umad knows"
    elif "[confidentiality]" in lockdown:
        found, why = "closed by the kernel's lockdown", "lockdown=confidentiality hides debugfs"
    elif facts.mem_limit.problem:
        found, why = "not readable as this user", "only root may; umad.service may read it too"
        fix = "sudo umadctl doctor"
    elif not facts.debugfs_mounted:
        found, why = "not mounted", ""
        fix = "mount -t debugfs debugfs /sys/kernel/debug"
        keep = Keep("/etc/fstab", "debugfs /sys/kernel/debug debugfs defaults 0 0")
    else:
        found, why = "kfd/mem_limit is not there", "this kernel's KFD was built without it"
    why += ("; " if why else "") + "without it umad goes by TTM's limit and cannot see KFD's own"
    return Finding(name, "advice", found, should, why, fix, keep)
