"""``umadctl events`` against a real daemon, and events in words."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_umadctl import run
from tests.daemon.running import ROOT, Daemon, eventually, running
from umad.core.state import EVENTS_KEPT


class Following:
    """``umadctl events --follow``; what it has said so far, by stream."""

    def __init__(self, daemon: Daemon, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "umad.cli.main", "--socket", daemon.socket, "events", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,))
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def end(self) -> None:
        self.process.kill()
        for reader in self._readers:
            reader.join()
        self.process.communicate()

    def says(self, *words: str) -> None:
        eventually(lambda: any(all(word in line for word in words) for line in self.out), 20)

    def warns(self, words: str) -> None:
        eventually(lambda: any(words in line for line in self.err), 20)


@contextmanager
def following(daemon: Daemon, *words: str) -> Iterator[Following]:
    made = Following(daemon, "--follow", *words)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_it_shows_what_was_decided_for_people_and_for_programs(daemon: Daemon) -> None:
    with daemon.client() as client:
        for at in range(60):  # more than the daemon tells at once
            client.worker(f"one-{at}", quota="1MiB").close()
        client.worker("llama", quota="64MiB", instance=1).load(lambda: bytearray(1))
        table = run("--socket", daemon.socket, "events")
        lines = table.stdout.splitlines()
        assert (table.returncode, table.stderr) == (0, "")
        assert len(lines) > 120
        assert re.fullmatch(
            r"\w{3} \d\d \d\d:\d\d:\d\d info    llama/1 registered: quota 64.0 MiB, .*",
            next(line for line in lines if "llama/1 registered" in line),
        )
        asked = run("--socket", daemon.socket, "events", "--json", "--worker", "llama")
        found = [json.loads(line) for line in asked.stdout.splitlines()]
        assert [event["name"] for event in found][:2] == ["registered", "loaded"]
        assert {event["worker"] for event in found} == {"llama/1"}
        assert {event["level"] for event in found} <= {"info", "warning"}
        assert run("--socket", daemon.socket, "events", "--since", "1us").stdout == ""
        assert run("--socket", daemon.socket, "events", "--since", "1h").stdout == table.stdout
        assert run("--socket", daemon.socket, "events", "--since", "60").returncode == 2


@pytest.mark.slow
def test_following_outlives_the_daemon_and_ends_with_ctrl_c(daemon: Daemon) -> None:
    with following(daemon) as tail, daemon.client() as client:
        for _ in range(5):  # so that the next daemon's numbers are below these
            client.worker("gone", quota="1MiB").close()
        worker = client.worker("before", quota="1MiB")
        tail.says("before registered")
        daemon.kill()
        tail.warns("waiting for umad")
        daemon.start()
        tail.warns("umad was restarted")
        client.worker("after", quota="1MiB")
        tail.says("after registered")
        tail.process.send_signal(signal.SIGINT)
        assert tail.process.wait(20) == 0
        assert "Traceback" not in "".join(tail.err)
        del worker
    assert sum("after registered" in line for line in tail.out) == 1


@pytest.mark.slow
def test_it_ends_when_nobody_reads_any_more(daemon: Daemon) -> None:
    with daemon.client() as client:
        worker = client.worker("llama", quota="1MiB")
        read, write = os.pipe()
        tail = subprocess.Popen(
            [sys.executable, "-m", "umad.cli.main", "--socket", daemon.socket, "events", "-f"],
            cwd=ROOT,
            stdout=write,
            stderr=subprocess.PIPE,
        )
        os.close(write)
        assert b"llama" in os.read(read, 65536)
        os.close(read)  # as `| head -1` does; no event comes any more
        _, said = tail.communicate(timeout=20)
        assert (tail.returncode, said) == (0, b"")
        del worker


def test_what_is_said_to_be_kept_is_kept() -> None:
    told = (
        ROOT / "umad/wire/PROTOCOL.md",
        ROOT / "umad/cli/events.py",
        ROOT / "umad/cli/report.py",
    )
    assert all(f" {EVENTS_KEPT} " in file.read_text() for file in told)
