"""Field case R8: bursts faster than the looks at memory.

A worker without a guard goes from calm to full touching speed past its quota.  Its own diary
says how fast it was and when; what it got over its quota is judged in time at that rate, so that
a slow machine and a fast one mean the same.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import CONFIG, ROOT, Daemon, eventually
from tests.integration.burster import MIB, read_diary

pytestmark = pytest.mark.slow

QUOTA = 300


@pytest.fixture
def daemon(folder: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    interval = getattr(request, "param", "200ms")
    text = CONFIG.format(socket=folder / "umad.sock", more="").replace("100ms", interval)
    made = Daemon(folder, text=text)
    try:
        yield made.start()
    finally:
        made.stop()


class Burster:
    """The worker process, calm at its birth; a context, so that it never outlives the test."""

    def __init__(self, daemon: Daemon, diary: Path, calm: int) -> None:
        arguments = [str(daemon.socket), str(diary), str(QUOTA), str(calm)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.burster", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        assert self._stdout.readline() == b"calm\n"

    def burst(self) -> None:
        self._stdin.write(b"\n")
        self._stdin.flush()

    def __enter__(self) -> "Burster":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        self._stdin.close()
        self._stdout.close()


def held(daemon: Daemon) -> int:
    return sum(process["bytes"] or 0 for process in daemon.status()["processes"])


def pace(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["pace"]
    return found


@pytest.mark.parametrize("calm", [40, 280])
def test_a_burst_gets_less_than_100_ms_worth_over_its_quota(
    daemon: Daemon, folder: Path, calm: int
) -> None:
    diary = folder / "diary"
    with Burster(daemon, diary, calm) as worker:
        eventually(lambda: held(daemon) > calm * MIB)  # a look has seen it at rest
        worker.burst()
        stopped = daemon.wait_for("stopped", pid=worker.process.pid)
    entries = read_diary(diary)
    rate = (entries[-1][1] - entries[0][1]) / (entries[-1][0] - entries[0][0])
    over = stopped["measured_at_kill_bytes"] - stopped["limit_bytes"]
    assert stopped["limit_bytes"] >= QUOTA * MIB
    assert 0 < over < 0.1 * rate, f"{1000 * over / rate:.0f} ms worth at {rate / MIB:.0f} MiB/s"


@pytest.mark.parametrize("daemon", ["5s"], indirect=True)
def test_a_new_worker_is_looked_at_before_the_interval_is_over(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.worker("new", quota="20MiB")
        eventually(lambda: daemon.status()["processes"][0]["bytes"], 2)


def test_watching_closely_costs_less_than_2_percent_of_a_core(daemon: Daemon, folder: Path) -> None:
    assert pace(daemon) == {"look_s": 0.2, "glance_s": None, "reason": "ease"}
    assert daemon.status()["fill_rate_bytes_per_s"] > 10 * MIB
    with Burster(daemon, folder / "diary", 290) as worker:
        eventually(lambda: pace(daemon)["reason"] == "near_limit")
        before_s, seconds = cpu_s(daemon.pid), 2.0
        with pytest.raises(subprocess.TimeoutExpired):
            worker.process.wait(seconds)
        assert cpu_s(daemon.pid) - before_s < 0.02 * seconds
        assert worker.process.poll() is None


def cpu_s(pid: int) -> float:
    """From the scheduler's own clock; the ticks of stat are too coarse."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9
