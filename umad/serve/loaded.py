"""A model in memory: what a worker's thread does with it, and what its forwards have taken.

Rules: the bytes of a run are admitted before it begins; what it took is taken in, however it
ended.  Stays out: when a model is loaded, and for whom.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Final, Protocol

import structlog

from umad.client.blocking import Client
from umad.client.burst import Burst, Forward
from umad.client.worker import Worker
from umad.core.cost import BEYOND_MAX, CostModel, Sample
from umad.errors import QuotaDenied, UmadError
from umad.serve.devices import Place
from umad.serve.jobs import Job
from umad.serve.kinds.base import Joins, Prepared, Result, Runner, Tells, Together
from umad.serve.link import pack_vector
from umad.serve.translate import translated
from umad.settings import ModelSettings
from umad.units import MIB

# A huge page of the tensors and one of other blocks may be used in part, which no sample shows.
HUGE_PAGES_BYTES: Final = 4 * MIB
STRAY_S: Final = 0.1  # between two looks at it
TELL_S: Final = 5.0  # between two words that long work goes on
log = structlog.get_logger()


class Load(Protocol):
    """Reads a model from its folder; ``umad.serve.loader.load`` is the real one."""

    def __call__(
        self,
        kind: str,
        path: str,
        *,
        device: str,
        dtype: str,
        progress: Callable[[str, float], None],
    ) -> Runner:
        """See ``umad.serve.loader.load``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A forward: at most so many tokens in each of its rows, and bytes; and how it is done."""

    tokens: int
    rows: int
    worst_case: int
    run: Callable[[], list[Result]]


class Loaded:
    """A model in a box: the lease hangs on the box, so the model can go before the lease does.

    Args:
        name: of the instance, for the log.
        runner: the model.
        place: where it lives.

    Attributes:
        run_s: seconds of the last run that went well.
        run_size: tokens and rows of its largest forward.
    """

    def __init__(self, name: str, runner: Runner, place: Place) -> None:
        self._name = name
        self.runner = runner
        self.place = place
        self.run_s = 0.0
        self.run_size = (1, 1)
        self._at_work: tuple[Worker, Forward] | None = None
        self._tell_s = 0.0
        self._stray_s, self._stray = 0.0, 0
        self._cost = CostModel()

    def learn(self, client: Client, model: ModelSettings) -> None:
        """Ask the daemon, which keeps it, what the forwards of this model have taken so far."""
        shape = f"{model.kind} {model.device} {model.dtype} {self.runner.resident_bytes}"
        if not _padded(self.runner):
            shape += " mean"  # what the tokens of a sample are, of several rows
        try:
            known = client.call("cost", {"model": model.name, "shape": shape})
        except UmadError as error:
            log.info("model.cost_unknown", model=model.name, why=error.message)
        else:
            self._cost = CostModel(Sample(*row) for row in known.get("samples", ()))

    def room(self, worker: Worker, quota: int) -> int:
        """Bytes that a forward may take within ``quota``; below 0 where the model is over it.

        Args:
            worker: whose quota it is.
            quota: what the model may hold without asking, in bytes.
        """
        return quota - self.held(worker) - self.stray(worker)

    def held(self, worker: Worker, kept: int = 0) -> int:
        """What the model holds between two runs; asked between two runs.

        Args:
            worker: whose model it is.
            kept: of what it holds, what goes before anything is refused.
        """
        held = self.runner.resident_bytes
        if worker.account is not None:  # what it keeps from run to run is there already
            held = max(held, worker.account_bytes - kept + HUGE_PAGES_BYTES)
        return held

    def stray(self, worker: Worker) -> int:
        """``Worker.stray_bytes`` a moment ago: to read it takes as long as a small decision."""
        if (now_s := monotonic()) >= self._stray_s:
            self._stray_s, self._stray = now_s + STRAY_S, worker.stray_bytes
        return self._stray

    def predict(self, worker: Worker, tokens: int, rows: int, worst_case: int) -> int:
        """Bytes to book for a forward of so many rows of so many tokens."""
        # One that is far larger than any since the load builds caches, too, which no sample shows.
        known = tokens * rows <= BEYOND_MAX * worker.meter.warmed
        return self._cost.predict(tokens, rows, worst_case, known=known)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Around what asks for predicted bytes: the cost model hears where there is no room."""
        try:
            yield
        except QuotaDenied:
            self._cost.refused()
            raise

    def observe(self, sample: Sample) -> None:
        """A forward has taken so much."""
        self._cost.observe(sample)

    def goes_on(self, worker: Worker, bursts: Iterable[Burst | Forward]) -> None:
        """Between two steps of long work: the daemon hears that it goes on.

        Else it would end the bursts in time, and take the model that works most for an idle one.
        """
        for burst in bursts:
            burst.extend()
        if monotonic() >= self._tell_s:
            self._tell_s = monotonic() + TELL_S
            worker.progress("serving", 1.0)

    def between(self) -> None:
        """Called by a run between its steps."""
        if self._at_work is not None:
            worker, forward = self._at_work
            self.goes_on(worker, [forward])

    def alone(self, job: Job) -> Work:
        """The forward that answers one job.

        Raises:
            UmadError: the job means nothing to the model.
        """
        runner, data = self.runner, job.data

        def cancelled() -> bool:
            self.between()
            return job.cancelled

        if isinstance(runner, Together):
            read: Prepared = job.prepared
            run = partial(runner.run_together, [read], cancelled)
            return Work(read.tokens, read.rows, read.bytes_needed, run)
        answer = (
            partial(runner.run_telling, data, cancelled, job.emit)
            if isinstance(runner, Tells)
            else partial(runner.run, data, cancelled)
        )
        with translated(self._name, "job"):
            worst_case = runner.bytes_needed(data)
            tokens, rows = runner.size(data)
        return Work(tokens, rows, worst_case, lambda: [answer()])

    def run(
        self, worker: Worker, work: Work, quota: int, wait_s: float, check: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """Do a forward; the results are as they travel.

        Args:
            worker: whose quota it is.
            work: what to do.
            quota: what the model may hold without asking, in bytes.
            wait_s: for the bytes beyond it.
            check: raises why it is not to begin, or its results not to be used.

        Raises:
            UmadError: the bytes were refused, or the model failed.
        """
        need = self.predict(worker, work.tokens, work.rows, work.worst_case)
        beyond = max(0, need - self.room(worker, quota))
        forward = worker.forward(
            beyond, predicted=need, tokens=work.tokens, batch=work.rows, wait_s=wait_s
        )
        try:
            with self.admitted(), forward:
                check()
                try:
                    with translated(self._name, "job"), self.place.use():
                        self._at_work = worker, forward
                        began_s = perf_counter()
                        done = work.run()
                        self.run_s = perf_counter() - began_s
                finally:
                    self._at_work = None
                    if beyond:  # torch would keep the burst's segments after its lease has ended
                        self.place.release()
                if len(done) == 1 and done[0].size is not None:
                    forward.tokens, forward.batch = done[0].size
                self.run_size = forward.tokens, forward.batch
                check()  # a run that was cut short ends like any other, and shows nothing
        finally:
            if forward.peak is not None:  # it began
                took = (forward.tokens, forward.batch, forward.peak, need)
                self._cost.observe(Sample(*took, exact=forward.exact))
        return [_travelling(result.data) for result in done]


def _padded(runner: Runner) -> bool:
    """Whether the rows of its forwards are as long as the longest of them."""
    if isinstance(runner, Joins) and runner.joins:
        return False
    return not isinstance(runner, Together) or runner.bounds.padded


def _travelling(data: dict[str, Any]) -> dict[str, Any]:
    """As ``link`` says: what has many elements travels as bytes."""
    if "vectors" in data:
        return {**data, "vectors": [pack_vector(one) for one in data["vectors"]]}
    if "segments" in data:
        return {**data, "segments": json.dumps(data["segments"]).encode()}
    return data
