"""Throw-away containers whose PID 1 is the real systemd.

Owns the outer half: cgroups, the namespaces' first process, running commands inside, and
leaving nothing behind.  The inner half is the script ``become-systemd``.  The root folder inside
is an overlay of this machine's ``/``: all that is installed here is there, all that is written
goes away.  The container has its own processes, mounts, network (loopback only) and cgroups, and
cannot change kernel settings.  Works on cgroup v1, hybrid and v2; needs root and the packages
named in ``PACKAGES``, but no systemd outside.
"""

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final

PACKAGES: Final = "systemd util-linux"
BOOT_S: Final = 60.0
_INNER: Final = Path(__file__).with_name("become-systemd")
_NAMESPACES: Final = ("--mount", "--uts", "--ipc", "--net", "--pid")
_ENVIRONMENT: Final = ("LANG=C.UTF-8", "HOME=/", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "PAGER=cat")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_PREFIX: Final = "umad-container"
_numbers = itertools.count()


class Unavailable(Exception):
    """This machine cannot run a container; the message says what is missing."""


def why_unavailable() -> str | None:
    """What keeps this machine from running a container, or None."""
    if os.geteuid() != 0:
        return "a container with systemd needs root"
    programs = ("/lib/systemd/systemd", "systemctl", "journalctl", "unshare", "nsenter", "setpriv")
    absent = [program for program in programs if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install {PACKAGES}"
    if not _hierarchies():
        return f"no cgroup hierarchy is mounted below {_CGROUPS}"
    return None


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Look every 10 ms until the condition holds.

    Raises:
        TimeoutError: it did not hold within ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        pause.wait(0.01)


class Container:
    """A running container; made by ``container()``.

    Attributes:
        init_pid: systemd's process id as seen from outside.
    """

    def __init__(self, init_pid: int) -> None:
        self.init_pid = init_pid

    def path(self, inside: str) -> Path:
        """Where an absolute path of the container can be read and written from outside."""
        return Path(f"/proc/{self.init_pid}/root{inside}")

    def argv(self, command: str, *, user: str | None = None) -> list[str]:
        """The argument list that runs a shell command inside, for subprocess."""
        enter = ["nsenter", "--target", str(self.init_pid), "--cgroup", *_NAMESPACES, "--"]
        # death with its nsenter, so that a timeout leaves nothing running inside
        clean = ["setpriv", "--pdeathsig", "KILL", "env", "-i", *_ENVIRONMENT]
        if user is None:
            return [*enter, *clean, "sh", "-c", command]
        become = 'exec setpriv --reuid "$0" --regid "$(id -g "$0")" --init-groups "$@"'
        shell = [*clean, "sh", "-c", command]
        return [*enter, "sh", "-c", become, user, *shell]

    def run(
        self,
        command: str,
        *,
        user: str | None = None,
        check: bool = True,
        timeout_s: float = 30.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command inside, as root or as ``user``, and collect its output.

        Raises:
            AssertionError: it failed and ``check`` is set; the message holds its output.
            subprocess.TimeoutExpired: it took longer than ``timeout_s`` seconds and was killed.
        """
        done = subprocess.run(
            self.argv(command, user=user),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done


@contextmanager
def container(
    binds: Mapping[Path, str] | None = None, root: Path = Path("/")
) -> Iterator[Container]:
    """Boot a container, and remove it whatever happens.

    Args:
        binds: folders of this machine and where they are seen inside, read-only.
        root: what lies below all that is written inside; another system than this machine's.

    Raises:
        Unavailable: this machine cannot run one, or systemd did not come up in it.
    """
    if (reason := why_unavailable()) is not None:
        raise Unavailable(reason)
    _remove_stale()
    hierarchies = _hierarchies()
    name = f"{_PREFIX}.{os.getpid()}.{_start_ticks(os.getpid())}.{next(_numbers)}"
    folders = [hierarchy.own / name for hierarchy in hierarchies]
    outer: subprocess.Popen[str] | None = None
    init_pid = 0
    try:
        for folder in folders:
            _make_cgroup(folder)
        with tempfile.TemporaryFile("w+") as log:
            outer = _start(hierarchies, folders, binds or {}, root, log)
            assert outer.stdout is not None
            init_pid = int(outer.stdout.readline() or 0)
            try:
                if init_pid == 0:
                    raise Unavailable("its first process ended")
                _await_boot(Container(init_pid))
            except (Unavailable, TimeoutError) as error:
                log.seek(0)
                raise Unavailable(f"systemd did not come up: {error}\n{log.read()}") from error
        yield Container(init_pid)
    finally:
        if outer is not None:
            _end(outer, init_pid)
        for folder in folders:
            # busy for a moment after its last process
            wait_until(partial(_removed, folder), 5.0, f"the end of {folder}")


@dataclass(frozen=True)
class _Hierarchy:
    """One mounted cgroup hierarchy and this process's own folder in it."""

    kind: str  # "cgroup" (v1) or "cgroup2"
    point: Path
    options: str
    own: Path

    def line(self) -> str:
        below = "/" + str(self.point.relative_to(_CGROUPS)).removeprefix(".")
        return f"{self.kind} {below} {self.options}"


def _hierarchies() -> list[_Hierarchy]:
    places: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        places[controllers] = place
    found: list[_Hierarchy] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, super_options = right.split(" ")[:3]
        if kind not in ("cgroup", "cgroup2") or not Path(point).is_relative_to(_CGROUPS):
            continue
        has = set(super_options.split(","))
        for controllers, place in places.items():
            names = set(filter(None, controllers.split(",")))
            if bool(names) != (kind == "cgroup") or not names <= has:
                continue
            # a mount may show a part of the hierarchy only, and we may be outside that part
            inside = Path(place).is_relative_to(root)
            own = Path(point, Path(place).relative_to(root) if inside else ".")
            options = ",none" * controllers.startswith("name=") + f",{controllers}" * bool(names)
            found.append(_Hierarchy(kind, Path(point), options, own))
    return found


def _start(
    hierarchies: Sequence[_Hierarchy],
    folders: Sequence[Path],
    binds: Mapping[Path, str],
    root: Path,
    log: IO[str],
) -> subprocess.Popen[str]:
    lines = [hierarchy.line() for hierarchy in hierarchies]
    if all(hierarchy.point != _CGROUPS for hierarchy in hierarchies):
        lines.insert(0, "tmpfs / ,mode=0755")  # v1: the hierarchies lie side by side in a tmpfs
    unshare = ["unshare", *_NAMESPACES, "--propagation=private", "--fork", "--kill-child=KILL"]
    return subprocess.Popen(
        # SIGKILL to this process ends unshare, and unshare's end ends the container
        ["setpriv", "--pdeathsig", "KILL", *unshare, "bash", str(_INNER)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # Ctrl-C is for the tests, which then clean up
        env={
            "PATH": os.environ.get("PATH", os.defpath),
            "CGROUPS": " ".join(map(str, folders)),
            "HIERARCHIES": "\n".join(lines),
            "ROOT": str(root),
            "BINDS": "\n".join(f"{source}\t{target}" for source, target in binds.items()),
        },
    )


def _await_boot(booting: Container) -> None:
    private = booting.path("/run/systemd/private")
    wait_until(private.exists, BOOT_S, "systemd's private socket")
    state = ""

    def decided() -> bool:
        nonlocal state
        state = booting.run("systemctl is-system-running --wait", check=False).stdout.strip()
        return state in ("running", "degraded")

    wait_until(decided, BOOT_S, "the end of the boot")
    if state == "degraded":
        failed = booting.run("systemctl --failed --no-legend; journalctl -b -p warning --no-pager")
        raise Unavailable(f"units failed\n{failed.stdout}")


def _end(outer: "subprocess.Popen[str]", init_pid: int) -> None:
    """Kill the container's first process, and so all of it; returns when all are gone."""
    if init_pid and outer.poll() is None:  # unshare has not reaped it: the number is still its own
        os.kill(init_pid, signal.SIGKILL)
    else:
        outer.kill()
    outer.wait()
    assert outer.stdout is not None
    outer.stdout.close()


def _make_cgroup(folder: Path) -> None:
    folder.mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):  # v1: empty at first, and nobody can enter
        if (folder / name).exists() and not (folder / name).read_text().strip():
            with suppress(OSError):  # v2 inherits by itself
                (folder / name).write_text((folder.parent / name).read_text())


def _removed(folder: Path) -> bool:
    """Remove a tree of empty cgroups; the kernel refuses where a process is left."""
    for place, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(place).rmdir()
    return not folder.exists()


def _remove_stale() -> None:
    """Remove the cgroups of containers whose maker was killed before it could."""
    for hierarchy in _hierarchies():
        for place, names, _ in os.walk(hierarchy.point):
            for name in [name for name in names if name.startswith(_PREFIX)]:
                names.remove(name)
                pid, ticks = name.split(".")[1:3]
                if _start_ticks(int(pid)) != int(ticks):
                    _removed(Path(place, name))


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def main(arguments: Sequence[str]) -> int:
    """Run a command in a fresh container; its exit status, or 125 if there is no container."""
    if not arguments:
        raise SystemExit("usage: boot COMMAND [ARGUMENT]...")

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    project = Path(__file__).resolve().parents[2]
    command: subprocess.Popen[bytes] | None = None
    try:
        with container({project: "/srv/umad"}) as booted:
            command = subprocess.Popen(booted.argv(shlex.join(arguments)))
            command.wait()
    except Unavailable as error:
        print(f"boot: {error}", flush=True)
        return 125
    finally:
        if command is not None:
            # After the container's end and not before: only nsenter can reap its child inside,
            # and the container is not gone before that is done.
            command.wait()
    return command.returncode if command.returncode >= 0 else 128 - command.returncode
