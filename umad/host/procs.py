"""Processes as the kernel shows them: identity, life, bytes, and the signals that end them.

Rules: a process is a pid *and* its start time; whoever signals holds a pidfd that was checked
against both.  Trouble with one process is the reading of that process and of no other.
Stays out: which process to stop, and when.
"""

import ctypes
import errno
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from umad.errors import ProbeError
from umad.host.files import LARGEST, KernelFile, Unreadable, inside, parsed, read_as, read_text
from umad.values import Identity, Moved, ProcessReading, Reading

_SYS_PROCESS_MRELEASE: Final = 448  # the same number on every architecture (Linux 5.15)
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stat:
    """Of /proc/PID/stat: state letter, parent, session, threads, start (clock ticks since boot)."""

    state: str
    start_ticks: int
    parent: int = 0
    session: int = 0
    threads: int = 1

    @property
    def ended(self) -> bool:
        """A zombie; the leader of a process may look like one while its threads live on."""
        return self.state in "ZX" and self.threads <= 1


@dataclass(frozen=True, slots=True)
class Status:
    """What /proc/PID/status says of life and memory; ``bytes`` is None where it says nothing.

    ``shmem`` is the part of ``bytes`` in shared memory, ``locked`` what the process (mlock) or a
    driver (VmPin: pinned buffers) keeps from being reclaimed; ``swapped`` is out in swap.
    """

    state: str
    threads: int
    bytes: int | None
    shmem: int = 0
    locked: int = 0
    swapped: int = 0


def parse_stat(data: bytes) -> Stat:
    """Read /proc/PID/stat; the name in parentheses may hold blanks and parentheses itself.

    Raises:
        ValueError: too few fields, or one that is no number.
    """
    fields = data[data.rindex(b")") + 1 :].split()
    if len(fields) < 20:
        raise ValueError("too few fields")
    parent, session, threads, start_ticks = (int(fields[at]) for at in (1, 3, 17, 19))
    if not 0 <= start_ticks < LARGEST:  # read as another process's, it would free this one's
        raise ValueError(f"started at {start_ticks}")
    return Stat(fields[0].decode("ascii", "replace"), start_ticks, parent, session, threads)


def parse_status(data: bytes) -> Status:
    """Read state, threads, RssAnon + RssShmem, VmLck + VmPin and VmSwap of /proc/PID/status.

    Raises:
        ValueError: no state, or a figure that is none.
    """
    state = _field(data, b"\nState:")
    if not state:
        raise ValueError("no State line")
    anon, shmem = _field(data, b"\nRssAnon:"), _field(data, b"\nRssShmem:")
    size, shared = None, 0
    if anon and shmem:
        shared = _kilobytes(shmem) * 1024
        size = _kilobytes(anon) * 1024 + shared
    threads = int(_field(data, b"\nThreads:") or 1)
    locked, pinned, swapped = (
        _kilobytes(text) * 1024 if (text := _field(data, key)) else 0
        for key in (b"\nVmLck:", b"\nVmPin:", b"\nVmSwap:")
    )
    letter = state[:1].decode("ascii", "replace")
    return Status(letter, threads, size, shared, locked + pinned, swapped)


def parse_proportional(data: bytes) -> int:
    """Anonymous and shared-memory bytes of /proc/PID/smaps_rollup, shared pages by their share.

    Raises:
        ValueError: the kernel (before 5.9) does not split them, or not the known layout.
    """
    anon, shmem = _field(data, b"\nPss_Anon:"), _field(data, b"\nPss_Shmem:")
    if not anon or not shmem:
        raise ValueError("no Pss_Anon or Pss_Shmem")
    return (_kilobytes(anon) + _kilobytes(shmem)) * 1024


def parse_uid(data: bytes) -> int:
    """The real user of /proc/PID/status.

    Raises:
        ValueError: not the known layout.
    """
    return int(_field(data, b"\nUid:").split(b"\t")[0])


def _field(data: bytes, key: bytes) -> bytes:
    at = data.find(key)
    if at < 0:
        return b""
    at += len(key)
    return data[at : data.index(b"\n", at)].strip()


def _kilobytes(text: bytes) -> int:
    number, _, unit = text.partition(b" ")
    if unit.strip() != b"kB" or not number.isdigit():
        raise ValueError(f"{text[:40]!r} is no size in kB")
    return int(number)


def parse_statm(data: bytes) -> int:
    """Resident bytes without the file-backed and shared ones, from /proc/PID/statm.

    Raises:
        ValueError: not the known layout.
    """
    fields = data.split()
    if len(fields) < 3:
        raise ValueError("too few fields")
    resident, shared = int(fields[1]), int(fields[2])
    if not 0 <= shared <= resident:
        raise ValueError("resident and shared pages contradict each other")
    return (resident - shared) * _PAGE_BYTES


