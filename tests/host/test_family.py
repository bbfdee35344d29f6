"""Who is of a registered process's family, on tables, on a fake tree and on the real machine."""

import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.daemon.running import eventually
from umad.host.clock import MonotonicClock
from umad.host.family import FamilyFinder, Joint, families, read_table
from umad.host.memory import MachineProbe
from umad.host.procs import ProcessTable, Stat, lineage, process_identity
from umad.units import MIB
from umad.values import Figure, Identity, Kin, ProcessReading, Reading

Table = dict[int, Stat]


def stat(parent: int, session: int, start: int, state: str = "S", threads: int = 1) -> Stat:
    return Stat(state, start, parent, session, threads)


def found(table: Table, *roots: Identity, **more: object) -> dict[int, list[int]]:
    """Pids of the members by pid of the registered process."""
    known = {root: frozenset[Identity]() for root in roots}
    result = families(table, known, umad=2, never=(), **more)  # type: ignore[arg-type]
    return {root.pid: sorted(one.pid for one in members) for root, members in result.items()}


W, V = Identity(10, 100), Identity(20, 200)


def test_descendants_are_family_and_whom_another_registered_has_is_not() -> None:
    table = {
        1: stat(0, 1, 0),
        5: stat(1, 5, 1),  # a shell
        10: stat(5, 5, 100),
        11: stat(10, 5, 110),
        12: stat(11, 5, 120),
        20: stat(12, 5, 200),
        21: stat(20, 5, 210),
        30: stat(5, 5, 300),  # a neighbour in the same session
    }
    assert found(table, W, V) == {10: [11, 12], 20: [21]}
    assert found(table, W) == {10: [11, 12, 20, 21]}


def test_umad_and_its_ancestors_have_no_family_and_are_in_none() -> None:
    table = {
        1: stat(0, 1, 0),
        10: stat(1, 10, 100),
        11: stat(10, 10, 110),  # umad
        12: stat(10, 10, 120),
        13: stat(11, 10, 130),
    }
    assert families(table, {W: ()}, umad=11, never={1, 10, 11}) == {W: frozenset()}
    # Where a link between the two is gone, umad and its children still are not of the family.
    table[11] = stat(1, 10, 110)
    assert families(table, {W: ()}, umad=11, never={1, 11}) == {W: {Identity(12, 120)}}


def test_who_was_seen_once_stays_when_its_parent_dies() -> None:
    orphan = Identity(11, 110)
    table = {1: stat(0, 1, 0), 11: stat(1, 5, 110), 12: stat(11, 5, 120)}
    assert families(table, {W: {orphan}}, umad=2, never=()) == {W: {orphan, Identity(12, 120)}}
    reused = {1: stat(0, 1, 0), 11: stat(1, 5, 999), 10: stat(1, 5, 888)}
    assert families(reused, {W: {orphan}}, umad=2, never=()) == {W: frozenset()}


def test_a_session_proves_descent_a_group_does_not() -> None:
    table = {
        1: stat(0, 1, 0),
        10: stat(1, 10, 100),  # leads its session
        11: stat(1, 10, 110),  # has lost its parent
        12: stat(11, 12, 120),
        13: stat(1, 12, 130),  # in the session of one who is of the family by another's
        14: stat(1, 14, 140),  # left the session after its parent
        15: stat(1, 10, 90),  # older than the leader
    }
    assert found(table, W) == {10: [11, 12, 13]}


def test_at_its_end_the_session_of_a_process_is_searched_once_more() -> None:
    table = {1: stat(0, 1, 0), 11: stat(1, 10, 110), 12: stat(1, 10, 90), 13: stat(1, 9, 130)}
    assert found(table, W, ended=W) == {10: [11]}
    assert found(table, W) == {10: []}
    table[10] = stat(1, 10, 105)  # another process by now
    assert found(table, W, ended=W) == {10: []}


def test_the_dead_are_no_family_but_a_leader_with_threads_is_not_dead() -> None:
    table = {
        10: stat(1, 10, 100),
        11: stat(10, 10, 110, "Z"),
        12: stat(10, 10, 120, "Z", threads=3),
        13: stat(12, 10, 130),
    }
    assert found(table, W) == {10: [12, 13]}


