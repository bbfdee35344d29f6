"""The engine: the process that holds the models, one worker thread per model instance.

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
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

import structlog

from umad.client.blocking import Client, connect
from umad.config import Settings
from umad.errors import ModelNotFound, UmadError, UnknownMethod
from umad.serve import logs
from umad.serve.jobs import Job, JobQueue
from umad.serve.link import LinkPeer, ModelState, link_limits, pack_vector
from umad.serve.main import check_config, read_config
from umad.serve.worker import Load, ModelThread

RUNTIME: Final = "runtime"
STOP_S: Final = 4.0  # the front waits a little longer before it sends signals
RETRY_MAX_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
log = structlog.get_logger()


class Engine:
    """The threads and what they share; made and served in one event loop.

    Args:
        settings: the whole configuration.
        libraries: imports what models need and returns what reads them; run once, in a thread.
        holds: seconds to hold back the first load of a model, by its name.
    """

    def __init__(
        self, settings: Settings, libraries: Callable[[], Load], holds: Mapping[str, float]
    ) -> None:
        self._settings = settings
        self._libraries = libraries
        self._holds = holds
        self._loop = asyncio.get_running_loop()
        self._queues = {model.name: JobQueue(model.name) for model in settings.models}
        self._models_of: dict[str, str] = {}  # open requests -> model
        self._threads: list[ModelThread] = []
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
        elif method == "stop":
            self._begin_stop(ident)
        else:
            self._peer.answer(ident, error=UnknownMethod(f"no method {method}").to_wire())

    def _take(self, ident: int, params: Mapping[str, Any]) -> None:
        request, model, wait_s = params["request"], params["model"], params["deadline_s"]
        queue = self._queues.get(model)
        if queue is None:
            self._peer.answer(ident, error=ModelNotFound(f"no model {model}").to_wire())
            return

        def reply(result: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> None:
            if result is not None and "vectors" in result:
                result = {**result, "vectors": [pack_vector(one) for one in result["vectors"]]}
            self._loop.call_soon_threadsafe(self._answer, ident, request, result, error)

        self._models_of[request] = model
        self._loop.call_later(wait_s, queue.expire, request)
        queue.put(Job(request, params["job"], time.monotonic() + wait_s, reply))

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
        if method == "cancel" and model is not None:
            self._queues[model].cancel(params["request"])

    def _begin_stop(self, ident: int | None = None) -> None:
        self._stopping.set()
        threading.Thread(target=self._stop, args=(ident,), name="stop", daemon=True).start()

    def _end(self, exit_code: int, ident: int | None = None) -> None:
        if ident is not None:
            self._peer.answer(ident)
        self._exit_code = exit_code
        self._loop.call_soon(self._ended.set)  # after what the answer wrote

    # --- in threads of their own ------------------------------------------------------------

    def _stop(self, ident: int | None) -> None:
        deadline_s = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._loop.call_soon_threadsafe(self._end, 0, ident)

    def _direct(self) -> None:
        """Connect, book the process itself, then start the workers by priority."""
        opened = self._until_open()
        if opened is None:
            return
        client, load = opened
        models = sorted(self._settings.models, key=lambda model: -model.priority)
        for model in models:
            for instance in range(model.instances):
                if self._stopping.is_set():
                    return
                thread = ModelThread(
                    client,
                    model,
                    instance,
                    self._queues[model.name],
                    load,
                    self._report,
                    self._on_poisoned,
                    self._holds.get(model.name, 0.0),
                )
                self._threads.append(thread)
                thread.start()
                # Loads go one after the other anyway (the init mutex); this keeps the order,
                # and a model that is refused lets the next one try.
                thread.settled.wait()

    def _open_books(self) -> tuple[Client, Load]:
        client = connect(self._settings.daemon.socket, name="umad-serve", on_unavailable="deny")
        try:
            # What no model owns is booked too, for life: the interpreter and its libraries.
            runtime = client.worker(RUNTIME, quota=self._settings.serve.runtime_quota, pin=True)
            return client, runtime.load(self._libraries, wait_s=RETRY_MAX_S)
        except UmadError:
            client.close()
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
                    for instance in range(model.instances):
                        self._report(model.name, instance, state)
                self._stopping.wait(pause_s)
        return None

    def _report(self, model: str, instance: int, state: ModelState) -> None:
        params = {"model": model, "instance": instance, **asdict(state)}
        self._loop.call_soon_threadsafe(self._peer.notify, "state", params)

    def _on_poisoned(self) -> None:
        log.error("engine.poisoned")
        self._loop.call_soon_threadsafe(self._end, 70)


def main(
    arguments: list[str] | None = None, libraries: Callable[[Settings], Load] | None = None
) -> int:
    """Run an engine; ``libraries`` stands in for the real ones."""
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
    settings = check_config(read_config(flags.config), "the configuration")
    holds = {name: float(wait_s) for name, _, wait_s in (h.partition("=") for h in flags.hold)}
    chosen = libraries or _import_libraries
    # The loop must get the interpreter soon, among threads that run Python between two kernels.
    sys.setswitchinterval(0.001)

    async def serve() -> int:
        return await Engine(settings, lambda: chosen(settings), holds).serve(
            socket.socket(fileno=flags.fd)
        )

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


def _import_libraries(settings: Settings) -> Load:
    """Import torch and what stands on it, divide the cores, and return the loader."""
    import torch
    import transformers  # noqa: F401  its bytes belong to the runtime, not to the first model

    from umad.serve import loader

    loader.quiet()
    cores = len(os.sched_getaffinity(0))
    workers = sum(model.instances for model in settings.models)
    # Every worker thread has an OpenMP team of its own: together they must not outnumber the
    # cores, or all of them wait for each other at every barrier.
    threads = max(1, cores // max(1, workers))
    torch.set_num_threads(threads)
    log.info("engine.libraries", torch=torch.__version__, cores=cores, threads=threads)
    return loader.load


if __name__ == "__main__":
    sys.exit(main())
