"""``umadctl run``: any program under a quota, as if it had been started without umad.

Owns the program's start and end: it is forked first and held back, registered in its own name,
and let go when its bytes are booked.  It is in a scope of its own where systemd makes one, else
in a session of its own, or in the terminal's foreground.  Whoever it starts and leaves behind
becomes this process's child, by which the daemon knows whose it is.  Signals and the exit status
pass through; when this process dies, the program runs on under its quota.
Stays out: how much it may hold and who stops it; that is the daemon's.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, NoReturn

import click

from umad.client import Client, DaemonUnavailable, UmadError, connect
from umad.errors import Recovering
from umad.host import cgroups
from umad.units import format_bytes, format_excess

NOT_STARTED: Final = 125  # as of env(1), nohup(1) and docker(1)
NOT_RUNNABLE: Final = 126
NOT_FOUND: Final = 127

# What a terminal sends goes to all that it would have gone to; the rest to the program alone.
_TO_GROUP: Final = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGWINCH})
_TO_PROGRAM: Final = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_STOPS: Final = frozenset({signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD})
_WAITED_FOR: Final = _TO_GROUP | _TO_PROGRAM | _STOPS
# Else a process of the background that hands the terminal back is stopped for it.
_BLOCKED: Final = _WAITED_FOR | {signal.SIGTTOU}
_PR_SET_CHILD_SUBREAPER: Final = 36
_SCOPE_S: Final = 2.0
_RETRY_S: Final = 0.2
_ASKED_EVERY_S: Final = 0.05
_END_S: Final = 2.0  # after the program's end, for the daemon to say how
_ORPHANS_S: Final = 10.0
_WHOM: Final = {
    "quota_exceeded": "{}, which was over its quota",
    "peak_exceeded": "{}, which was over its peak while it started",
    "orphaned": "what {} had left behind when it ended",
}


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be run, and with how much."""

    command: Sequence[str]
    registration: Mapping[str, Any]
    wait_s: float

    @property
    def name(self) -> str:
        """The worker's."""
        return str(self.registration["model"])


def run(socket: str | None, order: Order) -> int:
    """Run a program to its end; returns its exit status, 128 + N where signal N ended it."""
    if shutil.which(order.command[0]) is None:
        there = os.path.lexists(order.command[0]) and "/" in order.command[0]
        _say(f"cannot run {order.command[0]}: " + ("not executable" if there else "not found"))
        return NOT_RUNNABLE if there else NOT_FOUND
    # Orphans below us become ours, and not pid 1's: the daemon counts them as the program's.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    program = Program(order)  # before the client's thread: a fork would copy its locks
    try:
        with _blocked():  # what the client's thread has blocked is for this one
            client = connect(socket, name=f"run {order.name}"[:64])
        with client:
            client.on("queued", lambda told: _say(f"{order.name} waits: {told['reason']}"))
            seen = book(client, order, program.pid)
            with _blocked():
                program.go()
                code = program.supervise()
            tell_end(client, order.name, program.pid, seen)
            return code
    except UmadError as error:
        _say(error.message)
        return NOT_STARTED
    finally:
        program.close()


def book(client: Client, order: Order, pid: int) -> int:
    """Register the child and book its peak; returns the number of the last event before.

    Raises:
        UmadError: refused, or there was no room in time.
    """
    deadline_s = monotonic() + order.wait_s
    registration = {**order.registration, "process": pid}
    while True:
        left_s = max(0.0, deadline_s - monotonic())
        try:
            answer = client.call("register", registration)
            lease = answer
            if "lease" not in answer:  # else: a daemon that restarted has it from the last one
                ask = {"worker": answer["worker"], "wait_s": left_s}
                lease = client.call("reserve", ask)
                own_scope(pid, order.name)
                ticket = {"lease": lease["lease"], "token": lease["token"], "measured": 0}
                client.call("commit", ticket)
            return int(client.call("events")["next"])
        except (Recovering, DaemonUnavailable):
            if left_s <= 0:
                raise
            client.closing.wait(min(_RETRY_S, left_s))


