"""Bytes back after an unload, and whether 100 loads and unloads leave anything behind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.figures import Figure, at_most
from tests.daemon.running import ROOT, running
from umad.guard import preload

CYCLES = int(os.environ.get("BENCH_CYCLES", "100"))
CODE = """
import json, sys, time
import torch
from umad.client import connect
from umad.client.memory import process_bytes, settle
from umad.serve.libraries import bring, warm

class Box:
    pass

load = bring()  # as the engine does it
warm([sys.argv[2]])
settle()
client = connect(sys.argv[1])
worker = client.worker("bench", quota="512MiB")
shares, times, held = [], [], []
for cycle in range(int(sys.argv[3])):
    def read():
        box = Box()
        box.runner = load("chat", sys.argv[2], progress=lambda stage, ratio: None)
        box.extra = [torch.ones(1 << 18) for _ in range(100)]
        return box
    before = process_bytes()
    box = worker.load(read)
    full = process_bytes()
    started = time.perf_counter()
    del box.runner, box.extra
    worker.unload()
    times.append(time.perf_counter() - started)
    after = process_bytes()
    if cycle:  # the first one keeps what it imported
        shares.append((full - after) / (full - before))
        held.append(after)
    del box
print(json.dumps([shares, times, held]))
"""


def run() -> list[Figure]:
    from tests.demo.fixtures import checkpoints

    preload.build()
    environment, why = preload.launch_environment(os.environ)
    assert not why, why
    with tempfile.TemporaryDirectory(prefix="umad-") as folder, running(Path(folder)) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", CODE, daemon.socket, checkpoints() / "llama", str(CYCLES)],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    shares, times, held = json.loads(done.stdout.splitlines()[-1])
    back = sorted(shares)[len(shares) // 2]
    growth = (held[-1] - held[0]) / (1 << 20)
    return [
        Figure(
            "unload",
            "bytes back after an unload",
            100 * back,
            "%",
            ">= 98",
            None,
            len(shares),
            100 * min(shares),
            100 * max(shares),
            back >= 0.98,
        ),
        at_most(
            "unload", "time of an unload, p99", [1000 * t for t in times], "ms", 200, share=0.99
        ),
        Figure(
            "unload",
            f"growth of the process over {len(held)} loads and unloads",
            growth,
            "MiB",
            "<= 8",
            None,
            len(held),
            growth,
            growth,
            growth <= 8,
        ),
    ]
