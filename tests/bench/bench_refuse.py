"""Over-quota allocations in one guarded worker, four others computing beside it.

10,000 tries at random sizes from 1 to 8 threads: bytes over the quota (the page's peak against its
limit), refusals that were anything but torch's own error, and errors of the four.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.figures import Figure
from tests.daemon.running import ROOT, running
from umad.guard import preload

TRIES = 10_000
QUOTA_MIB = 128
CODE = """
import json, random, sys, threading
import torch
from umad.client import connect
from umad.client.accounts import process_page

torch.set_num_threads(1)
tries, quota = int(sys.argv[2]), int(sys.argv[3])
client = connect(sys.argv[1])

class Model:
    def __init__(self):
        self.weights = torch.randn(256, 256)

stopping, errors, rounds = threading.Event(), [], [0] * 4

def neighbour(index):
    worker = client.worker(f"n{index}", quota="64MiB")
    model = worker.load(Model)
    inputs = torch.randn(64, 256)
    expected = inputs @ model.weights
    while not stopping.is_set():
        try:
            with worker.forward():
                if not torch.equal(inputs @ model.weights, expected):
                    errors.append("wrong")
        except Exception as error:
            errors.append(repr(error))
        rounds[index] += 1

neighbours = [threading.Thread(target=neighbour, args=(index,)) for index in range(4)]
for thread in neighbours:
    thread.start()
worker = client.worker("greedy", quota=quota << 20)
model = worker.load(Model)
given = refused = strange = 0
for count in range(1, 9):
    lock = threading.Lock()

    def allocate(seed):
        global given, refused, strange
        chance, kept = random.Random(seed), []
        for _ in range(tries // 36 + 1):  # no fewer than asked for
            size = int(2 ** chance.uniform(16, 28))
            try:
                with worker.forward():
                    kept.append(torch.empty(size, dtype=torch.uint8))
                with lock:
                    given += 1
            except MemoryError:
                with lock:
                    refused += 1
                kept.clear()
            except Exception:
                with lock:
                    strange += 1
            if len(kept) > 8:
                kept.pop(chance.randrange(len(kept)))

    threads = [threading.Thread(target=allocate, args=(count * 10 + i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
stopping.set()
for thread in neighbours:
    thread.join()
line = process_page._page.read(worker.account)
print(json.dumps([given, refused, strange, line.peak - line.limit, len(errors), sum(rounds)]))
"""


def run() -> list[Figure]:
    preload.build()
    environment, why = preload.launch_environment(os.environ)
    assert not why, why
    with tempfile.TemporaryDirectory(prefix="umad-") as folder, running(Path(folder)) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", CODE, daemon.socket, str(TRIES), str(QUOTA_MIB)],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    given, refused, strange, over, errors, rounds = json.loads(done.stdout.splitlines()[-1])
    tries = given + refused + strange

    def none(figure: str, value: float, unit: str) -> Figure:
        return Figure("refuse", figure, value, unit, "<= 0", None, tries, value, value, value <= 0)

    return [
        none(f"bytes over the quota in {tries} tries, {refused} refused", max(0, over), "B"),
        none("refusals that were not an out-of-memory error in that thread", strange, "count"),
        none(f"errors of four other workers in {rounds} forwards", errors, "count"),
    ]
