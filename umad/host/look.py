"""One look at the machine in the making, and what every GPU of it has in common.

Rules: a look is filled from top to bottom and then frozen into a snapshot; nothing in it is read
twice.  Stays out: the files that figures come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from umad.values import NOT_MOVED, SYSTEM_POOL, Figure, Identity, Moved, PoolReading, Reading

GTT_POOL: Final = "gtt"
VRAM_POOL: Final = "vram"
UNIFIED_POOL: Final = "unified"


@dataclass(slots=True)
class Look:
    """What one look has found so far.

    ``meminfo`` is empty when it could not be read.  ``gpu_unlisted`` are the bytes of GPUs that
    meminfo has no line for, so that they show up as its residual; None when they are not known.
    ``kin`` are members of families, by member: the registered process that answers for it.
    """

    now_s: float
    system: PoolReading
    meminfo: Mapping[str, int] = field(default_factory=dict)
    info: dict[str, int | str] = field(default_factory=dict)
    anomalies: list[str] = field(default_factory=list)
    gpu_unlisted: int | None = 0
    kin: Mapping[Identity, Identity] = field(default_factory=dict)

    def unlisted(self, used: Reading) -> None:
        """Add what one GPU uses and meminfo does not list."""
        if used.value is None or self.gpu_unlisted is None:
            self.gpu_unlisted = None
        else:
            self.gpu_unlisted += used.value


@dataclass(slots=True)
class Tally:
    """The GPU bytes of one process, added up over GPUs and sources."""

    pools: dict[str, int] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    broken: Reading | None = None
    moved: Moved = NOT_MOVED

    def add(self, pool: str, size: int, source: str) -> None:
        """Count ``size`` bytes of a pool."""
        if size:
            self.pools[pool] = self.pools.get(pool, 0) + size
        if source not in self.sources:
            self.sources.append(source)

    def fail(self, source: str, problem: str) -> None:
        """One source cannot be read: the sum is not known."""
        if self.broken is None:
            self.broken = Reading.broken(source, problem)

    @property
    def told(self) -> bool:
        """Whether any source has spoken."""
        return self.broken is not None or bool(self.sources)

    def reading(self) -> Reading:
        """The sum with its sources, in bytes."""
        if self.broken is not None:
            return self.broken
        return Reading.of(sum(self.pools.values()), "+".join(self.sources))


class Gpu:
    """One GPU.  A subclass reads its pools; ``GpuProbe`` gives it its names.

    Args:
        pdev: PCI address as sysfs writes it; ``"tegra"`` for the GPU of a Jetson, which has none.
        kind: ``amd-apu``, ``amd-dgpu``, ``intel-igpu``, ``intel-dgpu``, ``nvidia-dgpu``,
            ``nvidia-uma``, ``jetson``.
        own_bytes: the size of memory that is the GPU's alone, 0 where it shares the system's.
        drm: its processes are found in DRM's fdinfo.
    """

    def __init__(self, pdev: str, kind: str, own_bytes: int, *, drm: bool) -> None:
        self.pdev = pdev
        self.kind = kind
        self.own_bytes = own_bytes
        self.drm = drm
        self.suffix = "-" + pdev.replace(":", "-")

    def name(self, what: str) -> str:
        """The name of a pool or of a figure of this GPU, unique among the GPUs."""
        return what + self.suffix

    @property
    def dram_pool(self) -> str:
        """The pool that its pages of system memory are taken through."""
        return SYSTEM_POOL

    @property
    def own_pool(self) -> str:
        """The pool of the memory that is its own."""
        return self.name(VRAM_POOL)

    def pools(self, look: Look) -> list[PoolReading]:
        """Its pools now; ``look`` is added to."""
        raise NotImplementedError


def unified_pool(
    gpu: Gpu, look: Look, used: Reading, limits: Mapping[str, Reading] | None = None
) -> PoolReading:
    """The pool of a GPU that takes system memory as it comes.

    Args:
        gpu: whose.
        look: the look so far.
        used: what all its clients hold.
        limits: what else bounds it; one that is absent does not.
    """
    binding_limits = {look.system.binding: look.system.safe, **(limits or {})}
    safe, binding = smallest(binding_limits)
    return PoolReading(
        gpu.name(UNIFIED_POOL), look.system.capacity, used, safe, binding, SYSTEM_POOL
    )


def left(total: Reading, used: Reading, what: str, anomalies: list[str]) -> Reading:
    """``total - used``, 0 and an anomaly where that is negative, unknown where a part is."""
    if total.value is None:
        return total
    if used.value is None:
        return used
    if used.value > total.value:
        anomalies.append(f"{what}: {used.value} bytes used of {total.value}")
    return Reading.of(max(0, total.value - used.value), what)


def smallest(limits: Mapping[str, Reading]) -> tuple[Reading, str]:
    """The smallest limit and its name; broken when one is broken; absent limits do not count."""
    for name, limit in limits.items():
        if limit.state is Figure.BROKEN:
            return limit, name
    values = {name: limit.value for name, limit in limits.items() if limit.value is not None}
    name = min(values, key=lambda key: values[key])
    return Reading.of(values[name], limits[name].source), name
