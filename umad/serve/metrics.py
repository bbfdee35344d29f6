"""``/metrics`` of the front: its own figures, and the daemon's after them.

Owns the count of requests by route, model and status, their times by layer, the one line in the log
that each of them gets, and the asking of the daemon.  Rules: no registry of the process is used;
labels are routes, layers and models that are configured, never what a client wrote; the daemon is
asked in a thread, once at a time however many ask, and without it the front's own figures are there
all the same.
"""

import asyncio
import gzip
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umad.client import connect
from umad.errors import UmadError
from umad.serve.spans import CLIENT_GONE, LAYERS, Span, begin
from umad.serve.work_metrics import families

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
DAEMON_TIMEOUT_S: Final = 1.0
KEPT_S: Final = 0.2
_OTHER: Final = "other"
_BUG: Final = 500  # what an exception is on its way to become
_GONE: Final = 499  # nothing was answered, because nobody was there
_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NO_DAEMON: Final = (
    b"# HELP umad_up Whether the daemon answers.\n# TYPE umad_up gauge\numad_up 0.0\n"
)
log = structlog.get_logger()


class FrontMetrics(Collector):
    """Counts requests and shows them with what ``look`` says.

    Args:
        socket: the daemon's.
        look: the front's state as ``/status`` shows it.
    """

    def __init__(self, socket: str, look: Callable[[], Mapping[str, Any]]) -> None:
        self._socket = socket
        self._look = look
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.refused: Counter[str] = Counter()
        self.client_gone = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.seconds = Histogram(
            "umad_serve_request_seconds",
            "From a request's headers to the end of its answer.",
            ["route", "model"],
            registry=None,
            buckets=_BOUNDS,
        )
        self.layers = Histogram(
            "umad_serve_layer_seconds",
            "Where requests waited: gate (their turn), body (the client sends), queue (the model "
            "is busy or loaded), engine (it answers), send (the client takes the answer).",
            ["layer", "model"],
            registry=None,
            buckets=_BOUNDS,
        )
        self.first = Histogram(
            "umad_serve_first_token_seconds",
            "From a request's headers to the first part of its stream.",
            ["model"],
            registry=None,
            buckets=_BOUNDS,
        )
        self._asking = asyncio.Lock()
        self._daemon = b""
        self._asked_s = float("-inf")

    def note(self, route: str, status: int, span: Span) -> None:
        """Count a request that has ended."""
        seconds, model = span.age_s, span.model
        self.requests[route, model, status] += 1
        self.seconds.labels(route, model).observe(seconds)
        if span.code == CLIENT_GONE:
            self.client_gone += 1
        elif span.code != "ok":
            self.refused[span.code] += 1
        for layer in LAYERS:
            if model and layer in span.seconds:
                self.layers.labels(layer, model).observe(span.seconds[layer])
        if span.first_s is not None:
            self.first.labels(model).observe(span.first_s)

    async def text(self) -> bytes:
        """The front's figures and the daemon's, in the text format."""
        async with self._asking:
            if time.monotonic() - self._asked_s >= KEPT_S:
                self._daemon = await asyncio.to_thread(_ask, self._socket)
                self._asked_s = time.monotonic()
        return generate_latest(self._registry) + self._daemon

    def collect(self) -> Iterator[Metric]:
        """The families, of this moment; for prometheus_client."""
        requests = CounterMetricFamily(
            "umad_serve_requests",
            "Requests that were answered; status 499 is a client that hung up.",
            labels=["route", "model", "status"],
        )
        for (route, model, status), count in self.requests.items():
            requests.add_metric([route, model, str(status)], count)
        yield requests
        for histogram in (self.seconds, self.layers, self.first):
            for family in histogram.collect():
                family.samples = [
                    one for one in family.samples if not one.name.endswith("_created")
                ]
                yield family
        look = self._look()
        models, work, engine = look["models"], look["requests"], look["engine"]
        yield _by_model(
            "umad_serve_requests_waiting",
            "Requests in a model's queue or in its work.",
            ((name, state["requests"]) for name, state in models.items()),
        )
        yield _by_model(
            "umad_serve_model_ready",
            "Whether a model takes requests.",
            ((name, state["ready"]) for name, state in models.items()),
        )
        yield from families({name: state["work"] for name, state in models.items()})
        refused = CounterMetricFamily(
            "umad_serve_refusals", "Requests that were refused, by error code.", labels=["code"]
        )
        for code, count in work["refused"].items():
            refused.add_metric([code], count)
        yield refused
        yield GaugeMetricFamily(
            "umad_serve_gate_waiting", "Requests whose turn has not come.", work["waiting"]
        )
        yield GaugeMetricFamily(
            "umad_serve_body_bytes", "Bodies of requests that are held.", work["body_bytes"]
        )
        yield GaugeMetricFamily(
            "umad_serve_engine_up", "Whether the inference process runs.", int(engine["running"])
        )
        yield CounterMetricFamily(
            "umad_serve_engine_restarts",
            "Inference processes that ended and were started again.",
            engine["restarts"],
        )


class MetricsMiddleware:
    """Counts every request with its status and its times, and tells the log; the outermost one."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._started = f"{int(time.time()):x}"
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the server for each request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        span = begin(scope, f"{self._started}-{next(self._numbers)}")
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = span.ident
            with span.inside("send"):
                await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            span.code = "internal"
            raise
        finally:
            status = status or (_GONE if span.code == CLIENT_GONE else _BUG)
            route = self._route(scope)
            self._metrics.note(route, status, span)
            if scope["method"] == "POST":
                _tell(route, status, span)

    def _route(self, scope: Scope) -> str:
        """The route's own path: what a client wrote into one is not a label."""
        path = getattr(scope.get("route"), "path", scope["path"])
        return path if path in self._routes else _OTHER


def _tell(route: str, status: int, span: Span) -> None:
    """The one line of a request: where it waited, how long, and why it failed if it did."""
    times = {f"{layer}_s": span.seconds.get(layer) for layer in LAYERS}
    times |= {"first_s": span.first_s, "seconds": span.age_s}
    log.info(
        "request.end",
        request=span.ident,
        route=route,
        model=span.model or "?",
        status=status,
        code=span.code,
        **({"reason": span.reason} if span.reason else {}),
        **{name: round(value, 4) for name, value in times.items() if value is not None},
    )


def _by_model(name: str, meaning: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=["model"])
    for model, value in values:
        family.add_metric([model], value)
    return family


def _ask(socket: str) -> bytes:
    """The daemon's text; without one, that there is none."""
    try:
        with connect(socket, name="umad-serve metrics", timeout_s=DAEMON_TIMEOUT_S) as client:
            answer = client.call("metrics")
    except UmadError:
        return _NO_DAEMON
    return gzip.decompress(answer["gzip"])
