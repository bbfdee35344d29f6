"""The daemon's state as families of metrics: pools, workers, processes, queues, counters.

A figure that is not known has no sample; who is gone has none any more.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from umad.core import ladder
from umad.core.audit import unattributed
from umad.core.report import physical, verdict, worker_state
from umad.core.room import free_now
from umad.core.state import Member, Process, State
from umad.values import Figure, Reading, Snapshot

# Workers and processes that have series; the rest is in the sums.  With names of 64 random
# characters the compressed text of so many is two thirds of what a message may have (a test).
SERIES_MAX: Final = 128
REASON_MAX: Final = 80
# The state's counters that are there from the first moment on; others appear with their first
# event.
_COUNTERS: Final = {
    "grants": "Leases that were granted.",
    "revocations": "Workers or processes that were told to stop.",
    "returns": "Workers whose bytes the guard took back.",
    "kills": "Processes that were sent SIGKILL.",
    "migrations": "Processes whose pages moved: out to swap, or out of a GPU's own memory.",
    "unkillable": "Processes that were still there long after SIGKILL.",
    "leaks": "Workers that said they gave bytes back and kept them.",
    "leases_expired": "Leases that ended by their deadline.",
    "leases_leaked": "Leases whose owner was garbage-collected instead of closed.",
    "evictions": "Models that were asked to go.",
    "evictions_missed": "Models that were asked to go and had not gone by the deadline.",
    "evictions_rescued": "Models that were asked to go and spared, since another could go.",
    "protocol_violations": "Connections that were closed for breaking the protocol.",
    "foreign_senders": "Processes that used another one's connection.",
    "orphaned": "Processes that ended and left others behind which hold memory.",
    "prediction_exceeded": "Forwards that took more than was predicted.",
    "fragmentation_steps": "Steps that were taken against fragmentation.",
    "oom_kills": "Processes that the kernel's OOM killer took, whoever they belong to.",
}
_REFUSALS: Final = "refusals_"
# What a queue is called, by what is asked for in it.
_QUEUES: Final = {"admit": "burst", "reserve": "load", "init_lock": "init"}


def families(state: State, guarded: Callable[[int], bool], now_s: float) -> Iterator[Metric]:
    """All of them.

    Args:
        state: the engine's.
        guarded: says whether a guard is active in a process, by pid.
        now_s: the loop's clock.
    """
    yield from _counted(state)
    yield from _queues(state, now_s)
    yield from _fragmentation(state)
    if state.snapshot is not None:
        yield from _pools(state, state.snapshot, now_s)
    yield from _workers(state)
    yield from _processes(state, guarded)


def gauge(name: str, meaning: str, value: float | None) -> Metric:
    """One without labels; what is not known has no sample."""
    return GaugeMetricFamily(name, meaning, value)


def counter(name: str, meaning: str, value: float) -> Metric:
    """One without labels; ``_total`` is added."""
    return CounterMetricFamily(name, meaning, value)


def _labelled(
    name: str, meaning: str, label: str, values: Iterable[tuple[str, float | None]]
) -> Metric:
    """A gauge with one label; what is not known has no sample."""
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for key, value in values:
        if value is not None:
            family.add_metric([key], value)
    return family


def _info(name: str, meaning: str, rows: Iterable[Mapping[str, str]]) -> Metric:
    """A gauge of 1 whose labels are what it tells."""
    family = GaugeMetricFamily(name, meaning)
    for row in rows:
        family.add_sample(name, dict(row), 1)
    return family


def _counted(state: State) -> Iterator[Metric]:
    refusals = CounterMetricFamily(
        "umad_refusals", "Requests that were refused, by error code.", labels=["code"]
    )
    for name, count in state.counters.items():
        if name.startswith(_REFUSALS):
            refusals.add_metric([name.removeprefix(_REFUSALS)], count)
        elif name not in _COUNTERS:
            yield counter(f"umad_{name}", f"How often: {name.replace('_', ' ')}.", count)
    yield refusals
    for name, meaning in _COUNTERS.items():
        yield counter(f"umad_{name}", meaning, state.counters[name])


def _queues(state: State, now_s: float) -> Iterator[Metric]:
    queues = dict(zip(_QUEUES.values(), state.queues, strict=True))
    yield _labelled(
        "umad_queue_waiting",
        "Requests that wait for a grant.",
        "queue",
        ((name, len(queue)) for name, queue in queues.items()),
    )
    yield _labelled(
        "umad_queue_oldest_seconds",
        "For how long the one that waits longest has waited, 0 where nobody waits.",
        "queue",
        (
            (name, max((now_s - one.since_s for one in queue), default=0.0))
            for name, queue in queues.items()
        ),
    )
    waits = HistogramMetricFamily(
        "umad_wait_seconds", "From a request to its grant.", labels=["queue"]
    )
    for what, histogram in state.waits.items():
        waits.add_metric([_QUEUES[what]], histogram.buckets(), histogram.sum)
    yield waits
    loads = HistogramMetricFamily(
        "umad_load_seconds",
        "From a load's grant, or from its turn where that came later, to its end.",
    )
    loads.add_metric([], state.load_seconds.buckets(), state.load_seconds.sum)
    yield loads
    yield gauge("umad_drained", "Whether people let no load begin.", int(state.drained))
    yield gauge(
        "umad_admission_closed",
        "Whether nothing is granted because the machine is below its reserve.",
        int(state.relief.closed_s is not None),
    )


def _fragmentation(state: State) -> Iterator[Metric]:
    risk = ladder.risk_of(state, None)
    yield gauge(
        "umad_fragmentation_ratio",
        "How much of the machine's free memory lies in crumbs: 0 none, 1 all.",
        risk.ratio,
    )
    yield _info(
        "umad_fragmentation_risk",
        "How likely a large load is to meet trouble.",
        [{"risk": risk.level.value}],
    )


def _pools(state: State, snapshot: Snapshot, now_s: float) -> Iterator[Metric]:
    yield gauge(
        "umad_sample_age_seconds", "Age of the figures of memory here.", now_s - snapshot.taken_s
    )
    pools = list(snapshot.pools.values())
    room = {pool.name: free_now(state, pool) for pool in pools}
    readings = [reading for pool in pools for reading in (pool.capacity, pool.used, pool.safe)]
    yield _labelled(
        "umad_broken_readings",
        "Figures that exist and cannot be read or believed now.",
        "of",
        (
            ("pool", _broken(readings)),
            ("process", _broken(reading.bytes for reading in snapshot.processes.values())),
        ),
    )
    for name, meaning, values in (
        ("capacity", "Physical size.", [(pool.name, pool.capacity.value) for pool in pools]),
        ("used", "Taken by anybody.", [(pool.name, pool.used.value) for pool in pools]),
        (
            "headroom",
            "What can be granted now, in the books and in the machine.",
            [(pool, bytes_) for pool, (bytes_, _, _) in room.items()],
        ),
        (
            "unattributed",
            "In use and held by no worker's process: other programs, the system, leaks of drivers.",
            [(pool.name, unattributed(pool, snapshot)) for pool in pools],
        ),
        ("reserve", "Never granted.", list(state.reserves.items())),
        (
            "budget",
            "What all workers together may book.",
            [(pool.name, pool.budget) for pool in state.ledger.pools.values()],
        ),
        (
            "booked",
            "Booked by workers, what is on its way back included.",
            [(name, state.ledger.booked(name)) for name in state.ledger.pools],
        ),
    ):
        yield _labelled(
            f"umad_pool_{name}_bytes", f"Of a pool of memory: {meaning}", "pool", values
        )
    yield _info(
        "umad_pool_binding_info",
        "Which limit sets a pool's headroom.",
        ({"pool": name, "limit": binding} for name, (_, binding, _) in room.items()),
    )
    yield gauge(
        "umad_unclaimed_bytes",
        "Kept free for workers from before a restart that have not come back.",
        state.unclaimed(),
    )
    unexplained = snapshot.info.get("mem_unexplained")
    yield gauge(
        "umad_unexplained_bytes",
        "In use, and no line of the kernel's and no GPU says by what: an unknown allocator's.",
        unexplained if isinstance(unexplained, int) else None,
    )


def _broken(readings: Iterable[Reading]) -> int:
    return sum(reading.state is Figure.BROKEN for reading in readings)


def _workers(state: State) -> Iterator[Metric]:
    named: dict[str, Member] = {}
    booked: dict[str, int] = {}
    for key, member in state.members.items():  # the later of two is the one that has not left
        name = member.worker.name
        named[name] = member
        booked[name] = booked.get(name, 0) + state.ledger.booked_by(key)
    yield gauge("umad_workers", "Registered workers, leaving ones included.", len(state.members))
    beyond = max(0, len(named) - SERIES_MAX)
    yield gauge("umad_workers_without_series", "Workers beyond the most shown by name.", beyond)
    shown = list(named.items())[:SERIES_MAX]
    figures = [(name, member.figures) for name, member in shown if member.figures is not None]
    for kind, meaning, values in (
        ("quota", "What it may hold.", [(name, one.worker.quota) for name, one in shown]),
        ("load_peak", "What its load may hold.", [(name, one.worker.peak) for name, one in shown]),
        ("booked", "What is booked for it.", [(name, booked[name]) for name, _ in shown]),
        ("measured", "Its model after the load.", [(name, one.measured) for name, one in shown]),
        ("held", "Charged to its account now.", [(name, one.held) for name, one in figures]),
        ("peak", "The most its account was charged.", [(name, one.peak) for name, one in figures]),
    ):
        yield _labelled(f"umad_worker_{kind}_bytes", f"Of a worker: {meaning}", "worker", values)
    yield _held(state, shown)
    refused = CounterMetricFamily(
        "umad_worker_refused_allocations",
        "Allocations that the guard refused to a worker.",
        labels=["worker"],
    )
    for name, one in figures:
        refused.add_metric([name], one.refused)
    yield refused
    forwards = CounterMetricFamily(
        "umad_worker_forwards", "Forwards that a worker reported.", labels=["worker"]
    )
    for name, member in shown:
        forwards.add_metric([name], member.forwards)
    yield forwards
    ratios = HistogramMetricFamily(
        "umad_prediction_ratio",
        "What a model's forwards took, as a share of what the cost formula had predicted.",
        labels=["model"],
    )
    for model in {member.worker.model: None for _, member in shown}:  # a dict keeps the order
        if (known := state.history.ratios(model)) is not None:
            ratios.add_metric([model], known.buckets(), known.sum)
    yield ratios
    yield _info(
        "umad_worker_state",
        "The state that a worker is in.",
        ({"worker": name, "state": worker_state(state, member)} for name, member in shown),
    )
    yield _info(
        "umad_worker_info",
        "Which process a worker lives in, and which pool its bytes are booked in.",
        (
            {
                "worker": name,
                "process": str(member.worker.identity.pid),
                "pool": member.worker.pool,
            }
            for name, member in shown
        ),
    )


def _held(state: State, shown: Iterable[tuple[str, Member]]) -> Metric:
    family = GaugeMetricFamily(
        "umad_worker_physical_bytes",
        "Of a worker: What it physically holds, by its account, or by its process if that is its "
        "alone.",
        labels=["worker", "source"],
    )
    for name, member in shown:
        if (held := physical(state, member)) is not None:
            family.add_metric([name, held[1]], held[0])
    return family


def _processes(state: State, guarded: Callable[[int], bool]) -> Iterator[Metric]:
    read = {} if state.snapshot is None else state.snapshot.processes
    shown = list(state.processes.values())[:SERIES_MAX]
    books = [(str(one.identity.pid), state.books_of(one)) for one in shown]
    readings = {str(one.identity.pid): read[one.identity] for one in shown if one.identity in read}
    held = {pid: reading.bytes for pid, reading in readings.items()}
    locked = [(pid, reading.locked_bytes) for pid, reading in readings.items()]
    swapped = [(pid, reading.moved.swapped) for pid, reading in readings.items()]
    evicted = [(pid, reading.moved.evicted) for pid, reading in readings.items()]
    yield gauge("umad_processes", "Processes that have workers.", len(state.processes))
    for kind, meaning, values in (
        ("", "What it physically holds.", [(pid, reading.value) for pid, reading in held.items()]),
        ("locked_", "Of that locked or pinned: it cannot be reclaimed.", locked),
        ("swapped_", "Moved out to swap.", swapped),
        ("evicted_", "Moved out of a GPU's own memory.", evicted),
        ("baseline_", "Held before its first worker.", [(pid, one.baseline) for pid, one in books]),
        ("limit_", "More than this is a breach.", [(pid, one.limit) for pid, one in books]),
    ):
        name = f"umad_process_{kind}bytes"
        yield _labelled(name, f"Of a process with workers: {meaning}", "process", values)
    yield _info(
        "umad_process_info",
        "Whose process it is, and which source its bytes are from.",
        (
            {
                "process": str(one.identity.pid),
                "comm": one.comm,
                "source": held[pid].source if (pid := str(one.identity.pid)) in held else "",
            }
            for one in shown
        ),
    )
    yield _info(
        "umad_process_state",
        "What is being done about a process.",
        ({"process": str(one.identity.pid), "state": verdict(state, one)} for one in shown),
    )
    yield _labelled(
        "umad_process_fragmentation_ratio",
        "How much of what a process's device allocator has free lies in crumbs, where it tells.",
        "process",
        (
            (str(one.identity.pid), ladder.risk_of(state, one.identity).ratio)
            for one in shown
            if one.segments is not None
        ),
    )
    yield _info(
        "umad_guard_info",
        "Whether quotas are enforced inside a process, and why not.",
        (_guard(one, on=guarded(one.identity.pid)) for one in shown),
    )


def _guard(process: Process, *, on: bool) -> dict[str, str]:
    return {
        "process": str(process.identity.pid),
        "state": "on" if on else "off",
        "reason": "" if on else process.guard_off[:REASON_MAX],
    }
