"""Programs that know nothing of umad, in a real daemon: units, proofs, and what outlives it.

The units are cgroups that the tests make; tests/systemd/test_adopt.py has those of a systemd.
"""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.fakes import engine
from tests.daemon.running import CONFIG, ROOT, Daemon, Raw, alive, eventually
from umad.daemon.adopt import Adoptions
from umad.host.procs import process_stat
from umad.units import MIB
from umad.wire.messages import check_params

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

MOUNT = next(
    (
        one
        for one in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        if Path(one, "cgroup.procs").exists()
    ),
    "/nowhere",
)
UNIT = f"umadtest-{os.getpid()}.service"
PROGRAM = (
    "import sys\n"
    "print('up', flush=True)\n"
    "for line in sys.stdin:\n"
    "    kept = bytearray(int(line) << 20); kept[::4096] = b'x' * (int(line) << 8)\n"
    "    print('holds', flush=True)\n"
)


class Unit:
    """A cgroup with a unit's name."""

    def __init__(self) -> None:
        self.slice = Path(MOUNT, f"umadtest{os.getpid()}.slice")
        self.folder = self.slice / UNIT
        self.processes: list[subprocess.Popen[str]] = []

    def starts(self, *, inside: bool = True) -> subprocess.Popen[str]:
        """Another process of it, or a neighbour."""
        one = subprocess.Popen(
            [sys.executable, "-S", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.processes.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "up\n"
        if inside:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "cgroup.procs").write_text(f"{one.pid}\n")
        return one

    def stops(self) -> None:
        """All of it, and its cgroup."""
        for one in self.processes:
            one.kill()
            one.communicate()
        if self.slice.exists():
            eventually(lambda: all(_removed(one) for one in (self.folder, self.slice)))
        self.processes.clear()


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def hold(one: subprocess.Popen[str], mib: int) -> None:
    assert one.stdin is not None
    one.stdin.write(f"{mib}\n")
    one.stdin.flush()


def umadctl(daemon: Daemon, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "umad.cli.main", "--socket", daemon.socket, *words]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)


def worker(daemon: Daemon, name: str = "engine") -> dict[str, Any] | None:
    return next((one for one in daemon.status()["workers"] if one["name"] == name), None)


@pytest.fixture
def unit() -> Iterator[Unit]:
    try:
        Path(MOUNT, "umadtest.slice").mkdir()
        Path(MOUNT, "umadtest.slice").rmdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    made = Unit()
    yield made
    made.stops()


@pytest.mark.root
def test_a_unit_is_put_under_quota_with_all_its_processes(daemon: Daemon, unit: Unit) -> None:
    first, neighbour = unit.starts(), unit.starts(inside=False)
    second = unit.starts()
    done = umadctl(daemon, "adopt", "--unit", UNIT, "--name", "engine", "--quota", "200MiB")
    assert done.returncode == 0, done.stderr
    told = rf"engine: {UNIT} \(pid {first.pid}\) holds \d+\.\d MiB, 200\.0 MiB are booked\n"
    assert re.fullmatch(told, done.stdout)
    again = umadctl(daemon, "adopt", "--unit", UNIT, "--quota", "10MiB")
    assert "200.0" not in again.stderr
    assert again.returncode == 1
    third = unit.starts()
    hold(second, 100)
    hold(third, 150)
    stopped = daemon.wait_for("stopped", worker="engine")
    assert stopped["reason"] == "quota_exceeded"
    assert stopped["comm"] == UNIT[:64]
    assert [one.wait(10) for one in (first, second, third)] == [-9, -9, -9]
    assert neighbour.poll() is None
    eventually(lambda: daemon.booked() == 0)
    unit.starts()
    eventually(lambda: daemon.booked() == 200 * MIB)
    assert umadctl(daemon, "disown", "engine").stdout == "engine: 200.0 MiB are no longer booked\n"
    assert umadctl(daemon, "disown", "engine").returncode == 1
    assert daemon.booked() == 0


TABLE = f'[[worker]]\nname = "engine"\nunit = "{UNIT}"\nquota = "100MiB"\npeak = "300MiB"\n'


