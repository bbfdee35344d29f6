"""An engine process whose models do what the prompt says: ``python -m tests.serve.scripted``."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from umad.config import Settings
from umad.serve import engine
from umad.serve.kinds.base import Result
from umad.serve.loaded import Load


class AcceleratorError(RuntimeError):
    """Named as torch names a device that failed."""


class Scripted:
    """``resident_bytes`` is what the path's last part says."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.resident_bytes = 1000

    def bytes_needed(self, job: Mapping[str, Any]) -> int:
        return int(job.get("need", 10))

    def size(self, job: Mapping[str, Any]) -> tuple[int, int]:
        return 1, 1

    def run(self, job: Mapping[str, Any], cancelled: Callable[[], bool]) -> Result:
        said = str(job.get("prompt", ""))
        if said == "wait":
            (self.path / "waiting").touch()
            tick = threading.Event()
            while not cancelled() and not (self.path / "release").exists():
                tick.wait(0.005)
        if said == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if said == "raise":
            raise ValueError(f"secret {said}")
        if said == "memory":
            raise MemoryError
        if said == "allocator":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        if said == "device":
            raise AcceleratorError("HIP error: unspecified launch failure")
        if "image" in job:
            return Result({"images": [job["image"]]})
        if "texts" in job:
            return Result({"vectors": [[0.5, 1.0]] * len(job["texts"]), "tokens": 1})
        return Result(
            {
                "text": said,
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "finish_reason": "stop",
                "thread": threading.get_native_id(),
                "pid": os.getpid(),
            }
        )


def libraries(_settings: Settings) -> Load:
    def load(
        kind: str, path: str, *, device: str, dtype: str, progress: Callable[[str, float], None]
    ) -> Scripted:
        assert (device, dtype) == ("cpu", "auto")
        folder = Path(path)
        with (folder.parent / "loads").open("a") as log:
            log.write(folder.name + "\n")
        progress("reading", 0.5)
        if (folder / "broken").exists():
            raise OSError(f"no weights in {folder.name}")
        return Scripted(kind, folder)

    return load


if __name__ == "__main__":
    sys.exit(engine.main(libraries=libraries, zygote="tests.serve.scripted_zygote"))
