"""`make run`: five models under one memory contract, and what becomes of a greedy sixth.

Starts the real thing (`umad up`), watches the five load, asks each once, lets a worker break
its quota while the five keep answering, and asks for what can never fit.  Every promise is
checked; with --once the exit code says whether all were kept.
"""

import argparse
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.demo import ask
from tests.demo.checkpoints import build_all
from umad.client import Client, UmadError, connect
from umad.units import format_bytes, format_duration

ROOT: Final = Path(__file__).resolve().parents[2]
KINDS: Final = {
    "llama": "chat",
    "qwen": "chat",
    "vision": "vision",
    "sdxl": "image",
    "whisper": "speech",
}
QUOTAS: Final = {
    "llama": "256MiB",
    "qwen": "256MiB",
    "vision": "256MiB",
    "sdxl": "384MiB",
    "whisper": "256MiB",
}
GREEDY_QUOTA: Final = "256MiB"
GREED: Final = "1GiB"
READY_WITHIN_S: Final = 180.0
KILL_WITHIN_S: Final = 0.1
ROUND_WITHIN_S: Final = 60.0


class Broken(Exception):
    """A promise that was not kept; the message is for the person who watches."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="end after the demonstration")
    once = parser.parse_args().once
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    # Short, since the path of a Unix socket is at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="umad-run-"))
    try:
        with Machine(folder) as machine:
            demonstrate(machine)
            if not once:
                keep_serving(machine)
    except Broken as broken:
        print(f"\nNOT AS PROMISED: {broken}")
        print_log(folder / "log")
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\numad and umad-serve have ended.")
    return 0


class Machine:
    """The product, running: `umad up` on a configuration of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "umad.sock")
        self.address = f"127.0.0.1:{free_port()}"
        self.log = folder / "log"
        self._up: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Machine":
        heading("Checkpoints")
        checkpoints = ROOT / ".work" / "checkpoints"
        build_all(checkpoints, progress=lambda name: say(f"building {name}"))
        say(f"five small models with random weights in {checkpoints.relative_to(ROOT)}/")
        config = self.folder / "umad.toml"
        config.write_text("".join(self._config(checkpoints)))
        heading("Start: umad up (the daemon umad, and umad-serve with its inference engine)")
        with self.log.open("wb") as log:
            self._up = subprocess.Popen(
                [sys.executable, "-m", "umad.daemon.main", "up", "--config", str(config)],
                cwd=ROOT,
                stderr=log,
                stdout=log,
                process_group=0,  # Ctrl-C reaches this program alone, which ends it in order
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._up is None:
            return
        self._up.terminate()
        try:
            code = self._up.wait(30)
        except subprocess.TimeoutExpired:
            self._up.kill()
            raise Broken("umad up did not end within 30 s") from None
        if code != 0:
            raise Broken(f"umad up ended with code {code}")

    def check_alive(self) -> None:
        if self._up is not None and self._up.poll() is not None:
            raise Broken(f"umad up ended with code {self._up.returncode}")

    def _config(self, checkpoints: Path) -> Iterator[str]:
        yield f'[daemon]\nsocket = "{self.socket}"\n'
        yield '[memory]\nreserve = "512MiB"\nbudget = "3GiB"\n'
        yield f'[serve]\nlisten = "{self.address}"\nruntime_quota = "1GiB"\n'
        for name, kind in KINDS.items():
            yield f'[[model]]\nname = "{name}"\nkind = "{kind}"\n'
            yield f'path = "{checkpoints / name}"\nquota = "{QUOTAS[name]}"\n'


def demonstrate(machine: Machine) -> None:
    client = when_it_answers(machine)
    with client:
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        client.on("event", events.put)
        client.call("events")
        watch_loading(machine)
        ask_each(machine)
        show_books(machine)
        let_one_be_greedy(machine, events)
        ask_too_much(machine)


def when_it_answers(machine: Machine) -> Client:
    pause = threading.Event()
    deadline_s = time.monotonic() + 15
    while True:
        machine.check_alive()
        try:
            return connect(machine.socket, name="make run")
        except UmadError as error:
            if time.monotonic() > deadline_s:
                raise Broken(error.message) from None
        pause.wait(0.1)


def watch_loading(machine: Machine) -> None:
    """A line per model each time its state changes, until all are ready."""
    started_s = time.monotonic()
    shown: dict[str, str] = {}
    pause = threading.Event()
    while True:
        machine.check_alive()
        answer = ask.get(machine.address, "/readyz")
        for name, state in answer.body.get("models", {}).items():
            text = f"{state['state']} {state['stage']}".strip()
            if state["state"] == "failed":
                raise Broken(f"{name} could not be loaded: {state['error']['message']}")
            if shown.get(name) != text:
                shown[name] = text
                done = round(10 * (1.0 if state["state"] == "ready" else state["ratio"]))
                say(f"{since(started_s)}  {name:8} [{'#' * done:10}] {text}")
        if answer.status == 200:
            say(f"all five are ready after {format_duration(time.monotonic() - started_s)}")
            return
        if time.monotonic() - started_s > READY_WITHIN_S:
            raise Broken(f"not all models are ready after {READY_WITHIN_S:.0f} s")
        pause.wait(0.1)


def ask_each(machine: Machine) -> None:
    heading("One request to each (random weights: well-formed, not wise)")
    for name, request in ask.FIVE.items():
        answer = request(machine.address, name)
        say(f"{name:8} {ask.gist(answer)}")
        if answer.status != 200:
            raise Broken(f"{name} answered with HTTP {answer.status}")


def show_books(machine: Machine) -> None:
    heading("The books: umadctl status")
    status = subprocess.run(
        [sys.executable, "-m", "umad.cli.main", "--socket", machine.socket, "status"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if status.returncode != 0:
        raise Broken(f"umadctl status: {status.stderr}")
    print(status.stdout.split("\nnot set up")[0].rstrip())


class Traffic:
    """Requests to all five, one thread each, until it is stopped."""

    def __init__(self, address: str) -> None:
        self.answered: dict[str, int] = dict.fromkeys(ask.FIVE, 0)
        self.failed: list[str] = []
        self._address = address
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_asking, args=(name,)) for name in ask.FIVE
        ]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def another_round(self) -> None:
        """Wait until each has answered a request that began after this call, or one has failed."""
        enough = {name: count + 2 for name, count in self.answered.items()}  # one is under way
        pause = threading.Event()
        deadline_s = time.monotonic() + ROUND_WITHIN_S
        while not self.failed and any(self.answered[name] < enough[name] for name in enough):
            if time.monotonic() > deadline_s:
                raise Broken(f"not each of the five answered within {ROUND_WITHIN_S:.0f} s")
            pause.wait(0.05)

    def _keep_asking(self, name: str) -> None:
        while not self._stop.is_set():
            answer = ask.FIVE[name](self._address, name)
            if answer.status == 200:
                self.answered[name] += 1
            else:
                self.failed.append(f"{name}: {ask.gist(answer)}")


def let_one_be_greedy(machine: Machine, events: "queue.SimpleQueue[dict[str, Any]]") -> None:
    heading("A sixth worker breaks its contract while the five are kept busy")
    with Traffic(machine.address) as traffic:
        greedy = subprocess.Popen(
            [sys.executable, "-m", "tests.demo.greedy", machine.socket, GREEDY_QUOTA, GREED],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert greedy.stdout is not None
        for line in greedy.stdout:
            say(f"greedy (pid {greedy.pid}): {line.strip()}")
        code = greedy.wait(60)
        stopped = wait_for_stop(events, greedy.pid)
        traffic.another_round()  # "all the while" includes the time after
    print_timeline(stopped, code)
    counts = ", ".join(f"{name} {count}" for name, count in traffic.answered.items())
    say(f"answered meanwhile: {counts}; failed: {len(traffic.failed)}")
    if code != -signal.SIGKILL:
        raise Broken(f"the greedy worker ended with code {code}, not by SIGKILL")
    if stopped["fence"] != "sigkill" or stopped["seen_to_kill_s"] > KILL_WITHIN_S:
        raise Broken(f"the kill took {stopped['seen_to_kill_s']} s from the sample that showed it")
    if traffic.failed:
        raise Broken("requests failed: " + "; ".join(traffic.failed[:3]))


def print_timeline(stopped: dict[str, Any], code: int) -> None:
    print()
    limit, seen = (format_bytes(stopped[key]) for key in ("limit_bytes", "measured_bytes"))
    steps = [
        (0.0, f"a look at memory shows {seen}; its limit is {limit} ({stopped['source']})"),
        (stopped["seen_to_revoke_s"], "revoked: told to stop"),
        (
            stopped["seen_to_kill_s"],
            f"SIGKILL: it had gone on to {format_bytes(stopped['measured_at_kill_bytes'])}",
        ),
        (
            stopped["seen_to_gone_s"],
            f"gone; {format_bytes(stopped['freed_bytes'])} back in the books",
        ),
    ]
    for at_s, text in steps:
        say(f"{'-' if at_s is None else f'{at_s * 1000:7.1f} ms'}  {text}")
    say(f"             its exit status: {signal.Signals(-code).name if code < 0 else code}")


def ask_too_much(machine: Machine) -> None:
    heading("A request that can never fit")
    answer = ask.paint(machine.address, "sdxl", "8192x8192")
    error = answer.body["error"]
    say("sdxl, an image of 8192x8192:")
    say(f"HTTP {answer.status} {error.get('code')}: {error['message']}")
    if answer.status != 413:
        raise Broken(f"expected HTTP 413, got {answer.status}")
    if any(ask.FIVE[name](machine.address, name).status != 200 for name in ask.FIVE):
        raise Broken("a model does not answer after the refusal")
    say("and the five still answer")


def keep_serving(machine: Machine) -> None:
    heading("It goes on serving; Ctrl-C ends it.  Try:")
    print(
        f"curl -s http://{machine.address}/v1/chat/completions \\\n"
        "  -H 'content-type: application/json' \\\n"
        '  -d \'{"model": "llama", "messages": [{"role": "user", "content": "hello"}]}\'\n'
        f".venv/bin/umadctl --socket {machine.socket} status\n"
        f".venv/bin/umadctl --socket {machine.socket} top\n"
        f"xdg-open http://{machine.address}/   # the live picture in a browser\n"
        f"tail -f {machine.log}",
        flush=True,
    )
    pause = threading.Event()
    while True:
        machine.check_alive()
        pause.wait(1.0)


def wait_for_stop(events: "queue.SimpleQueue[dict[str, Any]]", pid: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + 15
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            event = events.get(timeout=left_s)
        except queue.Empty:
            break
        if event["name"] == "stopped" and event["pid"] == pid:
            return event
    raise Broken("the daemon told of no stop")


def print_log(path: Path) -> None:
    if path.exists():
        lines = path.read_text(errors="replace").splitlines()[-20:]
        print("the last lines of the log:", *lines, sep="\n  ")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def say(text: str) -> None:
    print(f"   {text}", flush=True)


def since(started_s: float) -> str:
    return f"{time.monotonic() - started_s:5.1f} s"


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
