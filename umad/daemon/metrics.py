"""The daemon's figures for Prometheus: what is counted here, and the text that is shown.

Owns the histograms and counts that the state does not keep, and the rendering of everything in
Prometheus' text format.  Rules: no registry of the process is used, each rendering reads the
state as it is, so that a worker that is gone has no series any more; a figure that is not known
has no sample and is never 0; names come from registered workers and live processes, and of these
at most ``SERIES_MAX`` are shown; somebody who asks all the time costs one rendering each
``RENDER_EVERY_S``.
Source: prometheus.io, "Metric and label naming" and "Exposition formats".
"""

import gzip
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from umad import __version__
from umad.core.enforcement import FENCES
from umad.core.engine import Engine
from umad.core.report import worker_state
from umad.core.room import free_now
from umad.core.state import Member, Process, State
from umad.values import Figure, Reading, Snapshot

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Workers and processes that have series; the rest is in the sums.  With names of 64 random
# characters the compressed text of so many is half of what a message may have (a test).
SERIES_MAX: Final = 128
REASON_MAX: Final = 80
RENDER_EVERY_S: Final = 0.2

# Source: DESIGN 11: a look at most 300 us; seen to revoke 5 ms, to SIGKILL and to gone 100 ms.
_LOOK_BOUNDS: Final = (1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_STOP_BOUNDS: Final = (1e-3, 2e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)
# What a "stopped" event tells of each step, counted from the sample that showed the breach.
_STEPS: Final = {
    "revoke": "seen_to_revoke_s",
    "kill": "seen_to_kill_s",
    "gone": "seen_to_gone_s",
}
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
}
_REFUSALS: Final = "refusals_"


class Histogram:
    """Counts of seconds up to each bound; ``observe`` costs a bisection."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), the last without a bound."""
        total = 0
        found = []
        for bound, count in zip([*self._bounds, "+Inf"], self._counts, strict=True):
            total += count
            found.append((str(bound), float(total)))
        return found


class Metrics:
    """Counts, and renders on demand.

    Args:
        engine: whose state is shown.
        guarded: says whether a guard is active in a process, by pid.
        now_s: the loop's clock.
    """

    def __init__(
        self, engine: Engine, guarded: Callable[[int], bool], now_s: Callable[[], float]
    ) -> None:
        self._now_s = now_s
        self._started_s = now_s()
        self._look_seconds = Histogram(_LOOK_BOUNDS)
        self._stop_seconds = {step: Histogram(_STOP_BOUNDS) for step in _STEPS}
        self._stops = dict.fromkeys(FENCES, 0)
        self._looks = 0
        self._anomalies = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collected(lambda: self._collect(engine.state, guarded)))
        self._text = b""
        self._compressed = b""
        self._rendered_s = float("-inf")

    def looked(self, snapshot: Snapshot, seconds: float) -> None:
        """One look at memory and all that followed took so long."""
        self._looks += 1
        self._anomalies += len(snapshot.anomalies)
        self._look_seconds.observe(seconds)

    def stopped(self, fields: Mapping[str, Any]) -> None:
        """A worker or a process was stopped: the fields of that event."""
        self._stops[fields["fence"]] += 1
        for step, name in _STEPS.items():
            if fields[name] is not None:
                self._stop_seconds[step].observe(fields[name])

    def text(self) -> bytes:
        """Everything in the text format, ``RENDER_EVERY_S`` old at most."""
        if self._now_s() - self._rendered_s >= RENDER_EVERY_S:
            self._rendered_s = self._now_s()
            self._text, self._compressed = generate_latest(self._registry), b""
        return self._text

    def compressed(self) -> bytes:
        """The same in gzip's format."""
        text = self.text()
        self._compressed = self._compressed or gzip.compress(text, 3, mtime=0)
        return self._compressed

    def _collect(self, state: State, guarded: Callable[[int], bool]) -> Iterator[Metric]:
        now_s = self._now_s()
        yield InfoMetricFamily("umad_build", "This daemon.", {"version": __version__})
        yield _gauge("umad_up", "Whether the daemon answers.", 1)
        yield _gauge(
            "umad_generation", "Starts of the daemon, this one included.", state.generation
        )
        yield _gauge("umad_uptime_seconds", "Since this start.", now_s - self._started_s)
        yield _gauge(
            "umad_recovering",
            "Whether nothing is granted because former workers may still come back.",
            int(state.recovering(now_s)),
        )
        yield _gauge("umad_connections", "Open connections of clients.", len(state.clients))
        yield _counter("umad_looks", "Looks at memory.", self._looks)
        yield _counter("umad_anomalies", "Readings that contradicted themselves.", self._anomalies)
        looks = HistogramMetricFamily(
            "umad_look_seconds", "How long a look at memory and what followed from it took."
        )
        looks.add_metric([], self._look_seconds.buckets(), self._look_seconds.sum_s)
        yield looks
        yield from self._stopping()
        yield from _counted(state)
        yield from _queues(state)
        if state.snapshot is not None:
            yield from _pools(state, state.snapshot, now_s)
        yield from _workers(state)
        yield from _processes(state, guarded)

    def _stopping(self) -> Iterator[Metric]:
        stops = CounterMetricFamily(
            "umad_stops",
            "Workers and processes that were stopped, by what it took.",
            labels=["fence"],
        )
        for fence, count in self._stops.items():
            stops.add_metric([fence], count)
        yield stops
        seconds = HistogramMetricFamily(
            "umad_stop_seconds",
            "From the sample that showed a breach to each step of the stop.",
            labels=["step"],
        )
        for step, histogram in self._stop_seconds.items():
            seconds.add_metric([step], histogram.buckets(), histogram.sum_s)
        yield seconds


