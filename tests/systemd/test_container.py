"""The container itself: a real systemd inside, and nothing left behind outside."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd import container as module
from tests.systemd.container import Container, wait_until

BOOT = Path(__file__).with_name("boot")
pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.slow]


def traces() -> set[str]:
    """Cgroups, mounts and processes of containers that this machine has now."""
    names = {
        str(Path(place, name))
        for place, folders, _ in os.walk("/sys/fs/cgroup")
        for name in folders
        if name.startswith("umad-container")
    }
    names |= set(Path("/proc/mounts").read_text().splitlines())
    for stat in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b"container=umad\0" in stat.read_bytes():
                names.add(str(stat.parent))
        except OSError:
            continue
    return names


@pytest.fixture
def clean() -> Iterator[set[str]]:
    """What is there before; must be all there is afterwards."""
    if (reason := module.why_unavailable()) is not None:
        pytest.skip(reason)
    before = traces()
    yield before
    assert traces() == before


def boot(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BOOT, *command], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.usefixtures("clean")
def test_boot_passes_status_and_output_on() -> None:
    done = boot("sh", "-c", "cat /proc/1/comm; echo oops >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "systemd\n", "oops\n")


@pytest.mark.usefixtures("clean")
def test_boot_reports_death_by_a_signal_as_a_shell_does() -> None:
    assert boot("sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_in_mid_command_leaves_nothing(number: signal.Signals, clean: set[str]) -> None:
    running = subprocess.Popen(
        [BOOT, "sh", "-c", "systemd-run -q sleep 1000; echo up; exec sleep 1000"],
        stdout=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    assert len(traces() - clean) > 3
    running.send_signal(number)
    running.wait()
    running.stdout.close()
    # SIGKILL: the kernel ends the container; its empty cgroups go at the next boot
    wait_until(lambda: not any("/proc/" in name for name in traces() - clean), 10, "its end")
    if number == signal.SIGKILL:
        assert boot("true").returncode == 0


def test_a_missing_program_is_named_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    reason = module.why_unavailable()
    assert reason is not None
    assert "nsenter" in reason
    assert "apt-get install systemd util-linux" in reason


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(module.why_unavailable())


def test_services_start_when_they_say_ready(machine: Container) -> None:
    machine.path("/run/systemd/system/trial.service").write_text(
        "[Service]\nType=notify\nNotifyAccess=all\n"
        "ExecStart=/bin/sh -c 'touch /run/begun; systemd-notify --ready; exec sleep 1000'\n"
    )
    machine.run("systemctl daemon-reload; systemctl start trial")
    assert machine.path("/run/begun").exists()
    assert "MESSAGE" in machine.run("journalctl --sync; journalctl -u trial -o json").stdout
    machine.run("systemctl stop trial")


def test_commands_run_as_another_user(machine: Container) -> None:
    assert machine.run("id -un; id -Gn", user="nobody").stdout == "nobody\nnogroup\n"


def test_a_timeout_ends_the_command_inside(machine: Container) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        machine.run("exec sleep 4321", timeout_s=0.3)
    wait_until(
        lambda: machine.run("pgrep -f 'sleep 432[1]'", check=False).returncode == 1, 5, "its end"
    )


def test_neither_kernel_settings_nor_the_project_can_be_changed(machine: Container) -> None:
    # What is there already is written again: should this fail, nothing has been changed.
    setting = "/proc/sys/vm/swappiness"
    for command in (f'old=$(cat {setting}); echo "$old" > {setting}', "touch /srv/umad/README.md"):
        done = machine.run(command, check=False)
        assert "Read-only file system" in done.stderr


def test_a_failing_command_shows_its_output(machine: Container) -> None:
    with pytest.raises(AssertionError, match="exit status 3\nout\nwrong"):
        machine.run("echo out; echo wrong >&2; exit 3")
