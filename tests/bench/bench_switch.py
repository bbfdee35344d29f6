"""A hot switch between two models that do not fit beside each other, over a bare load of one.

From the call for the model that is not loaded to its first answer: the other one is asked to go,
unloads, its bytes are seen to be back, this one loads and answers.  For the rival the other one
has gone before.  What a load costs beyond plain from_pretrained is another benchmark's (load).
"""

import gc
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.bench.bench_load import JOB, make
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
            ours, theirs = _interleaved(daemon, paths)
        finally:
            daemon.stop()
    return [
        ratio(
            "switch",
            "hot switch to the first answer, over a load into free memory",
            ours,
            theirs,
            1.1,
        )
    ]


def _interleaved(daemon: Daemon, paths: list[Path]) -> tuple[list[float], list[float]]:
    import torch

    from umad.client.memory import settle
    from umad.serve.jobs import JobQueue
    from umad.serve.loader import load
    from umad.serve.worker import ModelThread
    from umad.settings import ModelSettings

    torch.set_num_threads(2)
    with daemon.client() as client:
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

        def timed(at: int) -> float:
            gc.collect()
            began_s = time.perf_counter()
            _ask(queues[at][0])
            return time.perf_counter() - began_s

        def goes(at: int) -> None:
            name = paths[at].name
            client.call("evict", {"name": name})
            eventually(lambda: _booked(daemon, name) < QUOTA // 10)

        timed(0), timed(1)  # the first imports
        settle()  # as the engine does after its imports
        ours, theirs = [], []
        for _ in range(PAIRS):
            ours.append(timed(0))  # 1 goes
            goes(0)
            theirs.append(timed(1))
        for _, thread in queues:
            thread.stop()
            thread.join()
    return ours, theirs


def _booked(daemon: Daemon, name: str) -> int:
    """What the books hold for it; a few MiB may come back with other pages only."""
    workers = daemon.status()["workers"]
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
