"""Breach seen -> the quota's memory back, whatever the thread does; and the neighbour's answers.

2 GiB held, the victim's quota is lowered under it; the daemon's own event has the times.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.figures import Figure, at_most
from tests.daemon.running import ROOT, Daemon
from umad.guard import preload

MODES = ("matmul", "retry", "bare except", "sleep", "loop")
RUNS = int(os.environ.get("BENCH_RUNS", "4"))
SIZE_MIB = 2048
CONFIG = '[daemon]\nsocket = "{socket}"\n[memory]\nreserve = "64MiB"\nbudget = "6GiB"\n'


def run() -> list[Figure]:
    preload.build()
    environment, why = preload.launch_environment(os.environ)
    assert not why, why
    back, rounds, wrong = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="umad-") as folder:
        socket = Path(folder) / "umad.sock"
        daemon = Daemon(Path(folder), text=CONFIG.format(socket=socket)).start()
        try:
            for mode in MODES * RUNS:
                seen = len(daemon.log)
                victim = [sys.executable, "-m", "tests.integration.victim", socket, mode]
                done = subprocess.run(
                    [*victim, str(SIZE_MIB)],
                    cwd=ROOT,
                    env=environment | {"OMP_NUM_THREADS": "1"},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                told = json.loads(done.stdout.splitlines()[-1])
                rounds, wrong = rounds + told["rounds"], wrong + told["wrong"]
                stopped = daemon.wait_for("stopped", since=seen, worker="victim", fence="return")
                back.append(1000 * stopped["seen_to_gone_s"])
        finally:
            daemon.stop()
    return [
        at_most(
            "return", f"breach seen -> {SIZE_MIB >> 10} GiB back, p99", back, "ms", 100, share=0.99
        ),
        Figure(
            "return",
            f"wrong answers of the neighbour in {rounds} iterations meanwhile",
            wrong,
            "count",
            "<= 0",
            None,
            len(back),
            wrong,
            wrong,
            wrong == 0,
        ),
    ]
