"""The units under a real systemd: start, activation, restart, watchdog, rights, journal."""

import json
import threading
from typing import Any

import pytest

from tests.systemd.conftest import ENVIRONMENT, INSIDE, PERMISSIVE, PROJECT, PYTHON, Installed
from tests.systemd.container import wait_until

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.slow]

SOCKET = "/run/umad/umad.sock"
STANDIN = f"""\
[Unit]
Wants=umad.service
After=umad.service
[Service]
Type=notify
NotifyAccess=main
User=umad-serve
SupplementaryGroups=umad
Environment={ENVIRONMENT}
ExecStart={PYTHON} {INSIDE}/tests/systemd/standin.py standin 32
"""


def hello(umad: Installed, *methods: str, user: str | None = None) -> list[Any]:
    """The answers to a hello and to further requests.

    Raises:
        ConnectionError: the daemon could not be reached, or ended before it answered.
    """
    said = umad.python("hello.py", *methods, user=user).splitlines()
    if said and said[-1].startswith("E"):
        raise ConnectionError(said[-1])
    return [json.loads(line) for line in said]


def status(umad: Installed) -> dict[str, Any]:
    answer: dict[str, Any] = hello(umad, "status")[1]
    return answer


def journal(umad: Installed, unit: str = "umad") -> list[dict[str, Any]]:
    umad.run("journalctl --sync")
    text = umad.run(f"journalctl -u {unit} -o json --since=@{umad.started_unix_s}").stdout
    return [json.loads(line) for line in text.splitlines()]


def said(umad: Installed) -> str:
    return "\n".join(str(entry.get("MESSAGE")) for entry in journal(umad))


def main_pid(umad: Installed, unit: str = "umad.service") -> int:
    return int(umad.show(unit, "MainPID"))


def restart(umad: Installed) -> None:
    umad.run("systemctl restart umad")


def kill(umad: Installed, beside: str = "") -> None:
    """SIGKILL for the daemon, which is gone when this returns: it can answer nobody any more."""
    pid = main_pid(umad)
    gone = f"while kill -0 {pid} 2> /dev/null; do :; done"
    umad.run(f"systemctl kill --signal=KILL umad {beside}; {gone}")


def strict(umad: Installed, swappiness: int, vfs_cache_pressure: int) -> None:
    """Start as the shipped unit does, on a machine with these settings."""
    binds = ""
    for name, value in (("swappiness", swappiness), ("vfs_cache_pressure", vfs_cache_pressure)):
        umad.machine.path(f"/run/{name}").write_text(f"{value}\n")
        binds += f"BindReadOnlyPaths=/run/{name}:/proc/sys/vm/{name}\n"
    umad.drop_in("umad.service", PERMISSIVE.replace(" --permissive", "") + binds)


def test_systemd_finds_no_fault_in_the_units(umad: Installed) -> None:
    umad.machine.path("/run/systemd/system/umad.service.d/0.conf").unlink()
    done = umad.run("cd /etc/systemd/system && systemd-analyze verify --man=no umad*.s*")
    found = (done.stdout + done.stderr).splitlines()
    # systemd before 254; the unit says what it means there.
    assert [line for line in found if "'FileDescriptorStorePreserve'" not in line] == []


def test_start_returns_when_the_daemon_can_answer(umad: Installed) -> None:
    umad.run("systemctl start umad")
    assert umad.show("umad", "ActiveState") == "active"
    assert "workers ready" in umad.show("umad", "StatusText")
    assert status(umad)["sample"]["age_s"] < 2


def test_a_connection_starts_the_daemon(umad: Installed) -> None:
    umad.run("systemctl start umad.socket")
    assert umad.show("umad", "ActiveState") == "inactive"
    assert hello(umad)[0]["version"] == 1
    assert umad.show("umad", "ActiveState") == "active"


def test_a_stop_leaves_the_socket_in_its_place(umad: Installed) -> None:
    umad.run("systemctl start umad")
    first = hello(umad)[0]["generation"]
    umad.run("systemctl stop umad.service")
    assert hello(umad)[0]["generation"] == first + 1


def test_the_socket_goes_with_its_unit(umad: Installed) -> None:
    umad.run("systemctl start umad.socket; systemctl stop umad.socket")
    assert not umad.machine.path(SOCKET).exists()


