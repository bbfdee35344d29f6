"""`umad up` without models: the daemon alone, supervised."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.daemon.running import CONFIG, ROOT, eventually
from umad.client import DaemonUnavailable, connect

pytestmark = pytest.mark.slow


def start(folder: Path, text: str) -> subprocess.Popen[str]:
    config = folder / "umad.toml"
    config.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "umad.daemon.main", "up", "--config", str(config), "--dry-run"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def daemon_of(up: "subprocess.Popen[str]") -> psutil.Process | None:
    return next(iter(psutil.Process(up.pid).children()), None)


def test_the_daemon_is_started_again_and_ctrl_c_ends_both(folder: Path) -> None:
    socket = folder / "umad.sock"
    up = start(folder, CONFIG.format(socket=socket, more=""))
    try:
        eventually(socket.exists, within_s=20)
        first = eventually(lambda: daemon_of(up))
        assert "--dry-run" in first.cmdline()
        assert "--permissive=all" in first.cmdline()
        first.kill()
        second = eventually(lambda: (now := daemon_of(up)) and now.pid != first.pid and now, 10)

        def answers() -> bool:
            try:
                with connect(str(socket)) as client:
                    return bool(client.call("status")["daemon"]["pid"] == second.pid)
            except DaemonUnavailable:
                return False

        eventually(answers, within_s=10)
    finally:
        os.kill(up.pid, signal.SIGINT)
        told = up.communicate(timeout=20)[1]
    assert up.returncode == 0
    assert "only the daemon runs" in told
    assert "SIGKILL" in told
    assert not second.is_running()
    assert not socket.exists()


def test_what_a_restart_would_not_mend_ends_it(folder: Path) -> None:
    (folder / "umad.sock").write_text("precious")
    up = start(folder, CONFIG.format(socket=folder / "umad.sock", more=""))
    told = up.communicate(timeout=30)[1]
    assert up.returncode == 78
    assert "no socket" in told
    assert "giving up" in told


def test_a_wrong_configuration_is_told_at_once(folder: Path) -> None:
    up = start(folder, "[memory]\nbudget = 12\n")
    told = up.communicate(timeout=30)[1]
    assert up.returncode == 78
    assert "line 2" in told
