"""Engines of other kinds under a real systemd: adopted units, programs in their own scopes."""

import json
from typing import Any

import pytest

from tests.systemd.conftest import PYTHON, Installed
from tests.systemd.container import wait_until

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.slow]

MIB = 1 << 20
HOLD = "kept = bytearray(%d << 20); kept[::4096] = b'x' * (%d << 8)"
# Its main process forks another, which a USR1 makes hold more than the quota.
ENGINE = f"""\
[Service]
Type=exec
Restart=always
RestartSec=200ms
DynamicUser=yes
ExecStart={PYTHON} -S -c "import os, signal; child = os.fork(); \
signal.signal(signal.SIGUSR1, lambda *_: None); \
child or signal.pause(); {HOLD % (50, 50)}; child or globals().update(more=bytes(300 << 20)); \
signal.pause()"
"""
FORKING = """\
[Service]
Type=forking
ExecStart=/bin/sh -c 'sleep 1000 & sleep 0.3'
"""


def workers(umad: Installed) -> dict[str, Any]:
    state = json.loads(umad.run("umadctl status --json").stdout)
    return {one["name"]: one for one in state["workers"]}


def test_a_unit_is_adopted_and_stopped_and_adopted_again(umad: Installed) -> None:
    umad.run("systemctl start umad")
    umad.unit("engine.service", ENGINE)
    umad.run("systemctl start engine")
    umad.unit("beside.service", ENGINE)
    umad.run("systemctl start beside")
    main = int(umad.show("engine", "MainPID"))
    done = umad.run("umadctl adopt --unit engine --quota 200MiB --peak 250MiB")
    assert f"(pid {main})" in done.stdout
    assert workers(umad)["engine"]["booked"] == 250 * MIB
    umad.run("systemctl kill --signal=USR1 --kill-whom=all engine")
    wait_until(lambda: int(umad.show("engine", "MainPID")) not in (0, main), 20, "its restart")
    wait_until(
        lambda: workers(umad).get("engine", {}).get("pid") == int(umad.show("engine", "MainPID")),
        10,
        "the new one under quota",
    )
    assert umad.show("beside", "NRestarts") == "0"
    umad.run("umadctl disown engine")
    assert workers(umad) == {}
    assert umad.show("engine", "ActiveState") == "active"


def test_a_table_counts_from_the_start_of_its_unit_which_may_fork(umad: Installed) -> None:
    file = umad.machine.path("/etc/umad/umad.toml")
    before = file.read_text()
    table = '[[worker]]\nname = "forks"\nunit = "forks.service"\nquota = "100MiB"\n'
    file.write_text(before + table)
    try:
        umad.run("systemctl start umad")
        umad.unit("forks.service", FORKING)
        umad.run("systemctl start forks")
        wait_until(lambda: "forks" in workers(umad), 5, "the worker")
        main = umad.show("forks", "MainPID")
        wait_until(lambda: str(workers(umad)["forks"]["pid"]) == main, 5, "its main process")
        umad.run("systemctl restart umad")
        wait_until(lambda: "forks" in workers(umad), 5, "the worker after a restart")
        assert umad.show("forks", "MainPID") == main
        umad.run("systemctl stop forks")
        wait_until(lambda: workers(umad) == {}, 5, "the end")
    finally:
        file.write_text(before)


def test_what_is_not_adopted(umad: Installed) -> None:
    umad.run("systemctl start umad")
    for unit in ("umad.service", "init.scope", "none"):
        done = umad.run(f"umadctl adopt --unit {unit} --quota 1GiB", check=False)
        assert done.returncode == 1
        assert "cannot be adopted" in done.stderr or "does not run" in done.stderr


def test_a_program_runs_in_a_scope_of_its_own(umad: Installed) -> None:
    umad.run("systemctl start umad dbus")
    code = "print(open('/proc/self/cgroup').read())"
    run = f'umadctl run --name mine --quota 100MiB -- {PYTHON} -S -c "{code}"'
    assert "/umad-run-mine-" in umad.run(run).stdout
    greedy = f"{HOLD % (300, 300)}; import time; time.sleep(20)"
    run = f'umadctl run --name mine --quota 100MiB -- {PYTHON} -S -c "{greedy}"'
    done = umad.run(run, check=False)
    assert done.returncode == 137
    assert "umad stopped mine, which was over its quota" in done.stderr
    left = umad.run("systemctl list-units --all --no-legend 'umad-run-*'").stdout
    assert left.strip() == "", "the scope goes with its program"
