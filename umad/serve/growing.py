"""Answers that grow together: for models whose runner ``Joins``.

Owns ``Growing``: jobs join the running batch between two steps, and leave it when their answer has
ended, their client has left, or they failed.  Rules:

1. a job joins when its bytes are there: within the quota beside those of the others, or booked
   beyond it.  While others grow nobody waits for a booking: it is asked for again when one has
   left, or a little later; jobs join in the order in which they came;
2. what was booked beyond the quota is given back as soon as the rest fits without it;
3. a step that gets no memory is done again without the one that joined last, which is set aside
   and reads its tokens again when another has left; a step that fails otherwise is done again for
   each alone.  Only those fail that fail alone;
4. what was read of prompts is kept for those that begin alike, in bytes of the quota that no answer
   is expected to take, and goes before any are booked or refused.  It is no answer's cost;
5. the thread can be interrupted (a revoke) in a step, never while a job joins: none gets lost.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import structlog

from umad.client.burst import Burst
from umad.client.memory import give_back
from umad.client.meter import Took
from umad.client.worker import Worker
from umad.core.cost import Sample
from umad.errors import QuotaExceeded, UmadError, WorkerRevoked
from umad.serve.growth import NOTHING, Growth
from umad.serve.instance import no_room
from umad.serve.jobs import Job
from umad.serve.kinds.base import Generation, Joins, Prepared, Result, mean_up
from umad.serve.loaded import Loaded
from umad.serve.translate import Poisoned, translated
from umad.serve.turns import Desk, Turns

ROWS_MAX: Final = 64
REPORT_S: Final = 1.0  # of a turn that goes on
RETRY_S: Final = 0.1  # between two attempts to book the next one's bytes
KEPT_RATIO: Final = 0.25  # of the quota beside the weights: what was read of prompts, at most
SHRUNK_S: Final = 30.0  # nothing is kept for so long after the daemon wanted it back
log = structlog.get_logger()


class Growing(Turns):
    """Several answers at a time; see ``Turns``.  A turn lasts until none grows."""

    at_once = 2 * ROWS_MAX

    def __init__(self, desk: Desk, worker: Worker, loaded: Loaded, runner: Joins) -> None:
        super().__init__(desk, worker, loaded)
        self._runner = runner
        self._generation: Generation = runner.generation()
        self._rows: dict[Any, Job] = {}
        self._aside: list[Any] = []  # of these, who has given way and waits, the first first
        self._freed = False  # one has left since one was set aside
        self._leases: list[Burst] = []
        self._held = 0  # by the model, before the first joined, but for what is kept of prompts
        self._retry_s = 0.0
        self._keeps_s = 0.0  # from then on

    def slim(self) -> None:
        """Let go of what is kept of prompts."""
        self._desk.shrink.clear()
        if self._generation.kept_bytes:
            self._generation.shrink(0)
            self._loaded.place.release()
            give_back(self._worker.account)
        self._desk.figures.kept_bytes = 0

    def _take(self, ended: Callable[[], bool], idle_s: float | None) -> list[Job]:
        queue, shrink = self._queue, self._desk.shrink
        began_s = time.monotonic()
        while True:
            if shrink.is_set():
                self._shrink()
            if not queue.waits:
                self._desk.figures.tell(idle=True)
                left_s = None if idle_s is None else began_s + idle_s - time.monotonic()
                queue.wait_until(lambda: queue.waits or ended() or shrink.is_set(), left_s)
                if shrink.is_set():
                    continue
            if ended() or not queue.waits:
                return []
            queue.drop_late()
            if jobs := queue.claim([job.request for job in queue.first(1)], full=False):
                return jobs

    def _work(self, jobs: list[Job]) -> None:
        worker = self._worker
        self._held = self._holds()
        self._retry_s = 0.0
        worker.share_cores()
        start = worker.meter.begin(worker.account, coarse=False)
        turn = Growth(jobs, start, time.monotonic())
        try:
            self._join_first(turn)
            while self._rows:
                self._desk.between()
                self._loaded.goes_on(self._worker, self._leases)
                if self._desk.shrink.is_set():
                    with turn.aside(self._worker):
                        self._shrink()
                self._drop_left(turn)
                self._go_on_with_one()
                if not self._aside:
                    self._join_more(turn)
                if self._rows:
                    self._step(turn)
                if turn.left and time.monotonic() - turn.began_s >= REPORT_S:
                    self._tell_so_far(turn)
        finally:
            for name in self._rows:  # after a fault of our own, which is their answer
                self._generation.leave(name)
            self._rows.clear()
            self._aside.clear()
            self._fit()
            self._desk.figures.growing = 0
            took = turn.took.then(worker.meter.end(turn.start))
            self._report(turn, took, time.monotonic() - turn.began_s)

    # --- joining ----------------------------------------------------------------------------

    def _join_first(self, turn: Growth) -> None:
        """The one that was taken; nobody grows, so it may wait for its bytes."""
        (job,) = turn.jobs
        try:
            wait_s = self._begins(job)
            self._read(job)
            with self._loaded.admitted():
                self._book(turn, job, wait_s)
        except UmadError as error:
            turn.jobs.remove(job)
            self._failed([job], error)
        else:
            self._join(turn, job)

    def _join_more(self, turn: Growth) -> None:
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

    def _join(self, turn: Growth, job: Job) -> None:
        turn.joined = max(turn.joined, job.prepared.tokens)
        job.device = self._desk.device
        name = self._generation.join(job.prepared, lambda: job.cancelled, job.emit)
        self._rows[name] = job
        self._desk.figures.growing = len(self._rows)

    def _book(self, turn: Growth, job: Job, wait_s: float) -> None:
        """Book what this one needs beside the others, where that is beyond the quota.

        Raises:
            UmadError: it was refused.
        """
        need = self._need(job.prepared)
        short = need - self._spare
        if short > 0 and (kept := self._generation.kept_bytes):  # 4
            self._give_way(turn, max(0, kept - short))
            short = need - self._spare
        if short > 0:
            self._leases.append(self._worker.admit(short, wait_s=wait_s))
        turn.predicted = max(turn.predicted, need)

    def _holds(self) -> int:
        """What the model holds while nobody grows, but for what is kept of prompts."""
        return self._loaded.held(self._worker, self._generation.kept_bytes)

    @property
    def _room(self) -> int:
        """Of the quota, for answers and what is kept of prompts."""
        return self._desk.model().quota - self._held - self._loaded.stray(self._worker)

    @property
    def _spare(self) -> int:
        """For answers, with what is booked beyond the quota."""
        return self._room - self._generation.kept_bytes + sum(one.bytes for one in self._leases)

    def _need(self, more: Prepared | None = None) -> int:
        """What those that grow, and one more, are expected to take together."""
        read = [job.prepared for job in self._rows.values()]
        need = self._expected(read)
        if more is None:
            return need
        # Far beyond all that was seen nothing may be known of them together; yet what they hold
        # adds up, and what passes is shared: it is never more than theirs and all of this one's.
        return min(self._expected([*read, more]), need + more.bytes_needed)

    def _expected(self, read: list[Prepared]) -> int:
        if not read:
            return 0
        tokens = mean_up([one.tokens for one in read])
        worst_case = sum(one.bytes_needed for one in read)
        return self._loaded.predict(self._worker, tokens, len(read), worst_case)

    # --- stepping ---------------------------------------------------------------------------

    def _step(self, turn: Growth) -> None:
        names = [name for name in self._rows if name not in self._aside]
        turn.see(*self._generation.size(names))
        try:
            done = self._forward(turn, names)
        except (Poisoned, WorkerRevoked) as error:
            self._fail(turn, list(self._rows), error)
            return
        except UmadError as error:
            done = self._each_alone(turn, names, error)
        else:
            self._desk.figures.forward(len(names))
        self._keep(turn)
        for name, result in done:
            job = self._leave(turn, name)
            turn.see(*(result.size or (0, 0)))
            self._desk.figures.prompt(result.data)
            self._done(job, result.data)
        if done:
            self._fit()
        self._desk.figures.tell()

    def _each_alone(
        self, turn: Growth, names: list[Any], error: UmadError
    ) -> list[tuple[Any, Result]]:
        """A step of several has failed: do it again for each (3)."""
        if len(names) == 1:
            self._fail(turn, names, error)
            return []
        self._failed([], error)
        turn.whole = False
        log.warning("batch.split", model=self._desk.name, jobs=len(names), code=error.code)
        done: list[tuple[Any, Result]] = []
        for name in names:
            try:
                done += self._forward(turn, [name])
            except UmadError as its_own:
                self._fail(turn, [name], its_own)
        return done

    def _forward(self, turn: Growth, names: list[Any]) -> list[tuple[Any, Result]]:
        """One step; whom there is no memory for is out of ``names`` afterwards (3)."""
        while True:
            try:
                return self._run(names)
            except QuotaExceeded:
                if self._generation.kept_bytes:
                    self._give_way(turn, 0)  # 4
                elif len(names) > 1:
                    self._set_aside(names.pop())
                else:
                    raise
            self._loaded.place.release()
            give_back(self._worker.account)

    def _set_aside(self, name: Any) -> None:
        self._generation.set_aside(name)
        self._aside.insert(0, name)  # who joined last is the first to go
        self._freed = False
        self._desk.figures.set_aside += 1
        log.info("answer.set_aside", model=self._desk.name, beside=len(self._rows) - 1)

    def _go_on_with_one(self) -> None:
        """Of those set aside, the one that came first, where another has left."""
        if self._aside and (self._freed or len(self._aside) == len(self._rows)):
            self._aside.pop(0)
            self._freed = False

    def _run(self, names: list[Any]) -> list[tuple[Any, Result]]:
        with (
            self._worker.running(),
            translated(self._desk.name, "job"),
            self._loaded.place.use(),
        ):
            done = self._generation.step(names)
        self._worker.check_revoked()
        return done

    # --- what was read of prompts -----------------------------------------------------------

    def _keep(self, turn: Growth) -> None:
        """Keep what the step has read, where nobody is expected to need the bytes (4)."""
        if not self._generation.fresh:
            return
        turn.spared = max(turn.spared, self._generation.spared_bytes)
        own = int(KEPT_RATIO * (self._desk.model().quota - self._loaded.runner.resident_bytes))
        most = max(0, min(own, self._room - self._need()))
        if time.monotonic() < self._keeps_s:
            most = 0
        try:
            with (
                turn.aside(self._worker),
                self._worker.running(),
                translated(self._desk.name, "keeping"),
                self._loaded.place.use(),
            ):
                self._generation.keep(most)
        except UmadError as error:
            log.warning("prompts.not_kept", model=self._desk.name, code=error.code)
            self._give_way(turn, 0)
            self._failed([], error)
        self._desk.figures.kept_bytes = self._generation.kept_bytes

    def _give_way(self, turn: Growth, most: int) -> None:
        """Keep no more than so much."""
        with turn.aside(self._worker):
            self._generation.shrink(most)
        self._desk.figures.kept_bytes = self._generation.kept_bytes
        if not self._rows:  # what it held may have pinned more than its own
            self._held = self._holds()

    def _shrink(self) -> None:
        """The daemon wants back what is only kept warm."""
        self.slim()
        self._keeps_s = time.monotonic() + SHRUNK_S

    # --- leaving ----------------------------------------------------------------------------

    def _drop_left(self, turn: Growth) -> None:
        """Let go of those whose client has left, and of all when this life ends."""
        for name, job in list(self._rows.items()):
            try:
                self._desk.check(job)
            except UmadError as error:
                self._leave(turn, name)
                self._answer_all([job], error)
                turn.whole = False
        self._fit()

    def _fail(self, turn: Growth, names: list[Any], error: UmadError) -> None:
        turn.whole = False
        self._failed([self._leave(turn, name) for name in names], error)
        self._fit()

    def _leave(self, turn: Growth, name: Any) -> Job:
        job = self._rows.pop(name)
        if name in self._aside:
            self._aside.remove(name)
        else:
            self._freed = True
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
        need, spare = self._need(), self._spare
        for lease in sorted(self._leases, key=lambda one: one.bytes):
            if not self._rows or need <= spare - lease.bytes:
                spare -= lease.bytes
                self._loaded.place.release()  # or torch keeps the segments
                self._leases.remove(lease)
                lease.release()

    def _tell_so_far(self, turn: Growth) -> None:
        """While it goes on: else the cost model would learn of a busy model nothing, for hours.

        Only when one has left: until then what was measured since the first joined says most.
        """
        took, turn.start = self._worker.meter.again(turn.start)
        now_s = time.monotonic()
        self._report(turn, turn.took.then(took), now_s - turn.began_s)
        turn.took = NOTHING
        turn.began_s, turn.tokens, turn.rows = now_s, 0, 0
        turn.predicted, turn.whole, turn.left, turn.joined = self._need(), True, False, 0
        turn.spared = 0
        turn.carried = max((job.prepared.tokens for job in self._rows.values()), default=0)

    def _report(self, turn: Growth, took: Took, seconds: float) -> None:
        """Tell the daemon and the cost model, as of a forward."""
        if not turn.rows:
            return
        first = turn.whole and self._worker.meter.is_first(turn.tokens * turn.rows)
        exact = turn.shows_all and took.exact and not first
        # What was spared is a bound, and no finding by itself.
        peak = max(took.bytes, min(took.bytes + turn.spared, turn.predicted))
        if took.refused:
            peak = max(took.bytes, turn.predicted + 1)
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