def _parse_resident(data: bytes) -> int:
    fields = data.split(None, 2)
    if len(fields) < 2:
        raise ValueError("too few fields")
    return int(fields[1]) * _PAGE_BYTES


def process_stat(pid: int, root: str = "/") -> Stat | None:
    """State and start time of a pid now; None when there is none or it cannot be read."""
    try:
        return read_as(inside(root, f"proc/{pid}/stat"), parse_stat)
    except Unreadable:
        return None


def process_identity(pid: int, root: str = "/") -> Identity | None:
    """The identity behind a pid now; None when there is none or it cannot be read."""
    stat = process_stat(pid, root)
    return None if stat is None else Identity(pid, stat.start_ticks)


def lineage(pid: int, root: str = "/") -> frozenset[int]:
    """The pid and those of its ancestors, as far up as they can be seen."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        stat = process_stat(pid, root)
        pid = 0 if stat is None else stat.parent
    return frozenset(found)


def comm(pid: int, root: str = "/") -> str:
    """The short name of a process, ``""`` when it cannot be read."""
    try:
        return read_text(inside(root, f"proc/{pid}/comm"))
    except Unreadable:
        return ""


def owner(pid: int) -> int | None:
    """The effective user id of a process; None when there is none."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def is_alive(identity: Identity, root: str = "/") -> bool:
    """Whether this very process still runs; a zombie does not.

    True as well when the kernel does not let us look: an error is no proof of death.
    """
    return _life(identity, root) != _GONE


_GONE: Final = "gone"


def _life(identity: Identity, root: str) -> str:
    """``_GONE``, or "" for alive, or why it cannot be known."""
    folder = inside(root, f"proc/{identity.pid}")
    try:
        stat = read_as(f"{folder}/stat", parse_stat)
    except Unreadable as error:
        if error.gone or (error.absent and not Path(folder).is_dir()):
            return _GONE
        return str(error)
    same = stat.start_ticks == identity.start_ticks and stat.state not in "ZX"
    return "" if same else _GONE


_SWITCHES: Final = b"\nvoluntary_ctxt_switches:"  # of /proc/PID/status, the last two lines


class ProcessTable:
    """Reads the bytes of the registered processes, one kept descriptor each.

    A kept descriptor of /proc/PID/status never shows another process: once its own has died it
    answers ESRCH, whoever got the pid.  So the start time is checked once, after the opening.

    Args:
        root: the folder that holds ``proc/``.
        keep: keep the descriptors; for processes whose number nobody limits, do not.
    """

    def __init__(self, root: str = "/", *, keep: bool = True) -> None:
        self._root = root
        self._keep = keep and root == "/"
        self._files: dict[Identity, KernelFile] = {}
        self._statm: dict[Identity, KernelFile] = {}
        # What was read last, up to the counters that nobody asks for, and what came of it.
        self._seen: dict[Identity, tuple[bytes, ProcessReading]] = {}

    def read(self, identity: Identity) -> ProcessReading:
        """Life and host bytes of one process; never raises."""
        path = inside(self._root, f"proc/{identity.pid}/status")
        file = self._files.get(identity)
        try:
            if file is None:
                file = KernelFile(path, keep=self._keep)
                data = file.read()
                known = False
            else:
                data = file.read()
                known = self._keep
            if not known:
                stat = read_as(inside(self._root, f"proc/{identity.pid}/stat"), parse_stat)
                if stat.start_ticks != identity.start_ticks:
                    return self._gone(identity, "another process has this pid")
                self._files[identity] = file
            data = data[: data.find(_SWITCHES) + 1] or data
            seen = self._seen.get(identity)
            if seen is not None and seen[0] == data:  # it stands still unless it takes memory
                return seen[1]
            status = parsed(path, data, parse_status)
        except Unreadable as error:
            if error.gone or error.absent:
                return self._unnamed(identity)
            return ProcessReading(identity, True, Reading.broken("status", str(error)))
        if status.state in "ZX" and status.threads <= 1:
            return self._gone(identity, "zombie")
        if status.bytes is None:
            return self._from_statm(identity)
        reading = ProcessReading(
            identity,
            True,
            Reading.of(status.bytes, "status"),
            host_bytes=status.bytes,
            shmem_bytes=status.shmem,
            locked_bytes=status.locked,
            moved=Moved(status.swapped),
        )
        if self._keep:
            self._seen[identity] = data, reading
        return reading

    def resident(self, identity: Identity) -> int:
        """Bytes in memory now, file pages included; 0 once it is gone.

        For a difference of two, at 3 us each: it is not asked whether the pid has a new owner.

        Raises:
            Unreadable: it shows no such figure.
        """
        file = self._statm.get(identity)
        if file is None:
            path = inside(self._root, f"proc/{identity.pid}/statm")
            file = self._statm[identity] = KernelFile(path, keep=self._keep)
        try:
            return parsed(file.path, file.read(), _parse_resident)
        except Unreadable as error:
            if error.gone or error.absent:
                return 0
            raise

    def keep_only(self, identities: frozenset[Identity]) -> None:
        """Close what belongs to processes that nobody asks for any more."""
        for files in (self._files, self._statm):
            for identity in files.keys() - identities:
                files.pop(identity).close()
                self._seen.pop(identity, None)

    def close(self) -> None:
        """Give every descriptor back."""
        self.keep_only(frozenset())

    def _unnamed(self, identity: Identity) -> ProcessReading:
        """``status`` is not there: the process is dead, or only that file is missing."""
        life = _life(identity, self._root)
        if life == _GONE:
            return self._gone(identity, life)
        if life:
            return ProcessReading(identity, True, Reading.broken("stat", life))
        return self._from_statm(identity)

    def _from_statm(self, identity: Identity) -> ProcessReading:
        # A leader that ended before its threads has no figures of its own; neither has a kernel
        # thread.  statm counts no shared memory, so its source is marked.
        try:
            size = read_as(inside(self._root, f"proc/{identity.pid}/statm"), parse_statm)
        except Unreadable as error:
            return ProcessReading(identity, True, Reading.broken("statm", str(error)))
        if size == 0:
            problem = f"process {identity.pid} shows no pages but is alive"
            return ProcessReading(identity, True, Reading.broken("statm", problem))
        return ProcessReading(identity, True, Reading.of(size, "statm"), host_bytes=size)

    def _gone(self, identity: Identity, how: str) -> ProcessReading:
        file = self._files.pop(identity, None)
        self._seen.pop(identity, None)
        if file is not None:
            file.close()
        return ProcessReading(identity, False, Reading.of(0, how))


