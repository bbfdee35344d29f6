"""One model instance in one thread: it loads, serves its model's queue, and comes back.

Owns ``ModelThread`` and what a model's own exceptions become.  Rules:
1. the bytes of a run are admitted before it begins;
2. whatever a model raises becomes an error map; its exception, which holds the frames and with
   them the tensors, is gone before the next job;
3. a revoked worker's answers are thrown away, and it loads again with a wait that doubles.
Stays out: the link, the daemon's protocol, what a model is.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import structlog

from umad.client.blocking import Client
from umad.client.memory import forget_frames, give_back, is_out_of_memory
from umad.client.worker import Worker
from umad.core.cost import BEYOND_MAX, CostModel, Sample
from umad.errors import (
    ModelFailed,
    ModelLoading,
    QuotaExceeded,
    UmadError,
    WorkerRevoked,
)
from umad.serve.devices import Place, place
from umad.serve.instance import Instance, stopped
from umad.serve.jobs import Job, JobQueue, Seat, gone, waited
from umad.serve.kinds.base import Runner
from umad.serve.link import ModelState, pack_vector
from umad.serve.logs import place_of
from umad.settings import ModelSettings
from umad.units import MIB, format_bytes

LOAD_WAIT_S: Final = 10.0
# What a model may keep of a request that passed its quota before it is loaded afresh: caches and
# libraries' buffers are no leak.
GROWN_MAX_BYTES: Final = 16 * MIB
GROWN_MAX_RATIO: Final = 0.05
# A huge page of the tensors and one of other blocks may be used in part, which no sample shows.
HUGE_PAGES_BYTES: Final = 4 * MIB
# A revoked thread that is where it was after this does not come back soon.
STUCK_AFTER_S: Final = 5.0
# Of a core; it may share the cores and the interpreter's lock with many others.
STUCK_BUSY_RATIO: Final = 0.1
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


class ModelThread(Instance):
    """Keeps one instance of a model loaded and serving, for as long as the engine runs.

    Args:
        client: the connection to the daemon, shared by all threads.
        model: what to load.
        instance: 0 for the first copy.
        queue: the model's.
        load: see ``Load``.
        report: told every change of state; called from several threads.
        poisoned: called when a device fault has left the whole process unusable.
        hold_s: wait this long before the first load (the model was revoked just before).
        stuck: called when the revoked thread has not come back: another must take its place.
        guard: the setting ``serve.guard``.
    """

    def __init__(
        self,
        client: Client,
        model: ModelSettings,
        instance: int,
        queue: JobQueue,
        load: Load,
        report: Callable[[str, int, ModelState], None],
        poisoned: Callable[[], None],
        hold_s: float = 0.0,
        stuck: Callable[["ModelThread"], None] = lambda _: None,
        guard: str = "auto",
    ) -> None:
        super().__init__(model, instance, report, hold_s)
        self._client = client
        self._queue = queue
        self._load = load
        self._poisoned = poisoned
        self._stuck = stuck
        self._guard = guard
        self._revoked: WorkerRevoked | None = None
        self._recycled: ModelLoading | None = None
        self._job: Job | None = None
        self._seat: Seat | None = None
        self._passed_quota = False
        self._runs_in = 0

    @property
    def busy(self) -> bool:
        """A job is at work."""
        return self._job is not None

    def stop(self) -> None:
        """Have the thread unload and end, after the job at work."""
        self._stopping.set()
        if self._job is not None:
            self._job.cancelled = True
        self._queue.wake()

    def _live(self) -> UmadError:
        """Register, load, serve, unload; returns why that ended."""
        model = self._model
        self._revoked = self._recycled = None
        self._runs_in = threading.get_ident()
        self._say("waiting")
        try:
            with self._client.worker(
                model.name,
                quota=model.quota,
                peak=model.peak_bytes,
                instance=self._instance,
                priority=model.priority,
                pin=model.pin,
                pool=model.pool,
                on_revoke=self._on_revoke,
                on_recycle=self._on_recycle,
            ) as worker:
                self._load_and_serve(worker)
        except UmadError as error:
            return self._revoked or error
        finally:
            give_back()
        return self._why_ended()

    def _load_and_serve(self, worker: Worker) -> None:
        model = self._model
        began_s = time.monotonic()

        def progress(stage: str, ratio: float) -> None:
            worker.progress(stage, ratio)
            self._report(ModelState("loading", stage, ratio))

        def load() -> _Loaded:
            self._report(ModelState("loading"))
            where = place(model, worker.account, self._guard)
            try:
                with _translated(self.name, "load"), where.use():
                    runner = self._load(
                        model.kind,
                        model.path,
                        device=model.device,
                        dtype=model.dtype,
                        progress=progress,
                    )
            finally:
                where.release()  # of a failed load all, of one that went well what only it needed
            return _Loaded(runner, where)

        loaded = worker.load(load, wait_s=LOAD_WAIT_S)
        try:
            loaded.cost = self._learned(loaded.runner)
            self._failures = 0
            log.info(
                "model.ready",
                model=self.name,
                resident_bytes=loaded.runner.resident_bytes,
                seconds=round(time.monotonic() - began_s, 2),
            )
            worker.progress("serving", 1.0)
            self._client.report_segments(at_once=True)
            self._serve(worker, loaded)
        finally:
            # The bytes first, then the word that they are gone.
            del loaded.runner
            left = loaded.place.release()
            if left:
                log.warning("model.device_bytes_left", model=self.name, bytes=left)
            worker.unload()

    def _learned(self, runner: Runner) -> CostModel:
        """What the forwards of this model have taken so far; the daemon keeps it."""
        model = self._model
        shape = f"{model.kind} {model.device} {model.dtype} {runner.resident_bytes}"
        try:
            known = self._client.call("cost", {"model": model.name, "shape": shape})
        except UmadError as error:
            log.info("model.cost_unknown", model=model.name, why=error.message)
            return CostModel()
        return CostModel(Sample(*row) for row in known.get("samples", ()))

    def _serve(self, worker: Worker, loaded: "_Loaded") -> None:
        with self._queue.served(self._why_ended) as self._seat:
            resident = loaded.runner.resident_bytes
            quota = loaded.place.status
            self._report(ModelState("ready", "serving", 1.0, resident, device_quota=quota))
            self.settled.set()
            while (job := self._queue.take(self._ended)) is not None:
                self._job = job
                self._work(worker, loaded, job)
                self._job = None
                self._client.report_segments()
                grown = worker.grown_bytes if self._passed_quota else 0
                if grown > max(GROWN_MAX_BYTES, int(self._model.quota * GROWN_MAX_RATIO)):
                    raise QuotaExceeded(
                        f"{self._model.name} keeps {format_bytes(grown)} after a request that "
                        "passed its quota; it is loaded afresh"
                    )

    def _ended(self) -> bool:
        return self._revoked is not None or self._recycled is not None or self._stopping.is_set()

    def _why_ended(self) -> UmadError:
        return self._revoked or self._recycled or stopped()

    def _work(self, worker: Worker, loaded: "_Loaded", job: Job) -> None:
        try:
            result = self._run(worker, loaded, job)
        except UmadError as error:
            self._queue.answer(job, error=error)
            if isinstance(error, QuotaExceeded | ModelFailed):
                loaded.place.release()
                give_back(worker.account)  # what the failed run held, before the next one begins
                self._passed_quota = isinstance(error, QuotaExceeded)
            if isinstance(error, _Poisoned):
                self._poisoned()
        else:
            self._queue.answer(job, result=result)

    def _run(self, worker: Worker, loaded: "_Loaded", job: Job) -> Mapping[str, Any]:
        runner = loaded.runner
        wait_s = job.deadline_s - time.monotonic()
        self._check(job)
        if wait_s <= 0:
            raise waited(self._model.name)
        with _translated(self.name, "job"):
            worst_case = runner.bytes_needed(job.data)
            tokens, rows = runner.size(job.data)
        # One that is far larger than any since the load builds caches, too, which no sample shows.
        known = tokens * rows <= BEYOND_MAX * worker.meter.warmed
        need = loaded.cost.predict(tokens, rows, worst_case, known=known)
        held = runner.resident_bytes
        if worker.account is not None:  # what it keeps from run to run is there already
            held = max(held, worker.account_bytes + HUGE_PAGES_BYTES)
        beyond = max(0, held + need - self._model.quota)
        forward = worker.forward(beyond, predicted=need, tokens=tokens, batch=rows, wait_s=wait_s)
        try:
            with forward:
                self._check(job)
                try:
                    with _translated(self.name, "job"), loaded.place.use():
                        done = runner.run(job.data, lambda: job.cancelled)
                finally:
                    if beyond:  # torch would keep the burst's segments after its lease has ended
                        loaded.place.release()
                forward.tokens, forward.batch = done.size or (tokens, rows)
                self._check(job)  # a run that was cut short ends like any other, and shows nothing
        finally:
            if forward.peak is not None:  # it began
                took = (forward.tokens, forward.batch, forward.peak, need)
                loaded.cost.observe(Sample(*took, exact=forward.exact))
        result = done.data
        if "vectors" in result:
            return {**result, "vectors": [pack_vector(one) for one in result["vectors"]]}
        return result

    def _check(self, job: Job) -> None:
        """Raise why this job is not to begin, or its result not to be used."""
        if self._revoked is not None:
            raise self._revoked
        if self._stopping.is_set():
            raise stopped()
        if job.cancelled:
            raise gone()

    def _on_recycle(self, told: Mapping[str, Any]) -> None:
        """Called by the client's listener: load afresh, after the job at work.

        To start the whole process afresh is not a thread's to do.
        """
        if not told["process"]:
            log.warning("model.recycled", model=self.name, reason=told["reason"])
            self._recycled = ModelLoading(
                f"{self._model.name} is loaded afresh, since memory is fragmented", retry_after_s=1
            )
            self._queue.wake()

    def _on_revoke(self, told: Mapping[str, Any]) -> None:
        """Called by the client's listener: the clients hear of it before the forward ends."""
        revoked = self._revoked = WorkerRevoked(
            f"{self._model.name} broke its quota and was told to stop: {told.get('reason')}",
            retry_after_s=5,
            details={key: told.get(key) for key in ("quota", "measured", "source")},
        )
        self._say("failed", revoked)
        job = self._job
        if job is not None:
            job.cancelled = True
            self._queue.answer(job, error=revoked)
        self._queue.wake()
        if self._seat is not None:
            self._seat.leave()  # who waits for this model hears of it now
        check = threading.Timer(STUCK_AFTER_S, self._find_stuck, (job, self._cpu_s()))
        check.daemon = True
        check.start()

    def _find_stuck(self, job: Job | None, cpu_s: float) -> None:
        """Some time after a revoke: a thread that is still in the same place is given up.

        Its memory is back and it is fenced, so it may sleep as long as it likes; one that burns
        a core costs the whole process, since nothing else ends a thread.
        """
        if self._revoked is None or job is None or self._job is not job:
            return
        self._stopping.set()  # should it ever come back, it only ends
        busy = (self._cpu_s() - cpu_s) / STUCK_AFTER_S
        log.error("model.stuck", model=self.name, cpu_share=round(busy, 2))
        if busy > STUCK_BUSY_RATIO:
            self._poisoned()
        else:
            self._stuck(self)

    def _cpu_s(self) -> float:
        """CPU time of this thread so far; 0 once it has ended."""
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(self._runs_in))
        except OSError:
            return 0.0


