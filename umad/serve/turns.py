"""How the jobs of a loaded model are taken and done, in its thread: here, one at a time.

Owns ``Desk`` (what an instance lends for it) and ``Turns``; ``batches`` and ``growing`` do several
at a time.  Rules: whatever a model raises becomes the error of the job that caused it, and what
that run held is given back before the next one; every job that was taken is answered; a fault of
our own costs the jobs at work and is counted, and never the thread.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog

from umad.client.memory import give_back
from umad.client.worker import Worker
from umad.errors import ModelFailed, QuotaExceeded, UmadError
from umad.serve.figures import Figures
from umad.serve.jobs import Job, JobQueue, waited
from umad.serve.kinds.base import Tells
from umad.serve.loaded import Loaded
from umad.serve.logs import place_of
from umad.serve.translate import Poisoned, translated
from umad.settings import ModelSettings
from umad.units import MIB

# What a model may keep of a request that passed its quota before it is loaded afresh: caches and
# libraries' buffers are no leak.
GROWN_MAX_BYTES: Final = 16 * MIB
GROWN_MAX_RATIO: Final = 0.05
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Desk:
    """What an instance lends to its turns.

    Attributes:
        name: of the instance, for the log.
        queue: its model's.
        model: its settings, as they are now.
        device: where it runs, if that is not where it should.
        window_s: how long a batch may wait for company.
        check: raises why a job is not to begin, or its result not to be used.
        between: called between two steps of a long turn.
        stays: False when nothing more is to begin.
        poisoned: called when a device fault has left the whole process unusable.
        figures: what was done.
        shrink: set when the daemon wants back what is only kept warm; who has done so clears it.
    """

    name: str
    queue: JobQueue
    model: Callable[[], ModelSettings]
    device: str | None
    window_s: float
    check: Callable[[Job], None]
    stays: Callable[[], bool]
    between: Callable[[], None]
    poisoned: Callable[[], None]
    figures: Figures
    shrink: threading.Event


class Turns:
    """One job at a time.

    Args:
        desk: the instance's.
        worker: whose quota it is.
        loaded: the model.

    Attributes:
        at_once: how many jobs it is worth to have here, at work or waiting.
    """

    at_once: int = 1

    def __init__(self, desk: Desk, worker: Worker, loaded: Loaded) -> None:
        self._desk: Final = desk
        self._queue: Final = desk.queue
        self._worker: Final = worker
        self._loaded: Final = loaded
        self._passed_quota = False  # a job did, and no other has failed since

    def take(self, ended: Callable[[], bool], idle_s: float | None) -> list[Job]:
        """What to do next, waiting for it; as ``JobQueue.take``, and empty where that is None."""
        while True:
            try:
                with translated(self._desk.name, "taking"):
                    return self._take(ended, idle_s)
            except UmadError as error:
                self._survived(error)
                # One less, or the same might be looked at for ever.
                first = [job.request for job in self._queue.first(1)]
                self._answer_all(self._queue.claim(first, full=True), error)

    def work(self, jobs: list[Job]) -> None:
        """Do what was taken, to its end; what joins meanwhile is in ``jobs`` from then on."""
        try:
            with translated(self._desk.name, "turn"):
                self._work(jobs)
        except UmadError as error:
            self._survived(error)
            self._answer_all(jobs, error)
        self._desk.figures.tell()

    def overgrown(self) -> int:
        """Bytes kept of a job that passed the quota, where they are too many to go on; else 0."""
        if not self._passed_quota:
            return 0
        most = max(GROWN_MAX_BYTES, int(self._desk.model().quota * GROWN_MAX_RATIO))
        if self._worker.grown_bytes > most:
            self.slim()
        grown = self._worker.grown_bytes
        return grown if grown > most else 0

    def slim(self) -> None:
        """Give back what is only kept warm; called in the model's thread, between two steps."""

    def _take(self, ended: Callable[[], bool], idle_s: float | None) -> list[Job]:
        job = self._queue.take(ended, idle_s)
        return [] if job is None else [job]

    def _work(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._alone(job)

    def _alone(self, job: Job) -> bool:
        """Do a job; whether it went well."""
        try:
            wait_s = self._begins(job)
            quota = self._desk.model().quota
            work = self._loaded.alone(job)
            (result,) = self._loaded.run(
                self._worker, work, quota, wait_s, partial(self._desk.check, job)
            )
            if job.emit is not None and not isinstance(self._loaded.runner, Tells):
                job.emit(result.get("text", ""))
        except UmadError as error:
            self._failed([job], error)
            return False
        self._done(job, result)
        return True

    def _begins(self, job: Job) -> float:
        """How long the job may wait for its bytes.

        Raises:
            UmadError: it is not to begin.
        """
        self._desk.check(job)
        job.device = self._desk.device
        wait_s = job.deadline_s - time.monotonic()
        if wait_s <= 0:
            raise waited(self._desk.model().name)
        return wait_s

    def _done(self, job: Job, result: Mapping[str, Any]) -> None:
        if job.device is not None:
            result = {**result, "device": job.device}
        self._queue.answer(job, result=result)

    def _failed(self, jobs: list[Job], error: UmadError) -> None:
        """A run has failed with this, which is the answer of these jobs, or of none yet."""
        self._answer_all(jobs, error)
        if isinstance(error, QuotaExceeded | ModelFailed):
            self._loaded.place.release()
            give_back(self._worker.account)  # what it held, before the next one begins
            self._passed_quota = isinstance(error, QuotaExceeded)
        if isinstance(error, Poisoned):
            self._desk.poisoned()

    def _answer_all(self, jobs: list[Job], error: UmadError) -> None:
        if jobs and isinstance(error, QuotaExceeded):
            log.warning(
                "model.over_quota",
                model=self._desk.name,
                jobs=len(jobs),
                reason=error.message,
                place=place_of(error.__cause__ or error),
            )
        for job in jobs:
            self._queue.answer(job, error=error)

    def _survived(self, error: UmadError) -> None:
        log.error("turns.restarted", model=self._desk.name, code=error.code, why=error.message)
        self._desk.figures.restarts += 1
