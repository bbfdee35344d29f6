"""One model instance in a process of its own: what a fork of the zygote becomes.

The main thread runs the same ``ModelThread`` as an instance that lives in the engine; a second
one reads the link; the third is the client's listener.  Its worker registers over this process's
own connection, so its quota, its baseline (what it shares with the zygote included) and its
SIGKILL are its own.

| from | message | params |
|---|---|---|
| engine | request ``run`` | ``request`` (id), ``job``, ``deadline_s`` (both have one clock), \
``stream`` |
| engine | notification ``cancel`` | ``request`` |
| engine | notification ``load`` | ``wait_s``: somebody wants the model |
| engine | notification ``keep`` | the same, of one that was asked to go |
| engine | notification ``stop`` | unload and end |
| engine | notification ``retire`` | ``reason``; the same, after the job at work |
| child | notification ``state`` | the fields of ``ModelState`` |
| child | notification ``chunk`` | ``request``, ``device``, ``text`` (that its answer grows by) |
| child | notification ``work`` | the fields of ``Figures`` |
| child | notification ``unloaded`` | it ends, since its model had to go |
| child | notification ``reloaded`` | the daemon has read its configuration again |

Rules: nothing of the zygote's stays open but the link and the lifeline; it ends with the engine.
What its queue holds when its model has to go is the engine's again.
"""

import logging
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog

from umad.client.blocking import connect
from umad.errors import ModelLoading, RemoteProtocolError, UmadError
from umad.serve import logs
from umad.serve.jobs import Job, JobQueue
from umad.serve.libraries import share_cores
from umad.serve.lifeline import end_with
from umad.serve.link import ModelState, link_limits
from umad.serve.loaded import Load
from umad.serve.parcel import Channel
from umad.serve.worker import ModelThread
from umad.settings import ModelSettings, Settings
from umad.wire.messages import Message, Notification, Request

POISONED: Final = 70
log = structlog.get_logger()


def main(
    link: int,
    lifeline: int,
    settings: Settings,
    model: ModelSettings,
    instance: int,
    load: Load,
    log_format: str,
    *,
    cold: bool,
) -> NoReturn:
    """Be that instance, from the fork on; ends the process."""
    code = 1
    try:
        if end_with(lifeline):
            _close_all_but(link, lifeline)
            # What `top` shows and the daemon notes: the command line is still the zygote's.
            Path("/proc/self/comm").write_text(f"umad {model.name}/{instance}")
            logs.configure(log_format, "umad-model")
            share_cores(settings)
            channel = Channel(socket.socket(fileno=link), "server", link_limits(settings))
            if cold:
                model = replace(model, load="request")
            code = _Child(channel, settings, model, instance, load).run()
    except BaseException:  # nothing may unwind into the zygote's frames
        log.exception("child.failed", model=model.name, instance=instance)
    finally:
        logging.shutdown()
        os._exit(code)


class _Child:
    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        model: ModelSettings,
        instance: int,
        load: Load,
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._model = model
        self._instance = instance
        self._load = load
        self._queue = JobQueue(model.name)

    def run(self) -> int:
        """Serve until told to stop; returns the exit code."""
        try:
            client = connect(self._settings.daemon.socket, name=f"umad-serve {self._model.name}")
        except UmadError as error:  # the engine waits, and forks another
            told = ModelState("waiting", error=error.to_wire(), retry_after_s=error.retry_after_s)
            self._report(self._model.name, self._instance, told)
            return 0
        thread = ModelThread(
            client,
            self._model,
            self._instance,
            self._queue,
            self._load,
            self._report,
            # What it was asked is answered by now; a device context ends with its process.
            lambda: os._exit(POISONED),
            stuck=lambda _: os._exit(POISONED),
            guard=self._settings.serve.guard,
            window_s=self._settings.batching_window_s,
            tell=lambda _model, _instance, shown: self._channel.notify("work", shown),
            ends_unloaded=True,
        )

        def recycle(told: Mapping[str, Any]) -> None:
            if not told["process"]:
                return  # the thread's own
            if thread.busy:
                log.info("child.not_recycled", model=self._model.name, reason=told["reason"])
                return
            log.warning("child.recycled", model=self._model.name, reason=told["reason"])
            thread.stop()  # and with it the process; the engine forks another

        client.on("recycle", recycle)
        client.on("reloaded", lambda _: self._channel.notify("reloaded", {}))
        threading.Thread(target=self._read, args=(thread,), name="link", daemon=True).start()
        thread.run()  # in this thread: there is one for inference, and it is the first
        if thread.unloaded:
            self._channel.notify("unloaded", {})
        return 0

    def _read(self, thread: ModelThread) -> None:
        try:
            while (messages := self._channel.receive()) is not None:
                for message in messages:
                    self._take(thread, message)
        except RemoteProtocolError as error:
            log.error("child.link_broken", reason=error.message)
        os._exit(0)  # without the engine there is nobody to work for

    def _take(self, thread: ModelThread, message: Message) -> None:
        if isinstance(message, Request):
            ident, params = message.id, message.params

            def reply(result: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> None:
                self._channel.answer(ident, result=result, error=error)

            request = params["request"]

            def emit(text: str) -> None:
                chunk = {"request": request, "text": text, "device": job.device}
                self._channel.notify("chunk", chunk)

            job = Job(request, params["job"], params["deadline_s"], reply)
            job.emit = emit if params["stream"] else None
            self._queue.put(job)
        elif isinstance(message, Notification):
            match message.method:
                case "cancel":
                    self._queue.cancel(message.params["request"])
                case "load":
                    thread.call(message.params["wait_s"])
                case "keep":
                    thread.keep()
                case "retire":
                    thread.retire(ModelLoading(message.params["reason"]))
                case "stop":
                    thread.stop()

    def _report(self, _model: str, _instance: int, state: ModelState) -> None:
        self._channel.notify("state", asdict(state))


def _close_all_but(*kept: int) -> None:
    """Close the zygote's descriptors: its control link, its books, its other children."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in kept:
            with suppress(OSError):  # the one that listed them is closed already
                os.close(fd)
