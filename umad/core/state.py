"""Everything the daemon remembers, in one place with one owner (the engine).

Members (workers), clients (connections), processes, the books, the queues, the mutex, the open
cases, the last snapshot and the counters.  Only lookups and sums live here; decisions are in
the modules beside this one.

Rule, held by ``State.check``: a load books its worker's steady quota at least, from the
reservation on, whatever its client asks for: what a worker may hold without asking is booked for
it.  Who raises the quota of a load (``membership.set_quota``) books the difference first.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from umad.config import Settings
from umad.core.access import Access, Permission
from umad.core.audit import NOISE_BYTES, AccountBooks, ProcessBooks
from umad.core.fragmentation import Fragmentation
from umad.core.histogram import Histogram
from umad.core.history import History
from umad.core.ledger import Ledger
from umad.core.mutex import InitMutex
from umad.core.pace import Pace
from umad.core.settling import Settling
from umad.core.waiting import Queue
from umad.core.watchdog import Watchdog
from umad.errors import InvariantBroken
from umad.values import (
    AccountFigures,
    Identity,
    LeaseKind,
    LeaseState,
    Moved,
    Outsider,
    Peer,
    Segments,
    Snapshot,
    Worker,
)

WORKERS_PER_CONNECTION_MAX = 64
LEASES_PER_WORKER_MAX = 4096
PROCESSES_MAX = 1024
OUTSIDE_PER_USER_MAX = 64  # programs that were registered by another process
ACCOUNTS_MAX = 63  # slots of an account page (guard/page.h)
QUEUE_MAX = 1024
EVENTS_KEPT = 256
NAMES_TOLD_MAX = 8
# A burst's wait is milliseconds, a load may take half an hour.
STEP_BOUNDS_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


@dataclass(slots=True)
class Client:
    """One connection."""

    id: int
    peer: Peer
    permission: Permission
    name: str = ""
    listening: bool = False
    workers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Draining:
    """A model was asked to go: for whom (a worker; None: people or the machine), and when."""

    rival: int | None
    deadline_s: float
    asked_s: float


@dataclass(slots=True)
class Relief:
    """What was done for a machine below its reserve, and when (monotonic; None: not yet).

    ``overdrawn`` are the pools that had less than nothing to give at the last look, as far as is
    known: more is used, or booked and not yet used, than may be.
    """

    closed_s: float | None = None  # admission is closed
    above_s: float | None = None  # and since then the reserve has been free all the time
    shrunk_s: float | None = None
    evicted_s: float | None = None
    overdrawn: tuple[str, ...] = ()


@dataclass(slots=True)
class Member:
    """A registered worker and what is known of it.  ``client`` is None while it is cut off.

    ``state``: registered (without a model), waiting, loading, ready, draining, leaving.
    """

    worker: Worker
    client: int | None
    state: str = "registered"
    stage: str = ""
    ratio: float = 0.0
    measured: int | None = None
    cut_off_s: float | None = None
    revoked: bool = False
    releasing_s: float | None = None
    leaking: bool = False
    limit_told: int | None = None
    figures: AccountFigures | None = None
    recycles: bool = False  # it carries out ``recycle``
    evicts: bool = False  # it carries out ``evict`` and ``load``
    granted_s: float = 0.0  # when its load was granted, and then the init mutex
    load_s: float | None = None  # what its last load took, once one was measured
    ready_s: float = 0.0  # since when its model is loaded
    worked_s: float = 0.0  # when its last forward ended
    draining: Draining | None = None
    asked_s: dict[str, float] = field(default_factory=dict)  # when it was to go, by rival's name
    missed_s: float | None = None  # when it last was to have gone and had not
    misses: int = 0  # how often in a row
    forwards: int = 0
    last_forward: Mapping[str, Any] = field(default_factory=dict)
    exceeded_s: float | None = None  # when people were told that a forward took more than predicted
    refused_s: float | None = None  # when they were told that it was refused memory
    refusals: int = 0  # since then
    settle_s: float = 0.0  # of a program that does not say when it has loaded
    settling: Settling | None = None  # it is loading


@dataclass(slots=True)
class Process:
    """A process with at least one worker, or with bytes that are still booked."""

    identity: Identity
    comm: str
    uid: int | None  # None: it could not be read
    baseline: int
    members: set[int] = field(default_factory=set)
    guard_off: str = ""  # why no guard enforces quotas in it
    accounts: set[int] = field(default_factory=set)  # slots of the account page that are taken
    # Of a page from before a restart: limits by slot of workers that have not come back, until
    # when they are waited for, and the slots of workers that were revoked then.
    unclaimed: dict[int, int] = field(default_factory=dict)
    unclaimed_until_s: float = 0.0
    fenced: frozenset[int] = frozenset()
    family: frozenset[Identity] = frozenset()  # whose bytes are in its readings
    ended: bool = False  # what is left is its family
    launcher: Identity | None = None  # who registered it
    unit: str = ""  # the systemd unit that was adopted, and its cgroup
    cgroup: str = ""
    segments: Segments | None = None  # of its device allocator, and when it told of them
    segments_s: float = 0.0
    moved: Moved | None = None  # as told last, and from when on it may be told again
    moved_told_s: float = 0.0

    @property
    def outside(self) -> bool:
        """It knows nothing of umad: its worker hangs on no connection."""
        return self.launcher is not None or bool(self.unit)

    @classmethod
    def of(cls, outsider: Outsider) -> "Process":
        """All that such a program holds counts: it has no baseline."""
        return cls(
            outsider.identity,
            outsider.comm,
            outsider.uid,
            0,
            family=outsider.others,
            launcher=outsider.launcher,
            unit=outsider.unit,
            cgroup=outsider.cgroup,
        )


def fence_of(generation: int) -> int:
    """Below all tokens that the daemon of this generation gives out, above all of those before.

    A number that is exact in a double too, for clients that have no other.
    """
    return generation << 32


class State:
    """See the module."""

    def __init__(
        self, settings: Settings, access: Access, generation: int, recovering_until_s: float
    ) -> None:
        self.settings = settings
        self.access = access
        self.generation = generation
        self.recovering_until_s = recovering_until_s
        self.ledger = Ledger(fence_of(generation))
        self.mutex = InitMutex(token=fence_of(generation))
        self.loads = Queue(QUEUE_MAX)
        self.bursts = Queue(QUEUE_MAX)
        self.inits = Queue(QUEUE_MAX)
        enforcement = settings.enforcement
        self.watchdog = Watchdog(
            enforcement.grace, enforcement.return_deadline, enforcement.unkillable_after
        )
        self.clients: dict[int, Client] = {}
        self.members: dict[int, Member] = {}
        self.processes: dict[Identity, Process] = {}
        self.snapshot: Snapshot | None = None
        self.pace: Pace | None = None
        self.fill_rate = 0  # bytes a second, measured at start; the fastest growth seen raises it
        self.pressed = False  # tasks stall on memory
        self.pressed_s = 0.0  # when that was seen last
        self.full_us: int | None = None  # for how long all of them did, since the start
        self.relief = Relief()
        self.drained = False  # people let no load begin
        self.fragmentation = Fragmentation()
        self.reserves: dict[str, int] = {}
        self.counters: Counter[str] = Counter()
        # From a request to its grant, by what was asked for; from a load's grant to its commit.
        self.waits = {what: Histogram(STEP_BOUNDS_S) for what in ("admit", "reserve", "init_lock")}
        self.load_seconds = Histogram(STEP_BOUNDS_S)
        self.history = History()
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self.event_seq = 0
        self.next_worker = 1

    def check(self) -> None:
        """Hold the books against themselves, and against the quotas.

        Raises:
            InvariantBroken: they contradict each other; a bug of ours.
        """
        self.ledger.check()
        for lease in self.ledger.leases.values():
            if lease.kind is not LeaseKind.LOAD or lease.state is LeaseState.RELEASING:
                continue
            worker = self.members[lease.worker].worker
            if lease.bytes < worker.quota:
                raise InvariantBroken(f"{lease} books less than the quota, {worker.quota} bytes")

    @property
    def queues(self) -> tuple[Queue, Queue, Queue]:
        """Bursts before loads: a forward that waits holds memory already."""
        return self.bursts, self.loads, self.inits

    def recovering(self, now_s: float) -> bool:
        """Former workers may still be on their way back."""
        return now_s < self.recovering_until_s

    def accounts(self) -> Iterator[tuple[AccountBooks, AccountFigures]]:
        """The workers whose account could be read, and what they may hold."""
        for key, member in self.members.items():
            if member.figures is None or member.state == "leaving":
                continue
            allowed = max(self.ledger.booked_by(key), member.worker.quota)
            loading = member.state == "loading"
            yield AccountBooks(member.worker.identity, key, allowed, loading), member.figures

    def bursting(self, worker: int) -> int:
        """Bytes of the forwards that a worker has at work."""
        return sum(
            lease.bytes
            for lease in self.ledger.of_worker(worker)
            if lease.kind is LeaseKind.BURST and lease.state is not LeaseState.RELEASING
        )

    def named(self, name: str) -> Member | None:
        """The live worker of that name."""
        return next(
            (
                member
                for member in self.members.values()
                if member.worker.name == name and member.state != "leaving"
            ),
            None,
        )

    def unclaimed(self) -> int:
        """Bytes that guards still hand out to workers from before a restart."""
        return sum(sum(process.unclaimed.values()) for process in self.processes.values())

    def names(self, process: Process) -> tuple[str, ...]:
        """The process's workers' names, sorted; of very many the first, and how many more."""
        names = sorted(self.members[key].worker.name for key in process.members)
        if len(names) > NAMES_TOLD_MAX:
            names[NAMES_TOLD_MAX:] = [f"and {len(names) - NAMES_TOLD_MAX} more"]
        return tuple(names)

    def books(self) -> Iterator[ProcessBooks]:
        """The books of each process."""
        for process in self.processes.values():
            yield self.books_of(process)

    def recycled(self, process: Process) -> bool:
        """Whether it may be killed for what its workers gave back by word and keep.

        Never where a worker would die that does not leak, nor where a guard can take the bytes.
        """
        return self.settings.enforcement.leak_policy == "kill" and all(
            member.leaking and member.worker.account is None
            for member in (self.members[key] for key in process.members)
        )

    def books_of(self, process: Process) -> ProcessBooks:
        """One process's sums."""
        # Nobody knows which pool an account's worker is in before it is back: in any of them.
        active = quotas = sum(process.unclaimed.values())
        releasing = 0
        allowed, judged = process.baseline + active, False
        by_pool: dict[str, int] = dict.fromkeys(self.ledger.pools, active) if active else {}
        loading = False
        for key in process.members:
            member = self.members[key]
            holding = self.ledger.holding(key)
            active += holding.active
            releasing += holding.releasing
            for name, size in holding.by_pool.items():
                by_pool[name] = by_pool.get(name, 0) + size
            # Who has left has no quota any more, only bytes that must still come back.
            if member.state == "leaving":
                allowed += holding.booked
            else:
                allowed += max(holding.booked, member.worker.quota)
                quotas += member.worker.quota
                judged = True
            loading = loading or member.state == "loading"
        return ProcessBooks(
            process.identity,
            process.baseline,
            active,
            releasing,
            quotas,
            0 if process.ended else allowed if judged else None,
            loading,
            tuple(sorted(by_pool.items())),
            process.ended,
            process.baseline + active + NOISE_BYTES  # nobody is killed for what wanders
            if releasing and self.recycled(process)
            else None,
        )
