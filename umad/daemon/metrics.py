"""The daemon's figures for Prometheus: what is counted here, and the text that is shown.

Owns the histograms and counts that the state does not keep, and the rendering of everything in
Prometheus' text format; what the state knows becomes families in ``state_metrics``.  Rules: no
registry of the process is used, each rendering reads the state as it is, so that a worker that is
gone has no series any more; a figure that is not known has no sample and is never 0; names come
from registered workers and live processes, and of these at most ``SERIES_MAX`` are shown;
somebody who asks all the time costs one rendering each ``RENDER_EVERY_S``.
Source: prometheus.io, "Metric and label naming" and "Exposition formats".
"""

import gzip
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from umad import __version__
from umad.core.enforcement import FENCES
from umad.core.engine import Engine
from umad.core.histogram import Histogram
from umad.core.state import State
from umad.daemon import state_metrics
from umad.daemon.state_metrics import counter, gauge
from umad.values import Snapshot

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
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
        yield gauge("umad_up", "Whether the daemon answers.", 1)
        yield gauge("umad_generation", "Starts of the daemon, this one included.", state.generation)
        yield gauge("umad_uptime_seconds", "Since this start.", now_s - self._started_s)
        yield gauge(
            "umad_recovering",
            "Whether nothing is granted because former workers may still come back.",
            int(state.recovering(now_s)),
        )
        yield gauge("umad_connections", "Open connections of clients.", len(state.clients))
        yield counter("umad_looks", "Looks at memory.", self._looks)
        yield counter("umad_anomalies", "Readings that contradicted themselves.", self._anomalies)
        looks = HistogramMetricFamily(
            "umad_look_seconds", "How long a look at memory and what followed from it took."
        )
        looks.add_metric([], self._look_seconds.buckets(), self._look_seconds.sum)
        yield looks
        yield from self._stopping()
        yield from state_metrics.families(state, guarded, now_s)

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
            seconds.add_metric([step], histogram.buckets(), histogram.sum)
        yield seconds


class _Collected(Collector):
    """What prometheus_client asks for the families."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        """The families, of this moment."""
        return self._collect()
