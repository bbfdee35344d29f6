"""Frozen values that more than one room speaks of: identities, readings, leases, snapshots.

No behaviour beyond small derived figures; bytes are ``int``, times are monotonic seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

SYSTEM_POOL: Final = "system"


class Figure(StrEnum):
    """The three states of a reading."""

    VALUE = "value"
    ABSENT = "absent"  # this machine has no such thing
    BROKEN = "broken"  # it has, and it cannot be read or believed now


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure in bytes with its source.  Unknown is neither 0 nor unlimited.

    ``value`` is None unless the state is VALUE; ``problem`` says why a reading is broken.
    """

    state: Figure
    source: str
    value: int | None = None
    problem: str = ""

    @classmethod
    def of(cls, value: int, source: str) -> "Reading":
        """A reading that holds."""
        return cls(Figure.VALUE, source, value)

    @classmethod
    def absent(cls, source: str) -> "Reading":
        """This machine has no such figure."""
        return cls(Figure.ABSENT, source)

    @classmethod
    def broken(cls, source: str, problem: str) -> "Reading":
        """The figure exists and could not be read; ``problem`` says why."""
        return cls(Figure.BROKEN, source, None, problem)


@dataclass(frozen=True, slots=True)
class Identity:
    """A process as the kernel names it: pids are reused, pid and start time together are not.

    ``start_ticks`` is field 22 of /proc/PID/stat (clock ticks since boot).
    """

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection (SO_PEERCRED, SO_PEERGROUPS)."""

    identity: Identity
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    comm: str = ""


@dataclass(frozen=True, slots=True)
class PoolReading:
    """What one pool of memory can give, as one snapshot saw it.

    ``capacity`` is the physical size, ``used`` what is taken by anybody, ``safe`` what may be
    handed out before umad's own reserve is subtracted, ``binding`` the limit that set ``safe``
    ("MemAvailable", "gtt", "kfd_ttm", ...).  ``parent`` names the pool whose DRAM this one is
    carved from dynamically (GTT of an APU), so that the two are never added.
    """

    name: str
    capacity: Reading
    used: Reading
    safe: Reading
    binding: str = ""
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Kin:
    """What is known of a registered process's family: its user, and who was found so far.

    ``uid`` is None where it could not be read.  ``launcher`` started it for umad and takes in its
    orphans; ``cgroup`` is the systemd unit's whose processes all are of the family.
    """

    uid: int | None
    members: frozenset[Identity] = frozenset()
    launcher: Identity | None = None
    cgroup: str = ""


@dataclass(frozen=True, slots=True)
class Outsider:
    """A program that knows nothing of umad and is put under quota by somebody else.

    Either its ``launcher`` is its parent and waits for it (``umadctl run``), or it is a systemd
    ``unit`` with this ``cgroup``, whose oldest process ``identity`` is; ``others`` are the rest.
    """

    identity: Identity
    comm: str
    uid: int | None
    launcher: Identity | None = None
    unit: str = ""
    cgroup: str = ""
    others: frozenset[Identity] = frozenset()


@dataclass(frozen=True, slots=True)
class Moved:
    """What of a process is not where it was put: pages that move behind everybody's back.

    ``swapped`` bytes are out in swap, ``evicted`` bytes were meant for the GPU's own memory and
    are in the system's; for ``evicted_ms`` in all its GPU queues stood still while pages moved.
    """

    swapped: int = 0
    evicted: int = 0
    evicted_ms: int = 0

    def plus(self, other: "Moved") -> "Moved":
        """Both together."""
        return Moved(
            self.swapped + other.swapped,
            self.evicted + other.evicted,
            self.evicted_ms + other.evicted_ms,
        )


NOT_MOVED: Final = Moved()


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """The physical bytes of one process: ``bytes`` is host plus GPU pages, each page once.

    Where it has a family, theirs are in it, and ``alive`` means any of them.  ``shmem_bytes`` is
    the part of ``host_bytes`` that other processes may map too, ``locked_bytes`` what cannot be
    reclaimed or swapped (mlock, pages pinned by a driver).  ``gpu`` says which pools the GPU
    pages are in; pages of system DRAM that no GPU pool describes are in ``"system"``.
    """

    identity: Identity
    alive: bool
    bytes: Reading
    host_bytes: int = 0
    gpu: tuple[tuple[str, int], ...] = ()
    shmem_bytes: int = 0
    locked_bytes: int = 0
    moved: Moved = NOT_MOVED

    @property
    def gpu_bytes(self) -> int:
        """The GPU pages of all pools, in bytes."""
        return sum(size for _, size in self.gpu)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """What the kernel keeps back in one zone, in bytes.

    Below ``low`` it reclaims, below ``min`` only it allocates; ``protection`` is kept, on top,
    from requests that a higher zone could serve.  ``managed`` is the size of the zone.
    """

    min: int
    low: int
    high: int
    protection: int
    managed: int


@dataclass(frozen=True, slots=True)
class Zone:
    """The free memory of one zone of one NUMA node.

    ``free_blocks`` counts free blocks by order, the smallest (one page) first; ``marks`` is None
    where the watermarks are not known.
    """

    node: int
    name: str
    free_blocks: tuple[int, ...]
    marks: Watermarks | None = None


@dataclass(frozen=True, slots=True)
class Zones:
    """How the machine's free memory lies; read every few seconds, not at every look.

    ``zones`` is empty where that is not known, ``problem`` says why.  ``counters`` are those of
    /proc/vmstat that tell of reclaim and compaction, since boot: one that this kernel lacks is
    missing, None: they cannot be read.  ``anomalies`` are what exists and cannot be believed.
    """

    taken_s: float
    page_bytes: int
    zones: tuple[Zone, ...] = ()
    problem: str = ""
    counters: Mapping[str, int] | None = field(default_factory=dict)
    anomalies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Segments:
    """How the memory lies that a process's device allocator has reserved, in bytes.

    ``allocated`` is what programs asked for, ``internal_free`` what rounding added to it,
    ``external_free`` free blocks of any size; of these ``blocks_free`` are in blocks of at least
    4 MiB, the largest of which has ``largest_free``.  A process reports it, and it may lie.
    """

    reserved: int
    allocated: int
    internal_free: int
    external_free: int
    blocks_free: int
    largest_free: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One immutable look at the machine; all rules of one tick share it.

    ``taken_s`` is the moment the first file was read, ``duration_s`` how long the look took.
    ``anomalies`` are readings that contradict themselves (used above total), one text each.
    ``zones`` may be some seconds older, and is None where nobody reads them.
    """

    taken_s: float
    duration_s: float
    pools: Mapping[str, PoolReading]
    processes: Mapping[Identity, ProcessReading]
    anomalies: tuple[str, ...] = ()
    info: Mapping[str, int | str] = field(default_factory=dict)
    zones: Zones | None = None