class _Collected(Collector):
    """What prometheus_client asks for the families."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        """The families, of this moment."""
        return self._collect()


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value)


def _counter(name: str, meaning: str, value: float) -> Metric:
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
            yield _counter(f"umad_{name}", f"How often: {name.replace('_', ' ')}.", count)
    yield refusals
    for name, meaning in _COUNTERS.items():
        yield _counter(f"umad_{name}", meaning, state.counters[name])


def _queues(state: State) -> Iterator[Metric]:
    lengths = zip(("burst", "load", "init"), (len(queue) for queue in state.queues), strict=True)
    yield _labelled("umad_queue_waiting", "Requests that wait for a grant.", "queue", lengths)


def _pools(state: State, snapshot: Snapshot, now_s: float) -> Iterator[Metric]:
    yield _gauge(
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
    yield _gauge(
        "umad_unclaimed_bytes",
        "Kept free for workers from before a restart that have not come back.",
        state.unclaimed(),
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
    yield _gauge("umad_workers", "Registered workers, leaving ones included.", len(state.members))
    beyond = max(0, len(named) - SERIES_MAX)
    yield _gauge("umad_workers_without_series", "Workers beyond the most shown by name.", beyond)
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
    yield _info(
        "umad_worker_state",
        "The state that a worker is in.",
        ({"worker": name, "state": worker_state(state, member)} for name, member in shown),
    )


def _processes(state: State, guarded: Callable[[int], bool]) -> Iterator[Metric]:
    read = {} if state.snapshot is None else state.snapshot.processes
    shown = list(state.processes.values())[:SERIES_MAX]
    books = [(str(one.identity.pid), state.books_of(one)) for one in shown]
    readings = {str(one.identity.pid): read[one.identity] for one in shown if one.identity in read}
    held = {pid: reading.bytes for pid, reading in readings.items()}
    locked = [(pid, reading.locked_bytes) for pid, reading in readings.items()]
    swapped = [(pid, reading.moved.swapped) for pid, reading in readings.items()]
    evicted = [(pid, reading.moved.evicted) for pid, reading in readings.items()]
    yield _gauge("umad_processes", "Processes that have workers.", len(state.processes))
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