class _Loaded:
    """A model in a box: the lease hangs on the box, so the model can go before the lease does."""

    def __init__(self, runner: Runner, place: Place) -> None:
        self.runner = runner
        self.place = place
        self.cost = CostModel()


class _Poisoned(ModelFailed):
    """A device fault: every later call of this process would fail too (see R6 in the tests)."""

    code = "model_failed"


@contextmanager
def _translated(worker: str, during: str) -> Iterator[None]:
    """Whatever model code raises, as an error of umad; its frames let go of their tensors.

    Raises:
        QuotaExceeded: torch or Python got no memory.
        ModelFailed: anything else.
    """
    try:
        yield
    except UmadError as error:
        forget_frames(error)
        raise
    except Exception as error:
        kind, place = type(error).__name__, place_of(error)
        # The text of an error in a job could quote the job; that of a load cannot.
        text = str(error)[:300] if during == "load" else ""
        log.error("model.error", model=worker, during=during, kind=kind, place=place, text=text)
        translated = _translate(error, kind, text)
        forget_frames(error)
        raise translated from error


def _translate(error: Exception, kind: str, text: str) -> UmadError:
    if is_out_of_memory(error):
        return QuotaExceeded("the model needed more memory than it was given", retry_after_s=5)
    if kind == "AcceleratorError":  # torch's, for a device that failed under it
        return _Poisoned("the device failed; the inference process starts again")
    return ModelFailed(f"the model failed with {kind}{': ' if text else ''}{text}")