def test_a_torn_table_shows_no_strangers() -> None:
    circle = {10: stat(1, 10, 100), 11: stat(12, 9, 110), 12: stat(11, 9, 110)}
    assert found(circle, W) == {10: []}
    # 11 was a stranger's pid when 12 was read, and a child's of 10 when 11 was.
    reused = {10: stat(1, 9, 100), 11: stat(10, 9, 500), 12: stat(11, 9, 300)}
    assert found(reused, W) == {10: [11]}


class Machine:
    """Processes as a kernel keeps them, with who really descends from whom."""

    def __init__(self) -> None:
        self.ticks = 10
        self.alive: dict[int, Stat] = {}
        self.line: dict[int, tuple[int, ...]] = {}  # all ancestors ever, by start tick
        self.add(0, 0, ())

    def add(self, parent: int, session: int, line: tuple[int, ...]) -> int | None:
        """A new process with the lowest pid that is free: pids are reused as soon as possible."""
        taken = set(self.alive) | {one.session for one in self.alive.values()}
        pid = next(pid for pid in range(1, 99) if pid not in taken)
        self.ticks += 1
        self.alive[pid] = Stat("S", self.ticks, parent, session or pid)
        self.line[self.ticks] = (*line, self.ticks)
        return pid

    def fork(self, pid: int) -> None:
        self.add(pid, self.alive[pid].session, self.line[self.alive[pid].start_ticks])

    def setsid(self, pid: int) -> None:
        if pid not in {one.session for one in self.alive.values()}:
            was = self.alive[pid]
            self.alive[pid] = Stat(was.state, was.start_ticks, was.parent, pid)

    def exit(self, pid: int) -> None:
        del self.alive[pid]
        for other, was in list(self.alive.items()):
            if was.parent == pid:
                self.alive[other] = Stat(was.state, was.start_ticks, 1, was.session)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fork", "fork", "fork", "setsid", "exit", "register", "search"]),
        st.integers(0, 30),
    ),
    max_size=60,
)


class Watch:
    """Registered processes on a machine; every search is held against who really is whose."""

    def __init__(self) -> None:
        self.machine = Machine()
        for parent in (1, 2, 1, 1):
            self.machine.fork(parent)
        self.umad = 3  # a child of 2
        self.roots: dict[Identity, frozenset[Identity]] = {}

    def search(self, ended: Identity | None = None) -> None:
        alive = self.machine.alive
        never = {1, self.umad, alive[self.umad].parent}
        found = families(alive, self.roots, umad=self.umad, never=never, ended=ended)
        for root, members in found.items():
            for member in members:
                assert alive[member.pid].start_ticks == member.start_ticks
                assert member.pid not in never
                self.check_line(root, member)
            self.roots[root] = members

    def check_line(self, root: Identity, member: Identity) -> None:
        """It descends from this root, with no other registered process and no umad between."""
        line = self.machine.line[member.start_ticks]
        assert root.start_ticks in line
        below = set(line[line.index(root.start_ticks) + 1 :])
        assert below.isdisjoint(one.start_ticks for one in self.roots)
        assert self.machine.alive[self.umad].start_ticks not in below

    def step(self, what: str, number: int) -> None:
        pids = sorted(self.machine.alive)
        pid = pids[number % len(pids)]
        me = Identity(pid, self.machine.alive[pid].start_ticks)
        if what == "fork" and len(pids) < 30:
            self.machine.fork(pid)
        elif what == "search":
            self.search()
        elif what == "setsid":
            self.machine.setsid(pid)
        elif what == "register" and pid not in {1, self.umad}:
            self.roots.setdefault(me, frozenset())
        elif what == "exit" and pid not in {1, self.umad}:
            self.machine.exit(pid)
            if me in self.roots:
                self.search(ended=me)
                if not self.roots[me]:
                    del self.roots[me]