def with_shared_once(reading: ProcessReading, root: str = "/") -> ProcessReading:
    """The same process with its shared memory counted by its share; unchanged where unreadable.

    Slow (22 ms for 4 GiB of 4 KiB pages): for a figure that something depends on.
    """
    path = inside(root, f"proc/{reading.identity.pid}/smaps_rollup")
    try:
        host = read_as(path, parse_proportional)
    except Unreadable:
        return reading
    if host >= reading.host_bytes:
        return reading
    return replace(
        reading,
        bytes=Reading.of(host + reading.gpu_bytes, "smaps_rollup"),
        host_bytes=host,
    )


def process_bytes(identity: Identity, root: str = "/") -> Reading:
    """RssAnon + RssShmem of one process now, in bytes; 0 once it is gone."""
    table = ProcessTable(root)
    try:
        return table.read(identity).bytes
    finally:
        table.close()


def open_pidfd(identity: Identity) -> int:
    """A descriptor that means this process and no later one with its pid; the caller closes it.

    Raises:
        ProbeError: the process is gone, the pid has passed to another, or no descriptor is left.
    """
    fd = _translated(f"open a pidfd of process {identity.pid}", lambda: os.pidfd_open(identity.pid))
    if process_identity(identity.pid) != identity:
        os.close(fd)
        raise ProbeError(f"process {identity.pid} is not the one that started at its time any more")
    return fd


def kill_via(pidfd: int, signum: int) -> bool:
    """Send a signal through a pidfd; False when the process is gone already.

    Raises:
        ProbeError: the signal may not or cannot be sent.
    """
    try:
        _translated(
            f"send {signal.Signals(signum).name}", lambda: signal.pidfd_send_signal(pidfd, signum)
        )
    except ProbeError as error:
        if error.details.get("errno") == errno.ESRCH:
            return False
        raise
    return True


def mrelease(pidfd: int) -> bool:
    """Take the memory of a dying process back at once (process_mrelease); False when it is gone.

    Blocks for as long as the kernel frees pages, so it is called off the loop.

    Raises:
        ProbeError: the process is not dying, or the kernel cannot (before Linux 5.15).
    """

    def release() -> None:
        if _libc.syscall(_SYS_PROCESS_MRELEASE, pidfd, 0) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    try:
        _translated("process_mrelease", release)
    except ProbeError as error:
        if error.details.get("errno") == errno.ESRCH:
            return False
        raise
    return True


def lock_memory() -> bool:
    """Keep this process's pages in memory, each once it is touched; False where not allowed.

    A watchman that is swapped out cannot act when he is needed.  Only where no limit can be
    passed: under one, a later allocation would fail instead.  What the start has freed goes back
    to the kernel first.
    """
    _libc.malloc_trim(0)  # of glibc; about 1 MiB of what compiling and importing took
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    if not unlimited and os.geteuid() != 0:
        return False
    return int(_libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)) == 0


_MCL_CURRENT: Final = 1
_MCL_FUTURE: Final = 2
_MCL_ONFAULT: Final = 4  # Linux 4.4: without it, all that is mapped would be read in
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_uint)


def _translated(what: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as error:
        raise ProbeError(
            f"cannot {what}: {error.strerror}", details={"errno": error.errno}
        ) from error