class Program:
    """The child: held back until ``go``.

    Attributes:
        pid: its own, from the fork to the end.
    """

    def __init__(self, order: Order) -> None:
        self._terminal = _in_foreground()
        self._code: int | None = None
        self._asked_to_stop = False
        held, self._gate = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._gate)
            _become(order.command, held, session=not self._terminal)
        os.close(held)
        if self._terminal:
            with contextlib.suppress(OSError):  # the child has done it
                os.setpgid(self.pid, self.pid)

    def go(self) -> None:
        """Let it start."""
        self._hand_terminal_to(self.pid)
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._gate, b"!")

    def supervise(self) -> int:
        """Pass signals on until it ends; returns its status.  ``_BLOCKED`` is blocked here."""
        self._reap()  # it may have ended while nobody waited for that
        while self._code is None:
            self._pass_on(signal.Signals(signal.sigwaitinfo(_WAITED_FOR).si_signo))
        self._hand_terminal_to(os.getpgrp())
        return self._code

    def close(self) -> None:
        """Without ``go`` it ends by itself: the gate is closed."""
        os.close(self._gate)

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGTSTP:
            # Nobody of a session without a terminal is stopped by SIGTSTP: POSIX says so.
            self._asked_to_stop = True
            self._signal_group(signal.SIGTSTP if self._terminal else signal.SIGSTOP)
        elif number == signal.SIGCONT:
            if _in_foreground():  # a shell's fg, and not its bg
                self._hand_terminal_to(self.pid)
            self._signal_group(number)
        elif number in _TO_GROUP:
            self._signal_group(number)
        else:
            os.kill(self.pid, number)  # it is not reaped yet: the number is its own

    def _hand_terminal_to(self, group: int) -> None:
        if self._terminal:
            with contextlib.suppress(OSError):  # it has hung up
                os.tcsetpgrp(0, group)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid != self.pid:
                continue  # it was left behind, and came to us
            if os.WIFSTOPPED(status):
                self._stop()
            else:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code

    def _stop(self) -> None:
        """It has stopped: so do we, where somebody waits for that, a shell for one."""
        self._hand_terminal_to(os.getpgrp())
        if self._terminal or self._asked_to_stop:
            self._asked_to_stop = False
            os.kill(os.getpid(), signal.SIGSTOP)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal, or not ours
        return False


def _become(command: Sequence[str], held: int, *, session: bool) -> NoReturn:
    """In the child: wait, and become the program."""
    code = NOT_STARTED
    try:
        if session:
            os.setsid()
        else:
            os.setpgid(0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        # It is registered before it is the program, and is to have its name there.
        Path("/proc/self/comm").write_text(Path(command[0]).name[:15])
        if os.read(held, 1):
            code = NOT_RUNNABLE
            os.execvp(command[0], list(command))  # noqa: S606  what the user asks for
    except OSError as error:
        os.write(2, f"umadctl: cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(code)


def own_scope(pid: int, name: str) -> bool:
    """Have systemd put the child into a scope of its own; False where it does not.

    Without one the program is known by its session and its descent, which is nearly as good.
    """
    if not Path("/run/systemd/system").is_dir() or shutil.which("busctl") is None:
        return False
    scope = f"umad-run-{name}-{pid}.scope"
    manager = "org.freedesktop.systemd1"
    call = ["busctl", "--system" if os.geteuid() == 0 else "--user", "call", manager]
    call += [f"/{manager.replace('.', '/')}", f"{manager}.Manager", "StartTransientUnit"]
    call += ["ssa(sv)a(sa(sv))", scope, "fail", "3"]
    call += ["Description", "s", f"{name}, run by umadctl"]
    call += ["CollectMode", "s", "inactive-or-failed", "PIDs", "au", "1", str(pid), "0"]
    deadline_s, pause = monotonic() + _SCOPE_S, threading.Event()
    try:
        done = subprocess.run(
            call,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SCOPE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    while done.returncode == 0 and monotonic() < deadline_s:
        if cgroups.of_process(pid).endswith(scope):
            return True
        pause.wait(0.01)
    return False


def tell_end(client: Client, name: str, pid: int, seen: int) -> None:
    """Wait until the daemon has seen the end, so that the bytes are back; say if it was umad's."""
    began_s = monotonic()
    while True:
        try:
            answer = client.call("events", {"since": seen})
        except UmadError:
            return  # the program's status counts, and it is there
        if answer["next"] < seen:  # a new daemon counts anew
            seen = 0
        mine = {one["name"]: one for one in answer["events"] if one.get("pid") == pid}
        if (stopped := mine.get("stopped")) is not None:
            if stopped["fence"] == "sigkill":
                held, limit = stopped["measured_bytes"], stopped["limit_bytes"]
                beyond = ""
                if limit:
                    beyond = f"{format_excess(held, limit)}, its limit is {format_bytes(limit)}"
                _say(
                    f"umad stopped {_WHOM.get(stopped['reason'], '{}').format(name)}: it held "
                    f"{format_bytes(held)}{beyond} ({stopped['source']})"
                )
            return
        patience_s = _ORPHANS_S if "orphaned" in mine else _END_S
        if "exited" in mine or monotonic() - began_s > patience_s:
            return
        client.closing.wait(_ASKED_EVERY_S)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say(text: str) -> None:
    click.echo(f"umadctl: {text}", err=True)
