"""A real daemon in a process of its own, on a socket of its own."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from umad.client import Client, connect
from umad.wire.connection import Connection
from umad.wire.messages import Response

ROOT = Path(__file__).parents[2]
CONFIG = """
[daemon]
socket = "{socket}"
[memory]
reserve = "64MiB"
budget = "2GiB"
interval = "100ms"
{more}
"""

# The test of pages brings greenlet, which structlog takes where it is: 1 MiB that no installed
# daemon has.
_AS_INSTALLED = (
    "import runpy, sys; sys.modules['greenlet'] = None; "
    "runpy.run_module('umad.daemon.main', run_name='__main__', alter_sys=True)"
)


class Daemon:
    """Started with ``start``; its log lines are JSON objects in ``log``."""

    def __init__(self, folder: Path, more: str = "", *flags: str, text: str | None = None) -> None:
        self.folder = folder
        self.socket = folder / "umad.sock"
        self.config = folder / "umad.toml"
        self.config.write_text(text or CONFIG.format(socket=self.socket, more=more))
        self.flags = ["--permissive", "--log-format", "json", *flags]
        self.process: subprocess.Popen[bytes] | None = None
        self.log: list[dict[str, Any]] = []
        self._told = threading.Condition()
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def command(self) -> list[str]:
        program = [sys.executable, "-c", _AS_INSTALLED, "--config", str(self.config)]
        return [*program, *self.flags]

    def spawn(self) -> None:
        """Start it without waiting."""
        self.process = subprocess.Popen(self.command(), cwd=ROOT, stderr=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def start(self) -> "Daemon":
        seen = len(self.log)
        self.spawn()
        self.wait_for("started", since=seen)
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        code = self.process.wait(10)
        if self._reader is not None:
            self._reader.join(5)
        return code

    def wait_for(
        self, event: str, *, since: int = 0, within_s: float = 15, **fields: Any
    ) -> dict[str, Any]:
        """The first log line of this event with these fields."""

        def found() -> dict[str, Any] | None:
            for line in self.log[since:]:
                if line.get("event") == event and fields.items() <= line.items():
                    return line
            return None

        with self._told:
            self._told.wait_for(lambda: found() or self._ended(), within_s)
            line = found()
        assert line is not None, f"no {event} {fields} among {self.log[-5:]}"
        return line

    def client(self, name: str = "test", **more: Any) -> Client:
        return connect(str(self.socket), name=name, **more)

    def status(self) -> dict[str, Any]:
        with self.client("status") as client:
            state: dict[str, Any] = client.call("status")
            return state

    def booked(self) -> int:
        return int(self.status()["pools"][0]["booked"])

    def rss(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def _ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            self._read_lines(lines)
        with self._told:
            self._told.notify_all()

    def _read_lines(self, lines: IO[bytes]) -> None:
        for raw in lines:
            try:
                line = json.loads(raw)
            except ValueError:
                line = {"event": "text", "text": raw.decode(errors="replace")}
            with self._told:
                self.log.append(line)
                self._told.notify_all()


@contextmanager
def running(folder: Path, more: str = "", *flags: str) -> Iterator[Daemon]:
    daemon = Daemon(folder, more, *flags)
    try:
        yield daemon.start()
    finally:
        daemon.stop()


class Raw:
    """A peer that may say anything: bytes, or messages through the wire's own machine."""

    def __init__(self, path: Path, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(15)
        self.socket.connect(str(path))
        self.wire = Connection("client")
        if hello:
            self.call("hello", versions=[1], client="raw")

    def call(self, method: str, **params: Any) -> Any:
        """The result, or the error map."""
        key, data = self.wire.send_request(method, params)
        self.socket.sendall(data)
        return self.answer(key)

    def answer(self, key: int) -> Any:
        while data := self.socket.recv(65536):
            for message in self.wire.feed(data):
                if isinstance(message, Response) and message.id == key:
                    return message.error or message.result
        raise ConnectionError("the daemon closed the connection")

    def closed_within(self, seconds: float) -> bool:
        """The daemon ends this connection, whatever it says before."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self.socket], [], [], left_s)
            if not ready:
                return False
            try:
                if not self.socket.recv(65536):
                    return True
            except ConnectionResetError:
                return True
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def eventually(condition: Callable[[], Any], within_s: float = 5.0) -> Any:
    """Wait until the condition holds; its value."""
    pause = threading.Event()
    deadline_s = time.monotonic() + within_s
    while True:
        value = condition()
        if value or time.monotonic() > deadline_s:
            assert value, f"not within {within_s} s"
            return value
        pause.wait(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
