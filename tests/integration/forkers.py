"""Small worker processes with children, one behaviour each, for the field cases of families.

    python -m tests.integration.forkers BEHAVIOUR SOCKET [ARGUMENT...]

Each prints what it has done; the test drives it by standard input, a line a step.
"""

import contextlib
import gc
import mmap
import os
import signal
import sys
from collections.abc import Callable

from umad.client import Client, UmadError, connect

MIB = 1 << 20


class Pages:
    """Stands for a model: private pages that a fork shares until one writes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map[::4096] = b"\x01" * (size // 4096)


def say(*words: object) -> None:
    print(*words, flush=True)


def step() -> None:
    if not sys.stdin.readline():
        os._exit(0)


def child(what: Callable[[], object]) -> int:
    """Fork: the child does it and waits for ever."""
    pid = os.fork()
    if pid == 0:
        try:
            what()
            while True:
                signal.pause()
        finally:
            os._exit(1)
    return pid


def nothing() -> None:
    """What a child does that only lives."""


def orphan(client: Client, kind: str, quota: str, size: str) -> None:
    """Loads little; its child touches ``size`` MiB; then it ends and the child does not."""
    worker = client.worker("orphan", quota=quota)
    model = worker.load(lambda: Pages(MIB))
    say("loaded")
    step()
    kept: list[Pages] = []
    ready, told = os.pipe()

    def touch() -> None:
        if kind == "setsid":
            os.setsid()
        kept.append(Pages(int(size) * MIB))
        os.write(told, b"x")

    say("child", child(touch))
    os.read(ready, 1)
    say("touched")
    if kind != "late":
        step()
    del model
    os._exit(0)


def sit(client: Client, name: str, quota: str) -> None:
    """Loads little and has a child of its own."""
    worker = client.worker(name, quota=quota)
    model = worker.load(lambda: Pages(MIB))
    say("loaded")
    say("child", child(nothing))
    step()
    del model


def sit_alone(arguments: list[str]) -> None:
    """Registers at a step, loads nothing that is really there, and waits."""
    _, socket, name, quota = arguments
    step()
    worker = connect(socket, name=name).worker(name, quota=quota)
    model = worker.load(lambda: Pages(4096))
    say("loaded")
    step()
    del model


def forks(client: Client, quota: str, size: str, count: str) -> None:
    """Loads, then forks ``count`` children that share its pages; gives back, and they do not."""
    worker = client.worker("forks", quota=quota)
    model = worker.load(lambda: Pages(int(size) * MIB))
    say("loaded")
    for _ in range(int(count)):
        say("child", child(nothing))
    step()
    model.map.close()
    hold = worker.bond.kept.let_go()
    assert hold is not None
    client.end(hold, leaked=False)
    say("released")
    step()


def lie(client: Client, quota: str, size: str) -> None:
    """Says that it gave everything back, and keeps it."""
    worker = client.worker("liar", quota=quota)
    model = worker.load(lambda: Pages(int(size) * MIB))
    hold = worker.bond.kept.let_go()
    assert hold is not None
    client.end(hold, leaked=False)
    say("released")
    step()
    del model


def stubborn(client: Client, how: str, quota: str) -> None:
    """Holds 400 MiB and is in something that no exception ends."""
    worker = client.worker("stubborn", quota=quota)
    model = worker.load(lambda: Pages(400 * MIB))
    say("loaded")
    step()
    if how == "svd":
        import torch

        matrix = torch.rand(3000, 3000)
        say("busy")
        with worker.forward():
            torch.linalg.svd(matrix)
    else:
        say("busy")
        with worker.forward():
            while True:
                with contextlib.suppress(BaseException):
                    sum(range(10_000))
    say("ended")
    del model


BEHAVIOURS = {
    "orphan": orphan,
    "sit": sit,
    "forks": forks,
    "lie": lie,
    "stubborn": stubborn,
}


if __name__ == "__main__":
    gc.freeze()
    try:
        BEHAVIOURS[sys.argv[1]](connect(sys.argv[2], name=sys.argv[1]), *sys.argv[3:])
    except UmadError as error:
        say("error", error.code, error.message)
        sys.exit(5)
