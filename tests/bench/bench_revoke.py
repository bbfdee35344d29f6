"""Breach seen -> revoke sent, SIGKILL sent, gone: with the loop under 1,000 requests a second."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.figures import Figure, at_most
from tests.daemon.running import ROOT, running

VICTIMS = 40
LOAD = """
import sys, threading, time
from umad.client import connect
client, pause = connect(sys.argv[1]), threading.Event()
due = time.perf_counter()
while True:
    client.call("ping")
    due += 0.001
    if (left := due - time.perf_counter()) > 0:
        pause.wait(left)
"""


def run() -> list[Figure]:
    stops = []
    with tempfile.TemporaryDirectory(prefix="umad-") as folder, running(Path(folder)) as daemon:
        load = subprocess.Popen([sys.executable, "-c", LOAD, str(daemon.socket)], cwd=ROOT)
        try:
            for _ in range(VICTIMS):
                victim = subprocess.Popen(
                    [sys.executable, "-m", "tests.demo.greedy", daemon.socket, "64MiB", "1GiB"],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                )
                stops.append(daemon.wait_for("stopped", pid=victim.pid, within_s=30))
                victim.wait(10)
        finally:
            load.kill()
            load.wait(10)

    def milliseconds(key: str) -> list[float]:
        return [1000 * stop[key] for stop in stops]

    return [
        at_most(
            "revoke",
            "breach seen -> revoke sent, p99",
            milliseconds("seen_to_revoke_s"),
            "ms",
            5,
            share=0.99,
        ),
        at_most(
            "revoke",
            "breach seen -> SIGKILL sent, p99",
            milliseconds("seen_to_kill_s"),
            "ms",
            100,
            share=0.99,
        ),
        at_most(
            "revoke",
            "breach seen -> process gone, median",
            milliseconds("seen_to_gone_s"),
            "ms",
            150,
        ),
    ]
