"""The jobs of one model: a queue that its instances' threads share.

Owns ``Job`` and ``JobQueue``.  Rules: every job is answered exactly once: by its run, its
cancellation, its deadline, or the end of the last instance that could have run it; a job whose
client has left or whose deadline has passed never begins; of the instances without their model
only as many load it as jobs need, those at work that would take more being enough.  Its length
is bounded by the front's gate.  Stays out: running a job.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from umad.errors import ModelLoading, UmadError, WaitedTooLong

REFUSAL_S: Final = 0.25
Reply = Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None], None]


@dataclass(slots=True, eq=False)
class Job:
    """One request's work.

    ``deadline_s`` is the monotonic time by which it must have begun; ``reply`` takes a result or
    an error map and may be called from any thread; so may ``emit``, which takes what the answer
    has grown by and is there where a stream was asked for.  ``on_cancel`` is for work that is done
    elsewhere: it is called, once or more, when a job at work is cancelled.  ``prepared`` is the
    job as its model reads it, once one has; ``began_s`` when it was taken, the last time;
    ``device`` where it is done, once it has begun, if that is not the model's own.
    """

    request: str
    data: Mapping[str, Any]
    deadline_s: float
    reply: Reply
    cancelled: bool = False
    answered: bool = False
    on_cancel: Callable[[], None] | None = None
    emit: Callable[[str], None] | None = None
    arrived_s: float = field(default_factory=time.monotonic)
    began_s: float = 0.0
    prepared: Any = None
    device: str | None = None
    taker: int = 0


class JobQueue:
    """The jobs of one model: those that wait, in order, and those at work.

    An instance that would answer a job has a seat, whether it has its model in memory or would
    load it for that; one that would have to load it rests.

    Attributes:
        arrivals: how many jobs have come to wait.
        on_arrival: called for each job that comes; set by an instance that was asked to go.
        not_yet: what a job is told that waits in vain for the model to be loaded.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._changed = threading.Condition()
        self._waiting: dict[str, Job] = {}
        self._at_work: dict[str, Job] = {}
        self._seats = 0
        self._resting = 0
        self.arrivals = 0
        self.on_arrival: Callable[[], None] | None = None
        self.not_yet: Callable[[], UmadError] | None = None

    @property
    def waits(self) -> bool:
        """Some job waits."""
        return bool(self._waiting)

    @property
    def patience_s(self) -> float:
        """How long to try for the most patient of the waiting jobs; 0 without one.

        A little less than it waits: a refusal shall come before its own time is over.
        """
        with self._changed:
            latest_s = max((job.deadline_s for job in self._waiting.values()), default=0.0)
        left_s = max(0.0, latest_s - time.monotonic())
        return max(left_s / 2, left_s - REFUSAL_S)

    def put(self, job: Job) -> None:
        """Add a job; it is refused at once where no instance would answer it."""
        with self._changed:
            seated = self._seats > 0
            if seated:
                self._waiting[job.request] = job
                self.arrivals += 1
                self._changed.notify_all()
        if not seated:
            refused = ModelLoading(f"{self._model} is not loaded now", retry_after_s=5)
            self.answer(job, error=refused)
        elif (arrived := self.on_arrival) is not None:
            arrived()

    def put_back(self, job: Job) -> None:
        """A job that was taken and never begun is the next one again."""
        with self._changed:
            self._at_work.pop(job.request, None)
            # Its timer may have looked for it in vain meanwhile.
            late = time.monotonic() >= job.deadline_s
            if self._seats and not job.cancelled and not late:
                self._waiting = {job.request: job, **self._waiting}
                self.arrivals += 1
                self._changed.notify_all()
                return
        self.answer(job, error=gone() if job.cancelled else self._in_vain())

    def take(
        self, ended: Callable[[], bool], idle_s: float | None = None, *, full: bool = True
    ) -> Job | None:
        """The next job, waiting for one.

        Args:
            ended: asked after each ``wake`` whether to give up.
            idle_s: seconds without a job after which to give up, too.
            full: the instance takes no more before it is done.

        Returns:
            None when it gave up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or ended(), idle_s)
            if ended() or not self._waiting:
                return None
            (job,) = self._begin([next(iter(self._waiting))], full=full)
            return job

    def first(self, most: int) -> list[Job]:
        """The first of those that wait, in order; they go on waiting."""
        with self._changed:
            return list(islice(self._waiting.values(), most))

    def claim(self, requests: Iterable[str], *, full: bool) -> list[Job]:
        """Take some of those that wait; who has left meanwhile is not among them.

        Args:
            requests: in the order in which to take them.
            full: the instance takes no more before it is done with them.
        """
        with self._changed:
            return self._begin(requests, full=full)

    def _begin(self, requests: Iterable[str], *, full: bool) -> list[Job]:
        jobs = [self._waiting.pop(request) for request in requests if request in self._waiting]
        for job in jobs:
            job.taker = threading.get_ident() if full else 0
            job.began_s = time.monotonic()
            self._at_work[job.request] = job
        self._changed.notify_all()  # one that rests may be needed for the next
        return jobs

    def rest(self, ended: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """For an instance without its model: wait until a job needs it, and tell whether one does.

        None does while another instance loads, or has a model and nothing to do.
        """

        def needed() -> bool:
            full = {job.taker for job in self._at_work.values() if job.taker}
            return bool(self._waiting) and self._seats - self._resting <= len(full)

        with self._changed:
            self._resting += 1
            try:
                self._changed.wait_for(lambda: ended() or needed(), timeout_s)
                return needed()
            finally:
                self._resting -= 1

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait for what ``wake`` tells of."""
        with self._changed:
            self._changed.wait_for(condition, timeout_s)

    def answer(
        self, job: Job, *, result: Mapping[str, Any] | None = None, error: UmadError | None = None
    ) -> None:
        """Answer a job, unless it is answered already."""
        with self._changed:
            self._at_work.pop(job.request, None)
            if job.answered:
                return
            job.answered = True
        job.reply(result, None if error is None else error.to_wire())

    def cancel(self, request: str) -> None:
        """Its client has left: a job that waits is dropped, one at work is told."""
        with self._changed:
            job = self._waiting.pop(request, None)
            running = self._at_work.get(request)
            if running is not None:
                running.cancelled = True
        if job is not None:
            self.answer(job, error=gone())
        elif running is not None and running.on_cancel is not None:
            running.on_cancel()

    def expire(self, request: str) -> None:
        """A job that still waits has waited too long."""
        with self._changed:
            job = self._waiting.pop(request, None)
        if job is not None:
            self.answer(job, error=self._in_vain())

    def drop_late(self) -> None:
        """Answer those that have waited too long, where no timer does."""
        now_s = time.monotonic()
        with self._changed:
            late = [job for job in self._waiting.values() if job.deadline_s <= now_s]
            for job in late:
                del self._waiting[job.request]
        for job in late:
            self.answer(job, error=self._in_vain())

    def wake(self) -> None:
        """Have whoever waits here ask again whether it has ended."""
        with self._changed:
            self._changed.notify_all()

    def _in_vain(self) -> UmadError:
        not_yet = self.not_yet
        return waited(self._model) if not_yet is None else not_yet()

    def seat(self, more: int) -> list[Job]:
        """Count a seat in or out; the jobs that nobody is left to answer."""
        with self._changed:
            self._seats += more
            left = [] if self._seats else list(self._waiting.values())
            if left:
                self._waiting.clear()
            self._changed.notify_all()
        return left


class Seat:
    """An instance's place at its model's queue; the last one to leave answers what still waits.

    Args:
        queue: its model's.
        why_left: asked then for what to answer.
    """

    def __init__(self, queue: JobQueue, why_left: Callable[[], UmadError]) -> None:
        self._queue = queue
        self._why_left = why_left
        self._lock = threading.Lock()
        self._taken = True
        queue.seat(+1)

    def leave(self) -> None:
        """Leave it, once; from any thread, in whatever the instance is stuck."""
        with self._lock:
            taken, self._taken = self._taken, False
        if taken:
            for job in self._queue.seat(-1):
                self._queue.answer(job, error=self._why_left())


def gone() -> WaitedTooLong:
    """For a job whose client has left; nobody reads it."""
    return WaitedTooLong("the client left")


def waited(model: str) -> WaitedTooLong:
    """For a job whose deadline has passed."""
    return WaitedTooLong(f"the request waited too long for its turn at {model}", retry_after_s=5)
