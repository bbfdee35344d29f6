"""The engine's side of the zygote: started when it is first needed, and again when it is gone.

Owns the zygote's process and the one rule about its death: children live on, because nothing they
need is in it, and the next fork starts another.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any, Final

import structlog

from umad.errors import ModelFailed, UmadError, from_wire
from umad.serve.parcel import Channel
from umad.serve.zygote import MESSAGE_BYTES
from umad.wire.frames import Limits

WARM_WITHIN_S: Final = 300.0  # the libraries, from a cold disk
FORK_WITHIN_S: Final = 15.0
log = structlog.get_logger()


class Nursery:
    """Gives processes for model instances; thread-safe.

    Args:
        config: the configuration's text.
        limits: of the links with the children.
        log_format: for the zygote and the children.
        module: what is run as the zygote.
    """

    def __init__(
        self,
        config: str,
        limits: Limits,
        log_format: str = "auto",
        module: str = "umad.serve.zygote",
    ) -> None:
        self._config = config
        self._limits = limits
        self._command = [sys.executable, "-m", module, f"--log-format={log_format}"]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._warm = False
        # Nobody else may ever hold the write end: its end is ours, see ``lifeline``.
        self._lifeline, self._held = os.pipe()

    def start(self) -> None:
        """Have the libraries brought in meanwhile; ``fork`` waits for them."""
        with self._lock:
            self._ensure()

    def renew(self, config: str) -> None:
        """Have the next fork made by a zygote with this configuration."""
        with self._lock:
            self._config = config
            self._drop()

    def fork(self, model: str, instance: int, *, cold: bool = False) -> Channel:
        """A new process for that instance; returns the link to it.

        Args:
            model: its name.
            instance: 0 for the first copy.
            cold: it is to load its model when it is told to.

        Raises:
            UmadError: why there is none: the daemon's refusal, or what is wrong with the zygote.
        """
        with self._lock:
            self._ensure()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    self._await_warm()
                    answer = self._ask(model, instance, theirs, cold=cold)
                except UmadError:
                    ours.close()
                    self._drop()
                    raise
        log.info("model.forked", model=model, instance=instance, pid=answer["pid"])
        return Channel(ours, "client", self._limits)

    def _ensure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._drop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), self._lifeline)
        with theirs, os.fdopen(os.memfd_create("umad.toml"), "w+b") as config:
            config.write(self._config.encode())
            config.seek(0)
            self._process = subprocess.Popen(
                [*self._command, f"--fd={fds[0]}", f"--lifeline={fds[1]}"],
                stdin=config,
                pass_fds=fds,
            )
        self._control, self._warm = ours, False
        log.info("zygote.start", pid=self._process.pid)

    def _await_warm(self) -> None:
        if not self._warm:
            self._receive(WARM_WITHIN_S)
            self._warm = True

    def _ask(self, model: str, instance: int, link: socket.socket, *, cold: bool) -> dict[str, Any]:
        assert self._control is not None
        asked = json.dumps({"model": model, "instance": instance, "cold": cold}).encode()
        try:
            socket.send_fds(self._control, [asked], [link.fileno()])
        except OSError as error:
            raise _lost() from error
        return self._receive(FORK_WITHIN_S)

    def _receive(self, within_s: float) -> dict[str, Any]:
        assert self._control is not None
        self._control.settimeout(within_s)
        try:
            data = self._control.recv(MESSAGE_BYTES)
        except OSError as error:  # no answer in time is one of them
            raise _lost() from error
        if not data:
            raise _lost()
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer

    def _drop(self) -> None:
        """End what is left of a zygote; without one nothing happens."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._process = self._control = None


def _lost() -> ModelFailed:
    return ModelFailed("the zygote ended; another is started", retry_after_s=1)
