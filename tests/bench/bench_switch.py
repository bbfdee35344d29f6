"""A hot switch between two models that do not fit beside each other, over a bare load of one.

From the call for the model that is not loaded to its first answer: the other one is asked to go,
unloads, its bytes are seen to be back, this one loads and answers.  For the first rival the other
one has gone before; the second is plain from_pretrained, which books and copies nothing: what a
load costs beyond that is in it, and told apart by another benchmark (load).
"""

import gc
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.bench_load import JOB, make, plain
from tests.bench.engine import as_engine
from tests.bench.figures import Figure, ratio
from tests.daemon.running import CONFIG, Daemon, eventually

PAIRS = 9
QUOTA = 1200 << 20  # of one; the checkpoint is about half of that
AT_ONCE = '[leases]\nresidence_min = "0s"\nrival_rest = "0s"\n'


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="umad-") as folder:
        paths = [Path(folder) / name for name in ("one", "two")]
        make(paths[0])
        shutil.copytree(paths[0], paths[1])
        text = CONFIG.format(socket=Path(folder) / "umad.sock", more=AT_ONCE)
        daemon = Daemon(Path(folder), text=text).start()
        try:
            taken = as_engine(__name__, str(daemon.socket), *map(str, paths))
        finally:
            daemon.stop()
    ours, free_s, plain_s = taken
    figure = "hot switch to the first answer, over"
    return [
        ratio("switch", f"{figure} a load into free memory", ours, free_s, 1.1),
        ratio("switch", f"{figure} plain from_pretrained to its answer", ours, plain_s, 1.1),
    ]


def _interleaved(socket: str, paths: list[Path]) -> tuple[list[float], ...]:
    import torch

    from umad.client import connect
    from umad.client.memory import settle
    from umad.serve.jobs import JobQueue
    from umad.serve.libraries import bring
    from umad.serve.worker import ModelThread
    from umad.settings import ModelSettings

    load = bring()
    torch.set_num_threads(2)
    with connect(socket) as client:
        queues = []
        for path in paths:
            model = ModelSettings(
                name=path.name, kind="chat", path=str(path), quota=QUOTA, load="request"
            )
            queue = JobQueue(model.name)
            thread = ModelThread(client, model, 0, queue, load, lambda *_: None, lambda: None)
            thread.start()
            thread.settled.wait(30)
            queues.append((queue, thread))

        def timed(work: Callable[[], None]) -> float:
            gc.collect()
            began_s = time.perf_counter()
            work()
            return time.perf_counter() - began_s

        def one() -> None:
            _ask(queues[0][0])

        def two() -> None:
            _ask(queues[1][0])

        def goes(at: int) -> None:
            name = paths[at].name
            client.call("evict", {"name": name})
            eventually(lambda: _booked(client, name) < QUOTA // 10)

        one(), two()  # the first imports
        plain(paths[0])
        settle()  # as the engine does after its imports
        ours, free_s, plain_s = [], [], []
        for _ in range(PAIRS):
            ours.append(timed(one))  # two goes
            plain_s.append(timed(lambda: plain(paths[0])))
            goes(0)
            free_s.append(timed(two))
        for _, thread in queues:
            thread.stop()
            thread.join()
    return ours, free_s, plain_s


def _booked(client: Any, name: str) -> int:
    """What the books hold for it; a few MiB may come back with other pages only."""
    workers = client.call("status")["workers"]
    return int(next(one["booked"] for one in workers if one["name"] == name))


def _ask(queue: Any) -> None:
    from umad.serve.jobs import Job

    answered = threading.Event()
    errors: list[Any] = []

    def reply(_result: Any, error: Any) -> None:
        errors.append(error)
        answered.set()

    queue.put(Job("bench", JOB, time.monotonic() + 60, reply))
    answered.wait(90)
    assert errors == [None], errors


if __name__ == "__main__":
    print(json.dumps(_interleaved(sys.argv[1], [Path(path) for path in sys.argv[2:]])))
