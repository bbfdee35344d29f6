"""The fences inside one process: a fenced worker's bytes are back, whatever its thread is doing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.running import ROOT, Daemon
from tests.integration.victim import MODES
from umad.guard import preload

CONFIG = """
[daemon]
socket = "{socket}"
[memory]
reserve = "64MiB"
budget = "4GiB"
"""
SIZE_MIB = 1024
BACK_WITHIN_S = 0.1

pytestmark = [pytest.mark.slow, pytest.mark.models]


def run_victim(daemon: Daemon, mode: str) -> dict[str, object]:
    preload.build()
    environment, why = preload.launch_environment(os.environ)
    assert not why
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.victim", daemon.socket, mode, str(SIZE_MIB)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_are_back_whatever_the_thread_does(folder: Path, mode: str) -> None:
    daemon = Daemon(folder, text=CONFIG.format(socket=folder / "umad.sock")).start()
    try:
        told = run_victim(daemon, mode)
        stopped = daemon.wait_for("stopped", worker="victim")
    finally:
        daemon.stop()
    assert told["account"] is not None, "the guard is not active"
    assert stopped["fence"] == "return"
    assert stopped["source"] == "account page"
    assert stopped["seen_to_gone_s"] <= BACK_WITHIN_S
    # The machine has the bytes back, says the kernel.
    assert stopped["left_bytes"] < (SIZE_MIB // 2) << 20
    assert told["revoked"]
    assert told["zeroed"]
    assert "check_revoked" not in told
    assert told["neighbour"], "a tensor of the neighbour was taken"
    assert told["wrong"] == 0
    assert int(str(told["rounds"])) > 50
    if mode == "loop":
        assert told["ended"] == ["WorkerRevoked"], "the courtesy reaches Python code"


def test_without_the_guard_the_process_is_killed(folder: Path) -> None:
    """The same breach where no account is: fence 3."""
    daemon = Daemon(folder, text=CONFIG.format(socket=folder / "umad.sock")).start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.victim", daemon.socket, "sleep", "1024"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == -9
        assert daemon.wait_for("stopped")["fence"] == "sigkill"
    finally:
        daemon.stop()
