"""The daemon towards a service manager that the test plays (R1): one datagram socket, no root."""

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.systemd.container import wait_until

pytestmark = pytest.mark.slow

PERIOD_S = 0.2  # half of WATCHDOG_USEC
_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207
_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@dataclass
class Manager:
    """What systemd would hear, line by line, with the moment it came."""

    sock: socket.socket
    daemon: "subprocess.Popen[bytes]"
    meminfo: Path
    heard: list[tuple[float, str]] = field(default_factory=list)

    def listen(self, seconds: float) -> None:
        """Collect for a fixed time."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._hear(left_s)

    def until(self, line: str, seconds: float = 10.0) -> None:
        """Collect until a line that begins so."""
        until_s = time.monotonic() + seconds
        while not any(said.startswith(line) for _, said in self.heard):
            left_s = until_s - time.monotonic()
            assert left_s > 0, f"no {line} in {self.heard}"
            self._hear(left_s)

    def times(self, line: str) -> list[float]:
        """When each such line came."""
        return [at_s for at_s, said in self.heard if said == line]

    def _hear(self, timeout_s: float) -> None:
        self.sock.settimeout(timeout_s)
        try:
            text = self.sock.recv(4096).decode()
        except TimeoutError:
            return
        self.heard += [(time.monotonic(), line) for line in text.splitlines()]


@contextmanager
def stopped_loop(pid: int) -> Iterator[None]:
    """Stop the main thread and no other: a helper thread could go on and say that all is well."""
    assert _ptrace(_PTRACE_SEIZE, pid, None, None) == 0
    assert _ptrace(_PTRACE_INTERRUPT, pid, None, None) == 0
    os.waitpid(pid, os.WUNTRACED)
    try:
        yield
    finally:
        assert _ptrace(_PTRACE_DETACH, pid, None, None) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and a root folder with this machine's memory in it."""
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    for name in ("meminfo", "vmstat", "sys/vm/swappiness", "sys/vm/vfs_cache_pressure"):
        (tmp_path / "proc" / name).write_text(Path("/proc", name).read_text())
    (tmp_path / "umad.toml").write_text(f'[daemon]\nsocket = "{tmp_path}/umad.sock"\n')
    return tmp_path


@contextmanager
def started(folder: Path, **variables: str) -> Iterator[Manager]:
    """A daemon whose service manager is the test."""
    address = f"umad-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{address}")
        command = [sys.executable, "-m", "umad.daemon.main", "--permissive"]
        command += ["--config", str(folder / "umad.toml"), "--root", str(folder)]
        environment = {"NOTIFY_SOCKET": f"@{address}", "WATCHDOG_USEC": "400000"} | variables
        daemon = subprocess.Popen(
            command,
            env=os.environ | environment,
            cwd=Path(__file__).resolve().parents[2],
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Manager(sock, daemon, folder / "proc/meminfo")
        finally:
            daemon.kill()
            daemon.wait()


def test_ready_comes_once_and_only_with_an_open_socket(folder: Path) -> None:
    with started(folder) as manager:
        manager.until("READY=1")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(folder / "umad.sock"))
        manager.listen(1.0)
        assert len(manager.times("READY=1")) == 1
        assert any(line.startswith("STATUS=") for _, line in manager.heard)


def test_pings_come_at_half_the_watchdogs_time(folder: Path) -> None:
    with started(folder) as manager:
        manager.until("READY=1")
        manager.listen(2.1)
        pings = manager.times("WATCHDOG=1")
        gaps = [later - earlier for earlier, later in itertools.pairwise(pings)]
        assert 8 <= len(pings) <= 13
        # never near the 400 ms at which systemd would abort it, in spite of a busy machine
        assert max(gaps) < 0.35
        assert sum(gaps) / len(gaps) == pytest.approx(PERIOD_S, abs=0.06)


def test_a_loop_that_stands_still_does_not_ping(folder: Path) -> None:
    with started(folder) as manager:
        manager.until("WATCHDOG=1")
        with stopped_loop(manager.daemon.pid):
            manager.heard.clear()
            manager.listen(0.05)  # one may have been on its way
            manager.heard.clear()
            manager.listen(0.95)
            assert manager.heard == []
        manager.until("WATCHDOG=1", 2.0)


def test_memory_that_cannot_be_read_neither_stops_the_pings_nor_is_hidden(folder: Path) -> None:
    with started(folder) as manager:
        manager.until("WATCHDOG=1")
        text = manager.meminfo.read_text()
        manager.meminfo.unlink()
        os.mkfifo(manager.meminfo)  # opens and never answers: a reader that waits would hang
        manager.heard.clear()
        manager.listen(1.0)
        assert len(manager.times("WATCHDOG=1")) >= 3
        assert "MEMORY UNKNOWN" in str(manager.heard)
        manager.meminfo.unlink()
        manager.meminfo.write_text(text)
        manager.listen(0.5)
        assert "MEMORY UNKNOWN" not in manager.heard[-1][1]


def test_a_watchdog_for_another_process_is_none_of_ours(folder: Path) -> None:
    with started(folder, WATCHDOG_PID="1") as manager:
        manager.until("READY=1")
        manager.listen(1.0)
        assert manager.times("WATCHDOG=1") == []


def test_sigterm_is_answered_with_stopping_and_a_clean_end(folder: Path) -> None:
    with started(folder) as manager:
        manager.until("READY=1")
        manager.daemon.send_signal(signal.SIGTERM)
        manager.until("STOPPING=1", 2.0)
        assert manager.daemon.wait(5) == 0
        assert not (folder / "umad.sock").exists()


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "@umad-test-nobody"])
def test_without_a_manager_it_works_as_well(folder: Path, address: str) -> None:
    path = folder / "umad.sock"
    with started(folder, NOTIFY_SOCKET=address) as manager:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            wait_until(lambda: client.connect_ex(str(path)) == 0, 10, "the socket")
            client.sendall(b"\xc1")  # no message begins so: it answers by closing
            assert client.recv(1) == b""
        manager.daemon.send_signal(signal.SIGTERM)
        assert manager.daemon.wait(5) == 0
