"""The GPUs of the machine: their pools, and which process holds how much of each.

Makers in their order: AMD and Intel (sysfs, DRM fdinfo, KFD), NVIDIA (nvmap, NVML).  Pools:

* ``vram``: memory of a GPU's own, the carve-out of an APU included;
* ``gtt``: system memory through the GTT of an AMD APU, which has limits of its own;
* ``unified``: system memory that a GPU takes as it comes (GB10, Jetson, Intel's integrated).

The first GPU's pools have these names; those of any other carry its PCI address, as in
``vram-0000-03-00.0``.  First is the one that ``memory.gpu`` names, else the one with most memory
of its own, else the one with the lowest address; it stays the first while the daemon runs.

Rules: a GPU is known by its PCI address, cardN moves; one that vanishes stays known and broken.
Stays out: decisions.
"""

import errno
import math
from collections.abc import Callable, Collection, Mapping
from typing import Final

from umad.host.amd import (
    AmdGpu,
    find_device,
    parse_hsa_memory,
    parse_hsa_pages,
    parse_page_pool,
)
from umad.host.clock import Clock
from umad.host.debugfs import DebugFile, debug_path
from umad.host.drm import Bill, ClientKey, DrmClient, DrmScanner, bill
from umad.host.files import Unreadable, read_as
from umad.host.intel import VENDOR as INTEL
from umad.host.intel import IntelGpu
from umad.host.look import Gpu, Look, Tally
from umad.host.nvidia import Nvidia, NvidiaGpu
from umad.host.paced import Paced
from umad.host.pci import cards, normal
from umad.values import SYSTEM_POOL, Identity, Moved, PoolReading, Reading

_SEARCH_S: Final = 10.0
"""How often a card or a driver that comes late is looked for."""
_DEBUG_S: Final = 1.0

# Sources whose figures may be older than the look that shows them.
_SLOW_SOURCES: Final = frozenset({"nvml", "nvmap"})


