"""The machine's memory: the probe that makes the snapshot.

Rules: a figure that contradicts itself is reported and never enlarges what may be handed out.
Stays out: umad's own reserve (the engine subtracts it), and every decision.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from umad.host.clock import Clock, MonotonicClock
from umad.host.family import Joint
from umad.host.files import LARGEST, KernelFile, Unreadable, inside, parsed
from umad.host.gpu import GpuProbe
from umad.host.look import Look, Tally
from umad.host.meminfo import MeminfoParser, residual, system_available, system_ceiling
from umad.host.pressure import Pressure, parse_psi
from umad.host.procs import ProcessTable, with_shared_once
from umad.host.zones import ZoneProbe
from umad.units import GIB, format_bytes
from umad.values import (
    SYSTEM_POOL,
    Identity,
    PoolReading,
    ProcessReading,
    Reading,
    Snapshot,
)

_AVAILABLE: Final = re.compile(rb"^MemAvailable: +([0-9]+) kB$", re.MULTILINE)
_SHOWN: Final = {
    "GPUActive": "gpu_active",
    "GPUReclaim": "gpu_reclaim",
    "CmaFree": "cma_free",
    "NvMapMemUsed": "nvmap_used",
}
_GLANCED_MAX: Final = 32  # a glance must stay cheap: larger families are left to the looks
# Lines that no kernel stops showing, and without which more could be handed out than is there.
_LASTING: Final = frozenset({"CmaFree", "Dirty", "Writeback", "GPUActive", "GPUReclaim"})


def reserve_default(mem_total: int) -> int:
    """What umad leaves to the system unless told otherwise, in bytes: 4 GiB or 4 % of memory."""
    return max(4 * GIB, mem_total * 4 // 100)


class MachineProbe:
    """``umad.core.ports.Probe`` on the real files.

    Args:
        root: the folder that holds ``proc/`` and ``sys/``.
        gpu: the PCI address of the only GPU to offer, ``"auto"`` for all, ``"none"``.
        clock: measures how long a look takes, and dates what is read beside the looks.
    """

    def __init__(self, root: str = "/", gpu: str = "auto", clock: Clock | None = None) -> None:
        self._root = root
        self._clock = clock or MonotonicClock()
        keep = root == "/"
        self._meminfo = KernelFile(inside(root, "proc/meminfo"), keep=keep)
        self._parse_meminfo = MeminfoParser()
        self._lasting: frozenset[str] = frozenset()
        self._psi = KernelFile(inside(root, "proc/pressure/memory"), keep=keep)
        self._psi_seen: tuple[bytes, Pressure] | None = None
        self._table = ProcessTable(root)
        self._kin = ProcessTable(root, keep=False)
        self._joint = Joint(root, self._clock)
        self._gpu = GpuProbe(root, gpu, self._clock)
        # Of the last look: its processes without their GPU pages, and their families.
        self._hosts: dict[Identity, ProcessReading] = {}
        self._families: Mapping[Identity, Collection[Identity]] = {}
        self._most = LARGEST  # all the memory there is
        self._zones = ZoneProbe(root)

    def sample(
        self,
        processes: Collection[Identity],
        now_s: float,
        families: Mapping[Identity, Collection[Identity]] = MappingProxyType({}),
    ) -> Snapshot:
        """One look at the machine and at these processes; never raises for a failed reading.

        Args:
            processes: the registered processes.
            now_s: monotonic seconds, becomes ``taken_s``.
            families: whose bytes count as theirs, by registered process.
        """
        started_s = self._clock.now_s()
        wanted = frozenset(processes)
        look = self._look(now_s)
        self._pressure(look.info, look.anomalies)
        pools = {SYSTEM_POOL: look.system, **self._gpu.pools(look)}
        self._table.keep_only(wanted)
        readings = {identity: self._table.read(identity) for identity in wanted}
        look.kin = {one: root for root, members in families.items() for one in members}
        kin = frozenset(look.kin)
        self._kin.keep_only(kin)
        readings |= {identity: self._kin.read(identity) for identity in kin}
        self._most = sum(
            pool.capacity.value or LARGEST for pool in pools.values() if pool.parent is None
        )
        self._hosts = {who: _believed(one, self._most) for who, one in readings.items()}
        self._families = families
        readings = dict(self._hosts)
        readings |= self._with_gpu(look)
        zones = self._zones.read(now_s)
        return Snapshot(
            taken_s=now_s,
            duration_s=self._clock.now_s() - started_s,
            pools=pools,
            processes=self._joint.join(readings, families, now_s),
            anomalies=(*look.anomalies, *zones.anomalies),
            info=look.info,
            zones=zones,
        )

    def confirm(self, snapshot: Snapshot, limits: Mapping[Identity, int]) -> Snapshot:
        """Look closer at those that seem to be over their limit.

        1. GPU pages that were read before this look are read again; where that does not answer
           at once they are unknown, which stops nobody.
        2. Shared memory counts once where a breach depends on it.

        Args:
            snapshot: of this moment.
            limits: what each process may hold, in bytes.
        """
        doubtful: dict[Identity, ProcessReading] = {}
        snapshot = self._with_new_gpu_bytes(snapshot, limits)  # 1
        for identity, reading in snapshot.processes.items():  # 2
            size, limit = reading.bytes.value, limits.get(identity)
            if size is None or limit is None or size <= limit:
                continue
            if (family := self._joint.confirm(identity, snapshot.taken_s)) is not None:
                doubtful[identity] = family
            elif size - reading.shmem_bytes <= limit:
                doubtful[identity] = with_shared_once(reading, self._root)
        if not doubtful:
            return snapshot
        return replace(snapshot, processes={**snapshot.processes, **doubtful})

    def _with_new_gpu_bytes(self, snapshot: Snapshot, limits: Mapping[Identity, int]) -> Snapshot:
        suspects: set[Identity] = set()
        for identity, reading in snapshot.processes.items():
            size, limit = reading.bytes.value, limits.get(identity)
            if size is not None and limit is not None and size > limit:
                suspects |= {identity, *self._families.get(identity, ())}
        if not (old := self._gpu.old & suspects):
            return snapshot
        readings = {**self._hosts, **self._with_gpu(self._look(snapshot.taken_s), fresh=old)}
        joined = self._joint.join(readings, self._families, snapshot.taken_s)
        return replace(snapshot, processes=joined)

    def glance(self, wanted: Collection[Identity | None]) -> dict[Identity | None, int]:
        """See ``umad.core.ports.Probe``."""
        held: dict[Identity | None, int] = {}
        for who in wanted:
            try:
                if who is None:
                    found = _AVAILABLE.search(self._meminfo.read())
                    if found is not None:
                        held[None] = -int(found[1]) * 1024
                elif len(family := self._families.get(who, ())) <= _GLANCED_MAX:
                    held[who] = self._table.resident(who)
                    held[who] += sum(self._kin.resident(one) for one in family)
            except Unreadable:
                continue  # the next look says what is the matter
        return held

    def check(self) -> list[str]:
        """What cannot be read on this machine, one text each; empty when nothing."""
        try:
            parsed(self._meminfo.path, self._meminfo.read(), self._parse_meminfo)
        except Unreadable as error:
            return [f"memory cannot be read: {error}"]
        problem = self._gpu.problem(self._look(self._clock.now_s()))
        return [problem] if problem else []

    def gpus(
        self, processes: Collection[Identity]
    ) -> tuple[dict[str, str], dict[Identity, Reading]]:
        """The GPUs and their kinds by address, and what any processes hold of them, in bytes.

        Of whom no source speaks is left out.
        """
        look = self._look(self._clock.now_s())
        self._gpu.pools(look)
        held = self._gpu.held(processes, look)
        kinds = {
            str(look.info[key.replace("gpu_kind", "gpu", 1)]): str(kind)
            for key, kind in look.info.items()
            if key.startswith("gpu_kind")
        }
        return kinds, {identity: tally.reading() for identity, tally in held.items()}

    def close(self) -> None:
        """Give every kept descriptor back."""
        self._meminfo.close()
        self._psi.close()
        self._table.close()
        self._gpu.close()
        self._zones.close()

    def _look(self, now_s: float) -> Look:
        """A new look, with what meminfo says."""
        try:
            meminfo = parsed(self._meminfo.path, self._meminfo.read(), self._parse_meminfo)
            if lost := self._lasting - meminfo.keys():
                raise Unreadable(self._meminfo.path, f"no {min(lost)}; it was there before")
        except Unreadable as error:
            # A machine without memory figures is no machine we know: missing is broken, too.
            broken = Reading.broken("meminfo", str(error))
            return Look(now_s, PoolReading(SYSTEM_POOL, broken, broken, broken, "MemAvailable"))
        self._lasting = _LASTING & meminfo.keys()
        info: dict[str, int | str] = {}
        anomalies: list[str] = []
        system = _system(meminfo, info, anomalies)
        return Look(now_s, system, meminfo, info, anomalies)

    def _with_gpu(
        self, look: Look, fresh: Collection[Identity] = ()
    ) -> dict[Identity, ProcessReading]:
        """The last look's processes with their GPU pages; only those that may have any."""
        alive = [identity for identity, reading in self._hosts.items() if reading.alive]
        held = self._gpu.held(alive, look, fresh)
        return {
            identity: _believed(_joined(self._hosts[identity], tally), self._most)
            for identity, tally in held.items()
        }

    def _pressure(self, info: dict[str, int | str], anomalies: list[str]) -> None:
        try:
            data = self._psi.read()
            seen = self._psi_seen
            if seen is None or data != seen[0]:  # it stands still unless somebody stalls
                self._psi_seen = seen = data, parsed(self._psi.path, data, parse_psi)
        except Unreadable as error:
            if not error.absent:
                anomalies.append(str(error))
            return
        pressure = seen[1]
        info["psi_some_permille_avg10"] = round(pressure.some_ratio_avg10 * 1000)
        info["psi_full_permille_avg10"] = round(pressure.full_ratio_avg10 * 1000)
        info["psi_some_us_total"] = pressure.some_us_total
        info["psi_full_us_total"] = pressure.full_us_total


