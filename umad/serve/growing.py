"""Answers that grow together: for models whose runner ``Joins``.

Owns ``Growing``: jobs join the running batch between two steps, and leave it when their answer has
ended, their client has left, or they failed.  Rules:

1. a job joins when its bytes are there: within the quota beside those of the others, or booked
   beyond it.  While others grow nobody waits for a booking: it is asked for again when one has
   left, or a little later; jobs join in the order in which they came;
2. what was booked beyond the quota is given back as soon as the rest fits without it;
3. a step that fails is done again for each alone, and only those fail that fail then;
4. the thread can be interrupted (a revoke) in a step, never while a job joins: none gets lost.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from umad.client.burst import Burst
from umad.client.meter import Start, Took
from umad.client.worker import Worker
from umad.core.cost import Sample
from umad.errors import UmadError, WorkerRevoked
from umad.serve.instance import no_room
from umad.serve.jobs import Job
from umad.serve.kinds.base import Generation, Joins, Prepared, Result
from umad.serve.loaded import Loaded
from umad.serve.translate import Poisoned, translated
from umad.serve.turns import Desk, Turns

ROWS_MAX: Final = 64
REPORT_S: Final = 1.0  # of a turn that goes on
RETRY_S: Final = 0.1  # between two attempts to book the next one's bytes
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Turn:
    """One turn: its jobs, and what is told of it next; it may last for hours under load.

    ``start`` and ``began_s`` are where that began to be measured; ``tokens`` and ``rows`` those
    of the step with the most of both since; ``predicted`` the most bytes that its answers were
    expected to take; ``whole``: nothing has failed; ``left``: an answer has ended; ``joined`` and
    ``carried``: the longest that has joined since, and that had joined before.
    """

    jobs: list[Job]
    start: Start
    began_s: float
    tokens: int = 0
    rows: int = 0
    predicted: int = 0
    whole: bool = True
    left: bool = False
    joined: int = 0
    carried: int = 0

    @property
    def shows_all(self) -> bool:
        """What was measured holds the reading of the longest prompt, which takes most."""
        return self.whole and self.joined >= self.carried

    def see(self, tokens: int, rows: int) -> None:
        if tokens * rows > self.tokens * self.rows:
            self.tokens, self.rows = tokens, rows


class Growing(Turns):
    """Several answers at a time; see ``Turns``.  A turn lasts until none grows."""

    at_once = 2 * ROWS_MAX

    def __init__(self, desk: Desk, worker: Worker, loaded: Loaded, runner: Joins) -> None:
        super().__init__(desk, worker, loaded)
        self._runner = runner
        self._generation: Generation = runner.generation()
        self._rows: dict[Any, Job] = {}
        self._leases: list[Burst] = []
        self._held = 0  # by the model, before the first joined
        self._retry_s = 0.0

    def _take(self, ended: Callable[[], bool], idle_s: float | None) -> list[Job]:
        queue = self._queue
        while True:
            if not queue.waits:
                self._desk.figures.tell(idle=True)
                queue.wait_until(lambda: queue.waits or ended(), idle_s)
            if ended() or not queue.waits:
                return []
            queue.drop_late()
            if jobs := queue.claim([job.request for job in queue.first(1)], full=False):
                return jobs

    def _work(self, jobs: list[Job]) -> None:
        worker = self._worker
        quota = self._desk.model().quota
        self._held = quota - self._loaded.room(worker, quota)
        self._retry_s = 0.0
        worker.share_cores()
        start = worker.meter.begin(worker.account, coarse=False)
        turn = _Turn(jobs, start, time.monotonic())
        try:
            self._join_first(turn)
            while self._rows:
                self._desk.between()
                self._loaded.goes_on(self._worker, self._leases)
                self._join_more(turn)
                self._drop_left(turn)
                if self._rows:
                    self._step(turn)
                if turn.left and time.monotonic() - turn.began_s >= REPORT_S:
                    self._tell_so_far(turn)
        finally:
            for name in self._rows:  # after a fault of our own, which is their answer
                self._generation.leave(name)
            self._rows.clear()
            self._fit()
            self._desk.figures.growing = 0
            self._report(turn, worker.meter.end(turn.start), time.monotonic() - turn.began_s)

    # --- joining ----------------------------------------------------------------------------

    def _join_first(self, turn: _Turn) -> None:
        """The one that was taken; nobody grows, so it may wait for its bytes."""
        (job,) = turn.jobs
        try:
            wait_s = self._begins(job)
            self._read(job)
            self._book(turn, job, wait_s)
        except UmadError as error:
            turn.jobs.remove(job)
            self._failed([job], error)
        else:
            self._join(turn, job)

    def _join_more(self, turn: _Turn) -> None:
        queue = self._queue
        if queue.waits:
            queue.drop_late()
        while (
            len(self._rows) < ROWS_MAX
            and self._desk.stays()
            and time.monotonic() >= self._retry_s
            and (head := queue.first(1))
        ):
            (job,) = head
            try:
                self._read(job)
                self._book(turn, job, 0.0)
            except UmadError as error:
                if no_room(error):  # 1
                    self._retry_s = time.monotonic() + RETRY_S
                else:
                    self._answer_all(queue.claim([job.request], full=False), error)
                continue
            full = len(self._rows) + 1 == ROWS_MAX
            for claimed in queue.claim([job.request], full=full):  # unless it has left meanwhile
                turn.jobs.append(claimed)
                self._join(turn, claimed)

    def _read(self, job: Job) -> None:
        if job.prepared is None:
            with translated(self._desk.name, "job"):
                job.prepared = self._runner.prepare(job.data)

    def _join(self, turn: _Turn, job: Job) -> None:
        turn.joined = max(turn.joined, job.prepared.tokens)
        job.device = self._desk.device
        name = self._generation.join(job.prepared, lambda: job.cancelled, job.emit)
        self._rows[name] = job
        self._desk.figures.growing = len(self._rows)

    def _book(self, turn: _Turn, job: Job, wait_s: float) -> None:
        """Book what this one needs beside the others, where that is beyond the quota.

        Raises:
            UmadError: it was refused.
        """
        need = self._need(job.prepared)
        short = need - self._room - sum(lease.bytes for lease in self._leases)
        if short > 0:
            self._leases.append(self._worker.admit(short, wait_s=wait_s))
        turn.predicted = max(turn.predicted, need)

    @property
    def _room(self) -> int:
        return self._desk.model().quota - self._held

    def _need(self, *more: Prepared) -> int:
        """What those that grow, and one more, are expected to take together."""
        read: list[Prepared] = [*(job.prepared for job in self._rows.values()), *more]
        if not read:
            return 0
        longest = max(one.tokens for one in read)
        worst_case = sum(one.bytes_needed for one in read)
        return self._loaded.predict(self._worker, longest, len(read), worst_case)

    # --- stepping ---------------------------------------------------------------------------

    def _step(self, turn: _Turn) -> None:
        turn.see(*self._generation.size)
        rows = len(self._rows)
        try:
            done = self._forward(None)
        except (Poisoned, WorkerRevoked) as error:
            self._fail(turn, list(self._rows), error)
            return
        except UmadError as error:
            done = self._each_alone(turn, error)
        else:
            self._desk.figures.forward(rows)
        for name, result in done:
            job = self._leave(turn, name)
            turn.see(*(result.size or (0, 0)))
            self._done(job, result.data)
        if done:
            self._fit()
        self._desk.figures.tell()

    def _each_alone(self, turn: _Turn, error: UmadError) -> list[tuple[Any, Result]]:
        """A step of several has failed: do it again for each (3)."""
        if len(self._rows) == 1:
            self._fail(turn, list(self._rows), error)
            return []
        self._failed([], error)
        turn.whole = False
        log.warning("batch.split", model=self._desk.name, jobs=len(self._rows), code=error.code)
        done: list[tuple[Any, Result]] = []
        for name in list(self._rows):
            try:
                done += self._forward([name])
            except UmadError as its_own:
                self._fail(turn, [name], its_own)
        return done

    def _forward(self, names: list[Any] | None) -> list[tuple[Any, Result]]:
        with (
            self._worker.running(),
            translated(self._desk.name, "job"),
            self._loaded.place.use(),
        ):
            done = self._generation.step(names)
        self._worker.check_revoked()
        return done

    # --- leaving ----------------------------------------------------------------------------

    def _drop_left(self, turn: _Turn) -> None:
        """Let go of those whose client has left, and of all when this life ends."""
        for name, job in list(self._rows.items()):
            try:
                self._desk.check(job)
            except UmadError as error:
                self._leave(turn, name)
                self._answer_all([job], error)
                turn.whole = False
        self._fit()

    def _fail(self, turn: _Turn, names: list[Any], error: UmadError) -> None:
        turn.whole = False
        self._failed([self._leave(turn, name) for name in names], error)
        self._fit()

    def _leave(self, turn: _Turn, name: Any) -> Job:
        job = self._rows.pop(name)
        turn.left = True
        self._generation.leave(name)
        self._desk.figures.growing = len(self._rows)
        self._retry_s = 0.0
        if job in turn.jobs:
            turn.jobs.remove(job)
        return job

    def _fit(self) -> None:
        """Give back what the others do not need (2), the smallest first."""
        if not self._leases:
            return
        need, spare = self._need(), self._room + sum(lease.bytes for lease in self._leases)
        for lease in sorted(self._leases, key=lambda one: one.bytes):
            if not self._rows or need <= spare - lease.bytes:
                spare -= lease.bytes
                self._loaded.place.release()  # or torch keeps the segments
                self._leases.remove(lease)
                lease.release()

    def _tell_so_far(self, turn: _Turn) -> None:
        """While it goes on: else the cost model would learn of a busy model nothing, for hours.

        Only when one has left: until then what was measured since the first joined says most.
        """
        took, turn.start = self._worker.meter.again(turn.start)
        now_s = time.monotonic()
        self._report(turn, took, now_s - turn.began_s)
        turn.began_s, turn.tokens, turn.rows = now_s, 0, 0
        turn.predicted, turn.whole, turn.left, turn.joined = self._need(), True, False, 0
        turn.carried = max((job.prepared.tokens for job in self._rows.values()), default=0)

    def _report(self, turn: _Turn, took: Took, seconds: float) -> None:
        """Tell the daemon and the cost model, as of a forward."""
        if not turn.rows:
            return
        first = turn.whole and self._worker.meter.is_first(turn.tokens * turn.rows)
        exact = turn.shows_all and took.exact and not first
        peak = max(took.bytes, turn.predicted + 1) if took.refused else took.bytes
        report = {
            "predicted": turn.predicted,
            "peak": peak,
            "tokens": turn.tokens,
            "batch": turn.rows,
            "exact": exact,
            "seconds": seconds,
        }
        self._worker.bond.report("forward_done", report)
        sample = Sample(turn.tokens, turn.rows, peak, turn.predicted, exact=exact)
        self._loaded.observe(sample)
