"""One model instance in one thread: it loads, serves its model's queue, goes, and comes back.

Owns ``ModelThread``; how jobs are taken and done, one or several at a time, is ``turns``.  Rules:
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
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog

from umad.client.blocking import Client
from umad.client.memory import give_back
from umad.client.worker import Worker
from umad.errors import ModelLoading, NeverFits, QuotaExceeded, UmadError, WorkerRevoked
from umad.serve.devices import place
from umad.serve.figures import Figures
from umad.serve.instance import Instance, no_room, stopped
from umad.serve.jobs import Job, JobQueue, Seat, gone
from umad.serve.link import ModelState, not_loaded
from umad.serve.loaded import Load, Loaded
from umad.serve.serving import turns_of
from umad.serve.translate import translated
from umad.serve.turns import Desk, Turns
from umad.settings import ModelSettings
from umad.units import MIB, format_bytes
from umad.values import SYSTEM_POOL

LOAD_WAIT_S: Final = 3.0  # for room, at the start
CALL_WAIT_S: Final = 30.0  # for the same, when a person wants the model
FALLBACK_WAIT_S: Final = 5.0  # where there is another place for it
SPARE_WAIT_S: Final = 0.1  # for the daemon to spare a model that has nothing more at work
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
        super().__init__(model, instance, report, hold_s)
        self._ends_unloaded = ends_unloaded
        self.unloaded = False
        self._client = client
        self._queue = queue
        self._load = load
        self._poisoned = poisoned
        self._stuck = stuck
        self._guard = guard
        self._revoked: WorkerRevoked | None = None
        self._recycled: ModelLoading | None = None
        self._failure: UmadError | None = None  # what ended the last life
        self._worker: Worker | None = None
        self._on = model  # as it is registered now: where it was configured to be, or elsewhere
        self._serving = False
        self._ready = ModelState("ready")
        self._wanted_s: float | None = None  # load it, and wait so long for room
        self._going = ""  # why it was asked to go
        self._kept = False  # the daemon was told that somebody wants it
        self._load_s: float | None = None  # how long the last load took
        self._reason = ""  # what the daemon says a load waits for
        self._jobs: list[Job] = []  # at work; a new list for each turn
        self._window_s = window_s
        self._figures = Figures(partial(tell, model.name, instance))
        self._shrink = threading.Event()
        self._seat: Seat | None = None
        self._runs_in = 0

    @property
    def busy(self) -> bool:
        """A job is at work."""
        return bool(self._jobs)

    def stop(self) -> None:
        """Have the thread unload and end; the jobs at work are cancelled."""
        self._stopping.set()
        for job in list(self._jobs):
            job.cancelled = True
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
        worker = self._worker
        if self._going and worker is not None:
            self._kept = True
            worker.keep()

    def change(self, model: ModelSettings) -> bool:
        """As in ``Instance``, where the quota may differ and when it is loaded and unloaded."""
        old, worker = self._model, self._worker
        if model.quota != old.quota and worker is not None:
            if self._on is not old or worker.held_bytes + worker.grown_bytes > model.quota:
                return False  # the next look at memory would find it in breach
            try:
                worker.set_quota(model.quota, model.peak_bytes)
            except UmadError as error:
                log.warning("model.quota_refused", model=self.name, reason=error.message)
                return False
        self._model = model
        if self._on is old:  # else it is where it may be, and its next load begins anew
            self._on = model
        self._queue.wake()
        return True

    def _live(self) -> UmadError:
        """Register, then load, serve and unload, as it is wanted; returns why that ended."""
        self._revoked = self._recycled = self._failure = None
        self._runs_in = threading.get_ident()
        self._say("waiting")
        try:
            self._be_known()
            while not self._ended():
                self._load_when_due()
        except UmadError as error:
            self._failure = error
        finally:
            self._go("")
            if not self.unloaded:
                self._leave_seat()
            if self._worker is not None:
                self._worker.close()
                self._worker = None
            give_back()
        return self._why_ended()

    # --- where it is registered -------------------------------------------------------------

    @property
    def _places(self) -> list[ModelSettings]:
        """Where it may run, as it would be configured there; the first is where it should."""
        model = self._model
        there = [replace(model, device=name, pool=SYSTEM_POOL) for name in model.fallback]
        return [model, *there]

    def _be_known(self) -> None:
        """Register, so that the daemon and its people know of it, loaded or not.

        Raises:
            UmadError: the daemon is not there, or refuses.
        """
        *others, last = self._places
        for model in others:
            try:
                self._register(model)
            except NeverFits:
                continue
            else:
                return
        self._register(last)

    def _register(self, model: ModelSettings) -> Worker:
        if self._worker is not None:
            if self._on == model:
                return self._worker
            self._worker.close()
            self._worker = None
        self._worker = self._client.worker(
            model.name,
            quota=model.quota,
            peak=model.peak_bytes,
            instance=self._instance,
            priority=model.priority,
            pin=model.pin,
            pool=model.pool,
            on_revoke=self._on_revoke,
            on_recycle=self._on_recycle,
            on_evict=self._on_evict,
            on_evict_cancelled=self._on_spared,
            on_load=lambda _: self.call(CALL_WAIT_S),
            on_queued=self._on_queued,
            on_shrink=self._on_shrink,
        )
        self._on = model
        return self._worker

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
        if self._seat is None:
            self._seat = Seat(self._queue, lambda: not_loaded(self._model.name, self._why_ended()))
        self._say("cold", failure, retry_s)
        self.settled.set()
        needed = self._queue.rest(lambda: self._ended() or self._wanted_s is not None, retry_s)
        wanted_s, self._wanted_s = self._wanted_s, None
        return max(self._queue.patience_s, wanted_s or 0.0) if needed else wanted_s

    def _leave_seat(self) -> None:
        seat, self._seat = self._seat, None
        self._queue.not_yet = None
        if seat is not None:
            seat.leave()

    def _load_and_serve(self, wait_s: float, *, called: bool) -> None:
        """Load, waiting so long for room; where somebody called, idle neighbours may have to go."""
        began_s = time.monotonic()
        self._reason = ""
        if called:
            self._say("waking")
            self._queue.not_yet = lambda: self._not_yet(began_s)
        loaded = self._load_somewhere(wait_s, evict=called)
        worker, self._failure, self._failures = self._known(), None, 0
        self._cold, self._wanted_s, self._queue.not_yet = False, None, None
        try:
            loaded.learn(self._client, self._on)
            self._load_s = time.monotonic() - began_s
            log.info(
                "model.ready",
                model=self.name,
                device=self._on.device,
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

    def _load_somewhere(self, wait_s: float, *, evict: bool) -> Loaded:
        """Load the model where it should be, or else where it may be.

        Raises:
            UmadError: no place had room, or the load failed.
        """
        refused: UmadError | None = None
        *others, last = self._places
        for on in (*others, last):
            patience_s = wait_s if on is last else min(wait_s, FALLBACK_WAIT_S)
            try:
                return self._load_on(self._register(on), on, patience_s, evict=evict)
            except UmadError as error:
                if refused is not None:
                    error.message = f"{refused.message}; and on {on.device}: {error.message}"
                if on is last or not (no_room(error) or isinstance(error, NeverFits)):
                    raise
                refused = error
                log.warning("model.fallback", model=self.name, reason=error.message)
        raise AssertionError("the last place has returned or raised")

    def _load_on(
        self, worker: Worker, model: ModelSettings, wait_s: float, *, evict: bool
    ) -> Loaded:
        state = "loading" if self._seat is None else "waking"

        def progress(stage: str, ratio: float) -> None:
            worker.progress(stage, ratio)
            self._report(ModelState(state, stage, ratio))

        def load() -> Loaded:
            self._report(ModelState(state))
            where = place(model, worker.account, self._guard)
            try:
                with translated(self.name, "load"), where.use():
                    runner = self._load(
                        model.kind,
                        model.path,
                        device=model.device,
                        dtype=model.dtype,
                        progress=progress,
                    )
            finally:
                where.release()  # of a failed load all, of one that went well what only it needed
            return Loaded(self.name, runner, where)

        return worker.load(load, wait_s=wait_s, evict=evict)

    def _not_yet(self, began_s: float) -> UmadError:
        """What is said to one who has waited in vain for the model to be loaded."""
        left_s = 5.0 if self._load_s is None else began_s + self._load_s - time.monotonic()
        why = f": {self._reason}" if self._reason else ""
        return ModelLoading(
            f"{self._model.name} is not loaded yet{why}", retry_after_s=max(1.0, left_s)
        )

    def _known(self) -> Worker:
        assert self._worker is not None, "what is loaded is registered"
        return self._worker

    def _serve(self, worker: Worker, loaded: Loaded) -> None:
        """Do jobs until the model has to go, nobody has used it for long, or this life ends."""
        if self._seat is None:
            self._seat = Seat(self._queue, lambda: not_loaded(self._model.name, self._why_ended()))
        turns = turns_of(self._desk(), worker, loaded)
        self._ready = ModelState(
            "ready",
            "serving",
            1.0,
            loaded.runner.resident_bytes,
            device_quota=loaded.place.status,
            device=self._on.device,
            takes=turns.at_once,
        )
        self._serving = True
        self._report(self._ready)
        self.settled.set()
        try:
            while jobs := self._next(turns):
                self._jobs = jobs
                turns.work(jobs)
                self._jobs = []
                self._client.report_segments()
                if not turns.passed_quota:
                    continue
                most = max(GROWN_MAX_BYTES, int(self._model.quota * GROWN_MAX_RATIO))
                if worker.grown_bytes > most:
                    turns.slim()
                if (grown := worker.grown_bytes) > most:
                    raise QuotaExceeded(
                        f"{self._model.name} keeps {format_bytes(grown)} after a request that "
                        "passed its quota; it is loaded afresh"
                    )
        finally:
            del turns  # it has the model, and an error would keep this frame
            self._figures.kept_bytes = 0

    def _desk(self) -> Desk:
        device = self._on.device
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
        if self._worker is None or not self._worker.loaded:
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
        jobs = self._jobs
        for job in list(jobs):
            job.cancelled = True
            self._queue.answer(job, error=revoked)
        self._queue.wake()
        if (seat := self._seat) is not None:
            seat.leave()  # who waits for this model hears of it now
        check = threading.Timer(STUCK_AFTER_S, self._find_stuck, (jobs, self._cpu_s()))
        check.daemon = True
        check.start()

    def _find_stuck(self, jobs: list[Job], cpu_s: float) -> None:
        """Some time after a revoke: a thread that is still in the same place is given up.

        Its memory is back and it is fenced, so it may sleep as long as it likes; one that burns
        a core costs the whole process, since nothing else ends a thread.
        """
        if self._revoked is None or not jobs or self._jobs is not jobs:
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