@pytest.mark.root
def test_a_table_counts_whenever_its_unit_runs(folder: Path, unit: Unit) -> None:
    text = CONFIG.format(socket=folder / "umad.sock", more=TABLE + 'settle = "300ms"\n')
    daemon = Daemon(folder, text=text).start()
    try:
        assert worker(daemon) is None
        first = unit.starts()
        shown = eventually(lambda: worker(daemon))
        assert (shown["pid"], shown["state"], shown["booked"]) == (first.pid, "loading", 300 * MIB)
        hold(first, 80)
        daemon.wait_for("loaded", worker="engine")
        second = unit.starts()
        first.kill()
        first.communicate()
        eventually(lambda: (one := worker(daemon)) is not None and one["pid"] == second.pid)
        assert daemon.booked() == 100 * MIB
        assert second.poll() is None, "it is no orphan: its unit runs"
        refused = umadctl(daemon, "disown", "engine")
        assert "[[worker]]" in refused.stderr
        unit.stops()
        eventually(lambda: daemon.booked() == 0)
        again = unit.starts()
        eventually(lambda: (one := worker(daemon)) is not None and one["pid"] == again.pid)
    finally:
        daemon.stop()


@pytest.mark.root
def test_what_a_killed_daemon_watched_the_next_one_watches(daemon: Daemon, unit: Unit) -> None:
    member = unit.starts()
    umadctl(daemon, "adopt", "--unit", UNIT, "--name", "engine", "--quota", "200MiB")
    command = [sys.executable, "-m", "umad.cli.main", "--socket", str(daemon.socket), "run"]
    command += ["--name", "program", "--quota", "300MiB", "--", sys.executable, "-S", "-c", PROGRAM]
    program = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "up\n"
    pids = {worker(daemon, name)["pid"] for name in ("engine", "program")}  # type: ignore[index]
    daemon.kill()
    assert all(map(alive, pids))
    daemon.start()
    state = daemon.status()
    assert {one["pid"] for one in state["workers"]} == pids
    assert state["pools"][0]["booked"] == 500 * MIB
    hold(program, 400)
    program.wait(20)  # before its input is closed, at which it would end by itself
    assert "umad stopped program, which was over its quota" in program.communicate()[1]
    assert program.returncode == 128 + 9
    hold(member, 250)
    assert member.wait(10) == -9


CAPTIVE = (
    "import json, sys\n"
    "from pathlib import Path\n"
    "from tests.daemon.running import Raw\n"
    "for line in sys.stdin:\n"
    "    method, params = json.loads(line)\n"
    "    with Raw(Path(sys.argv[1])) as raw:\n"
    "        print(json.dumps(raw.call(method, **params)), flush=True)\n"
)


def test_a_restart_frees_no_program_and_takes_its_launcher_back(daemon: Daemon) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", CAPTIVE, str(daemon.socket)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def it_asks(method: str, **params: Any) -> Any:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(json.dumps([method, params]) + "\n")
        program.stdin.flush()
        return json.loads(program.stdout.readline())

    def it_cannot_free_itself(key: int) -> None:
        own = {"model": "program", "quota": 300 * MIB}
        assert it_asks("register", **own)["code"] == "name_taken"
        assert it_asks("register", **own, held=MIB)["code"] == "name_taken"
        assert it_asks("register", model="other", quota=300 * MIB)["code"] == "name_taken"
        assert it_asks("unregister", worker=key)["code"] == "access_denied"
        assert it_asks("disown", name="program")["code"] == "lease_not_found"
        assert daemon.booked() == 300 * MIB

    registration = {"model": "program", "quota": 300 * MIB, "process": program.pid}
    try:
        with Raw(daemon.socket) as launcher:
            key = launcher.call("register", **registration)["worker"]
            lease = launcher.call("reserve", worker=key)
            ticket = {"lease": lease["lease"], "token": lease["token"]}
            launcher.call("commit", **ticket, measured=0)
            it_cannot_free_itself(key)
        daemon.kill()
        daemon.start()
        [kept] = daemon.status()["workers"]
        it_cannot_free_itself(kept["id"])
        with Raw(daemon.socket) as launcher:
            back = launcher.call("register", **registration)
            assert back["worker"] == kept["id"]
            assert "lease" in back, "it need not be booked again"
            daemon.wait_for("rejoined", worker="program")
            it_cannot_free_itself(kept["id"])
        eventually(lambda: it_asks("unregister", worker=kept["id"])["code"] == "access_denied")
        assert daemon.booked() == 300 * MIB, "it hangs on no connection"
    finally:
        program.kill()
        program.communicate()


