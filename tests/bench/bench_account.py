"""`used` in the account page against the kernel: five models under load in one engine.

The engine is stopped for each look, so that the page and smaps tell of the same moment.  The truth
of a model is what is resident of its account's range and of its own checkpoint's files.
"""

import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.bench_isolation import make_small
from tests.bench.figures import Figure, at_most
from tests.daemon.running import eventually
from tests.demo import ask
from tests.integration.stack import Stack
from umad.guard import preload
from umad.guard.page import SLOTS, AccountPage
from umad.units import MIB

MODELS = ("one", "two", "three", "four", "five")
QUOTAS = {name: (384 + at) * MIB for at, name in enumerate(MODELS)}  # tells whose account it is
LOOKS = int(os.environ.get("BENCH_RUNS", "40"))
# In the engine: where each account's blocks lie, written down on a signal.
WHERE = """
import json, os, signal
def tell(*_):
    from umad.guard.account import account_range
    ranges = [account_range(slot) for slot in range(63)]
    with open(os.environ["BENCH_RANGES"], "w") as file:
        json.dump([[one.base, one.base + one.bytes] for one in ranges], file)
signal.signal(signal.SIGUSR1, tell)
"""
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)")


def run() -> list[Figure]:
    preload.build()
    with tempfile.TemporaryDirectory(prefix="umad-") as folder, _engine(Path(folder)) as running:
        pid = running.pid("engine")
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        told = Path(folder) / "ranges"
        ranges = json.loads(eventually(lambda: told.exists() and told.read_text()))
        page = _page(pid)
        limits = [page.read(slot).limit for slot in range(SLOTS)]
        slots = {name: limits.index(quota) for name, quota in QUOTAS.items()}
        off: list[float] = []
        mapped: list[float] = []
        with _load(running):
            pause = threading.Event()
            for look in range(LOOKS):
                pause.wait(0.1 + look % 7 / 50)
                with _stopped(pid):
                    used = {name: page.read(slots[name]).used for name in MODELS}
                    resident = _resident(pid)
                for name in MODELS:
                    low, high = ranges[slots[name]]
                    files = str(Path(folder) / name)
                    own = sum(size for at, _, size in resident if low <= at < high)
                    weights = sum(size for _, path, size in resident if path.startswith(files))
                    off.append(100 * abs(used[name] - own - weights) / (own + weights))
                    mapped.append(weights / MIB)
        page.close()
    return [
        at_most(
            "account", "used against the truth, the furthest of all looks", off, "%", 2.0, share=1.0
        ),
        at_most(
            "account", "of it weights that are a mapping of their file", mapped, "MiB", 0, share=1.0
        ),
    ]


@contextmanager
def _engine(folder: Path) -> Iterator[Stack]:
    (folder / "inject").mkdir()
    (folder / "inject/sitecustomize.py").write_text(WHERE)
    make_small(folder / MODELS[0])
    for name in MODELS[1:]:
        shutil.copytree(folder / MODELS[0], folder / name)
    stack = Stack(folder, {})
    text = stack.config.read_text() + "".join(
        f'[[model]]\nname = "{name}"\nkind = "chat"\nquota = "{quota}B"\npath = "{folder / name}"\n'
        for name, quota in QUOTAS.items()
    )
    stack.config.write_text(text)
    stack.start(PYTHONPATH=str(folder / "inject"), BENCH_RANGES=str(folder / "ranges"))
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.stop()


@contextmanager
def _load(running: Stack) -> Iterator[None]:
    """A client for each model, prompts of changing lengths."""
    ended = threading.Event()

    def keep_asking(model: str, seed: int) -> None:
        turn = seed
        while not ended.is_set():
            turn += 1
            words = " harbour" * (turn * 37 % 300)
            answer = ask.chat(running.address, model, f"Tell me{words}.", 4 + turn % 13)
            assert answer.status == 200, ask.gist(answer)

    threads = [
        threading.Thread(target=keep_asking, args=(model, at)) for at, model in enumerate(MODELS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _page(pid: int) -> AccountPage:
    """The engine's page, mapped here as well."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:umad-accounts" in str(entry.readlink()):
            fd = os.open(entry, os.O_RDWR)
            try:
                return AccountPage.from_fd(fd)
            finally:
                os.close(fd)
    raise AssertionError("the engine has no account page")


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: _all_stopped(pid))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _all_stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks)


def _resident(pid: int) -> list[tuple[int, str, int]]:
    """Start, path and resident bytes of each mapping."""
    found: list[tuple[int, str, int]] = []
    at, path = 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if head := _HEAD.fullmatch(line):
            at, path = int(head[1], 16), head[3]
        elif line.startswith("Rss:"):
            found.append((at, path, int(line.split()[1]) << 10))
    return found
