"""The engine: the process that holds the models, one thread per model instance.

A thread runs its model itself, or, for ``isolation = "process"``, minds the process that does.

``python -m umad.serve.engine``, started by the front with one end of the link.  Owns the order
of the start (libraries, books, models by priority), the hand-over between the loop that speaks
the link and the threads that work, and the end: with the front, at its word, or at SIGTERM.
Rules: nothing is loaded before the daemon has booked it; the daemon's absence is a state, not an
error; all books go back by the end of the connection, so ending needs no tidiness.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import structlog

from umad.client.blocking import Client, connect
from umad.client.memory import settle, shared
from umad.client.worker import Worker
from umad.errors import (
    ConfigError,
    ModelLoading,
    ModelNotFound,
    NameTaken,
    UmadError,
    UnknownMethod,
)
from umad.serve import logs
from umad.serve.instance import Instance
from umad.serve.jobs import Job, JobQueue
from umad.serve.libraries import bring, share_cores, warm
from umad.serve.link import LinkPeer, ModelState, link_limits
from umad.serve.loaded import Load
from umad.serve.main import check_config, read_config
from umad.serve.nursery import Nursery
from umad.serve.process import ModelProcess
from umad.serve.worker import ModelThread
from umad.settings import ModelSettings, Settings

RUNTIME: Final = "runtime"
RUNTIMES_MAX: Final = 16  # instances of umad-serve that share a daemon
STOP_S: Final = 4.0  # the front waits a little longer before it sends signals
RETRY_MAX_S: Final = 5.0
STUCK_HOLD_S: Final = 5.0  # as a revoked model waits otherwise
RETIRE_S: Final = 60.0  # for the last job of a model that a reload changes
# Settings of a model that need no other load of it.
_FOLLOWED: Final = ("quota", "load", "idle_unload", "fallback")
_PR_SET_PDEATHSIG: Final = 1
log = structlog.get_logger()


class Engine:
    """The threads and what they share; made and served in one event loop.

    Args:
        settings: the whole configuration.
        libraries: imports what models need and returns what reads them; run once, in a thread.
        holds: seconds to hold back the first load of a model, by its name.
        nursery: gives processes to models that want their own.
    """

    def __init__(
        self,
        settings: Settings,
        libraries: Callable[[], Load],
        holds: Mapping[str, float],
        nursery: Nursery,
    ) -> None:
        self._settings = settings
        self._libraries = libraries
        self._holds = dict(holds)
        self._name_taken = False
        self._nursery = nursery
        self._loop = asyncio.get_running_loop()
        self._queues = {model.name: JobQueue(model.name) for model in settings.models}
        self._models_of: dict[str, str] = {}  # open requests -> model
        self._threads: dict[str, list[Instance]] = {}
        self._books: tuple[Client, Load] | None = None
        self._reloads: queue.SimpleQueue[tuple[Settings, str]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._ended = asyncio.Event()
        self._exit_code = 0
        self._peer = LinkPeer(
            "server",
            link_limits(settings),
            on_request=self._on_request,
            on_notification=self._on_notification,
            on_lost=self._ended.set,
        )

    async def serve(self, link: socket.socket) -> int:
        """Serve until the end; returns the exit code."""
        await self._peer.open(link)
        # Ctrl-C in a terminal reaches the whole group: the front decides, and tells us.
        self._loop.add_signal_handler(signal.SIGINT, lambda: None)
        self._loop.add_signal_handler(signal.SIGTERM, self._begin_stop)
        threading.Thread(target=self._direct, name="director", daemon=True).start()
        await self._ended.wait()
        return self._exit_code

    # --- in the loop ------------------------------------------------------------------------

    def _on_request(self, ident: int, method: str, params: dict[str, Any]) -> None:
        if method == "run":
            self._take(ident, params)
        elif method == "ping":
            self._peer.answer(ident)
        elif method == "stop":
            self._begin_stop(ident)
        elif method == "reload":
            self._read_again(ident, params["config"])
        else:
            self._peer.answer(ident, error=UnknownMethod(f"no method {method}").to_wire())

    def _read_again(self, ident: int, text: str) -> None:
        try:
            settings = check_config(text, "the configuration")
        except ConfigError as error:
            self._peer.answer(ident, error=error.to_wire())
            return
        self._reloads.put((settings, text))
        self._peer.answer(ident)

    def _take(self, ident: int, params: Mapping[str, Any]) -> None:
        request, model, wait_s = params["request"], params["model"], params["deadline_s"]
        waiting = self._queues.get(model)
        if waiting is None:
            self._peer.answer(ident, error=ModelNotFound(f"no model {model}").to_wire())
            return

        def reply(result: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> None:
            if result is not None:
                result = {**result, "queued_s": job.began_s - job.arrived_s}
            self._loop.call_soon_threadsafe(self._answer, ident, request, result, error)

        def emit(text: str) -> None:
            chunk = {"request": request, "text": text, "device": job.device}
            self._loop.call_soon_threadsafe(self._peer.notify, "chunk", chunk)

        self._models_of[request] = model
        self._loop.call_later(wait_s, waiting.expire, request)
        job = Job(request, params["job"], time.monotonic() + wait_s, reply)
        job.emit = emit if params.get("stream", False) else None
        waiting.put(job)

    def _answer(
        self,
        ident: int,
        request: str,
        result: Mapping[str, Any] | None,
        error: Mapping[str, Any] | None,
    ) -> None:
        self._models_of.pop(request, None)
        self._peer.answer(ident, result=result, error=error)

    def _on_notification(self, method: str, params: dict[str, Any]) -> None:
        model = self._models_of.get(params.get("request", ""))
        if method == "cancel" and model in self._queues:
            self._queues[model].cancel(params["request"])

    def _begin_stop(self, ident: int | None = None) -> None:
        self._stopping.set()
        threading.Thread(target=self._stop, args=(ident,), name="stop", daemon=True).start()

    def _start_afresh(self, reason: str) -> None:
        """End, so that the front starts the next engine; not while anybody is served."""
        if self._models_of or self._stopping.is_set():
            log.info("engine.not_recycled", why="it is at work, or ending", reason=reason)
            return
        log.warning("engine.recycled", reason=reason)
        self._begin_stop()

    def _end(self, exit_code: int, ident: int | None = None) -> None:
        if ident is not None:
            self._peer.answer(ident)
        self._exit_code = exit_code
        self._loop.call_soon(self._ended.set)  # after what the answer wrote

    # --- in threads of their own ------------------------------------------------------------

    def _stop(self, ident: int | None) -> None:
        deadline_s = time.monotonic() + STOP_S
        threads = [thread for those in list(self._threads.values()) for thread in those]
        for thread in threads:
            thread.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        self._loop.call_soon_threadsafe(self._end, 0, ident)

    def _direct(self) -> None:
        """Start the models by priority; then follow each new configuration.

        A fault of our own ends the engine: without this thread no model ever comes.
        """
        try:
            self._start(self._settings.models)
            while not self._stopping.is_set():
                self._follow(*self._reloads.get())
        except BaseException:
            self._on_poisoned()
            raise

    def _start(self, models: Iterable[ModelSettings]) -> None:
        """Start the workers of some models, by priority.

        The process itself is booked first.  Where every model has a process of its own, this one
        imports nothing, holds nothing worth booking and is no worker.
        """
        by_priority = sorted(models, key=lambda model: -model.priority)
        if self._books is None and any(model.isolation == "thread" for model in by_priority):
            self._books = self._until_open()
        for model in by_priority:
            threads = self._threads[model.name] = []
            for instance in range(model.instances):
                if self._stopping.is_set():
                    return
                thread = self._instance(model, instance)
                threads.append(thread)
                thread.start()
                # Loads go one after the other anyway (the init mutex); this keeps the order,
                # and a model that is refused lets the next one try.
                thread.settled.wait()

    def _follow(self, settings: Settings, text: str) -> None:
        """Take over new settings: models come, go and change; the others notice nothing."""
        old = {model.name: model for model in self._settings.models}
        new = {model.name: model for model in settings.models}
        self._settings = settings
        fresh = [
            model for name, model in new.items() if not self._is_followed(old.get(name), model)
        ]
        removed = [name for name in old if name not in new]
        again = [model.name for model in fresh if model.name in old]
        retired = {
            name: ModelNotFound(f"{name} is configured no more")
            if name in removed
            else ModelLoading(f"{name} is loaded afresh with new settings", retry_after_s=5)
            for name in [*removed, *again]
        }
        for name, why in retired.items():
            for thread in self._threads[name]:
                thread.retire(why)
        for name in retired:
            for thread in self._threads.pop(name):
                thread.join(RETIRE_S)
        if any(model.isolation == "process" for model in fresh):
            self._nursery.renew(text)
        for name in removed:
            self._loop.call_soon_threadsafe(self._queues.pop, name)
        for model in fresh:
            self._queues.setdefault(model.name, JobQueue(model.name))
        log.info("engine.reloaded", started=[model.name for model in fresh], removed=removed)
        self._start(fresh)

    def _is_followed(self, old: ModelSettings | None, new: ModelSettings) -> bool:
        """Whether a model's threads go on as they are, with its new settings."""
        if old is None or old == new:
            return old == new
        if replace(old, **{name: getattr(new, name) for name in _FOLLOWED}) != new:
            return False
        followed = [thread.change(new) for thread in self._threads[new.name]]  # each of them
        return all(followed)

    def _instance(self, model: ModelSettings, instance: int) -> Instance:
        waiting, hold_s = self._queues[model.name], self._holds.pop(model.name, 0.0)
        if model.isolation == "process":
            return ModelProcess(
                model,
                instance,
                waiting,
                self._nursery,
                self._report,
                hold_s,
                self._on_reloaded,
                self._tell,
            )
        books = self._books
        assert books is not None

        def take_its_place(stuck: ModelThread) -> None:
            # In the thread of a timer.  The old one is fenced and may sleep for ever.
            if self._stopping.is_set():
                return
            fresh = new(STUCK_HOLD_S)
            threads = self._threads[model.name]
            threads[threads.index(stuck)] = fresh
            fresh.start()

        def new(wait_s: float) -> ModelThread:
            client, load = books
            return ModelThread(
                client,
                model,
                instance,
                waiting,
                load,
                self._report,
                self._on_poisoned,
                wait_s,
                take_its_place,
                self._settings.serve.guard,
                window_s=self._settings.batching_window_s,
                tell=self._tell,
            )

        return new(hold_s)

    def _open_books(self) -> tuple[Client, Load]:
        client = connect(self._settings.daemon.socket, name="umad-serve", on_unavailable="deny")
        client.on("recycle", self._on_recycle)
        client.on("reloaded", lambda _: self._on_reloaded())
        try:
            if "process" in self._settings.isolations:
                self._nursery.start()  # its imports run beside ours
            # What no model owns is booked too, for life: the interpreter and its libraries.
            return client, self._runtime(client).load(self._bring, wait_s=RETRY_MAX_S)
        except UmadError:
            client.close()
            raise

    def _runtime(self, client: Client) -> Worker:
        """Registered under the first number that is free: others may share the daemon.

        Only at a second try: whoever has the name at the first may be the engine before this
        one, which is just ending.
        """
        numbers = range(RUNTIMES_MAX if self._name_taken else 1)
        for number in numbers:
            try:
                quota = self._settings.serve.runtime_quota
                return client.worker(RUNTIME, instance=number, quota=quota, pin=True)
            except NameTaken:
                self._name_taken = True
                if number == numbers[-1]:
                    raise
        raise AssertionError("the last number has returned or raised")

    def _bring(self) -> Load:
        """Import the libraries; one that was broken off leaves half of it behind: no second try."""
        try:
            return self._libraries()
        except BaseException:
            self._on_poisoned()
            raise

    def _until_open(self) -> tuple[Client, Load] | None:
        """Open the books, however long it takes; meanwhile all models wait, and say why."""
        wait_s = 0.2
        while not self._stopping.is_set():
            try:
                return self._open_books()
            except UmadError as error:
                wait_s = min(2 * wait_s, RETRY_MAX_S)
                pause_s = max(wait_s, error.retry_after_s or 0)
                log.warning("books.waiting", code=error.code, reason=error.message)
                state = ModelState("waiting", error=error.to_wire(), retry_after_s=pause_s)
                for model in self._settings.models:
                    begun = len(self._threads.get(model.name, ()))  # those speak for themselves
                    for instance in range(begun, model.instances):
                        self._report(model.name, instance, state)
                self._stopping.wait(pause_s)
        return None

    def _report(self, model: str, instance: int, state: ModelState) -> None:
        params = {"model": model, "instance": instance, **asdict(state)}
        self._loop.call_soon_threadsafe(self._peer.notify, "state", params)

    def _tell(self, model: str, instance: int, figures: dict[str, Any]) -> None:
        params = {"model": model, "instance": instance, **figures}
        self._loop.call_soon_threadsafe(self._peer.notify, "work", params)

    def _on_recycle(self, told: Mapping[str, Any]) -> None:
        if told["process"]:
            self._loop.call_soon_threadsafe(self._start_afresh, told["reason"])

    def _on_reloaded(self) -> None:
        self._loop.call_soon_threadsafe(self._peer.notify, "reloaded", {})

    def _on_poisoned(self) -> None:
        log.error("engine.poisoned")
        self._loop.call_soon_threadsafe(self._end, 70)


