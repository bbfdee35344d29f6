"""``umadctl run`` with a real daemon and real programs: quotas, ends, signals, terminals."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import ROOT, Daemon, eventually, running
from umad.host.procs import process_stat
from umad.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

UMADCTL = [sys.executable, "-m", "umad.cli.main"]
TOUCH = "def touch(mib): b = bytearray(mib << 20); b[::4096] = b'x' * (mib << 8); return b\n"
SAY = "import os, signal, sys, time\nsay = lambda *words: print(*words, flush=True)\n"
# Twice away from its parents: neither descent nor a session tells whose it is.
ESCAPE = (
    "def escape():\n"
    "    if os.fork(): return os.wait()\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    os.setsid()\n"
    "    kept = touch(200); say('child', os.getpid())\n"
    "    while True: signal.pause()\n"
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="umad-") as folder, running(Path(folder)) as made:
        yield made


class Run:
    """One umadctl run, of a Python program."""

    def __init__(self, daemon: Daemon, name: str, quota: str, code: str, *flags: str) -> None:
        self.daemon, self.name = daemon, name
        command = [*UMADCTL, "--socket", daemon.socket, "run", "--name", name, "--quota", quota]
        program = ["--", sys.executable, "-S", "-c", SAY + TOUCH + ESCAPE + code]
        self.process = subprocess.Popen(
            [*command, *flags, *program],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ends(self) -> tuple[int, str, str]:
        """Its exit status, and the rest of what it said."""
        out, errors = self.process.communicate(timeout=30)
        return self.process.returncode, out, errors

    def shown(self) -> dict[str, Any] | None:
        workers = self.daemon.status()["workers"]
        return next((one for one in workers if one["name"] == self.name), None)

    def holds(self) -> dict[str, Any]:
        """The process in the daemon's eyes."""
        worker = self.shown()
        assert worker is not None
        found: dict[str, Any] = next(
            one for one in self.daemon.status()["processes"] if one["pid"] == worker["pid"]
        )
        return found


@pytest.fixture
def run(daemon: Daemon) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def start(name: str, quota: str, code: str, *flags: str) -> Run:
        made.append(Run(daemon, name, quota, code, *flags))
        return made[-1]

    yield start
    for one in made:
        worker = one.shown()
        if worker is not None:
            os.kill(worker["pid"], signal.SIGKILL)
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdin, one.process.stdout, one.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # and not read to its end: somebody may have it open still
    eventually(lambda: daemon.booked() == 0)


def state(pid: int) -> str:
    stat = process_stat(pid)
    return "" if stat is None else stat.state


def test_status_output_and_bytes_come_back(daemon: Daemon, run: Callable[..., Run]) -> None:
    ended = run("seven", "100MiB", "say('here'); print('there', file=sys.stderr); sys.exit(7)")
    assert ended.ends() == (7, "here\n", "there\n")
    assert ended.shown() is None, "when umadctl ends, the books are right"
    killed = run("killed", "100MiB", "os.kill(os.getpid(), signal.SIGSEGV)")
    assert killed.ends()[0] == 128 + signal.SIGSEGV
    assert killed.ends()[2] == "", "that was not umad"


def test_a_grandchild_over_the_quota_costs_its_program_and_nobody_beside(
    run: Callable[..., Run],
) -> None:
    sibling = run("sibling", "200MiB", "say('up'); sys.stdin.readline(); say('done')")
    assert sibling.hears() == "up"
    code = "if os.fork() == 0: kept = touch(400); time.sleep(60)\nos.wait()"
    status, _, errors = run("greedy", "200MiB", code).ends()
    assert status == 128 + signal.SIGKILL
    pattern = (
        r"umadctl: umad stopped greedy, which was over its quota: it held (\d+\.\d) MiB "
        r"\((\d+\.\d) MiB too much\), its limit is 200\.0 MiB \(status of 2 processes\)\n"
    )
    told = re.fullmatch(pattern, errors)
    assert told is not None, errors
    assert 200 < float(told[1]) < 500
    assert float(told[2]) == pytest.approx(float(told[1]) - 200, abs=0.11)
    assert sibling.shown() is not None
    assert sibling.process.communicate("\n", timeout=10)[0] == "done\n"