def test_nobody_outside_the_group_can_use_the_socket_at_any_moment(umad: Installed) -> None:
    path = umad.machine.path(SOCKET)
    umad_gid = int(umad.run("getent group umad").stdout.split(":")[2])
    seen: set[tuple[int, int]] = set()
    enough = threading.Event()

    def watch() -> None:
        while not enough.is_set():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            seen.add((found.st_mode & 0o777, found.st_gid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        umad.run("systemctl start umad.socket; systemctl start umad; systemctl restart umad")
    finally:
        enough.set()
        watcher.join()
    assert (0o660, umad_gid) in seen
    assert {mode for mode, _ in seen} == {0o660}
    assert {gid for _, gid in seen} <= {0, umad_gid}
    folder = path.parent.stat()
    assert (folder.st_mode & 0o777, folder.st_gid) == (0o750, umad_gid)


def test_members_can_connect_and_others_cannot(umad: Installed) -> None:
    umad.run("getent passwd alice > /dev/null || useradd --system --groups umad alice")
    umad.run("systemctl start umad")
    assert hello(umad, user="alice")[0]["version"] == 1
    assert umad.python("hello.py", user="nobody") == "EACCES"


def test_decisions_are_in_the_journal_with_their_fields(umad: Installed) -> None:
    umad.unit("standin.service", STANDIN)
    umad.run("systemctl start umad standin")
    entries = {entry["UMAD_EVENT"]: entry for entry in journal(umad) if "UMAD_EVENT" in entry}
    assert {"started", "registered", "loaded"} <= set(entries)
    loaded = entries["loaded"]
    assert loaded["UMAD_WORKER"] == "standin"
    assert loaded["_SYSTEMD_UNIT"] == "umad.service"
    assert len(loaded["MESSAGE_ID"]) == 32
    assert loaded["PRIORITY"] == "6"


def test_the_journal_is_searched_by_worker_and_explains_itself(umad: Installed) -> None:
    catalog = (PROJECT / "packaging/umad.catalog").read_bytes()
    umad.machine.path("/usr/lib/systemd/catalog/umad.catalog").write_bytes(catalog)
    umad.unit("standin.service", STANDIN)
    umad.run("journalctl --update-catalog; systemctl start umad standin; journalctl --sync")
    since = f"--since=@{umad.started_unix_s}"
    told = umad.run(f"journalctl -x -u umad {since} UMAD_WORKER=standin").stdout
    assert "Subject: Worker standin has loaded its model" in told
    assert f"lease {loaded_lease(umad)} now books" in " ".join(told.replace("░", "").split())
    assert "umadctl status" in told
    assert "umad has started" not in told
    assert "umad has started" in umad.run(f"journalctl -x -u umad {since}").stdout


def loaded_lease(umad: Installed) -> str:
    (loaded,) = [one for one in journal(umad) if one.get("UMAD_EVENT") == "loaded"]
    return str(loaded["UMAD_LEASE"])


def test_a_killed_daemon_is_back_on_the_same_socket(umad: Installed) -> None:
    umad.run("systemctl start umad")
    generation = hello(umad)[0]["generation"]
    socket = umad.machine.path(SOCKET).stat().st_ino
    kill(umad)
    # this client comes while nobody is there, and waits in the socket for the next daemon
    assert hello(umad)[0]["generation"] == generation + 1
    assert umad.machine.path(SOCKET).stat().st_ino == socket


def test_a_killed_daemon_is_back_before_anybody_asks(umad: Installed) -> None:
    umad.run("systemctl start umad")
    killed = main_pid(umad)
    kill(umad)
    wait_until(
        lambda: main_pid(umad) not in (0, killed) and umad.show("umad", "ActiveState") == "active",
        2.0,
        "the restart",
    )
    assert umad.show("umad", "NRestarts") == "1"


def test_a_hung_loop_is_aborted_and_started_again(umad: Installed) -> None:
    umad.drop_in("umad.service", "[Service]\nWatchdogSec=1s\n")
    umad.run("systemctl start umad")
    hung = main_pid(umad)
    umad.run(f"kill -STOP {hung}")
    wait_until(
        lambda: main_pid(umad) not in (0, hung) and umad.show("umad", "ActiveState") == "active",
        6.0,
        "the restart",
    )
    assert hello(umad)[0]["version"] == 1
    text = said(umad)
    assert "Watchdog timeout" in text
    assert "Current thread" in text  # its stacks, by faulthandler


def test_a_healthy_daemon_is_left_alone_by_the_watchdog(umad: Installed) -> None:
    umad.drop_in("umad.service", "[Service]\nWatchdogSec=1s\n")
    umad.run("systemctl start umad")
    healthy = main_pid(umad)
    threading.Event().wait(2.5)
    assert main_pid(umad) == healthy


def test_strict_it_refuses_a_machine_that_is_not_set_up(umad: Installed) -> None:
    strict(umad, 60, 100)
    assert umad.run("systemctl start umad", check=False).returncode != 0
    assert umad.show("umad", "ExecMainStatus") == "69"
    assert umad.show("umad", "NRestarts") == "0"
    assert umad.show("umad", "ActiveState") == "failed"
    text = said(umad)
    assert "sysctl -w vm.swappiness=1" in text
    assert "sysctl -w vm.vfs_cache_pressure=50" in text


def test_strict_it_starts_with_the_values_that_we_ship(umad: Installed) -> None:
    strict(umad, 1, 50)
    umad.run("systemctl start umad")
    assert hello(umad)[0]["version"] == 1


def test_a_waiting_client_does_not_start_a_refusing_daemon_again_and_again(umad: Installed) -> None:
    strict(umad, 60, 100)
    umad.run("systemctl start umad.socket")
    umad.run(f"{ENVIRONMENT} {PYTHON} {INSIDE}/tests/systemd/hello.py", check=False)
    threading.Event().wait(1.0)
    assert said(umad).count("Main process exited") == 1
    assert umad.show("umad.socket", "ActiveState") == "active"


def test_a_wrong_configuration_is_told_and_not_tried_again(umad: Installed) -> None:
    file = umad.machine.path("/etc/umad/umad.toml")
    good = file.read_text()
    file.write_text("[memory]\nbudged = 1\n")
    try:
        assert umad.run("systemctl start umad", check=False).returncode != 0
    finally:
        file.write_text(good)
    assert umad.show("umad", "ExecMainStatus") == "78"
    assert umad.show("umad", "NRestarts") == "0"
    assert "line 2: memory.budged" in said(umad)


def test_a_restart_of_the_daemon_leaves_workers_running_and_the_books_right(
    umad: Installed,
) -> None:
    umad.unit("standin.service", STANDIN)
    umad.run("systemctl start umad standin")
    worker = main_pid(umad, "standin.service")

    def books() -> Any:
        state = status(umad)
        workers = [
            {key: one[key] for key in ("name", "pid", "quota", "state")} for one in state["workers"]
        ]
        return workers, [(pool["name"], pool["booked"]) for pool in state["pools"]]

    before = books()
    assert [one["pid"] for one in before[0]] == [worker]
    assert before[1][0][1] > 32 << 20
    for again in (restart, kill):
        again(umad)
        wait_until(lambda: books() == before, 2.0, "the same books")
        assert main_pid(umad, "standin.service") == worker


def test_the_sandbox_leaves_what_the_daemon_needs_and_nothing_else(umad: Installed) -> None:
    umad.run(
        "mkdir -p /home/someone/model && echo {} > /home/someone/model/config.json"
        " && chown -R nobody /home/someone && chmod 0700 /home/someone;"
        "mount -t debugfs debugfs /sys/kernel/debug && mount -o remount,bind,ro /sys/kernel/debug;"
        "[ -e /dev/disk ] || mknod -m 0660 /dev/disk b 7 0;"
        # As a machine with NVIDIA's driver: systemd finds the nodes by their name in this list.
        "mknod -m 0666 /dev/nvidia0 c 195 0;"
        "sed 's/^Character devices:/&\\n195 nvidia/' /proc/devices > /run/devices;"
        "mount --bind /run/devices /proc/devices"
    )
    victim = umad.run(
        "systemd-run --quiet --uid=nobody --unit=victim sleep 1000;"
        "systemctl show --value -p MainPID victim"
    ).stdout.strip()
    umad.drop_in(
        "umad.service",
        f"[Service]\nType=oneshot\nRestart=no\nWatchdogSec=0\nExecStart=\n"
        f"ExecStart={PYTHON} {INSIDE}/tests/systemd/powers.py {victim}\n",
    )
    umad.run("systemctl start umad.service")
    umad.run("umount /sys/kernel/debug; umount /proc/devices; rm /dev/nvidia0")
    (line,) = [line for line in said(umad).splitlines() if line.startswith("{")]
    refused = {name for name, result in json.loads(line).items() if result is not True}
    assert refused == {"shadow", "root", "write", "settings", "disk", "network", "namespace"}, line
    assert umad.show("victim", "ActiveState") != "active"


def test_the_users_and_groups_are_there(umad: Installed) -> None:
    groups = umad.run("id -Gn umad; getent group umad video render | wc -l").stdout.split()
    assert groups == ["umad", "3"]
    assert "umad-serve" in umad.run("getent passwd umad-serve").stdout
