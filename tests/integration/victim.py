"""A guarded process with two workers: a neighbour that computes, and a victim that misbehaves.

    LD_PRELOAD=... python -m tests.integration.victim SOCKET MODE MIB

The victim holds MIB in tensors and is in MODE when its quota is lowered.  One JSON line at the
end says what the neighbour computed meanwhile and what became of the victim's thread.
"""

import contextlib
import ctypes
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy
import torch

from umad.client import WorkerRevoked, connect, shared

MIB = 1 << 20


class Hoard:
    """Stands for a model; its weights are one tensor."""

    def __init__(self, size: int) -> None:
        self.weights = torch.ones(size // 4)


def matmul() -> None:
    left = torch.ones(6000, 6000)
    torch.mm(left, left)


def swallow() -> None:
    while True:
        with contextlib.suppress(BaseException):  # a bare except
            sum(range(10_000))


def retry() -> None:
    while True:
        with contextlib.suppress(Exception):
            torch.ones(64 << 20)


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def loop() -> None:
    count = 0
    while True:
        count += 1


def from_pretrained() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(hidden_size=256, num_hidden_layers=4, intermediate_size=512)
        LlamaForCausalLM(config).save_pretrained(folder)
        while True:
            LlamaForCausalLM.from_pretrained(folder)


def pinned() -> None:
    """Its weights are locked in memory, as pinned buffers are."""
    weights = kept[0].weights
    locked = ctypes.CDLL(None).mlock(
        ctypes.c_void_p(weights.data_ptr()), ctypes.c_size_t(weights.nbytes)
    )
    if locked != 0:
        raise OSError("mlock is not allowed here")
    threading.Event().wait(60)


def arrays() -> None:
    """What is no tensor is never taken by force: it would break more than this worker."""
    others.append(numpy.ones(300 * MIB // 8))


kept: list[Hoard] = []
others: list[Any] = []
cache: list[torch.Tensor] = []  # of the module: made by the victim, used by the neighbour too
MODES: dict[str, Callable[[], None]] = {
    "matmul": matmul,
    "sleep": lambda: threading.Event().wait(60) and None,
    "bare except": swallow,
    "retry": retry,  # a swallowed exception
    "lock": lock,
    "loop": loop,
    "from_pretrained": from_pretrained,
    "pinned": pinned,
}
TAKES: dict[str, Callable[[], None]] = {"arrays": arrays}  # and sleeps then


def main(socket: str, mode: str, size: int) -> None:
    torch.set_num_threads(1)
    client = connect(socket, name="victim")
    neighbour = client.worker("neighbour", quota="256MiB")
    model = neighbour.load(lambda: Hoard(16 * MIB))
    torch.manual_seed(1)
    inputs = torch.randn(64, 64)
    expected = inputs @ inputs
    rounds = wrong = 0
    stopping = threading.Event()

    def compute() -> None:
        nonlocal rounds, wrong
        while not stopping.is_set():
            with neighbour.forward():
                if not torch.equal(inputs @ inputs, expected) or model.weights[-1] != 1:
                    wrong += 1
                rounds += 1

    worker = client.worker("victim", quota=(size + 600) * MIB)
    hoard = worker.load(lambda: Hoard(size * MIB))
    kept.append(hoard)
    ended: list[str] = []
    busy = threading.Event()

    def misbehave() -> None:
        try:
            with worker.forward():
                with shared():
                    cache.append(torch.ones(8 * MIB))
                TAKES.get(mode, lambda: None)()
                busy.set()
                MODES.get(mode, MODES["sleep"])()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is told
            ended.append(type(error).__name__)

    threading.Thread(target=misbehave, daemon=True).start()
    neighbour_thread = threading.Thread(target=compute)
    neighbour_thread.start()
    busy.wait()
    threading.Event().wait(0.5)  # let it get into its mode
    # Far below what it holds, and above the scratch memory of a matmul: what is no tensor is
    # never taken by force, and would cost the process.
    client.call("set_quota", {"worker": worker.id, "quota": 64 * MIB})
    worker.revoked.wait(10)
    threading.Event().wait(0.5)
    stopping.set()
    neighbour_thread.join()
    told = {
        "account": worker.account,
        "revoked": worker.revoked.is_set(),
        "ended": ended,
        "rounds": rounds,
        "wrong": wrong,
        "zeroed": bool(hoard.weights[0] == 0),
        "neighbour": bool((model.weights == 1).all()),
        "shared": bool((cache[0] == 1).all()),
    }
    with contextlib.suppress(WorkerRevoked):
        worker.check_revoked()
        told["check_revoked"] = "passed"
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    os._exit(0)  # not through the interpreter's end: the victim's thread is still at it