def _system(
    meminfo: Mapping[str, int], info: dict[str, int | str], anomalies: list[str]
) -> PoolReading:
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
    for key, name in _SHOWN.items():
        if key in meminfo:
            info[name] = meminfo[key]
    return PoolReading(
        SYSTEM_POOL,
        Reading.of(total, "MemTotal"),
        Reading.of(total - meminfo["MemAvailable"], "MemTotal-MemAvailable"),
        Reading.of(min(total, system_available(meminfo)), "MemAvailable"),
        "MemAvailable",
    )


def _joined(process: ProcessReading, held: Tally) -> ProcessReading:
    """Host plus GPU bytes; GPU pages are in no RSS, so that each page counts once."""
    gpu = held.reading()
    if gpu.value is None:
        return replace(process, bytes=gpu)
    total = process.bytes
    if total.value is not None:
        total = Reading.of(total.value + gpu.value, f"{total.source}+{gpu.source}")
    moved = process.moved.plus(held.moved)
    return replace(process, bytes=total, gpu=tuple(sorted(held.pools.items())), moved=moved)


def _believed(process: ProcessReading, most: int) -> ProcessReading:
    """Nobody is stopped for holding more than the machine has: such a figure is broken."""
    size = process.bytes.value
    if size is None or size <= most:
        return process
    why = f"process {process.identity.pid}: {format_bytes(size)} is more than the machine has"
    return replace(process, bytes=Reading.broken(process.bytes.source, why))
