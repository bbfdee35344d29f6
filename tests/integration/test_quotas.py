"""Quotas that people change, with the real client: the next load books what they have set."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_umadctl import run
from tests.daemon.running import Daemon, eventually, running
from umad.client import Worker

pytestmark = pytest.mark.slow
MIB = 1 << 20


class Blocks:
    def __init__(self, size: int) -> None:
        self.bytes = bytearray(b"\x01") * size


def books(daemon: Daemon) -> tuple[int, int, int, int]:
    """MiB: of the one worker its quota and booking, of its process booking and limit."""
    state = daemon.status()
    [worker], [process] = state["workers"], state["processes"]
    beyond = process["limit"] - process["baseline"]
    sizes = (worker["quota"], worker["booked"], process["booked"], beyond)
    assert all(size % MIB == 0 for size in sizes)
    return tuple(size // MIB for size in sizes)


def unloaded(daemon: Daemon, worker: Worker, model: Blocks) -> None:
    model.bytes = bytearray()
    worker.unload()
    eventually(lambda: daemon.booked() == 0)


def set_quota(daemon: Daemon, size: str) -> Any:
    return run("--socket", daemon.socket, "set-quota", "w1", size)


def test_a_quota_raised_without_a_model_is_booked_by_the_next_load(folder: Path) -> None:
    with (
        running(folder) as daemon,
        daemon.client() as client,
        client.worker("w1", quota="50MiB") as worker,
    ):
        model = worker.load(lambda: Blocks(20 * MIB))
        assert books(daemon) == (50, 50, 50, 50)
        unloaded(daemon, worker, model)
        assert set_quota(daemon, "300MiB").stdout == "w1: quota 300.0 MiB\n"
        model = worker.load(lambda: Blocks(20 * MIB))
        assert books(daemon) == (300, 300, 300, 300)
        shown = run("--socket", daemon.socket, "status").stdout
        [row] = (line for line in shown.splitlines() if line.startswith("w1 "))
        assert row.count("300.0") == 2  # booked, quota
        unloaded(daemon, worker, model)
        model = worker.load(lambda: Blocks(20 * MIB), peak="10MiB")
        assert books(daemon) == (300, 300, 300, 300)
        with client.worker("w2", quota="1700MiB") as other:
            beside = other.load(lambda: Blocks(MIB))
            refused = set_quota(daemon, "400MiB")
            assert refused.returncode == 1
            assert "a quota of 400.0 MiB for w1 takes 100.0 MiB more" in refused.stderr
            del beside, model


def test_a_worker_that_sets_its_own_quota_and_peak_loads_by_them(folder: Path) -> None:
    with (
        running(folder) as daemon,
        daemon.client() as client,
        client.worker("w1", quota="50MiB", peak="60MiB") as worker,
    ):
        model = worker.load(lambda: Blocks(20 * MIB))
        worker.set_quota("100MiB", "120MiB")
        assert books(daemon) == (100, 100, 100, 100)
        unloaded(daemon, worker, model)
        model = worker.load(lambda: Blocks(20 * MIB))
        assert books(daemon) == (100, 100, 100, 100)
        daemon.kill()
        daemon.start()
        eventually(lambda: daemon.status()["workers_total"] == 1)
        assert books(daemon) == (100, 100, 100, 100)
        assert daemon.status()["workers"][0]["peak"] == 120 * MIB
        unloaded(daemon, worker, model)