def test_who_may_register_whom(daemon: Daemon) -> None:
    child = subprocess.Popen(["sleep", "60"])
    grandchild = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    assert grandchild.stdout is not None
    below = int(grandchild.stdout.readline())
    try:
        with Raw(daemon.socket) as raw:
            for pid, code in (
                (1, "access_denied"),
                (os.getpid(), "access_denied"),
                (below, "access_denied"),
                (2**22 + 1, "invalid_params"),
            ):
                answer = raw.call("register", model="a", quota=MIB, process=pid)
                assert answer["code"] == code
            assert raw.call("register", model="a", quota=MIB, process=child.pid)["worker"] == 1
    finally:
        os.kill(below, 9)
        for one in (child, grandchild):
            one.kill()
            one.communicate()


@pytest.mark.root
def test_for_whom_may_only_read_nothing_is_read(daemon: Daemon) -> None:
    daemon.folder.chmod(0o711)
    daemon.socket.chmod(0o666)
    os.seteuid(65534)
    try:
        raw = Raw(daemon.socket)
    finally:
        os.seteuid(0)
    with raw:
        assert "pools" in raw.call("status")
        for method, params in (
            ("adopt", {"unit": "none-of-this-name.service"}),
            ("register", {"process": 2**22 + 1}),
            ("register", {}),
        ):
            answer = raw.call(method, model="a", quota=MIB, **params)
            assert answer["code"] == "access_denied", "what there is on the machine is not told"
            assert "may only read" in answer["message"]


@pytest.mark.parametrize(
    ("unit", "why"),
    [
        ("none-of-this-name.service", "does not run"),
        ("umad.service", "umad's own"),
        ("umad-serve.service", "umad's own"),
        ("session-4.scope", "all that somebody has started"),
        ("user@1000.service", "all that somebody has started"),
        ("init.scope", "the system itself"),
    ],
)
def test_what_cannot_be_adopted(daemon: Daemon, unit: str, why: str) -> None:
    with Raw(daemon.socket) as raw:
        answer = raw.call("adopt", model="a", unit=unit, quota=MIB)
        assert answer["code"] == "invalid_params"
        assert why in answer["message"]


@pytest.mark.root
def test_a_unit_that_umad_itself_runs_in_is_never_adopted(daemon: Daemon, unit: Unit) -> None:
    unit.starts()
    (unit.folder / "cgroup.procs").write_text(f"{daemon.pid}\n")
    try:
        done = umadctl(daemon, "adopt", "--unit", UNIT, "--quota", "100MiB")
        assert "umad runs in it" in done.stderr
    finally:
        Path(MOUNT, "cgroup.procs").write_text(f"{daemon.pid}\n")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "[" * 100_000, "\xff"),
        '{"units": [{"unit": 4}], "programs": []}',
        '{"units": [], "programs": [{}]}',
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_makes_no_sense_is_told_of_and_dropped(folder: Path, text: str) -> None:
    (folder / "outside.json").write_text(text, encoding="latin-1")
    assert "cannot use" in Adoptions(folder, "/").load()


def test_what_could_not_be_written_is_told_once_and_written_later(folder: Path) -> None:
    state, adoptions, file = engine().state, Adoptions(folder, "/"), folder / "outside.json"
    adoptions.answered(
        "adopt", check_params("adopt", {"model": "a", "unit": "a.service", "quota": MIB})
    )
    assert adoptions.keep(state) == ""
    kept = file.read_text()
    adoptions.answered(
        "adopt", check_params("adopt", {"model": "b", "unit": "b.service", "quota": MIB})
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept), hard))  # the disk is full
    try:
        assert adoptions.keep(state) == f"cannot write {file}: File too large"
        assert adoptions.keep(state) == "", "it is asked at every look"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_text() == kept
    assert [one.name for one in folder.iterdir()] == ["outside.json"]
    assert adoptions.keep(state) == ""
    assert "b.service" in file.read_text()
    file.unlink()
    file.mkdir()
    adoptions.answered("disown", {"name": "a"})
    assert "cannot write" in adoptions.keep(state), "another reason"
    assert [one.name for one in folder.iterdir()] == ["outside.json"]


def test_a_program_that_has_ended_meanwhile_is_forgotten(folder: Path, daemon: Daemon) -> None:
    stat = process_stat(os.getpid())
    assert stat is not None
    params = {"model": "gone", "quota": MIB}
    gone = {"pid": os.getpid(), "start_ticks": stat.start_ticks + 1, "launcher": [1, 1]}
    daemon.kill()
    (folder / "outside.json").write_text(
        json.dumps({"units": [], "programs": [{**gone, "params": params}]})
    )
    daemon.start()
    assert worker(daemon, "gone") is None
    eventually(lambda: not (folder / "outside.json").exists())