@settings(max_examples=150, deadline=None)
@given(STEPS)
@example(
    [
        *(("setsid", 13), ("fork", 0), ("fork", 22), ("fork", 0), ("fork", 0), ("fork", 0)),
        *(("fork", 0), ("fork", 3), ("fork", 30), ("fork", 0), ("exit", 1), ("register", 29)),
        *(("search", 0), ("exit", 28), ("fork", 0), ("fork", 0), ("fork", 0), ("register", 20)),
    ]
)
def test_whatever_processes_do_no_stranger_is_ever_of_a_family(
    steps: list[tuple[str, int]],
) -> None:
    watch = Watch()
    for what, number in steps:
        watch.step(what, number)
    watch.search()


# ----------------------------------------------------------------- a fake tree


def put(root: Path, pid: int, parent: int, start: int, cgroup: str, uid: int = 1000) -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    fields = [f"{pid} (w) S", parent, pid, 1, *[0] * 13, 1, 0, start, 0, 0]
    (folder / "stat").write_text(" ".join(map(str, fields)) + "\n")
    (folder / "cgroup").write_text(f"9:memory:/x\n0::/{cgroup}\n")
    (folder / "status").write_text(f"Name:\tw\nState:\tS\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")


def unit(root: Path, cgroup: str, *pids: int) -> None:
    folder = root / "sys/fs/cgroup" / cgroup
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


def find(finder: FamilyFinder, *roots: Identity, uid: int | None = 1000) -> dict[int, list[int]]:
    result = finder.find({root: Kin(uid) for root in roots})
    return {root.pid: sorted(one.pid for one in members) for root, members in result.items()}


def test_who_escapes_inside_the_process_own_cgroup_is_found(tmp_path: Path) -> None:
    own = "app.slice/w.service"
    put(tmp_path, 10, 1, 100, own)
    put(tmp_path, 11, 10, 110, own)
    put(tmp_path, 50, 1, 50, own)
    unit(tmp_path, own, 10, 11, 50)
    finder = FamilyFinder(str(tmp_path))
    assert find(finder, W) == {10: [11]}, "somebody else is in it: it proves nothing"
    unit(tmp_path, own, 10, 11)
    assert find(finder, W) == {10: [11]}
    put(tmp_path, 60, 1, 600, own)
    put(tmp_path, 61, 60, 610, "elsewhere.scope")
    unit(tmp_path, own, 10, 11, 60)
    assert find(finder, W) == {10: [11, 60, 61]}
    (tmp_path / "proc/10/stat").unlink()
    put(tmp_path, 70, 1, 700, own)  # the unit has been started again
    unit(tmp_path, own, 11, 60, 70)
    assert find(finder, W) == {10: []}


@pytest.mark.parametrize("cgroup", ["", "user.slice", "other.scope/deeper", "w.service"])
def test_a_cgroup_that_is_no_process_own_proves_nothing(tmp_path: Path, cgroup: str) -> None:
    put(tmp_path, 10, 1, 100, cgroup)
    finder = FamilyFinder(str(tmp_path))
    if cgroup == "w.service":
        put(tmp_path, 20, 1, 200, cgroup)  # registered too: whose would an orphan be?
        unit(tmp_path, cgroup, 10, 20)
        assert find(finder, W, V) == {10: [], 20: []}
    else:
        unit(tmp_path, cgroup, 10)
        assert find(finder, W) == {10: []}
    put(tmp_path, 60, 1, 600, cgroup)
    unit(tmp_path, cgroup, 10, 20, 60)
    assert find(finder, W, V)[10] == []


def test_a_cgroup_whose_list_makes_no_sense_proves_nothing(tmp_path: Path) -> None:
    put(tmp_path, 10, 1, 100, "w.scope")
    folder = tmp_path / "sys/fs/cgroup/w.scope"
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text("ten\n")
    assert find(FamilyFinder(str(tmp_path)), W) == {10: []}


def test_a_process_of_another_user_is_no_family_except_to_root(tmp_path: Path) -> None:
    put(tmp_path, 10, 1, 100, "")
    put(tmp_path, 11, 10, 110, "", uid=0)
    put(tmp_path, 12, 11, 120, "")
    put(tmp_path, 13, 10, 130, "")
    (tmp_path / "proc/13/status").unlink()
    finder = FamilyFinder(str(tmp_path))
    assert find(finder, W) == {10: [12]}
    assert find(finder, W, uid=0) == {10: [11, 12, 13]}
    assert find(finder, W, uid=None) == {10: []}


