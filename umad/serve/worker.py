"""One model instance in one thread: it loads, serves its model's queue, goes, and comes back.

Owns ``ModelThread``: when the model is loaded, and what ends that.  Where it is registered and
loads is ``berth``, how jobs are taken and done, one or several at a time, ``turns``, and what
becomes of those at work when the thread is to stop ``at_work``.  Rules:
1. the bytes of a run are admitted before it begins;
2. whatever a model raises becomes an error map; its exception, which holds the frames and with
   them the tensors, is gone before the next job;
3. a revoked worker's answers are thrown away, and it loads again with a wait that doubles;
4. a model without memory is registered all the same (cold): a job, or the daemon's word, has it
   loaded, and for that alone idle neighbours are asked to go.  Who loads unasked, at the start,
   drives nobody out;
5. who is asked to go finishes what is at work and begins nothing; jobs that come meanwhile wait
   until it is spared, or loaded again.
Stays out: the link, the daemon's protocol, what a model is.
"""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import structlog

from umad.client.blocking import Client
from umad.client.memory import give_back
from umad.client.worker import Worker
from umad.errors import ModelLoading, QuotaExceeded, UmadError, WorkerRevoked
from umad.serve.at_work import AtWork
from umad.serve.berth import Berth
from umad.serve.figures import Figures
from umad.serve.instance import Instance, no_room, stopped
from umad.serve.jobs import Job, JobQueue, gone
from umad.serve.link import ModelState
from umad.serve.loaded import Load, Loaded
from umad.serve.serving import turns_of
from umad.serve.turns import Desk, Turns
from umad.settings import ModelSettings
from umad.units import format_bytes