class GpuProbe:
    """Pools and per-process bytes of all GPUs; nothing at all where there is none.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
        wanted: the PCI address of the only GPU that has pools, ``"auto"`` for all, ``"none"``.
        clock: dates the answers of NVML.
    """

    def __init__(self, root: str, wanted: str, clock: Clock) -> None:
        self._root = root
        try:
            self._wanted = normal(wanted)
        except ValueError:  # "auto", "none", "tegra", or what ``check`` complains about
            self._wanted = wanted.lower()
        # Processes whose GPU bytes were older than the last look that asked for none to be fresh.
        self.old: set[Identity] = set()
        self._scanner = DrmScanner(root)
        self._payers: dict[ClientKey, Identity] = {}
        self._nvidia = Nvidia(root, clock)
        self._gpus: dict[str, Gpu] = {}
        self._first: Gpu | None = None
        self._search_s = -math.inf
        self._page_pool = self._debug(DebugFile.TTM_PAGE_POOL, parse_page_pool)
        self._hsa: dict[str, dict[str, Paced[int]]] = {}

    def problem(self, look: Look) -> str:
        """What keeps the GPU from being used, "" when nothing."""
        self._find(look)
        if self._wanted not in ("auto", "none") and self._first is None:
            return f"memory.gpu: no GPU with memory figures at {self._wanted}"
        problems = [gpu.problem() for gpu in self._watched() if isinstance(gpu, AmdGpu)]
        return next((f"GPU memory cannot be read: {each}" for each in problems if each), "")

    def pools(self, look: Look) -> dict[str, PoolReading]:
        """The pools now; ``look`` is added to."""
        self._find(look)
        self._nvidia.note(look)
        made: dict[str, PoolReading] = {}
        for gpu in self._watched():
            look.info[gpu.name("gpu")] = gpu.pdev
            look.info[gpu.name("gpu_kind")] = gpu.kind
            made.update((pool.name, pool) for pool in gpu.pools(look))
            if isinstance(gpu, AmdGpu):
                self._vendor_figures(gpu, look)
        self._explain_residual(look)
        return made

    def held(
        self,
        identities: Collection[Identity],
        look: Look,
        fresh: Collection[Identity] = (),
    ) -> dict[Identity, Tally]:
        """GPU bytes of each process; empty where there is no GPU.

        Args:
            identities: the registered processes that are alive.
            look: the look so far, is added to.
            fresh: those of them of which no figure may be old.
        """
        wanted = frozenset(identities)
        self._scanner.keep_only(wanted)
        self._nvidia.keep_only(wanted)
        if not fresh:
            self.old = set()
        if not self._gpus and not self._nvidia.asking:
            return {}
        tallies = {identity: Tally() for identity in identities}
        if any(gpu.drm for gpu in self._gpus.values()):
            self._tally_drm(tallies, look, fresh)
        if fresh:
            self._nvidia.read(look, fresh=True)
        self._nvidia.tally(identities, tallies, look)
        if not fresh:
            self.old = {
                identity
                for identity, tally in tallies.items()
                if not _SLOW_SOURCES.isdisjoint(tally.sources)
                or self._scanner.old(identity, look.now_s)
            }
        return {identity: tally for identity, tally in tallies.items() if tally.told}

    def close(self) -> None:
        """Give every kept descriptor back, and stop asking NVML."""
        for gpu in self._gpus.values():
            if isinstance(gpu, AmdGpu | IntelGpu):
                gpu.close()
        self._scanner.close()
        self._nvidia.close()

    # ------------------------------------------------------------ finding GPUs

    def _find(self, look: Look) -> None:
        """Take over what is there now."""
        if self._wanted == "none":
            return
        known = self._gpus.values()
        lost = any(gpu.moved for gpu in known if isinstance(gpu, AmdGpu | IntelGpu))
        if lost or not self._search_s - _SEARCH_S <= look.now_s < self._search_s:
            self._search_s = look.now_s + _SEARCH_S
            self._search_cards()
            self._nvidia.search(look)
        self._nvidia.read(look)
        for each in self._nvidia.gpus:
            self._gpus.setdefault(each.pdev, each)
        self._name()

    def _search_cards(self) -> None:
        shown = {card.pdev: card for card in cards(self._root)}
        for pdev, card in shown.items():
            if (device := find_device(self._root, card)) is not None:
                known = self._gpus.get(pdev)
                if not isinstance(known, AmdGpu):
                    self._gpus[pdev] = AmdGpu(self._root, device)
                elif known.moved or known.device != device:
                    known.adopt(device)
            elif card.vendor == INTEL and pdev not in self._gpus:
                self._gpus[pdev] = IntelGpu(self._root, card)
        for pdev, gpu in self._gpus.items():
            if isinstance(gpu, AmdGpu) and gpu.moved:
                gpu.adopt(None)
            elif isinstance(gpu, IntelGpu) and gpu.moved:
                gpu.adopt(shown.get(pdev))

    def _name(self) -> None:
        """Choose the first GPU once; all others keep names with their address."""
        if self._first is None:
            fits = [gpu for gpu in self._gpus.values() if self._wanted in ("auto", gpu.pdev)]
            if fits:
                self._first = min(fits, key=lambda gpu: (-gpu.own_bytes, gpu.pdev))
                self._first.suffix = ""

    def _watched(self) -> list[Gpu]:
        """The GPUs that have pools, the first one first."""
        if self._first is None:
            return []
        if self._wanted != "auto":
            return [self._first]
        others = sorted(pdev for pdev, gpu in self._gpus.items() if gpu is not self._first)
        return [self._first, *(self._gpus[pdev] for pdev in others)]

    # --------------------------------------------------------------- processes

    def _tally_drm(
        self, tallies: Mapping[Identity, Tally], look: Look, fresh: Collection[Identity]
    ) -> None:
        """Add what DRM's fdinfo and KFD say."""
        clients: dict[Identity, list[DrmClient]] = {}
        for identity, tally in tallies.items():
            try:
                clients[identity] = self._scanner.clients(
                    identity, look.now_s, fresh=identity in fresh
                )
            except Unreadable as error:
                tally.fail("fdinfo", str(error))
        hidden = tallies.keys() - clients.keys()
        billing = bill(clients, hidden, self._payers, look.kin)
        self._payers = billing.payers
        look.anomalies.extend(billing.odd)
        for identity, why in billing.unknown.items():
            tallies[identity].fail("fdinfo", why)
        look.info["gpu_shared"] = sum(
            each.shared for bills in billing.bills.values() for each in bills.values()
        )
        if (age_ms := self._scanner.age_ms(look.now_s)) is not None:
            look.info["fdinfo_age_ms"] = age_ms
        for identity, bills in billing.bills.items():
            tally = tallies[identity]
            for gpu in self._gpus.values():
                if isinstance(gpu, AmdGpu):
                    bills.setdefault(gpu.pdev, Bill())
            for pdev, each in bills.items():
                self._pay(tally, identity.pid, pdev, each)
                tally.moved = tally.moved.plus(self._moved(identity.pid, pdev, each, look))
            if not bills:
                tally.add(SYSTEM_POOL, 0, "fdinfo")

    def _pay(self, tally: Tally, pid: int, pdev: str, each: Bill) -> None:
        """Add what one process holds of one device, by the greater of fdinfo and KFD."""
        gpu = self._gpus.get(pdev) or Gpu(pdev, "", 0, drm=True)  # sysfs does not show it
        dram, own, source = each.dram, each.own, "fdinfo"
        if isinstance(gpu, NvidiaGpu):
            return  # NVML's to tell
        if isinstance(gpu, AmdGpu):
            try:
                more = gpu.kfd_bytes(pid) - each.dram - each.own
            except Unreadable as error:
                tally.fail("kfd", str(error))
                return
            if more > 0:
                source = "kfd"
                dram, own = (dram + more, own) if gpu.device.prefer_gtt else (dram, own + more)
        tally.add(gpu.dram_pool, dram, source)
        tally.add(gpu.own_pool, own, source)

    # ------------------------------------------------- figures for people only

    def _moved(self, pid: int, pdev: str, each: Bill, look: Look) -> Moved:
        """What of one process on one device was moved."""
        gpu, stood_ms = self._gpus.get(pdev), 0
        if isinstance(gpu, AmdGpu):
            try:
                stood_ms = gpu.evicted_ms(pid)
            except Unreadable as error:
                look.anomalies.append(str(error))
        return Moved(evicted=each.evicted, evicted_ms=stood_ms)

    def _explain_residual(self, look: Look) -> None:
        """What of meminfo's residual the GPUs account for, and what nobody does."""
        if any(gpu.drm for gpu in self._gpus.values()):
            pool = self._figure("ttm_page_pool", self._page_pool, look)
            if pool is not None and "GPUActive" not in look.meminfo:
                look.unlisted(Reading.of(pool, "page_pool"))
        residual, explained = look.info.get("mem_residual"), look.gpu_unlisted
        if not isinstance(residual, int) or explained is None:
            return
        look.info["mem_residual_gpu"] = explained
        look.info["mem_unexplained"] = max(0, residual - explained)

    def _vendor_figures(self, gpu: AmdGpu, look: Look) -> None:
        """The hsa layout of debugfs, where a vendor's kernel has it."""
        if gpu.pdev not in self._hsa:
            self._hsa[gpu.pdev] = {
                "hsa_pages_used": self._debug(DebugFile.HSA_PAGES, parse_hsa_pages, gpu.pdev),
                "hsa_memory_used": self._debug(DebugFile.HSA_MEMORY, parse_hsa_memory, gpu.pdev),
            }
        for name, paced in self._hsa[gpu.pdev].items():
            self._figure(gpu.name(name), paced, look)

    def _debug(
        self, file: DebugFile, parse: Callable[[bytes], int], pdev: str = "0000:00:00.0"
    ) -> Paced[int]:
        path = debug_path(self._root, file, pdev)
        return Paced(lambda: read_as(path, parse), _DEBUG_S)

    def _figure(self, name: str, paced: Paced[int], look: Look) -> int | None:
        found = paced.get(look.now_s)
        if isinstance(found, int):
            look.info[name] = found
            look.info[f"{name}_age_ms"] = paced.age_ms(look.now_s)
            return found
        # Only root may look into debugfs; that is no contradiction.
        if not found.absent and found.code not in (errno.EACCES, errno.EPERM):
            look.anomalies.append(str(found))
        return None
