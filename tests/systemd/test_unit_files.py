"""The unit files as text, and the files that lie beside them (R2): no root, no systemd."""

import shutil
import subprocess
from pathlib import Path

import pytest

from umad.config import DaemonSettings, MemorySettings
from umad.errors import ConfigError, PreflightError
from umad.host.preflight.finding import Fact
from umad.host.preflight.gpu import pages_limit_advised
from umad.host.preflight.kernel import judge_sysctl
from umad.units import parse_duration

PROJECT = Path(__file__).resolve().parents[2]
UNITS = {path.name: path.read_text() for path in (PROJECT / "systemd").iterdir()}
SERVICES = ("umad.service", "umad-serve.service")
# Settings that take something away, and so need a reason for whoever meets the refusal.
HARDENING = (
    "AmbientCapabilities", "Capability", "Device", "IPAddress", "Inaccessible", "Limit", "Lock",
    "MemoryDeny", "NoNew", "Private", "Proc", "Protect", "RemoveIPC", "Restrict", "SystemCall",
    "TasksMax",
)  # fmt: skip


def settings(unit: str) -> list[tuple[str, str]]:
    """Every "Key=value" of a unit file, in order."""
    lines = UNITS[unit].splitlines()
    pairs = [line.partition("=") for line in lines if line and line[0] not in "#[ "]
    return [(key, value) for key, _, value in pairs]


def of(unit: str, key: str) -> list[str]:
    return [value for name, value in settings(unit) if name == key]


def active_lines(file: str) -> list[str]:
    text = (PROJECT / file).read_text()
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize(
    "line",
    [
        "Type=notify",
        "NotifyAccess=main",
        "Restart=always",
        "KillMode=mixed",
        "RuntimeDirectory=umad",
        "RuntimeDirectoryPreserve=yes",
        "StateDirectory=umad",
        "OOMScoreAdjust=-900",
        "ManagedOOMPreference=avoid",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        "NoNewPrivileges=yes",
        "ExecStart=/usr/bin/umad --config /etc/umad/umad.toml",
    ],
)
def test_the_daemons_unit_has(line: str) -> None:
    assert tuple(line.split("=", 1)) in settings("umad.service")


@pytest.mark.parametrize(
    "line",
    [
        "Type=notify",
        "NotifyAccess=main",
        "Restart=always",
        "KillMode=mixed",
        "OOMPolicy=continue",
        "OOMScoreAdjust=0",
        "Environment=HSA_ENABLE_SDMA=0",
        "SupplementaryGroups=umad video render",
        "LimitCORE=0",
        "ExecStart=/usr/bin/umad-serve --config /etc/umad/umad.toml",
    ],
)
def test_the_inference_unit_has(line: str) -> None:
    assert tuple(line.split("=", 1)) in settings("umad-serve.service")


@pytest.mark.parametrize("unit", SERVICES)
@pytest.mark.parametrize("key", ["ProtectProc", "ProcSubset", "PrivatePIDs", "PrivateUsers"])
def test_no_process_is_hidden_from(unit: str, key: str) -> None:
    assert of(unit, key) == []


def test_no_device_is_hidden_from_the_gpu_libraries() -> None:
    keys = {key for key, _ in settings("umad-serve.service")}
    assert not keys & {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}
    # these close every device without a line of its own, so the policy must be stated
    assert of("umad.service", "PrivateDevices") == []
    assert of("umad.service", "DevicePolicy") == ["closed"]


def test_debugfs_and_pressure_stay_visible() -> None:
    hidden = " ".join(of("umad.service", "InaccessiblePaths"))
    assert not {"/sys", "/proc", "/dev"} & {path[1:5].rstrip("/") for path in hidden.split()}


@pytest.mark.parametrize(("unit", "other"), [SERVICES, SERVICES[::-1]])
def test_neither_service_takes_the_other_down(unit: str, other: str) -> None:
    pulling = {"Requires", "Requisite", "BindsTo", "PartOf", "Upholds", "PropagatesStopTo"}
    named = {key for key, value in settings(unit) if other in value.split()}
    assert named <= {"Wants", "After"}
    assert not named & pulling


@pytest.mark.parametrize("unit", [*SERVICES, "umad-compact.service"])
def test_every_restriction_stands_below_a_reason(unit: str) -> None:
    reason = False
    for line in UNITS[unit].splitlines():
        if line.startswith("#"):
            reason = not line.startswith("# ---")
        elif not line.strip():
            reason = False
        elif line.startswith(HARDENING):
            assert reason, line


def test_the_daemon_is_exposed_to_little() -> None:
    """2.0 of 10 at most, by systemd's own judgement."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze not found: apt-get install systemd")
    unit = str(PROJECT / "systemd/umad.service")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_only_ends_that_a_restart_cannot_mend_are_final() -> None:
    final = {ConfigError.exit_code, PreflightError.exit_code}
    (codes,) = of("umad.service", "RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} == final
    assert of("umad.service", "StartLimitIntervalSec") == ["0"]


def test_the_watchdog_waits_for_many_ticks() -> None:
    (watchdog,) = of("umad.service", "WatchdogSec")
    assert parse_duration(watchdog) >= 25 * MemorySettings().interval


def test_the_socket_is_the_one_of_the_configuration() -> None:
    daemon = DaemonSettings()
    assert of("umad.socket", "ListenStream") == [daemon.socket]
    assert of("umad.socket", "SocketGroup") == [daemon.group]
    assert of("umad.socket", "SocketMode") == ["0660"]
    assert int(of("umad.socket", "Backlog")[0]) >= daemon.connections_max
    assert f"d {Path(daemon.socket).parent} 0750 umad umad -" in UNITS["umad.tmpfiles"]


def test_every_user_and_group_of_the_units_is_made() -> None:
    made = {line.split()[1] for line in active_lines("systemd/umad.sysusers")}
    for unit in (*SERVICES, "umad.socket"):
        for key in ("User", "Group", "SupplementaryGroups", "SocketGroup"):
            assert set(" ".join(of(unit, key)).split()) <= made


def test_the_shipped_kernel_settings_pass_the_preflight() -> None:
    values = dict(line.split(" = ") for line in active_lines("etc/sysctl.d/90-umad.conf"))
    assert values.keys() == {"vm.swappiness", "vm.vfs_cache_pressure"}
    for name, value in values.items():
        found = judge_sysctl(name.removeprefix("vm."), Fact("", value))
        assert found.severity == "ok"
        # What a finding would have the operator write is what we ship.
        off = judge_sysctl(name.removeprefix("vm."), Fact("", "99"))
        assert off.keep is not None
        assert off.keep.line == f"{name} = {value}"


def test_the_drivers_examples_are_what_the_preflight_advises() -> None:
    text = (PROJECT / "etc/modprobe.d/umad.conf").read_text()
    advised = pages_limit_advised(131_000_000 * 1024)  # MemTotal of a machine of 128 GiB
    assert f"#options ttm pages_limit={advised}\n" in text
    assert f"#options amdttm pages_limit={advised} page_pool_size=" in text
    assert "#options amdgpu gttsize=-1\n" in text


def test_no_driver_option_is_set_for_a_machine_that_we_do_not_know() -> None:
    assert active_lines("etc/modprobe.d/umad.conf") == []
