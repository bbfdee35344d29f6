"""Small worker processes, one behaviour each, for the field cases.

    python -m tests.integration.workers BEHAVIOUR SOCKET [ARGUMENT...]

Each prints "ready" lines; the test drives it by standard input, a line a step.
"""

import ctypes
import gc
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

from umad.client import Client, UmadError, connect
from umad.client.memory import give_back, process_bytes

MIB = 1 << 20


class Blocks:
    """Stands for a model; really touched."""

    def __init__(self, size: int) -> None:
        self.bytes = touched(size)


def touched(size: int) -> bytearray:
    return bytearray(b"\x01") * size


def say(*words: object) -> None:
    print(*words, flush=True)


def step() -> str:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return line.strip()


def load_and_hold(client: Client, name: str, quota: str, peak: str, touch: str) -> None:
    """Loads: touches ``touch`` MiB, settles at 280; waits inside the load for a step."""
    worker = client.worker(name, quota=quota, peak=peak)

    def load() -> Blocks:
        much = touched(int(touch) * MIB)
        say("touched")
        step()
        del much
        return Blocks(280 * MIB)

    model = worker.load(load)
    say("loaded")
    step()
    del model


def torch_touch(client: Client, quota: str) -> None:
    """Allocates far more than its quota, then touches past it."""
    import torch

    client.worker("toucher", quota=quota)
    tensor = torch.empty(8 << 30, dtype=torch.uint8)
    say("allocated")
    step()
    tensor[: 600 << 20 : 4096] = 1
    say("touched")
    step()


def shared_anonymous(client: Client, quota: str, size: str) -> None:
    """Shared-anonymous pages: nothing of it is RssAnon."""
    client.worker("pinned", quota=quota)
    say("registered")
    step()
    pages = mmap.mmap(-1, int(size) * MIB)
    for offset in range(0, len(pages), 4096):
        pages[offset] = 1
    say("touched")
    step()


def locked(client: Client, quota: str, size: str) -> None:
    """Pages that cannot be reclaimed, as pinned buffers are."""
    client.worker("pinned", quota=quota)
    pages = mmap.mmap(-1, int(size) * MIB)
    at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(at), ctypes.c_size_t(len(pages))):
        raise OSError(ctypes.get_errno(), "mlock")
    say("locked")
    step()


