"""The zygote: a process that holds the libraries, so that a model's process is only a fork away.

``python -m umad.serve.zygote``, started by the engine (``nursery``) with its configuration on
stdin, one end of a SOCK_SEQPACKET pair, and the lifeline.  What the two say is JSON, one datagram
each:

| from | message | meaning |
|---|---|---|
| zygote | ``{"ready": true}`` or ``{"error": map}`` | once, when the libraries are in or refused |
| engine | ``{"model", "instance", "cold"}``, a descriptor | fork it; its link to the engine |
| zygote | ``{"pid"}`` or ``{"error": map}`` | the answer |

Rules: at every fork this process has one thread and no GPU context, or it refuses (a lock that
another thread held would stay locked in the child); it runs no model; its own memory is booked as
worker ``zygote``; it reaps what it forked.  It ends with the engine, and so does each child, by
the lifeline.  The children of a zygote that dies live on: nothing they need is in it.
"""

import argparse
import json
import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from umad.client.memory import settle
from umad.errors import ModelFailed, UmadError
from umad.serve import child, libraries, logs
from umad.serve.booking import Booking
from umad.serve.lifeline import end_with
from umad.serve.loaded import Load
from umad.serve.main import check_config
from umad.settings import Settings

MESSAGE_BYTES: Final = 16 << 10  # an error map with its details, at most
RECONNECT_S: Final = 0.5
_TASKS: Final = Path("/proc/self/task")
log = structlog.get_logger()


class Zygote:
    """Forks on demand.

    Args:
        control: its end of the pair with the engine.
        lifeline: see ``lifeline``.
        settings: the whole configuration.
        load: what reads a model.
        booking: its own entry in the daemon's books.
        log_format: for the children's logs.
    """

    def __init__(
        self,
        control: socket.socket,
        lifeline: int,
        settings: Settings,
        load: Load,
        booking: Booking,
        log_format: str,
    ) -> None:
        self._control = control
        self._lifeline = lifeline
        self._settings = settings
        self._load = load
        self._booking = booking
        self._log_format = log_format
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._children: dict[int, int] = {}  # pidfd -> pid

    def serve(self) -> None:
        """Serve until the engine ends the link, or a fork is refused."""
        self._watch_booking()
        while True:
            # The daemon comes back by itself, sooner or later: ask again now and then.
            timeout_s = None if self._booking.connected else RECONNECT_S
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._control:
                    if not self._answer():
                        return
                elif key.fd in self._children:
                    self._reap(key.fd)
                elif not self._booking.drain():
                    self._selector.unregister(key.fileobj)
                    self._booking.disconnect()
            if not self._booking.connected and self._booking.reconnect():
                self._watch_booking()

    def _watch_booking(self) -> None:
        self._selector.register(self._booking.fileno(), selectors.EVENT_READ)

    def _answer(self) -> bool:
        """Do one thing for the engine; False when there is nothing more to do for it."""
        data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4)
        if not data or len(fds) != 1:
            return False
        asked = json.loads(data)
        try:
            pid = self._fork(asked["model"], asked["instance"], fds[0], cold=asked["cold"])
        except UmadError as error:
            log.error("zygote.refused", reason=error.message)
            self._control.send(json.dumps({"error": error.to_wire()}).encode())
            return False  # what is wrong here stays wrong: the engine starts another zygote
        finally:
            os.close(fds[0])  # or the engine would not see the child's end
        self._control.send(json.dumps({"pid": pid}).encode())
        return True

    def _fork(self, model: str, instance: int, link: int, *, cold: bool) -> int:
        """Fork one child; returns its pid, and in the child never.

        Raises:
            ModelFailed: this process is not fit for it, or the system has no room for another.
        """
        threads = len(list(_TASKS.iterdir()))
        if threads != 1:
            raise ModelFailed(f"the zygote has {threads} threads and may not fork", retry_after_s=1)
        if libraries.device_touched():
            raise ModelFailed("the zygote has touched a device and may not fork", retry_after_s=1)
        try:
            pid = os.fork()
        except OSError as error:
            raise ModelFailed(
                f"no process for {model}: {error.strerror}", retry_after_s=5
            ) from error
        if pid == 0:
            child.main(
                link,
                self._lifeline,
                self._settings,
                next(one for one in self._settings.models if one.name == model),
                instance,
                self._load,
                self._log_format,
                cold=cold,
            )
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        log.info("zygote.forked", model=model, instance=instance, pid=pid)
        return pid

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        log.info("zygote.reaped", pid=pid, status=os.waitstatus_to_exitcode(status))


def main(arguments: list[str] | None = None, bring: Callable[[], Load] = libraries.bring) -> int:
    """Run a zygote; ``bring`` stands in for the real libraries."""
    parser = argparse.ArgumentParser(prog="umad.serve.zygote")
    parser.add_argument("--fd", type=int, required=True, help="this end of the link")
    parser.add_argument("--lifeline", type=int, required=True, help="the pipe's read end")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="auto")
    flags = parser.parse_args(arguments)
    if not end_with(flags.lifeline):
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's affair
    os.environ.update(libraries.BEFORE_IMPORT)
    logs.configure(flags.log_format, "umad-zygote")
    control = socket.socket(fileno=flags.fd)
    settings = check_config(sys.stdin.read(), "the configuration")
    booking = Booking(settings.daemon.socket, "zygote", settings.serve.runtime_quota)

    def build() -> Load:
        load = bring()
        libraries.warm(model.path for model in settings.models if model.isolation == "process")
        settle()
        return load

    told: dict[str, Any] = {"ready": True}
    try:
        load = booking.load(build)
    except UmadError as error:
        told = {"error": error.to_wire()}
    control.send(json.dumps(told).encode())
    if "ready" in told:
        Zygote(control, flags.lifeline, settings, load, booking, flags.log_format).serve()
    logging.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
