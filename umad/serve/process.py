"""One model instance in a process of its own, seen from the engine.

Owns ``ModelProcess``: it stands where ``worker.ModelThread`` stands for a model of the engine's
own, takes jobs from the same queue, and carries them to the child (``child``): one at a time, or
as many as it says that it can use at once.
Rules: a child's end is the end of the jobs it was given, and no restart of the engine; they are
answered then (``WorkerLost``); another is forked after a wait that doubles, from 5 s to 5 min,
until one has lived for 10 min.  A child whose model had to go ends, so that all of its memory is
back; the next one is forked at once, and is cold.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

from umad.errors import (
    InvalidParams,
    LocalProtocolError,
    ModelLoading,
    RemoteProtocolError,
    UmadError,
    WorkerLost,
    WorkerRevoked,
    from_wire,
)
from umad.serve.figures import sum_of
from umad.serve.instance import Instance, stopped
from umad.serve.jobs import Job, JobQueue
from umad.serve.link import MODEL_STATES, TAKES_REQUESTS, ModelState
from umad.serve.nursery import Nursery
from umad.serve.parcel import Channel
from umad.settings import ModelSettings
from umad.wire.messages import Message, Notification, Response

BACKOFF_LOST_S: Final = (5.0, 300.0)
STEADY_S: Final = 600.0
log = structlog.get_logger()


class ModelProcess(Instance):
    """Keeps one instance of a model running in a child; its own thread hands out the jobs.

    Args:
        model: what to load.
        instance: 0 for the first copy.
        queue: the model's.
        nursery: gives the processes.
        report: told every change of state; called from two threads.
        hold_s: wait this long before the first fork.
        reloaded: told that the daemon has read its configuration again.
        tell: told what was done: model, instance and ``Figures`` as plain values.
    """

    def __init__(
        self,
        model: ModelSettings,
        instance: int,
        queue: JobQueue,
        nursery: Nursery,
        report: Callable[[str, int, ModelState], None],
        hold_s: float = 0.0,
        reloaded: Callable[[], None] = lambda: None,
        tell: Callable[[str, int, dict[str, Any]], None] = lambda _model, _instance, _shown: None,
    ) -> None:
        super().__init__(model, instance, queue, report, hold_s)
        self._nursery = nursery
        self._reloaded = reloaded
        self._tell = tell
        self._child: _Child | None = None
        self._refused: UmadError | None = None  # why there is no child

    def stop(self) -> None:
        """Have the child unload and end; the job at work is cancelled."""
        self._stopping.set()
        if (child := self._child) is not None:
            child.channel.notify("stop", {})

    def retire(self, why: UmadError) -> None:
        """Have the child unload and end, after the job at work."""
        self._retired = why
        self._stopping.set()
        if (child := self._child) is not None:
            child.channel.notify("retire", {"reason": why.message})

    def _backoff(self, error: UmadError) -> tuple[float, float]:
        if isinstance(error, WorkerLost | WorkerRevoked):
            return BACKOFF_LOST_S
        return super()._backoff(error)

    def _live(self) -> UmadError:
        """Fork, hand out jobs while the child takes them; returns why it ended."""
        self._say("waiting")
        self._refused = None
        try:
            while self._live_once() and not self._stopping.is_set():
                self._cold = True
        except UmadError as error:
            self._refused = error
        finally:
            self._leave_seat()
        return self._why_ended()

    def _live_once(self) -> bool:
        """One child from its fork to its end; whether it ended because its model had to go.

        Raises:
            UmadError: there is no child to be had.
        """
        began_s = time.monotonic()
        channel = self._nursery.fork(self._model.name, self._instance, cold=self._cold)
        child = self._child = _Child(channel)
        if self._stopping.is_set():
            channel.notify("stop", {})
        reader = threading.Thread(
            target=self._read, args=(child,), name=f"{self.name} link", daemon=True
        )
        reader.start()
        while child.wait_open():
            self._take_seat()
            with child.changed:  # or this could overtake the word that it is away again
                self._report(child.state)
            self.settled.set()
            while not child.is_away():
                self._attend(child, child.state.state)
            if not child.unloaded:
                self._leave_seat()
        reader.join()
        if time.monotonic() - began_s >= STEADY_S:
            self._failures = 0
        return child.unloaded

    def _attend(self, child: "_Child", state: str) -> None:
        """Do what there is to do for a child in this state, until it is in another."""

        def other() -> bool:
            return child.is_away() or child.state.state != state

        if state == "ready":
            self._cold, self._queue.not_yet = False, None
            self._queue.wait_until(lambda: other() or child.room > 0, None)
            job = None if other() else self._queue.take(other, full=child.room == 1)
            if job is not None:
                self._hand_over(child, job)
            return
        if state == "cold":
            if not self._queue.rest(other):
                return
            child.channel.notify("load", {"wait_s": self._queue.patience_s})
        self._queue.not_yet = lambda: ModelLoading(
            f"{self._model.name} is not loaded yet", retry_after_s=5
        )
        child.wait(other)

    def _leave_seat(self) -> None:
        self._queue.on_arrival = None
        super()._leave_seat()

    def _hand_over(self, child: "_Child", job: Job) -> None:
        """Have the child do a job; its answer comes by the reader."""
        asked = {
            "request": job.request,
            "job": job.data,
            "deadline_s": job.deadline_s,
            "stream": job.emit is not None,
        }
        if not child.give(job):
            self._not_done(child, job)
            return
        try:
            ident = child.channel.request("run", asked)
        except LocalProtocolError as error:
            if child.take_back(job.request) is None:
                return  # it was lost meanwhile, and the reader has answered
            # A channel that has just closed refuses too; then the loss is the answer.
            refused = InvalidParams(f"the request cannot travel to the model: {error.message}")
            if child.lost:
                self._not_done(child, job)
            else:
                self._queue.answer(job, error=refused)
            return

        def cancel() -> None:
            child.channel.notify("cancel", {"request": job.request})

        job.on_cancel = cancel
        if job.cancelled:  # before there was anybody to tell
            cancel()
        if (response := child.sent(ident, job.request)) is not None:
            self._answer(job, response)

    def _answer(self, job: Job, response: Response) -> None:
        if response.error is not None:
            self._queue.answer(job, error=from_wire(response.error))
        else:
            self._queue.answer(job, result=response.result)
        self._queue.wake()  # there is room for another

    def _not_done(self, child: "_Child", job: Job) -> None:
        """The child ended without an answer to a job."""
        if child.unloaded:  # it was on its way when the child had to go
            self._queue.put_back(job)
        else:
            self._queue.answer(job, error=self._lost())

    def _read(self, child: "_Child") -> None:
        """The child's word, as it comes; runs in a thread of its own."""
        try:
            while (messages := child.channel.receive()) is not None:
                for message in messages:
                    self._note(child, message)
        except RemoteProtocolError as error:
            log.error("child.broken", model=self.name, reason=error.message)
        for job in reversed(child.lose()):  # each that comes back is the next one
            self._not_done(child, job)
        child.channel.dispose()
        self._queue.wake()

    def _note(self, child: "_Child", message: Message) -> None:
        if isinstance(message, Response):
            if (job := child.settle(message)) is not None:
                self._answer(job, message)
            return
        try:
            if not isinstance(message, Notification):
                raise TypeError
            if message.method == "state":
                state = ModelState(**message.params)
                if state.state not in MODEL_STATES:
                    raise ValueError
                self._turn(child, state)
            else:
                self._hear(child, message)
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError("a model's process sent what it may not") from error

    def _hear(self, child: "_Child", told: Notification) -> None:
        match told.method:
            case "unloaded":
                child.unloaded = True
            case "reloaded":
                self._reloaded()
            case "chunk":
                child.emit(**told.params)
            case "work":
                sum_of([told.params])
                self._tell(self._model.name, self._instance, told.params)
            case _:
                raise ValueError

    def _turn(self, child: "_Child", state: ModelState) -> None:
        with child.changed:
            opens = child.is_away() and state.state in TAKES_REQUESTS
            child.turn(state)
            if not opens:  # that is told of when the queue is served
                self._report(state)
        self._queue.on_arrival = None
        if state.state == "draining":
            self._queue.on_arrival = child.keep
            if self._queue.waits:
                child.keep()
        self._queue.wake()
        if state.error is not None:
            self.settled.set()

    def _why_ended(self) -> UmadError:
        """What stopped the child's serving, as far as it said."""
        if self._stopping.is_set():
            return self._retired or stopped()
        if self._refused is not None:
            return self._refused
        child = self._child
        if child is not None and child.state.error is not None:
            return from_wire(child.state.error)
        return self._lost()

    def _lost(self) -> UmadError:
        error = WorkerLost(f"the process of {self.name} ended and is being started again")
        error.retry_after_s = self._wait_s(error)
        return error