def test_c20_an_orphan_stays_billed_and_is_stopped_at_the_end(run: Callable[..., Run]) -> None:
    program = run("parent", "500MiB", "escape(); sys.stdin.readline(); sys.exit(3)")
    child = int(program.hears().split()[1])
    shown = eventually(lambda: (one := program.holds())["bytes"] > 200 * MIB and one)
    assert shown["family"] == [child]
    assert shown["comm"] == Path(sys.executable).name[:15]
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    status, _, errors = program.ends()
    assert status == 3
    assert "umad stopped what parent had left behind when it ended: it held 2" in errors
    assert state(child) in ("", "Z")
    assert program.shown() is None


def test_c07_its_peak_counts_until_it_has_settled(daemon: Daemon, run: Callable[..., Run]) -> None:
    code = "kept = touch(150); a = touch(150); say('peak'); time.sleep(0.5); del a; say('steady')\n"
    code += "sys.stdin.readline(); a = touch(150); say('over'); time.sleep(60)"
    program = run("loads", "200MiB", code, "--peak", "400MiB", "--settle", "500ms")
    assert program.hears() == "peak"
    shown = program.shown()
    assert shown is not None
    assert (shown["state"], shown["booked"]) == ("loading", 400 * MIB)
    assert program.hears() == "steady"
    daemon.wait_for("loaded", worker="loads")
    eventually(lambda: daemon.booked() == 200 * MIB)
    assert program.process.poll() is None
    program.process.stdin.write("\n")  # type: ignore[union-attr]
    assert "which was over its quota" in program.ends()[2]
    code = "kept = touch(450); time.sleep(60)"
    over = run("bursts", "200MiB", code, "--peak", "400MiB")
    assert "over its peak while it started" in over.ends()[2]


def test_it_waits_for_room_within_its_bound(run: Callable[..., Run]) -> None:
    first = run("first", "1500MiB", "say('up'); sys.stdin.readline()")
    assert first.hears() == "up"
    status, out, errors = run("hasty", "600MiB", "say('up')", "--wait", "100ms").ends()
    assert (status, out) == (125, "")
    assert "600.0 MiB asked of pool 'system'" in errors
    assert "first 1.5 GiB" in errors
    second = run("second", "600MiB", "say('up')")
    assert second.process.stderr is not None
    assert re.match("umadctl: second waits: .*600.0 MiB asked", second.process.stderr.readline())
    left = run("left", "600MiB", "say('up')")
    assert left.process.stderr is not None
    assert "left waits" in left.process.stderr.readline()
    left.process.kill()
    eventually(lambda: left.shown() is None)
    assert left.ends()[1] == "", "it was never started"
    first.process.communicate("\n", timeout=10)
    assert second.ends() == (0, "up\n", "")


