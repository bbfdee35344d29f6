"""An engine whose models go greedy on request: ``python -m tests.integration.greedy_engine``.

Real torch tensors under the real guard; a job's prompt says what the model does.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from umad.config import Settings
from umad.serve import at_work, engine
from umad.serve.kinds.base import Result
from umad.serve.loaded import Load

MIB = 1 << 20
MORE_THAN_ANY_QUOTA = 1 << 30


class AcceleratorError(RuntimeError):
    """Named as torch names a device that failed."""


class Greedy:
    """A model with a weight matrix; ``kept`` is what it should not keep."""

    kind = "chat"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(sum(folder.name.encode()))
        self.weights = torch.randn(1024, 1024)
        self.resident_bytes = self.weights.nbytes
        self.kept: list[Any] = []
        self.calls = 0

    def bytes_needed(self, job: Mapping[str, Any]) -> int:
        return MIB

    def size(self, job: Mapping[str, Any]) -> tuple[int, int]:
        return 1, 1

    def run(self, job: Mapping[str, Any], cancelled: Callable[[], bool]) -> Result:
        said = str(job["prompt"])
        if said != "work":
            getattr(self, said)()
        inputs = torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)
        total = float((inputs @ self.weights).double().sum())
        return Result(
            {
                "text": repr(total),
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "finish_reason": "stop",
            }
        )

    def giant(self) -> None:
        """One tensor beyond every quota."""
        torch.ones(MORE_THAN_ANY_QUOTA // 4)

    def leak(self) -> None:
        """A slow leak of small tensors."""
        for _ in range(MORE_THAN_ANY_QUOTA // 4096):
            self.kept.append(torch.ones(1024))

    def cache(self) -> None:
        """A cache that grows, as a KV cache does: by being copied into a larger one."""
        cache = torch.ones(MIB // 4)
        self.kept.append(cache)
        while cache.nbytes < MORE_THAN_ANY_QUOTA:
            cache = torch.cat([cache, torch.ones(4 * MIB // 4)])
            self.kept[0] = cache

    def helper(self) -> None:
        """Allocation from a thread that it starts."""
        failed: list[BaseException] = []

        def allocate() -> None:
            try:
                while len(self.kept) * 8 * MIB < MORE_THAN_ANY_QUOTA:
                    self.kept.append(torch.ones(8 * MIB // 4))
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        if failed:
            raise MemoryError(str(failed[0]))

    def pinned(self) -> None:
        """Memory that it locks, as pinned buffers are."""
        libc = ctypes.CDLL(None)
        while len(self.kept) * MIB < MORE_THAN_ANY_QUOTA:
            block = torch.ones(MIB // 4)
            libc.mlock(ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(4096))
            self.kept.append(block)

    def sticky(self) -> None:
        """After five calls the device is broken, for good."""
        self.calls += 1
        if self.calls > 5:
            raise AcceleratorError("HIP error: unspecified launch failure")

    def asleep(self) -> None:
        """Waits for a lock that nobody gives up; no exception reaches it."""
        self.hoard()
        held = threading.Lock()
        held.acquire()
        held.acquire()

    def burning(self) -> None:
        """Never ends, as a sort was seen to when what it sorts turns to zeros."""
        self.hoard()
        while True:
            with contextlib.suppress(BaseException):
                sum(range(10_000))

    def hoard(self) -> None:
        self.kept.append(torch.ones(64 * MIB // 4))
        (self.folder / "at work").touch()


def libraries(_settings: Settings) -> Load:
    torch.set_num_threads(1)

    def load(
        kind: str, path: str, *, device: str, dtype: str, progress: Callable[[str, float], None]
    ) -> Greedy:
        progress("reading", 0.5)
        model = Greedy(Path(path))
        if (Path(path) / "greedy").exists():
            (Path(path) / "greedy").unlink()  # the next load behaves
            model.giant()
        return model

    return load


if __name__ == "__main__":
    # A stuck thread is given up soon, and its successor begins at once.
    at_work.STUCK_AFTER_S = 1.0
    engine.STUCK_HOLD_S = 0.1
    sys.exit(engine.main(libraries=libraries))