def main(
    arguments: list[str] | None = None,
    libraries: Callable[[Settings], Load] | None = None,
    zygote: str = "umad.serve.zygote",
) -> int:
    """Run an engine; ``libraries`` stands in for the real ones, ``zygote`` is run as one."""
    parser = argparse.ArgumentParser(prog="umad.serve.engine")
    parser.add_argument("--config", required=True)
    parser.add_argument("--fd", type=int, required=True, help="this end of the link")
    parser.add_argument("--parent", type=int, required=True, help="pid of the front")
    parser.add_argument("--hold", action="append", default=[], help="MODEL=SECONDS")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="auto")
    flags = parser.parse_args(arguments)
    if not _die_with(flags.parent):
        return 0
    logs.configure(flags.log_format, "umad-engine")
    text = read_config(flags.config)
    settings = check_config(text, "the configuration")
    holds = {name: float(wait_s) for name, _, wait_s in (h.partition("=") for h in flags.hold)}
    chosen = libraries or bring_all
    nursery = Nursery(text, link_limits(settings), flags.log_format, zygote)
    # The loop must get the interpreter soon, among threads that run Python between two kernels.
    sys.setswitchinterval(0.001)

    async def serve() -> int:
        engine = Engine(settings, lambda: chosen(settings), holds, nursery)
        return await engine.serve(socket.socket(fileno=flags.fd))

    code = asyncio.run(serve())
    log.info("engine.ended", exit_code=code)
    logging.shutdown()
    # Not through the interpreter's end: a worker may be deep in a forward that nobody waits for.
    os._exit(code)


def _die_with(parent: int) -> bool:
    """Have the kernel end this process with its parent; False when that is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def bring_all(settings: Settings) -> Load:
    """Import what the models of this process need, and return what reads them."""
    load = bring()
    from umad.serve.linear import keep_kernels_in  # it imports torch

    keep_kernels_in(shared)
    # Their modules belong to the runtime too, and not to whoever is loaded first.
    warm(model.path for model in settings.models if model.isolation == "thread")
    settle()
    share_cores(settings)
    return load


if __name__ == "__main__":
    sys.exit(main())