class _Child:
    """One child's life: its last state, and the jobs it was given."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.state = ModelState()
        self.lost = False
        self.unloaded = False  # it ends because its model had to go
        self._given: dict[str, Job] = {}  # by request
        self._asked: dict[int, str] = {}  # the requests, by the id that their answer carries
        self._early: dict[int, Response] = {}  # answers that came before their id was known here
        self.changed = threading.Condition()

    def is_away(self) -> bool:
        """It takes no jobs now, and loads no model for one."""
        return self.lost or self.state.state not in TAKES_REQUESTS

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a change of its state."""
        with self.changed:
            self.changed.wait_for(condition)

    def wait_open(self) -> bool:
        """Wait until it takes jobs; False when it never will again."""
        self.wait(lambda: self.lost or not self.is_away())
        return not self.lost

    def keep(self) -> None:
        """It was asked to go, and somebody wants its model."""
        self.channel.notify("keep", {})

    @property
    def room(self) -> int:
        """How many jobs more it can use."""
        return max(0, self.state.takes - len(self._given))

    def give(self, job: Job) -> bool:
        """It is to have this job; False when it has ended."""
        with self.changed:
            if not self.lost:
                self._given[job.request] = job
            return not self.lost

    def take_back(self, request: str) -> Job | None:
        """It could not be given this one; None where that has come back already."""
        with self.changed:
            return self._given.pop(request, None)

    def sent(self, ident: int, request: str) -> Response | None:
        """It was asked, under this id; the answer, if that was quicker."""
        with self.changed:
            early = self._early.pop(ident, None)
            if early is None:
                self._asked[ident] = request
            else:
                self._given.pop(request, None)
            return early

    def settle(self, response: Response) -> Job | None:
        """An answer has come: whose, as far as that is known."""
        with self.changed:
            request = self._asked.pop(response.id, None)
            if request is None:
                self._early[response.id] = response
                return None
            return self._given.pop(request, None)

    def emit(self, request: str, text: str, device: str | None) -> None:
        """The answer to a request has grown."""
        with self.changed:
            job = self._given.get(request)
        if job is not None and job.emit is not None:
            job.device = device
            job.emit(text)

    def turn(self, state: ModelState) -> None:
        """Its state has changed."""
        with self.changed:
            self.state = state
            self.changed.notify_all()

    def lose(self) -> list[Job]:
        """It has ended: the jobs it was given and has not answered, in order."""
        with self.changed:
            self.lost = True
            left, self._given = list(self._given.values()), {}
            self.changed.notify_all()
            return left