LOAD_WAIT_S: Final = 3.0  # for room, at the start
CALL_WAIT_S: Final = 30.0  # for the same, when a person wants the model
SPARE_WAIT_S: Final = 0.1  # for the daemon to spare a model that has nothing more at work
# Of a core, of a revoked thread that does not come back; it may share the cores and the
# interpreter's lock with many others.
STUCK_BUSY_RATIO: Final = 0.1
log = structlog.get_logger()


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
        window_s: how long a batch may wait for company.
        tell: told what was done, now and then: model, instance and ``Figures`` as plain values.
        ends_unloaded: end once the model had to go; the end of the process gives back the rest.

    Attributes:
        unloaded: it has ended so, and what its queue holds is still to be answered.
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
        *,
        window_s: float = 0.0,
        tell: Callable[[str, int, dict[str, Any]], None] = lambda _model, _instance, _shown: None,
        ends_unloaded: bool = False,
    ) -> None:
        super().__init__(model, instance, queue, report, hold_s)
        self._ends_unloaded = ends_unloaded
        self.unloaded = False
        self._client = client
        self._poisoned = poisoned
        self._stuck = stuck
        self._revoked: WorkerRevoked | None = None
        self._recycled: ModelLoading | None = None
        self._failure: UmadError | None = None  # what ended the last life
        self._serving = False
        self._ready = ModelState("ready")
        self._wanted_s: float | None = None  # load it, and wait so long for room
        self._going = ""  # why it was asked to go
        self._kept = False  # the daemon was told that somebody wants it
        self._load_s: float | None = None  # how long the last load took
        self._reason = ""  # what the daemon says a load waits for
        self._at_work = AtWork(queue)
        self._window_s = window_s
        self._figures = Figures(partial(tell, model.name, instance))
        self._shrink = threading.Event()
        self._berth = Berth(
            client,
            self.name,
            model,
            instance,
            load,
            guard,
            self._report,
            {
                "on_revoke": self._on_revoke,
                "on_recycle": self._on_recycle,
                "on_evict": self._on_evict,
                "on_evict_cancelled": self._on_spared,
                "on_load": lambda _: self.call(CALL_WAIT_S),
                "on_queued": self._on_queued,
                "on_shrink": self._on_shrink,
            },
        )

    @property
    def busy(self) -> bool:
        """A job is at work."""
        return bool(self._at_work.jobs)

    def stop(self) -> None:
        """Have the thread unload and end; the jobs at work are cancelled."""
        self._stopping.set()
        self._at_work.cancel()
        self._queue.wake()

    def retire(self, why: UmadError) -> None:
        """Have the thread unload and end, after the job at work."""
        self._retired = why
        self._stopping.set()
        self._queue.wake()

    def call(self, wait_s: float) -> None:
        """Somebody wants the model: load it, if it is not; wait so long for room."""
        self._wanted_s = wait_s
        self._queue.wake()

    def keep(self) -> None:
        """Somebody wants the model, which was asked to go: the daemon may spare it."""
        worker = self._berth.worker
        if self._going and worker is not None:
            self._kept = True
            worker.keep()

    def change(self, model: ModelSettings) -> bool:
        """As in ``Instance``, where the quota may differ and when it is loaded and unloaded."""
        old = self._model
        if not self._berth.take_quota(old, model):
            return False
        self._model = model
        self._berth.follow(old, model)
        self._queue.wake()
        return True

    def _live(self) -> UmadError:
        """Register, then load, serve and unload, as it is wanted; returns why that ended."""
        self._revoked = self._recycled = self._failure = None
        self._at_work.is_here()
        self._say("waiting")
        try:
            self._berth.be_known(self._model)
            while not self._ended():
                self._load_when_due()
        except UmadError as error:
            self._failure = error
        finally:
            self._go("")
            if not self.unloaded:
                self._leave_seat()
            self._berth.close()
            give_back()
        return self._why_ended()

    # --- cold, and loading ------------------------------------------------------------------

    def _load_when_due(self) -> None:
        """Rest, where it is not time to load; load; serve until the model has to go.

        1. at the start it loads unasked; where there is no room it tries again, unasked, after
           waits that double;
        2. one that was loaded on request, or had to go, rests until somebody wants it;
        3. so does one of 1 in its waits.

        Raises:
            UmadError: why this life ends; a load that found no room does not end it.
        """
        called_s = None
        if self._cold or self._failure is not None:
            called_s = self._rest()
            if self._ended():
                return
        wait_s = called_s
        if wait_s is None:
            wait_s = LOAD_WAIT_S if self._failure is None else 0.0
        try:
            self._load_and_serve(wait_s, called=called_s is not None)
        except UmadError as error:
            if self._revoked is not None or not no_room(error):
                raise
            self._failure = error
            self._leave_seat()  # those who waited for it hear the reason
            log.warning("model.no_room", model=self.name, reason=error.message)
            if called_s is None:
                self._failures += 1
            else:
                pause_s = max(1.0, error.retry_after_s or 0)
                self._say("waiting", error, pause_s)
                self._stopping.wait(pause_s)

    def _rest(self) -> float | None:
        """Wait until somebody wants the model, or until it may be tried unasked again.

        Returns:
            How long to wait for room; None: nobody asked.
        """
        failure = None if self._cold else self._failure
        retry_s = None if failure is None else self._wait_s(failure)
        self._recycled = None  # there is nothing to be loaded afresh
        self._take_seat()
        self._say("cold", failure, retry_s)
        self.settled.set()
        needed = self._queue.rest(lambda: self._ended() or self._wanted_s is not None, retry_s)
        wanted_s, self._wanted_s = self._wanted_s, None
        return max(self._queue.patience_s, wanted_s or 0.0) if needed else wanted_s

    def _load_and_serve(self, wait_s: float, *, called: bool) -> None:
        """Load, waiting so long for room; where somebody called, idle neighbours may have to go."""
        began_s = time.monotonic()
        self._reason = ""
        if called:
            self._say("waking")
            self._queue.not_yet = lambda: self._not_yet(began_s)
        state = "loading" if self._seat is None else "waking"
        worker, loaded = self._berth.load(self._model, wait_s, evict=called, state=state)
        self._failure, self._failures = None, 0
        self._cold, self._wanted_s, self._queue.not_yet = False, None, None
        try:
            loaded.learn(self._client, self._berth.on)
            self._load_s = time.monotonic() - began_s
            log.info(
                "model.ready",
                model=self.name,
                device=self._berth.on.device,
                resident_bytes=loaded.runner.resident_bytes,
                seconds=round(self._load_s, 2),
            )
            worker.progress("serving", 1.0)
            self._client.report_segments(at_once=True)
            self._serve(worker, loaded)
        finally:
            self._serving = False
            # The bytes first, then the word that they are gone.
            del loaded.runner
            left = loaded.place.release()
            if left:
                log.warning("model.device_bytes_left", model=self.name, bytes=left)
            worker.unload()
        if not self._ended():
            log.info("model.unloaded", model=self.name, why=self._going or "nobody used it")
            self._figures.tell(idle=True)
            self._go("")
            self._cold = True
            if self._ends_unloaded:
                self.unloaded = True
                self._stopping.set()

    def _not_yet(self, began_s: float) -> UmadError:
        """What is said to one who has waited in vain for the model to be loaded."""
        left_s = 5.0 if self._load_s is None else began_s + self._load_s - time.monotonic()
        why = f": {self._reason}" if self._reason else ""
        return ModelLoading(
            f"{self._model.name} is not loaded yet{why}", retry_after_s=max(1.0, left_s)
        )

    def _serve(self, worker: Worker, loaded: Loaded) -> None:
        """Do jobs until the model has to go, nobody has used it for long, or this life ends."""
        self._take_seat()
        turns = turns_of(self._desk(), worker, loaded)
        self._ready = ModelState(
            "ready",
            "serving",
            1.0,
            loaded.runner.resident_bytes,
            device_quota=loaded.place.status,
            device=self._berth.on.device,
            takes=turns.at_once,
        )
        self._serving = True
        self._report(self._ready)
        self.settled.set()
        try:
            while jobs := self._next(turns):
                self._at_work.jobs = jobs
                turns.work(jobs)
                self._at_work.jobs = []
                self._client.report_segments()
                if grown := turns.overgrown():
                    raise QuotaExceeded(
                        f"{self._model.name} keeps {format_bytes(grown)} after a request that "
                        "passed its quota; it is loaded afresh"
                    )
        finally:
            del turns  # it has the model, and an error would keep this frame
            self._figures.kept_bytes = 0

    def _desk(self) -> Desk:
        device = self._berth.on.device
        return Desk(
            self.name,
            self._queue,
            lambda: self._model,
            None if device == self._model.device else device,
            self._window_s,
            self._check,
            lambda: not self._ended() and not self._going,
            self._client.report_segments,
            self._poisoned,
            self._figures,
            self._shrink,
        )

    def _next(self, turns: Turns) -> list[Job]:
        """What to do next; nothing when the model has to go, for whatever reason.

        Its idle time runs from the end of its last job, since that is when this is called.
        """
        while True:
            jobs = turns.take(lambda: self._ended() or bool(self._going), self._model.idle_unload)
            if jobs or self._ended() or not self._going or not self._spared():
                return jobs

    def _spared(self) -> bool:
        """Nothing is at work, and it was asked to go: whether it may stay, since it is wanted."""
        if self._queue.waits:
            self.keep()
        if self._kept:
            self._queue.wait_until(lambda: self._ended() or not self._going, SPARE_WAIT_S)
        return not self._going

    def _ended(self) -> bool:
        return self._revoked is not None or self._recycled is not None or self._stopping.is_set()

    def _why_ended(self) -> UmadError:
        ending = self._retired or (stopped() if self._stopping.is_set() else None)
        return self._revoked or self._recycled or ending or self._failure or stopped()

    def _check(self, job: Job) -> None:
        """Raise why this job is not to begin, or its result not to be used."""
        if self._revoked is not None:
            raise self._revoked
        if self._stopping.is_set() and self._retired is None:
            raise stopped()
        if job.cancelled:
            raise gone()

    def _on_evict(self, told: Mapping[str, Any]) -> None:
        """Called by the client's listener: go, after the job at work."""
        worker = self._berth.worker
        if worker is None or not worker.loaded:
            return  # there is nothing to unload
        self._go(str(told.get("reason") or "the daemon wants its memory"))
        self._say("draining")
        if self._queue.waits:
            self.keep()
        self._queue.wake()

    def _on_spared(self, _told: Mapping[str, Any]) -> None:
        """Called by the client's listener: it need not go."""
        if self._going:
            self._go("")
            if self._serving:
                self._report(self._ready)
            self._queue.wake()

    def _go(self, why: str) -> None:
        self._going, self._kept = why, False
        self._queue.on_arrival = self.keep if why else None

    def _on_queued(self, told: Mapping[str, Any]) -> None:
        """Called by the client's listener: a load waits, and why."""
        if told["what"] == "reserve":
            self._reason = told["reason"]

    def _on_shrink(self, _told: Mapping[str, Any]) -> None:
        """Called by the client's listener: what is kept is the model thread's to give back."""
        self._shrink.set()
        self._queue.wake()

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
        jobs = self._at_work.refuse(revoked)
        self._queue.wake()
        if (seat := self._seat) is not None:
            seat.leave()  # who waits for this model hears of it now
        self._at_work.watch(jobs, self._give_up)

    def _give_up(self, busy: float) -> None:
        """Some time after a revoke, and the thread is still in the same place.

        Its memory is back and it is fenced, so it may sleep as long as it likes; one that burns
        a core costs the whole process, since nothing else ends a thread.
        """
        if self._revoked is None:
            return
        self._stopping.set()  # should it ever come back, it only ends
        log.error("model.stuck", model=self.name, cpu_share=round(busy, 2))
        if busy > STUCK_BUSY_RATIO:
            self._poisoned()
        else:
            self._stuck(self)
