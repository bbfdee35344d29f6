"""One model instance in a process of its own, seen from the engine.

Owns ``ModelProcess``: it stands where ``worker.ModelThread`` stands for a model of the engine's
own, takes jobs from the same queue, and carries them to the child (``child``), one at a time.
Rules: a child's end is the end of its job alone, and no restart of the engine; the job is
answered then (``WorkerLost``); another is forked after a wait that doubles, from 5 s to 5 min,
until one has lived for 10 min.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from umad.errors import (
    InvalidParams,
    LocalProtocolError,
    RemoteProtocolError,
    UmadError,
    WorkerLost,
    WorkerRevoked,
    from_wire,
)
from umad.serve.instance import Instance, stopped
from umad.serve.jobs import Job, JobQueue
from umad.serve.link import MODEL_STATES, ModelState
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
    """

    def __init__(
        self,
        model: ModelSettings,
        instance: int,
        queue: JobQueue,
        nursery: Nursery,
        report: Callable[[str, int, ModelState], None],
        hold_s: float = 0.0,
    ) -> None:
        super().__init__(model, instance, report, hold_s)
        self._queue = queue
        self._nursery = nursery
        self._child: _Child | None = None

    def stop(self) -> None:
        """Have the child unload and end, after the job at work."""
        self._stopping.set()
        if (child := self._child) is not None:
            child.channel.notify("stop", {})

    def _backoff(self, error: UmadError) -> tuple[float, float]:
        if isinstance(error, WorkerLost | WorkerRevoked):
            return BACKOFF_LOST_S
        return super()._backoff(error)

    def _live(self) -> UmadError:
        """Fork, hand out jobs while the child is ready; returns why it ended."""
        self._say("waiting")
        began_s = time.monotonic()
        try:
            channel = self._nursery.fork(self._model.name, self._instance)
        except UmadError as error:
            return error
        child = self._child = _Child(channel)
        if self._stopping.is_set():
            channel.notify("stop", {})
        reader = threading.Thread(
            target=self._read, args=(child,), name=f"{self.name} link", daemon=True
        )
        reader.start()
        while child.wait_ready():
            with self._queue.served(self._why_ended):
                with child.changed:  # or this could overtake the word that it is away again
                    self._report(child.state)
                self.settled.set()
                while (job := self._queue.take(child.is_away)) is not None:
                    self._hand_over(child, job)
        reader.join()
        if time.monotonic() - began_s >= STEADY_S:
            self._failures = 0
        return self._why_ended()

    def _hand_over(self, child: "_Child", job: Job) -> None:
        """Have the child do a job, to its end."""
        asked = {"request": job.request, "job": job.data, "deadline_s": job.deadline_s}
        try:
            ident = child.channel.request("run", asked)
        except LocalProtocolError as error:
            # A channel that has just closed refuses too; then the loss is the answer.
            refused = InvalidParams(f"the request cannot travel to the model: {error.message}")
            self._queue.answer(job, error=self._lost() if child.lost else refused)
            return

        def cancel() -> None:
            child.channel.notify("cancel", {"request": job.request})

        job.on_cancel = cancel
        if job.cancelled:  # before there was anybody to tell
            cancel()
        response = child.wait_answer(ident)
        if response is None:
            self._queue.answer(job, error=self._lost())
        elif response.error is not None:
            self._queue.answer(job, error=from_wire(response.error))
        else:
            self._queue.answer(job, result=response.result)

    def _read(self, child: "_Child") -> None:
        """The child's word, as it comes; runs in a thread of its own."""
        try:
            while (messages := child.channel.receive()) is not None:
                for message in messages:
                    self._note(child, message)
        except RemoteProtocolError as error:
            log.error("child.broken", model=self.name, reason=error.message)
        child.lose()
        child.channel.dispose()
        self._queue.wake()

    def _note(self, child: "_Child", message: Message) -> None:
        if isinstance(message, Response):
            child.settle(message)
            return
        try:
            if not isinstance(message, Notification) or message.method != "state":
                raise TypeError
            state = ModelState(**message.params)
            if state.state not in MODEL_STATES:
                raise TypeError
        except TypeError as error:
            raise RemoteProtocolError("a model's process sent what it may not") from error
        with child.changed:
            child.turn(state)
            if state.state == "ready":
                return  # told of when the queue is served
            self._report(state)
        self._queue.wake()
        if state.error is not None:
            self.settled.set()

    def _why_ended(self) -> UmadError:
        """What stopped the child's serving, as far as it said."""
        if self._stopping.is_set():
            return stopped()
        child = self._child
        if child is not None and child.state.error is not None:
            return from_wire(child.state.error)
        return self._lost()

    def _lost(self) -> UmadError:
        error = WorkerLost(f"the process of {self.name} ended and is being started again")
        error.retry_after_s = self._wait_s(error)
        return error


class _Child:
    """One child's life: its last state, and the answer to the one job it has."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.state = ModelState()
        self.lost = False
        self._answers: dict[int, Response] = {}
        self.changed = threading.Condition()

    def is_away(self) -> bool:
        """It takes no jobs now."""
        return self.lost or self.state.state != "ready"

    def wait_ready(self) -> bool:
        """Wait until it takes jobs; False when it never will again."""
        with self.changed:
            self.changed.wait_for(lambda: self.lost or not self.is_away())
            return not self.lost

    def wait_answer(self, ident: int) -> Response | None:
        """Wait for an answer; None when the child ended without one."""
        with self.changed:
            self.changed.wait_for(lambda: self.lost or ident in self._answers)
            return self._answers.pop(ident, None)

    def settle(self, response: Response) -> None:
        """An answer has come."""
        with self.changed:
            self._answers[response.id] = response
            self.changed.notify_all()

    def turn(self, state: ModelState) -> None:
        """Its state has changed."""
        with self.changed:
            self.state = state
            self.changed.notify_all()

    def lose(self) -> None:
        """It has ended."""
        with self.changed:
            self.lost = True
            self.changed.notify_all()