def test_orphans_that_a_launcher_took_in_are_its_programs(tmp_path: Path) -> None:
    for pid, parent in ((5, 1), (10, 5), (11, 10), (12, 5), (13, 12), (20, 5), (21, 20)):
        put(tmp_path, pid, parent, pid * 10, "")
    launcher = Identity(5, 50)
    kin = {W: Kin(1000, launcher=launcher), V: Kin(1000)}
    found = FamilyFinder(str(tmp_path)).find(kin)
    assert {one.pid for one in found[W]} == {11, 12, 13}, "neither it nor another registered one"
    assert {one.pid for one in found[V]} == {21}
    put(tmp_path, 5, 1, 55, "")  # the launcher has died, and another has its pid
    assert {one.pid for one in FamilyFinder(str(tmp_path)).find(kin)[W]} == {11}


def test_all_in_an_adopted_unit_are_one_family_whoever_they_are(tmp_path: Path) -> None:
    own = "system.slice/w.service"
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.procs").write_text("1\n")
    put(tmp_path, 10, 1, 100, own)
    put(tmp_path, 11, 1, 110, own, uid=33)
    put(tmp_path, 12, 1, 120, f"{own}/engine")
    put(tmp_path, 20, 1, 200, own)
    put(tmp_path, 21, 20, 210, own)
    unit(tmp_path, own, 10, 11, 20, 21)
    unit(tmp_path, f"{own}/engine", 12)
    kin = {W: Kin(1000, cgroup=own), V: Kin(1000)}
    found = FamilyFinder(str(tmp_path)).find(kin)
    assert {one.pid for one in found[W]} == {11, 12}
    assert {one.pid for one in found[V]} == {21}, "who has registered counts by himself"
    (tmp_path / "proc/10/stat").unlink()
    found = FamilyFinder(str(tmp_path)).find(kin, ended=W)
    assert {one.pid for one in found[W]} == {11, 12}, "the unit lives on"


def test_without_a_list_of_processes_families_are_as_they_were(tmp_path: Path) -> None:
    kin = {W: Kin(0, frozenset({V}))}
    assert FamilyFinder(str(tmp_path)).find(kin) == {W: {V}}


def test_nothing_is_searched_when_nobody_was_born(tmp_path: Path) -> None:
    loadavg = tmp_path / "proc/loadavg"
    finder = FamilyFinder(str(tmp_path))
    put(tmp_path, 10, 1, 100, "")
    loadavg.write_text("0.5 0.4 0.3 1/99 10\n")
    assert find(finder, W) == {10: []}
    put(tmp_path, 11, 10, 110, "")
    assert find(finder, W) == {10: []}
    put(tmp_path, 20, 1, 200, "")
    put(tmp_path, 21, 20, 210, "")
    assert find(finder, W, V) == {10: [11], 20: [21]}, "another was registered"
    loadavg.write_text("0.5 0.4 0.3 1/99 21\n")
    put(tmp_path, 21, 1, 210, "")
    assert find(finder, V) == {20: []}
    put(tmp_path, 22, 20, 220, "")
    assert finder.find({V: Kin(0)}, ended=V)[V] == {Identity(22, 220)}
    loadavg.write_text("torn\n")
    assert find(finder, V) == {20: [22]}


def test_who_was_found_and_not_taken_over_is_found_again(tmp_path: Path) -> None:
    put(tmp_path, 10, 1, 100, "")
    put(tmp_path, 11, 10, 110, "")
    (tmp_path / "proc/loadavg").write_text("0.5 0.4 0.3 1/99 11\n")
    finder = FamilyFinder(str(tmp_path))
    assert find(finder, W) == {10: [11]}
    assert find(finder, W) == {10: [11]}, "as when a registration asked first, and was refused"


def test_a_process_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, 10, 1, 100, "")
    (tmp_path / "proc/11").mkdir()
    assert set(read_table(str(tmp_path))) == {10}


# ------------------------------------------------------------ the real machine


