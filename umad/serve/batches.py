"""Several jobs in one forward: for models whose runner is ``Together``.

Owns ``Batches``: it lets ``core.batching`` choose among those that wait, and does what was chosen.
Rules: identity travels with the job; who has left is dropped before the bytes are booked and again
before the forward; a batch that fails, or gets no room, is done one by one, so that only the
culprit gets the error.
"""

import time
from collections.abc import Callable
from typing import Final

import structlog

from umad.client.worker import Worker
from umad.core.batching import ROWS_MAX, Batch, Batcher, Item
from umad.errors import UmadError
from umad.serve.jobs import Job
from umad.serve.kinds.base import Together
from umad.serve.loaded import Loaded, Work
from umad.serve.translate import Poisoned, translated
from umad.serve.turns import Desk, Turns

LOOK_MAX: Final = 4 * ROWS_MAX  # of those that wait, so many are read and compared
log = structlog.get_logger()


class Batches(Turns):
    """Those of like length together; see ``Turns``."""

    def __init__(self, desk: Desk, worker: Worker, loaded: Loaded, runner: Together) -> None:
        super().__init__(desk, worker, loaded)
        self._runner = runner
        self._batcher = Batcher(desk.window_s, runner.bounds)
        self.at_once = 2 * runner.bounds.rows_max

    def _take(self, ended: Callable[[], bool], idle_s: float | None) -> list[Job]:
        queue = self._queue
        while True:
            if not queue.waits:
                self._desk.figures.tell(idle=True)
                queue.wait_until(lambda: queue.waits or ended(), idle_s)
                if not queue.waits:
                    return []
            if ended():
                return []
            queue.drop_late()
            arrivals = queue.arrivals
            items = [self._item(job) for job in queue.first(LOOK_MAX) if self._reads(job)]
            choice = self._choose(items)
            if isinstance(choice, Batch):
                # Who has left meanwhile is not among them.
                jobs = queue.claim([item.id for item in choice.items], full=True)
                if jobs:
                    self._desk.figures.batches[choice.why] += 1
                    return jobs
            elif choice is not None:
                left_s = choice - time.monotonic()
                queue.wait_until(lambda: queue.arrivals != arrivals or ended(), left_s)  # noqa: B023

    def _choose(self, items: list[Item]) -> Batch | float | None:
        room = self._loaded.room(self._worker, self._desk.model().quota)
        return self._batcher.choose(items, time.monotonic(), bytes_max=room, price=self._price)

    def _price(self, units: int, rows: int) -> int:
        tokens = units * self._runner.unit
        worst_case = self._runner.bytes_together(tokens, rows)
        return self._loaded.predict(self._worker, tokens, rows, worst_case)

    def _reads(self, job: Job) -> bool:
        """Read a job, once; what means nothing to the model is answered."""
        if job.prepared is None:
            try:
                with translated(self._desk.name, "job"):
                    job.prepared = self._runner.prepare(job.data)
            except UmadError as error:
                self._answer_all(self._queue.claim([job.request], full=True), error)
                return False
        return True

    def _item(self, job: Job) -> Item:
        read = job.prepared
        units, times = self._units(read.tokens), (job.arrived_s, job.deadline_s)
        return Item(job.request, units, read.rows, *times, read.alike, read.passes)

    def _units(self, tokens: int) -> int:
        return -(-tokens // self._runner.unit)

    def _work(self, jobs: list[Job]) -> None:
        live = [job for job in jobs if self._still_begins(job)]
        if not live:
            return
        rows = sum(job.prepared.rows for job in live)
        if self._runner.bounds.padded:
            tokens = max(job.prepared.tokens for job in live)
        else:  # what they hold follows from all of them
            tokens = -(-sum(job.prepared.tokens * job.prepared.rows for job in live) // rows)
        well = False
        try:
            if len(live) > 1 and not (well := self._together(live, tokens, rows)):
                for job in live:
                    self._alone(job)
            elif len(live) == 1:
                well = self._alone(live[0])
        finally:
            # One that is alone may be done in parts: of its images each by itself.
            longest, most = self._loaded.run_size
            forwards = -(-rows // most)
            area = self._units(longest) * most
            if not self._runner.bounds.padded:
                area = sum(self._item(job).area for job in live) // forwards
            passes = live[0].prepared.passes * forwards
            seconds = self._loaded.run_s / passes if well else None
            self._batcher.done(time.monotonic(), area, seconds)
        if well:
            self._desk.figures.forward(rows)

    def _still_begins(self, job: Job) -> bool:
        try:
            self._begins(job)
        except UmadError as error:
            self._answer_all([job], error)
            return False
        return True

    def _together(self, jobs: list[Job], tokens: int, rows: int) -> bool:
        """Do these in one forward; False when it failed, and none is answered."""
        read = [job.prepared for job in jobs]

        def all_left() -> bool:
            self._loaded.between()
            return all(job.cancelled for job in jobs)

        def check() -> None:
            # Of one that is still there: who has left is no reason against the others.
            self._desk.check(next((job for job in jobs if not job.cancelled), jobs[0]))

        work = Work(
            tokens,
            rows,
            self._runner.bytes_together(tokens, rows),
            lambda: self._runner.run_together(read, all_left),
        )
        quota = self._desk.model().quota
        try:
            results = self._loaded.run(self._worker, work, quota, 0.0, check)
        except Poisoned as error:
            self._failed(jobs, error)
        except UmadError as error:
            self._failed([], error)
            log.warning("batch.split", model=self._desk.name, jobs=len(jobs), code=error.code)
        else:
            for job, result in zip(jobs, results, strict=True):
                self._done(job, result)
            return True
        return False
