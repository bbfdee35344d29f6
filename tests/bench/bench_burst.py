"""Crossing -> seen: an unguarded worker goes from calm to full touching speed past its quota.

The room it has is what decides, so it is measured short (20 MiB), and with the 100 MiB of a
model that leaves a quarter of its quota.

Prediction, before the first run: a glance every 20 ms catches a short room 0 to 21 ms after the
crossing, 10 in the median; with 100 MiB to go at 3 GiB/s one glance falls into the burst and
foretells the crossing, so 3 ms in the median and 10 at p99.
"""

import random
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.bench.figures import Figure, at_most
from tests.daemon.running import ROOT, Daemon, running
from tests.integration.burster import MIB, read_diary

BURSTS = 30
QUOTA = 300
ROOMS = (20, 100)
TARGET_MS = 25


def run() -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory(prefix="umad-") as folder, running(Path(folder)) as daemon:
        daemon.config.write_text(daemon.config.read_text().replace("100ms", "200ms"))
        daemon.stop()
        daemon.start()
        for room in ROOMS:
            bursts = [burst(daemon, Path(folder) / "diary", room) for _ in range(BURSTS)]
            seen = [seen_ms for seen_ms, _ in bursts]
            rate = statistics.median(rate for _, rate in bursts)
            what = f"crossing -> seen, {room} MiB to go at {rate / MIB / 1024:.1f} GiB/s"
            figures.append(at_most("burst", f"{what}, median", seen, "ms", TARGET_MS))
            figures.append(at_most("burst", f"{what}, p99", seen, "ms", TARGET_MS, share=0.99))
    return figures


def burst(daemon: Daemon, diary: Path, room: int) -> tuple[float, float]:
    """Milliseconds from the crossing to the look that saw it, and the rate in bytes a second."""
    arguments = [str(daemon.socket), str(diary), str(QUOTA), str(QUOTA - room)]
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.burster", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker.stdin, worker.stdout:
        assert worker.stdout.readline() == b"calm\n"
        threading.Event().wait(0.5 + random.random() * 0.2)  # anywhere between two looks
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        stopped = daemon.wait_for("stopped", pid=worker.pid)
    worker.wait(10)
    with daemon.client() as client:
        events = client.call("events")["events"]
    seen_s = next(
        event["unix_s"]
        for event in events
        if event["name"] == "revoked" and event["pid"] == worker.pid
    )
    entries = read_diary(diary)
    assert stopped["measured_at_kill_bytes"] > stopped["limit_bytes"]
    crossed_s = next(at_s for at_s, size in entries if size > QUOTA * MIB)
    passed_s = entries[-1][0] - entries[0][0]
    return 1000 * (seen_s - crossed_s), (entries[-1][1] - entries[0][1]) / passed_s
