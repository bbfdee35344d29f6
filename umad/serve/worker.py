"""One model instance in one thread: it loads, serves its model's queue, and comes back.

Owns ``ModelThread`` and what a model's own exceptions become.  Rules:
1. the bytes of a run are admitted before it begins;
2. whatever a model raises becomes an error map; its exception, which holds the frames and with
   them the tensors, is gone before the next job;
3. a revoked worker's answers are thrown away, and it loads again with a wait that doubles.
Stays out: the link, the daemon's protocol, what a model is.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import structlog

from umad.client.blocking import Client
from umad.client.memory import forget_frames, give_back
from umad.client.worker import Worker
from umad.config import ModelSettings
from umad.errors import (
    DaemonUnavailable,
    MemoryUnknown,
    ModelFailed,
    ModelLoading,
    Overloaded,
    QuotaDenied,
    QuotaExceeded,
    Recovering,
    UmadError,
    WaitedTooLong,
    WorkerRevoked,
)
from umad.serve.jobs import Job, JobQueue, gone, waited
from umad.serve.kinds.base import Runner
from umad.serve.link import ModelState
from umad.serve.logs import place_of

LOAD_WAIT_S: Final = 10.0
# (first, longest) wait between two loads: for room that may come, and for a fault that somebody
# must mend while each attempt holds the load mutex and reads gigabytes.
BACKOFF_WAITING_S: Final = (1.0, 60.0)
BACKOFF_FAILED_S: Final = (2.0, 300.0)
# Refusals that only mean "not now"; any other is a fault that somebody must mend.
_NOT_NOW: Final = (
    DaemonUnavailable,
    MemoryUnknown,
    Overloaded,
    QuotaDenied,
    Recovering,
    WaitedTooLong,
)
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


class ModelThread(threading.Thread):
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
    ) -> None:
        # A daemon thread: a forward that never ends must not keep the process from ending.
        super().__init__(name=f"{model.name}/{instance}", daemon=True)
        self._client = client
        self._model = model
        self._instance = instance
        self._queue = queue
        self._load = load
        self._report_to = report
        self._poisoned = poisoned
        self._hold_s = hold_s
        self._stopping = threading.Event()
        self._revoked: WorkerRevoked | None = None
        self._job: Job | None = None
        self._failures = 0
        self.settled = threading.Event()  # the first load has ended, well or not

    def stop(self) -> None:
        """Have the thread unload and end, after the job at work."""
        self._stopping.set()
        if self._job is not None:
            self._job.cancelled = True
        self._queue.wake()

    def run(self) -> None:
        """The thread's life."""
        if self._hold_s:
            self._say("waiting", _held(self._model.name), self._hold_s)
            self.settled.set()
            self._stopping.wait(self._hold_s)
        while not self._stopping.is_set():
            error = self._live()
            self.settled.set()
            if self._stopping.is_set():
                return
            not_now = isinstance(error, _NOT_NOW)
            state = "waiting" if not_now else "failed"
            first_s, longest_s = BACKOFF_WAITING_S if not_now else BACKOFF_FAILED_S
            # The exponent is bounded too: a model may fail for days.
            wait_s = min(first_s * 2 ** min(self._failures, 10), longest_s)
            wait_s = max(wait_s, error.retry_after_s or 0)
            self._failures += 1
            self._say(state, error, wait_s)
            log.warning(
                "model." + state,
                model=self.name,
                code=error.code,
                reason=error.message,
                retry_in_s=round(wait_s, 1),
            )
            self._stopping.wait(wait_s)

    def _live(self) -> UmadError:
        """Register, load, serve, unload; returns why that ended."""
        model = self._model
        self._revoked = None
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
            ) as worker:
                self._load_and_serve(worker)
        except UmadError as error:
            return self._revoked or error
        finally:
            give_back()
        return self._revoked or _stopped()

    def _load_and_serve(self, worker: Worker) -> None:
        model = self._model
        began_s = time.monotonic()

        def progress(stage: str, ratio: float) -> None:
            worker.progress(stage, ratio)
            self._report(ModelState("loading", stage, ratio))

        def load() -> _Loaded:
            self._report(ModelState("loading"))
            with _translated(self.name, "load"):
                return _Loaded(
                    self._load(
                        model.kind,
                        model.path,
                        device=model.device,
                        dtype=model.dtype,
                        progress=progress,
                    )
                )

        loaded = worker.load(load, wait_s=LOAD_WAIT_S)
        try:
            self._failures = 0
            log.info(
                "model.ready",
                model=self.name,
                resident_bytes=loaded.runner.resident_bytes,
                seconds=round(time.monotonic() - began_s, 2),
            )
            worker.progress("serving", 1.0)
            self._serve(worker, loaded)
        finally:
            # The bytes first, then the word that they are gone.
            del loaded.runner
            worker.unload()

    def _serve(self, worker: Worker, loaded: "_Loaded") -> None:
        with self._queue.served(lambda: self._revoked or _stopped()):
            resident = loaded.runner.resident_bytes
            self._report(ModelState("ready", "serving", 1.0, resident))
            self.settled.set()
            while (job := self._queue.take(self._ended)) is not None:
                self._job = job
                self._work(worker, loaded.runner, job)
                self._job = None

    def _ended(self) -> bool:
        return self._revoked is not None or self._stopping.is_set()

    def _work(self, worker: Worker, runner: Runner, job: Job) -> None:
        try:
            result = self._run(worker, runner, job)
        except UmadError as error:
            self._queue.answer(job, error=error)
            if isinstance(error, QuotaExceeded | ModelFailed):
                gc.collect()  # what the failed run held in cycles, before the next one begins
            if isinstance(error, _Poisoned):
                self._poisoned()
        else:
            self._queue.answer(job, result=result)

    def _run(self, worker: Worker, runner: Runner, job: Job) -> Mapping[str, Any]:
        wait_s = job.deadline_s - time.monotonic()
        self._check(job)
        if wait_s <= 0:
            raise waited(self._model.name)
        with _translated(self.name, "job"):
            need = runner.bytes_needed(job.data)
        beyond = max(0, runner.resident_bytes + need - self._model.quota)
        tokens = job.data.get("max_tokens", 0)
        with worker.forward(beyond, predicted=need, tokens=tokens, batch=1, wait_s=wait_s):
            self._check(job)
            with _translated(self.name, "job"):
                result = runner.run(job.data, lambda: job.cancelled).data
        self._check(job)  # a run that was cut short ends like any other
        return result

    def _check(self, job: Job) -> None:
        """Raise why this job is not to begin, or its result not to be used."""
        if self._revoked is not None:
            raise self._revoked
        if self._stopping.is_set():
            raise _stopped()
        if job.cancelled:
            raise gone()

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

    def _say(
        self, state: str, error: UmadError | None = None, retry_after_s: float | None = None
    ) -> None:
        told = None if error is None else error.to_wire()
        self._report(ModelState(state, error=told, retry_after_s=retry_after_s))

    def _report(self, state: ModelState) -> None:
        self._report_to(self._model.name, self._instance, state)


class _Loaded:
    """A model in a box: the lease hangs on the box, so the model can go before the lease does."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner


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
    except UmadError:
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
    if _is_out_of_memory(error):
        return QuotaExceeded("the model needed more memory than it was given", retry_after_s=5)
    if kind == "AcceleratorError":  # torch's, for a device that failed under it
        return _Poisoned("the device failed; the inference process starts again")
    return ModelFailed(f"the model failed with {kind}{': ' if text else ''}{text}")


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    texts = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _stopped() -> ModelLoading:
    return ModelLoading("the inference process is stopping", retry_after_s=5)


def _held(model: str) -> WorkerRevoked:
    return WorkerRevoked(f"{model} broke its quota; it is loaded again after a wait")