@pytest.fixture
def scope() -> Iterator[Path]:
    """A v2 cgroup as systemd would make for a worker."""
    mounts = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
    mount = next((one for one in mounts if (one / "cgroup.procs").exists()), None)
    if mount is None or os.geteuid() != 0:
        pytest.skip("no cgroup v2 that this user may write to")
    made = mount / f"umad-test-{os.getpid()}.scope"
    made.mkdir()
    yield made
    eventually(lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


# It starts a child that leaves its session and its parent, all before anybody looks.
ESCAPE = "setsid sh -c 'sleep 60 >/dev/null & echo $!' & wait; read line"


@pytest.mark.root
def test_an_escaped_child_is_found_in_a_real_cgroup(scope: Path) -> None:
    worker = subprocess.Popen(
        ["sh", "-c", f"read line; {ESCAPE}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    escaped = 0
    try:
        (scope / "cgroup.procs").write_text(str(worker.pid))
        identity = process_identity(worker.pid)
        assert identity is not None
        finder = FamilyFinder()
        assert finder.find({identity: Kin(0)}) == {identity: frozenset()}
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        escaped = int(worker.stdout.readline())
        eventually(lambda: process_identity(worker.pid) in read_parents(escaped, worker.pid))
        members = finder.find({identity: Kin(0)})[identity]
        assert escaped in {one.pid for one in members}
    finally:
        if escaped:
            os.kill(escaped, signal.SIGKILL)
        worker.kill()
        worker.communicate()


def read_parents(pid: int, worker: int) -> list[Identity | None]:
    """The worker's identity once the process has lost its parent; else nothing."""
    return [process_identity(worker)] if worker not in lineage(pid) else []


def test_the_line_of_a_process_ends_at_the_top() -> None:
    assert {os.getpid(), os.getppid()} <= lineage(os.getpid())
    assert lineage(2**22 + 1) == {2**22 + 1}
    assert lineage(0) == frozenset()


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Children by fork, each doing something and waiting."""
    pids: list[int] = []

    def start(what: Callable[[], object]) -> int:
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            what()
            os.write(told, b"x")
            signal.pause()
        pids.append(pid)
        os.read(ready, 1)
        os.close(ready)
        os.close(told)
        return pid

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


SIZE = 64 * MIB


def test_pages_shared_since_the_fork_count_once_and_copies_when_they_are_made(
    forked: Callable[[Callable[[], object]], int],
) -> None:
    pages = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[::4096] = b"\x01" * (SIZE // 4096)
    child = process_identity(forked(lambda: None))
    me = process_identity(os.getpid())
    assert me is not None
    assert child is not None
    probe = MachineProbe(gpu="none")
    alone = probe.sample([me], 0.0).processes[me].bytes.value
    both = probe.sample([me], 1.0, {me: {child}}).processes[me]
    assert alone is not None
    assert both.bytes.value is not None
    assert both.bytes.source == "status of 2 processes"
    assert both.bytes.value < alone + SIZE // 2
    assert set(probe.sample([me], 1.1, {me: {child}}).processes) == {me}

    def write() -> None:
        pages[::4096] = b"\x02" * (SIZE // 4096)

    writer = process_identity(forked(write))
    assert writer is not None
    three = probe.sample([me], 2.0, {me: {child, writer}}).processes[me]
    assert three.bytes.value is not None
    assert three.bytes.value > alone + SIZE * 0.9
    pages.close()
    probe.close()


# ----------------------------------------------------------- joining, in figures


def reading(pid: int, size: int | None, **more: int) -> ProcessReading:
    figure = Reading.broken("status", "torn") if size is None else Reading.of(size, "status")
    gpu = tuple((name, more[name]) for name in ("gtt", "vram") if name in more)
    alive = bool(more.get("alive", 1))
    return ProcessReading(Identity(pid, pid), alive, figure, size or 0, gpu)


def rollup(root: Path, pid: int, anonymous: int) -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    text = f"x\nPss_Anon:{anonymous // 1024:>12} kB\nPss_Shmem:{0:>12} kB\n"
    (folder / "smaps_rollup").write_text(text)


def joined(joint: Joint, now_s: float, *readings: ProcessReading) -> ProcessReading:
    root, *members = readings
    by_identity = {one.identity: one for one in readings}
    result = joint.join(by_identity, {root.identity: {one.identity for one in members}}, now_s)
    assert set(result) == {root.identity}
    return result[root.identity]


def test_a_count_lasts_a_second_and_confirm_makes_it_anew(tmp_path: Path) -> None:
    joint = Joint(str(tmp_path), MonotonicClock())
    pair = reading(1, 100 * MIB), reading(2, 100 * MIB)
    rollup(tmp_path, 1, 55 * MIB)
    rollup(tmp_path, 2, 55 * MIB)
    assert joined(joint, 0.0, *pair).bytes.value == 110 * MIB
    rollup(tmp_path, 2, 95 * MIB)
    assert joined(joint, 0.5, *pair).bytes.value == 110 * MIB
    once = joint.confirm(pair[0].identity, 0.5)
    assert once is not None
    assert once.bytes.value == 150 * MIB
    rollup(tmp_path, 1, 95 * MIB)
    assert joint.confirm(pair[0].identity, 0.5) == once, "counted for this look already"
    assert joined(joint, 1.6, *pair).bytes.value == 190 * MIB
    assert joint.confirm(Identity(9, 9), 1.6) is None
    # Another family: counted at once.
    rollup(tmp_path, 3, 10 * MIB)
    assert joined(joint, 1.7, *pair, reading(3, 20 * MIB)).bytes.value == 200 * MIB


def test_what_one_holds_is_there_whatever_was_shared_at_the_last_count(tmp_path: Path) -> None:
    joint = Joint(str(tmp_path), MonotonicClock())
    rollup(tmp_path, 1, 50 * MIB)
    rollup(tmp_path, 2, 50 * MIB)
    assert joined(joint, 0.0, reading(1, 100 * MIB), reading(2, 100 * MIB)).host_bytes == 100 * MIB
    assert joined(joint, 0.1, reading(1, 0), reading(2, 100 * MIB)).host_bytes == 100 * MIB


def test_gpu_pages_of_a_family_are_added_by_pool(tmp_path: Path) -> None:
    joint = Joint(str(tmp_path), MonotonicClock())
    rollup(tmp_path, 1, MIB)
    rollup(tmp_path, 2, MIB)
    both = joined(joint, 0.0, reading(1, MIB, gtt=5), reading(2, MIB, gtt=7, vram=9))
    assert both.gpu == (("gtt", 12), ("vram", 9))
    assert both.bytes.value == 2 * MIB + 21


def test_a_dead_process_is_what_its_family_holds(tmp_path: Path) -> None:
    joint = Joint(str(tmp_path), MonotonicClock())
    left = joined(joint, 0.0, reading(1, 0, alive=0), reading(2, 9 * MIB))
    assert (left.identity.pid, left.alive, left.bytes.value) == (1, True, 9 * MIB)
    assert left.shmem_bytes == 0, "nothing to confirm"
    gone = joined(joint, 0.1, reading(1, 0, alive=0), reading(2, 0, alive=0))
    assert not gone.alive


def test_what_cannot_be_told_is_broken_and_not_a_number(tmp_path: Path) -> None:
    joint = Joint(str(tmp_path), MonotonicClock())
    rollup(tmp_path, 1, 50 * MIB)
    assert joined(joint, 0.0, reading(1, 100 * MIB), reading(2, None)).bytes.state is Figure.BROKEN
    # One that has ended between the two readings shares nothing.
    assert joined(joint, 1.0, reading(1, 50 * MIB), reading(3, 50 * MIB)).host_bytes == 50 * MIB
    rollup(tmp_path, 4, MIB)
    (tmp_path / "proc/4/smaps_rollup").write_text("garbage")
    broken = joined(joint, 2.0, reading(1, 50 * MIB), reading(4, 50 * MIB))
    assert broken.bytes.state is Figure.BROKEN
    assert "smaps_rollup" in broken.bytes.problem


def test_members_cost_no_descriptors() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    table = ProcessTable(keep=False)
    me = process_identity(os.getpid())
    assert me is not None
    assert table.read(me).alive
    assert len(list(Path("/proc/self/fd").iterdir())) == before
