import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.daemon.running import eventually
from umad.errors import ProbeError
from umad.host.memory import MachineProbe
from umad.host.procs import (
    ProcessTable,
    comm,
    is_alive,
    kill_via,
    mrelease,
    open_pidfd,
    parse_stat,
    parse_statm,
    parse_status,
    process_bytes,
    process_identity,
)
from umad.units import MIB
from umad.values import Figure, Identity


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def identity_of(pid: int) -> Identity:
    identity = process_identity(pid)
    assert identity is not None
    return identity


def zombie() -> int:
    """A child that has ended and was not waited for; the caller waits."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def tree(root: Path, pid: int, **files: str) -> Identity:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    files.setdefault("stat", f"{pid} (w) S" + " 0" * 18 + " 77 0 0\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    return Identity(pid, 77)


def test_the_start_time_is_the_kernels(child):
    identity = identity_of(child.pid)
    started_s = identity.start_ticks / os.sysconf("SC_CLK_TCK") + psutil.boot_time()
    assert started_s == pytest.approx(psutil.Process(child.pid).create_time(), abs=1.1)


def test_a_name_with_blanks_and_parentheses_does_not_shift_the_fields():
    head = b"42 (a) S (b) 1 2) R" + b" 0" * 18
    assert parse_stat(head + b" 777 0") == parse_stat(b"42 (x) R" + b" 0" * 18 + b" 777 0")


def test_what_is_locked_and_what_is_in_swap():
    data = b"Name:\tx\nState:\tS\nVmLck:\t4 kB\nVmPin:\t8 kB\nVmSwap:\t16 kB\n"
    status = parse_status(data)
    assert (status.locked, status.swapped) == (12 * 1024, 16 * 1024)


@pytest.mark.parametrize("data", [b"", b"1", b"1 (x", b"1 (x) S 1 2", b"1 (x) S" + b" x" * 22])
def test_damaged_stat_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        parse_stat(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"Name:\tx\n",
        b"Name:\tx\nState:\tS\nRssAnon:\t4 MB\nRssShmem:\t0 kB\n",
        b"Name:\tx\nState:\tS\nRssAnon:\t-4 kB\nRssShmem:\t0 kB\n",
        b"Name:\tx\nState:\tS\nRssAnon:\t4 kB\nRssShmem:\t0 k",
    ],
)
def test_damaged_status_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        parse_status(data)


@pytest.mark.parametrize("data", [b"", b"1", b"1 2", b"1 2 3", b"1 -2 0", b"a b c"])
def test_damaged_statm_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        parse_statm(data)


def test_anonymous_and_shared_pages_both_count():
    me = identity_of(os.getpid())
    before = process_bytes(me).value
    shared = mmap.mmap(-1, 16 * MIB)  # shared anonymous: RssShmem
    shared.write(b"1" * (16 * MIB))
    after = process_bytes(me)
    shared.close()
    assert before is not None
    assert after.value is not None
    assert after.source == "status"
    assert 15 * MIB < after.value - before < 60 * MIB


def test_of_no_process():
    assert process_identity(2**22 + 1) is None
    assert comm(2**22 + 1) == ""
    assert process_bytes(Identity(2**22 + 1, 5)).value == 0
    assert not is_alive(Identity(2**22 + 1, 5))


def test_a_reused_pid_is_another_process(child):
    real = identity_of(child.pid)
    older = Identity(real.pid, real.start_ticks - 1)
    assert is_alive(real)
    assert not is_alive(older)
    reading = ProcessTable().read(older)
    assert not reading.alive
    assert reading.bytes.value == 0


def test_a_zombie_is_not_alive():
    pid = zombie()
    try:
        identity = identity_of(pid)
        assert not is_alive(identity)
        reading = ProcessTable().read(identity)
        assert not reading.alive
        assert reading.bytes.value == 0
    finally:
        os.waitpid(pid, 0)


def test_a_process_is_followed_to_its_end(child):
    identity = identity_of(child.pid)
    table = ProcessTable()
    first = table.read(identity)
    assert first.alive
    assert first.bytes.value
    assert table.read(identity).alive
    child.kill()
    child.wait()
    last = table.read(identity)
    assert not last.alive
    assert last.bytes.value == 0
    table.close()


def test_a_process_that_stands_still_is_not_parsed_again(child):
    table = ProcessTable()
    identity = identity_of(child.pid)
    assert eventually(lambda: table.read(identity) is table.read(identity))
    table.close()


def test_a_process_that_moves_is_read_anew():
    table = ProcessTable()
    ours = identity_of(os.getpid())
    sizes = [table.read(ours).bytes.value]
    taken = bytearray(64 * MIB)
    taken[::4096] = b"1" * len(taken[::4096])
    sizes.append(table.read(ours).bytes.value)
    del taken
    sizes.append(table.read(ours).bytes.value)
    before, high, after = (size or 0 for size in sizes)
    assert high - before > 56 * MIB
    assert high - after > 56 * MIB
    table.close()


def test_descriptors_of_forgotten_processes_are_closed(child):
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path would add one of its own

    before = open_now()
    table = ProcessTable()
    identity = identity_of(child.pid)
    table.read(identity)
    assert open_now() == before + 1
    table.keep_only(frozenset())
    assert open_now() == before


def test_statm_stands_in_and_is_marked(tmp_path):
    page = os.sysconf("SC_PAGE_SIZE")
    identity = tree(tmp_path, 5, statm="900 500 100 0 0 0 0\n")
    reading = ProcessTable(str(tmp_path)).read(identity)
    assert reading.alive
    assert (reading.bytes.value, reading.bytes.source) == (400 * page, "statm")
    old_kernel = tree(tmp_path, 6, status="Name:\tw\nState:\tS\n", statm="900 500 100 0\n")
    assert ProcessTable(str(tmp_path)).read(old_kernel).bytes.source == "statm"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"statm": "0 0 0 0 0 0 0\n"},
        {"status": ""},
        {"status": "garbage"},
        {"status": "Name:\tw\nState:\tS\n"},
        {"stat": "garbage", "status": "Name:\tw\nState:\tS\nRssAnon: 4 kB\nRssShmem: 0 kB\n"},
        {"stat": "garbage"},
    ],
)
def test_what_cannot_be_read_is_broken_and_alive(tmp_path, files):
    reading = ProcessTable(str(tmp_path)).read(tree(tmp_path, 5, **files))
    assert reading.alive
    assert reading.bytes.state is Figure.BROKEN
    assert reading.bytes.value is None
    assert "proc/5" in reading.bytes.problem or "process 5" in reading.bytes.problem


def test_an_ended_leader_with_living_threads_still_holds_its_memory(tmp_path):
    status = "Name:\tw\nState:\tZ (zombie)\nThreads:\t3\n"
    reading = ProcessTable(str(tmp_path)).read(
        tree(tmp_path, 5, status=status, statm="0 0 0 0 0 0 0\n")
    )
    assert reading.alive
    assert reading.bytes.state is Figure.BROKEN


def test_a_signal_reaches_its_process_and_says_when_it_is_gone(child):
    pidfd = open_pidfd(identity_of(child.pid))
    try:
        assert kill_via(pidfd, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert not kill_via(pidfd, signal.SIGKILL)
        assert not mrelease(pidfd)
    finally:
        os.close(pidfd)


def test_no_pidfd_for_another_process_with_the_same_pid(child):
    real = identity_of(child.pid)
    with pytest.raises(ProbeError, match=str(child.pid)):
        open_pidfd(Identity(real.pid, real.start_ticks + 1))
    with pytest.raises(ProbeError, match="pidfd"):
        open_pidfd(Identity(2**22 + 1, 1))
    assert child.poll() is None


def test_the_memory_of_a_living_process_is_not_released(child):
    pidfd = open_pidfd(identity_of(child.pid))
    try:
        with pytest.raises(ProbeError, match="process_mrelease"):
            mrelease(pidfd)
    finally:
        os.close(pidfd)


def test_the_memory_of_a_dying_process_is_released():
    code = "x = bytearray(b'1') * (64 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        identity = identity_of(child.pid)
        assert (process_bytes(identity).value or 0) > 64 * MIB
        pidfd = open_pidfd(identity)
        try:
            kill_via(pidfd, signal.SIGKILL)
            mrelease(pidfd)  # False when the kernel was faster
        finally:
            os.close(pidfd)
        assert child.wait() == -signal.SIGKILL
        assert process_bytes(identity).value == 0


@pytest.mark.slow
def test_sampling_while_processes_come_and_go():
    """R7: 300 forks a second; every reading is a value or gone, never an exception."""
    stop = threading.Event()
    pids: list[int] = []

    def storm() -> None:
        while not stop.wait(1 / 300):
            with subprocess.Popen(["true"]) as process:
                pids.append(process.pid)

    threads = [threading.Thread(target=storm) for _ in range(2)]
    for thread in threads:
        thread.start()
    probe = MachineProbe("/")
    seen = gone = 0
    longest_s = 0.0
    until_s = time.monotonic() + 3
    try:
        while time.monotonic() < until_s:
            names = (name for name in psutil.pids() if name > 2)
            identities = [each for each in map(process_identity, names) if each is not None]
            before_s = time.thread_time()
            snapshot = probe.sample(identities, time.monotonic())
            # Of this thread alone: how long the storm and the machine keep it waiting is theirs.
            longest_s = max(longest_s, time.thread_time() - before_s)
            assert snapshot.processes.keys() == set(identities)
            for reading in snapshot.processes.values():
                seen += 1
                gone += not reading.alive
                # kernel threads and exiting processes have no pages; all others have a figure
                assert reading.bytes.value is not None or "no pages" in reading.bytes.problem
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        probe.close()
    assert len(pids) > 100
    assert seen > 1000
    assert longest_s < 0.5
