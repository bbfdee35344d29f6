"""The jobs of one model: a queue that its instances' threads share.

Owns ``Job`` and ``JobQueue``.  Rules: every job is answered exactly once: by its run, its
cancellation, its deadline, or the end of the last instance that could have run it; a job whose
client has left or whose deadline has passed never begins.  Its length is bounded by the front's
gate.  Stays out: running a job.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from umad.errors import ModelLoading, UmadError, WaitedTooLong

Reply = Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None], None]


@dataclass(slots=True, eq=False)
class Job:
    """One request's work.

    ``deadline_s`` is the monotonic time by which it must have begun; ``reply`` takes a result or
    an error map and may be called from any thread.  ``on_cancel`` is for work that is done
    elsewhere: it is called, once or more, when a job at work is cancelled.
    """

    request: str
    data: Mapping[str, Any]
    deadline_s: float
    reply: Reply
    cancelled: bool = False
    answered: bool = False
    on_cancel: Callable[[], None] | None = None


class JobQueue:
    """The jobs of one model: those that wait, in order, and those at work."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._changed = threading.Condition()
        self._waiting: dict[str, Job] = {}
        self._at_work: dict[str, Job] = {}
        self._instances = 0

    def put(self, job: Job) -> None:
        """Add a job; it is refused at once while no instance serves."""
        with self._changed:
            if self._instances:
                self._waiting[job.request] = job
                self._changed.notify()
                return
        self.answer(job, error=ModelLoading(f"{self._model} is not loaded now", retry_after_s=5))

    def take(self, ended: Callable[[], bool]) -> Job | None:
        """The next job, waiting for one; None once ``ended`` says so (after ``wake``)."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or ended())
            if ended():
                return None
            request = next(iter(self._waiting))
            job = self._at_work[request] = self._waiting.pop(request)
            return job

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
            self.answer(job, error=waited(self._model))

    def wake(self) -> None:
        """Have every ``take`` ask again whether it has ended."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def served(self, why_ended: Callable[[], UmadError]) -> Iterator["Seat"]:
        """While one instance serves; it may leave its seat before, in whatever it is stuck."""
        seat = Seat(self, why_ended)
        try:
            yield seat
        finally:
            seat.leave()

    def seat(self, more: int) -> list[Job]:
        """Count an instance in or out; the jobs that nobody is left to run."""
        with self._changed:
            self._instances += more
            left = [] if self._instances else list(self._waiting.values())
            if left:
                self._waiting.clear()
        return left


class Seat:
    """An instance's place at its model's queue; the last one to leave answers what still waits."""

    def __init__(self, queue: JobQueue, why_ended: Callable[[], UmadError]) -> None:
        self._queue = queue
        self._why_ended = why_ended
        self._lock = threading.Lock()
        self._taken = True
        queue.seat(+1)

    def leave(self) -> None:
        """Leave it, once; from any thread."""
        with self._lock:
            taken, self._taken = self._taken, False
        if taken:
            for job in self._queue.seat(-1):
                self._queue.answer(job, error=self._why_ended())


def gone() -> WaitedTooLong:
    """For a job whose client has left; nobody reads it."""
    return WaitedTooLong("the client left")


def waited(model: str) -> WaitedTooLong:
    """For a job whose deadline has passed."""
    return WaitedTooLong(f"the request waited too long for its turn at {model}", retry_after_s=5)