@dataclass(frozen=True, slots=True)
class AccountFigures:
    """What a guard says of one worker's account; a process wrote it, and it may lie.

    ``used`` are bytes charged now, ``peak`` the most so far, ``refused`` counts allocations,
    ``returned`` is how much of ``used`` was taken away by force; ``closed`` while it is fenced,
    ``swept`` once its tensor pages were taken at least once.
    """

    used: int
    peak: int
    refused: int
    returned: int = 0
    closed: bool = False
    swept: bool = False

    @property
    def held(self) -> int:
        """Bytes of the account that are still in memory."""
        return max(0, self.used - self.returned)


@dataclass(frozen=True, slots=True)
class PageFigures:
    """What a process's account page says when the daemon finds it after a restart.

    ``limits`` are the bytes that each open account may hold, by slot; ``fenced`` the slots of
    closed ones; ``used`` what all open ones are charged now, in bytes.
    """

    limits: Mapping[int, int]
    fenced: frozenset[int]
    used: int


HISTORY_SAMPLES_MAX: Final = 256
HISTORY_MODELS_MAX: Final = 64
HISTORY_STOPS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """What is kept of a model: of which shape it is, and its forwards, oldest first.

    A row is (tokens, rows, bytes, predicted, exact); see ``core.cost.Sample``.
    """

    shape: str
    rows: tuple[tuple[int, int, int, int, bool], ...]


class LeaseKind(StrEnum):
    """What a lease is for."""

    LOAD = "load"  # a model's bytes: its peak while loading, its steady quota afterwards
    BURST = "burst"  # one forward's bytes beyond the steady quota


class LeaseState(StrEnum):
    """Where a lease is in its life; it ends exactly once."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    RELEASING = "releasing"  # given back by word, still booked until seen to be gone


@dataclass(frozen=True, slots=True)
class Lease:
    """Booked bytes.  ``token`` fences: only who shows it may commit, void or release.

    ``parts`` are (pool, bytes); ``deadline_s`` is when the lease expires, None for never.
    """

    id: int
    worker: int
    kind: LeaseKind
    state: LeaseState
    parts: tuple[tuple[str, int], ...]
    token: int
    deadline_s: float | None = None

    @property
    def bytes(self) -> int:
        """The sum over the parts, nearly always one."""
        parts = self.parts
        return parts[0][1] if len(parts) == 1 else sum(size for _, size in parts)

    @property
    def is_loaded(self) -> bool:
        """Of a model, or a program, that is in memory and was not given back."""
        return self.kind is LeaseKind.LOAD and self.state is LeaseState.COMMITTED


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker: one model instance in one thread of one process.

    ``account`` is its slot in the process's account page, None where no guard is active.
    """

    id: int
    model: str
    instance: int
    identity: Identity
    quota: int
    peak: int
    pool: str = SYSTEM_POOL
    priority: int = 0
    pin: bool = False
    thread: int = 0
    account: int | None = None

    @property
    def name(self) -> str:
        """``llama`` for the first instance, ``llama/1`` for the second."""
        return f"{self.model}/{self.instance}" if self.instance else self.model
