"""The whole product, running: `umad up` on a configuration of the test."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.daemon.running import ROOT, eventually
from tests.demo import ask
from tests.demo.fixtures import checkpoints
from tests.demo.run import free_port
from umad.client import Client, UmadError, connect

KINDS = {
    "llama": "chat",
    "qwen": "chat",
    "vision": "vision",
    "sdxl": "image",
    "whisper": "speech",
}
# What each program's command line holds.
PROGRAMS = {
    "daemon": "umad.daemon.main",
    "front": "umad.serve.main",
    "engine": "umad.serve.engine",
}


class Stack:
    """`umad up` and its children; ``address`` is the front's."""

    def __init__(self, folder: Path, models: dict[str, str], more: str = "") -> None:
        self.folder = folder
        self.models = models
        self.socket = folder / "umad.sock"
        self.address = f"127.0.0.1:{free_port()}"
        self.config = folder / "umad.toml"
        self.config.write_text(
            f'[daemon]\nsocket = "{self.socket}"\n'
            '[memory]\nreserve = "64MiB"\nbudget = "4GiB"\ninterval = "100ms"\n'
            f'[serve]\nlisten = "{self.address}"\nruntime_quota = "1GiB"\n{more}'
            + "".join(
                f'[[model]]\nname = "{name}"\nkind = "{KINDS[name]}"\nquota = "{quota}"\n'
                f'path = "{checkpoints() / name}"\n'
                for name, quota in models.items()
            )
        )
        self.up: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> "Stack":
        with (self.folder / "log").open("ab") as log:
            self.up = subprocess.Popen(
                [sys.executable, "-m", "umad.daemon.main", "up", "--config", str(self.config)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=os.environ | environment,
            )
        return self

    def stop(self) -> int:
        if self.up is None:
            return 0
        self.up.terminate()
        try:
            return self.up.wait(30)
        finally:
            if self.up.poll() is None:
                self.up.kill()
                self.up.wait()

    def pid(self, program: str) -> int | None:
        """The running process of that name, or None at the moment."""
        assert self.up is not None
        with suppress(psutil.Error):
            for child in psutil.Process(self.up.pid).children(recursive=True):
                with suppress(psutil.Error):
                    words = child.cmdline()
                    if PROGRAMS[program] in words and child.status() != psutil.STATUS_ZOMBIE:
                        return child.pid
        return None

    def kill(self, program: str) -> int:
        """SIGKILL it; returns the pid it had."""
        pid = eventually(lambda: self.pid(program), within_s=30)
        os.kill(pid, signal.SIGKILL)
        return int(pid)

    def wait_ready(self, within_s: float = 120) -> None:
        eventually(lambda: ask.get(self.address, "/readyz").status == 200, within_s)

    def client(self) -> Client:
        """A client, as soon as a daemon answers."""

        def try_it() -> Client | None:
            try:
                return connect(self.socket, name="test")
            except UmadError:
                return None

        client = eventually(try_it, within_s=15)
        assert isinstance(client, Client)
        return client

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            state: dict[str, Any] = client.call("status")
            return state

    def log(self) -> list[dict[str, Any]]:
        lines = []
        for line in (self.folder / "log").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def logged(self, event: str, within_s: float = 15, **fields: Any) -> dict[str, Any]:
        """The first log line of this event with these fields."""

        def found() -> dict[str, Any] | None:
            for line in self.log():
                if line.get("event") == event and fields.items() <= line.items():
                    return line
            return None

        line = eventually(found, within_s)
        assert isinstance(line, dict)
        return line


@contextmanager
def stack(
    folder: Path, models: dict[str, str], more: str = "", **environment: str
) -> Iterator[Stack]:
    made = Stack(folder, models, more).start(**environment)
    try:
        yield made
    except BaseException:
        print("\n".join((folder / "log").read_text(errors="replace").splitlines()[-60:]))
        raise
    finally:
        made.stop()


class Asker(threading.Thread):
    """Asks one model again and again; keeps every answer that is not the expected one.

    Expected are the first answer's text (temperature 0: the same each time), and, while a
    program is away, a refused connection or a 503 with Retry-After.
    """

    def __init__(self, stack: Stack, model: str) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self._model = model
        self._ended = threading.Event()
        self.answered = 0
        self.away = 0
        self.wrong: list[str] = []
        self._expected = text_of(self._ask())

    def run(self) -> None:
        while not self._ended.is_set():
            answer = self._ask()
            if answer.status == 200 and text_of(answer) == self._expected:
                self.answered += 1
            elif answer.status == 0 or (answer.status == 503 and answer.retry_after is not None):
                self.away += 1
                self._ended.wait(0.02)
            else:
                self.wrong.append(f"{answer.status} {answer.retry_after} {answer.body}")

    def end(self) -> None:
        self._ended.set()
        self.join(60)

    def _ask(self) -> ask.Answer:
        return ask.post(
            self._stack.address,
            "/v1/chat/completions",
            model=self._model,
            messages=[{"role": "user", "content": "What does a ledger do?"}],
            max_tokens=8,
            temperature=0,
        )


def text_of(answer: ask.Answer) -> str:
    return str(answer.body["choices"][0]["message"]["content"]) if answer.status == 200 else ""