def two_on_a_segment(client: Client, quota: str, size: str) -> None:
    """A parent and a child map one segment; each is a worker."""
    segment = mmap.mmap(-1, int(size) * MIB)
    segment[::4096] = b"\x01" * (len(segment) // 4096)
    path = client.path
    client.close()
    child = os.fork()
    name = "parent" if child else "child"
    mine = connect(path, name=name)
    # What both map was there before they registered: it is in their baseline.  So map it anew.
    worker = mine.worker(name, quota=quota)
    fresh = mmap.mmap(-1, 4096)
    sum(segment[::4096])
    say(name, worker.id)
    fresh.close()
    if child:
        step()
        os.kill(child, 9)
        os.waitpid(child, 0)
    else:
        threading.Event().wait()


def failed_load(client: Client, keep: str) -> None:
    """A load that fails; ``keep`` holds on to its tensors on purpose."""
    kept: list[Any] = []
    worker = client.worker("failing", quota="400MiB")
    before = process_bytes()

    def load() -> Blocks:
        block = touched(300 * MIB)
        if keep == "keep":
            kept.append(block)
        raise MemoryError("no more")

    try:
        worker.load(load)
    except MemoryError as error:
        kept.append(error)  # as a batch loop stores its last error
    say("failed", (process_bytes() - before) // MIB)
    step()
    kept.clear()
    give_back()
    say("cleared", (process_bytes() - before) // MIB)
    step()


def failed_forward(client: Client) -> None:
    """A job runs out of memory; the loop around it stores its last error and goes on."""
    worker = client.worker("failing", quota="400MiB")
    kept: list[Any] = []

    def job() -> None:
        block = touched(300 * MIB)
        say("full", process_bytes() // MIB)
        raise MemoryError(f"no more than {len(block)}")

    def batch() -> None:
        try:
            with worker.forward():
                job()
        except MemoryError as error:
            kept.append(error)

    before = process_bytes()
    batch()
    say("failed", (process_bytes() - before) // MIB, type(kept[0].__cause__).__name__)
    batch()  # and the next one begins with all of its room
    say("again", (process_bytes() - before) // MIB)
    step()


def os_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def many_threads(client: Client) -> None:
    """Ten threads that run one forward each, all of them alive until the end."""
    import torch

    torch.set_num_threads(8)
    worker = client.worker("many", quota="400MiB")
    matrix = worker.load(lambda: Tensors(torch.randn(600, 600)))
    before = os_threads()
    met = threading.Barrier(11)

    def forward() -> None:
        with worker.forward():
            torch.relu(matrix.tensor @ matrix.tensor)
        met.wait()
        met.wait()

    threads = [threading.Thread(target=forward) for _ in range(10)]
    for thread in threads:
        thread.start()
    met.wait()
    say("threads", os_threads() - before)
    met.wait()
    for thread in threads:
        thread.join()
    later = threading.Thread(target=lambda: say("later", torch.get_num_threads()))
    later.start()
    later.join()


def shared_segment(client: Client, name: str, quota: str, path: str) -> None:
    """Maps a segment of POSIX shared memory and touches all of it."""
    client.worker(name, quota=quota)
    with Path(path).open("r+b") as file:
        segment = mmap.mmap(file.fileno(), 0)
    segment[::4096] = b"\x01" * (len(segment) // 4096)
    say("touched")
    step()


def fragments(client: Client) -> None:
    """Keeps every 500th of 20,000 blocks, says that all is unloaded, trims later."""
    worker = client.worker("fragments", quota="1900MiB")
    libc = ctypes.CDLL(None)
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: glibc keeps all it ever had
    libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: 80 kB blocks come from the heap
    blocks = worker.load(lambda: Holder([touched(80_000) for _ in range(18_000)]))
    say("loaded")
    step()
    kept = blocks.blocks[::500]
    blocks.blocks.clear()
    # By word alone, as a program does that does not know of trimming.
    hold = worker.bond.kept.let_go()
    assert hold is not None
    client.end(hold, leaked=False)
    say("unloaded", process_bytes() // MIB)
    step()
    give_back()
    say("trimmed", process_bytes() // MIB)
    step()
    del kept


class Holder:
    def __init__(self, blocks: list[bytearray]) -> None:
        self.blocks = blocks


def grow(client: Client, name: str, quota: str, size: str) -> None:
    """Loads little, grows to ``size`` MiB on a step."""
    worker = client.worker(name, quota=quota)
    model = worker.load(lambda: Blocks(MIB))
    say("loaded")
    step()
    model.bytes = touched(int(size) * MIB)
    say("grown")
    step()


def hold_the_gil(client: Client, quota: str) -> None:
    """One thread keeps the interpreter lock in a C call, another takes memory without it."""
    client.worker("holder", quota=quota)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    held = ctypes.PyDLL(None)
    size = 600 * MIB
    start = threading.Event()

    def take() -> None:
        start.wait()
        address = libc.malloc(ctypes.c_size_t(size))
        # Released lock: memset runs beside the sleeper, which then never lets go.
        libc.memset(ctypes.c_void_p(address), 1, ctypes.c_size_t(size))

    threading.Thread(target=take, daemon=True).start()
    say("registered")
    step()
    start.set()
    threading.Event().wait(0.01)  # the memset is under way
    held.usleep(900_000)
    held.usleep(900_000)
    held.usleep(900_000)
    say("survived")


def guarded(client: Client, quota: str) -> None:
    """Under the guard: on each step "N" it asks for a tensor of N MiB in a forward."""
    import torch

    worker = client.worker("guarded", quota=quota)
    model = worker.load(lambda: Tensors(torch.ones(4 << 20)))
    say("loaded", worker.account)
    while True:
        size = int(step())
        try:
            with worker.forward():
                torch.ones(size << 18)
            say("given")
        except UmadError as error:
            say("refused", error.code, float(model.tensor[0]))


class Tensors:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


BEHAVIOURS = {
    "guarded": guarded,
    "load_and_hold": load_and_hold,
    "torch_touch": torch_touch,
    "shared_anonymous": shared_anonymous,
    "locked": locked,
    "two_on_a_segment": two_on_a_segment,
    "failed_load": failed_load,
    "failed_forward": failed_forward,
    "many_threads": many_threads,
    "shared_segment": shared_segment,
    "fragments": fragments,
    "grow": grow,
    "hold_the_gil": hold_the_gil,
}


if __name__ == "__main__":
    gc.freeze()
    try:
        BEHAVIOURS[sys.argv[1]](connect(sys.argv[2], name=sys.argv[1]), *sys.argv[3:])
    except UmadError as error:
        say("error", error.code, error.message)
        sys.exit(5)
