"""The fences inside one process: a fenced worker's bytes are back, whatever its thread is doing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
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
# The daemon's own deadline: what is not back by then costs the process, which here must live on.
DEADLINE_S = BACK_WITHIN_S = 0.1
SLACK_S = 0.1  # a look, and a test machine whose cores are busy

pytestmark = [pytest.mark.slow, pytest.mark.models]


def start_victim(daemon: Daemon, mode: str) -> "subprocess.CompletedProcess[str]":
    preload.build()
    environment, why = preload.launch_environment(os.environ)
    assert not why
    return subprocess.run(
        [sys.executable, "-m", "tests.integration.victim", daemon.socket, mode, str(SIZE_MIB)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_are_back_whatever_the_thread_does(
    folder: Path, mode: str, record_property: Callable[[str, object], None]
) -> None:
    daemon = Daemon(folder, text=CONFIG.format(socket=folder / "umad.sock")).start()
    try:
        done = start_victim(daemon, mode)
        assert done.returncode == 0, done.stderr[-2000:]
        stopped = daemon.wait_for("stopped", worker="victim")
    finally:
        daemon.stop()
    told = json.loads(done.stdout.splitlines()[-1])
    record_property("bytes_back_after_s", stopped["seen_to_gone_s"])
    print(f"{mode}: {SIZE_MIB} MiB back {1000 * stopped['seen_to_gone_s']:.0f} ms after the look")
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
    assert told["shared"], "a tensor that both use was taken"
    assert told["wrong"] == 0
    assert int(str(told["rounds"])) > 50
    if mode == "loop":
        assert told["ended"] == ["WorkerRevoked"], "the courtesy reaches Python code"


def test_what_cannot_be_taken_costs_the_process_at_the_deadline(folder: Path) -> None:
    daemon = Daemon(folder, text=CONFIG.format(socket=folder / "umad.sock")).start()
    try:
        assert start_victim(daemon, "arrays").returncode == -9
        stopped = daemon.wait_for("stopped")
    finally:
        daemon.stop()
    assert stopped["fence"] == "sigkill"
    assert stopped["seen_to_revoke_s"] < DEADLINE_S
    assert DEADLINE_S <= stopped["seen_to_kill_s"] <= DEADLINE_S + SLACK_S


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