def test_a_program_that_is_killed_before_it_starts(run: Callable[..., Run]) -> None:
    first = run("big", "1900MiB", "say('up'); sys.stdin.readline()")
    assert first.hears() == "up"
    waits = run("early", "1GiB", "say('up')")
    assert waits.process.stderr is not None
    assert "early waits" in waits.process.stderr.readline()
    shown = waits.shown()
    assert shown is not None
    os.kill(shown["pid"], signal.SIGKILL)
    assert waits.ends()[0] == 125
    code = (
        "import os; from umad.cli.run import Order, Program, _blocked\n"
        "program = Program(Order(['true'], {}, 0.0)); os.kill(program.pid, 9)\n"
        "os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)\n"
        "with _blocked(): program.go(); print(program.supervise())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=10)
    assert done.stdout == b"137\n"


HEARS = (
    "def hear(number, _): say(signal.Signals(number).name)\n"
    "for name in ('INT', 'TERM', 'HUP', 'QUIT', 'USR1', 'USR2', 'WINCH', 'CONT'):\n"
    "    signal.signal(getattr(signal, 'SIG' + name), hear)\n"
    "say('pid', os.getpid())\n"
    "while True: signal.pause()\n"
)


def test_signals_pass_through(run: Callable[..., Run]) -> None:
    program = run("hears", "100MiB", HEARS)
    pid = int(program.hears().split()[1])
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH"):
        program.process.send_signal(getattr(signal, f"SIG{name}"))
        assert program.hears() == f"SIG{name}"
    umadctl = program.process.pid
    program.process.send_signal(signal.SIGTSTP)
    eventually(lambda: state(pid) == state(umadctl) == "T")
    program.process.send_signal(signal.SIGCONT)
    assert program.hears() == "SIGCONT"
    eventually(lambda: state(umadctl) == "S")
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    assert program.hears() == "SIGCONT"
    assert state(umadctl) == "S", "whoever stops the program alone wakes it alone"
    os.kill(pid, signal.SIGKILL)
    assert program.ends()[0] == 128 + signal.SIGKILL


def test_when_umadctl_dies_the_program_runs_on_under_its_quota(run: Callable[..., Run]) -> None:
    code = "say('pid', os.getpid()); sys.stdin.readline(); kept = touch(400); signal.pause()"
    program = run("outlives", "200MiB", code)
    pid = int(program.hears().split()[1])
    program.process.kill()
    program.process.wait()
    eventually(lambda: program.daemon.status()["connections"] == 1)
    assert state(pid) in ("R", "S")
    assert program.daemon.booked() == 200 * MIB
    program.process.stdin.write("\n")  # type: ignore[union-attr]
    program.process.stdin.flush()  # type: ignore[union-attr]
    eventually(lambda: state(pid) in ("", "Z"))
    program.daemon.wait_for("stopped", worker="outlives")
    eventually(lambda: program.shown() is None)


def test_at_a_terminal_it_is_the_foreground_job(daemon: Daemon) -> None:
    command = [*UMADCTL, "--socket", str(daemon.socket), "run", "--name", "job"]
    command += ["--quota", "100MiB", "--", sys.executable, "-S", "-c", SAY + HEARS]
    umadctl, terminal = pty.fork()
    if umadctl == 0:
        os.chdir(ROOT)
        os.execv(command[0], command)
    with os.fdopen(terminal, "r+b", buffering=0) as typed:

        def hears() -> str:
            line = b""
            while not line.endswith(b"\n"):
                line += typed.read(1)
            return line.decode().strip()

        pid = int(hears().split()[1])
        assert os.tcgetpgrp(terminal) == pid
        typed.write(b"\x03")
        assert hears() == "^CSIGINT"
        typed.write(b"\x1a")
        assert os.WIFSTOPPED(os.waitpid(umadctl, os.WUNTRACED)[1])
        assert state(pid) == "T"
        assert os.tcgetpgrp(terminal) == umadctl, "a shell would take it from here"
        os.kill(umadctl, signal.SIGCONT)
        assert hears() == "^ZSIGCONT"
        eventually(lambda: os.tcgetpgrp(terminal) == pid)
        typed.write(b"\x1c")
        assert hears() == "^\\SIGQUIT"
        os.kill(pid, signal.SIGTERM)
        assert hears() == "SIGTERM"
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(umadctl, 0)[1]) == 128 + signal.SIGKILL


def test_what_cannot_be_run_is_said(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    for socket, quota, program, status, why in (
        (daemon.socket, "1MiB", "no-such-program", 127, "cannot run no-such-program: not found"),
        (daemon.socket, "1MiB", str(tmp_path / "plain"), 126, "not executable"),
        (daemon.socket, "4GiB", "true", 125, "4.0 GiB can never fit"),
        (tmp_path / "none", "1MiB", "true", 125, "systemctl start umad"),
        (daemon.socket, "1", "true", 2, "'1' has no unit"),
    ):
        command = [*UMADCTL, "--socket", str(socket), "run", "--name", "x", "--quota", quota]
        done = subprocess.run(
            [*command, program, "--quota"], cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        assert why in done.stderr
