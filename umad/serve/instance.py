"""One instance of a model in the engine, whatever it runs in: its lives and the waits between them.

Owns ``Instance``: live, say why that ended, wait, live again; and the seat at its model's queue,
which it has while it would answer jobs.  What a life is stands in ``worker`` (a thread that runs
the model) and in ``process`` (a thread that minds the process which does).  A life goes on while
the model is in memory, and while it is cold: not loaded, until somebody wants it.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Final

import structlog

from umad.errors import (
    DaemonUnavailable,
    Drained,
    MemoryUnknown,
    ModelLoading,
    Overloaded,
    QuotaDenied,
    Recovering,
    UmadError,
    WaitedTooLong,
    WorkerRevoked,
)
from umad.serve.jobs import JobQueue, Seat
from umad.serve.link import ModelState, not_loaded
from umad.serve.translate import translated
from umad.settings import ModelSettings

# (first, longest) wait between two loads: for room that may come, and for a fault that somebody
# must mend while each attempt holds the load mutex and reads gigabytes.
BACKOFF_WAITING_S: Final = (1.0, 60.0)
BACKOFF_FAILED_S: Final = (2.0, 300.0)
# Refusals that only mean "not now"; any other is a fault that somebody must mend.
_NOT_NOW: Final = (
    DaemonUnavailable,
    Drained,
    MemoryUnknown,
    ModelLoading,
    Overloaded,
    QuotaDenied,
    Recovering,
    WaitedTooLong,
)
log = structlog.get_logger()


class Instance(threading.Thread):
    """Keeps one instance of a model loaded and serving, for as long as the engine runs.

    Args:
        model: what to load.
        instance: 0 for the first copy.
        queue: the model's.
        report: told every change of state; called from several threads.
        hold_s: wait this long before the first load (the model was revoked just before).
    """

    def __init__(
        self,
        model: ModelSettings,
        instance: int,
        queue: JobQueue,
        report: Callable[[str, int, ModelState], None],
        hold_s: float = 0.0,
    ) -> None:
        # A daemon thread: a forward that never ends must not keep the process from ending.
        super().__init__(name=f"{model.name}/{instance}", daemon=True)
        self._model = model
        self._instance = instance
        self._queue = queue
        self._seat: Seat | None = None
        self._report_to = report
        self._hold_s = hold_s
        self._stopping = threading.Event()
        self._retired: UmadError | None = None
        self._cold = model.load == "request"  # it does not load before somebody wants it
        self._failures = 0
        self.settled = threading.Event()  # the first load has ended, well or not, or is not due

    @abstractmethod
    def stop(self) -> None:
        """Have it unload and end; the job at work is cancelled."""

    @abstractmethod
    def retire(self, why: UmadError) -> None:
        """Have it unload and end, after the job at work; those that wait are told ``why``."""

    def change(self, model: ModelSettings) -> bool:
        """Follow new settings as it goes on; False: it must be started afresh for them."""
        return False

    @abstractmethod
    def _live(self) -> UmadError:
        """Load, serve, unload; returns why that ended."""

    @abstractmethod
    def _why_ended(self) -> UmadError:
        """Why it answers no jobs: what they are told."""

    def _take_seat(self) -> None:
        """Answer jobs from now on: with the model, or once it is loaded for them."""
        if self._seat is None:
            self._seat = Seat(self._queue, lambda: not_loaded(self._model.name, self._why_ended()))

    def _leave_seat(self) -> None:
        """Answer no more; nothing happens without a seat."""
        seat, self._seat = self._seat, None
        self._queue.not_yet = None
        if seat is not None:
            seat.leave()

    def _backoff(self, error: UmadError) -> tuple[float, float]:
        """(first, longest) wait after such an end."""
        return BACKOFF_WAITING_S if isinstance(error, _NOT_NOW) else BACKOFF_FAILED_S

    def run(self) -> None:
        """The thread's life."""
        if self._hold_s:
            self._say("waiting", _held(self._model.name), self._hold_s)
            self.settled.set()
            self._stopping.wait(self._hold_s)
        while not self._stopping.is_set():
            error = self._lived()
            self.settled.set()
            if self._stopping.is_set():
                return
            state = "waiting" if isinstance(error, _NOT_NOW) else "failed"
            wait_s = self._wait_s(error)
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

    def _lived(self) -> UmadError:
        """Why a life ended; a fault of our own ends it too, and never the thread."""
        try:
            with translated(self.name, "life"):
                return self._live()
        except UmadError as error:
            return error

    def _wait_s(self, error: UmadError) -> float:
        """How long to wait after such an end before living again."""
        first_s, longest_s = self._backoff(error)
        # The exponent is bounded too: a model may fail for days.
        wait_s: float = min(first_s * 2 ** min(self._failures, 10), longest_s)
        return max(wait_s, error.retry_after_s or 0)

    def _say(
        self, state: str, error: UmadError | None = None, retry_after_s: float | None = None
    ) -> None:
        told = None if error is None else error.to_wire()
        self._report(ModelState(state, error=told, retry_after_s=retry_after_s))

    def _report(self, state: ModelState) -> None:
        self._report_to(self._model.name, self._instance, state)


def no_room(error: UmadError) -> bool:
    """A load was refused for what others hold or people said: no reason to stop trying."""
    return isinstance(error, QuotaDenied | WaitedTooLong | Drained)


def stopped() -> ModelLoading:
    """For what is refused because the process ends."""
    return ModelLoading("the inference process is stopping", retry_after_s=5)


def _held(model: str) -> WorkerRevoked:
    return WorkerRevoked(f"{model} broke its quota; it is loaded again after a wait")
