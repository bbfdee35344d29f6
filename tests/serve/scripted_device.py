"""An engine and a zygote whose models lie on a device: the driver is the tests', torch a stand-in.

``python -m tests.serve.scripted_device`` is the engine; with ``--lifeline`` it is the zygote.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.serve import fake_torch
from umad.config import Settings
from umad.serve import engine, zygote
from umad.serve.kinds.base import Result
from umad.serve.loaded import Load

MIB = 1 << 20
WEIGHTS_MIB = 24


def driver(name: str, kind: type[Any] = ctypes.c_uint64) -> Any:
    return kind.in_dll(ctypes.CDLL(os.environ["UMAD_DEVICE_RUNTIME"]), f"fake_{name}")


class OnDevice:
    """Two pieces of weights; a job takes ``take`` MiB, ``keep`` MiB for good."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.resident_bytes = WEIGHTS_MIB * MIB
        # Only the loading needs it, and only together with half of the weights.
        scratch = fake_torch.Tensor(6 * MIB)
        self.weights = [fake_torch.Tensor(WEIGHTS_MIB // 2 * MIB)]
        del scratch
        self.weights.append(fake_torch.Tensor(WEIGHTS_MIB // 2 * MIB))
        self.myself = self  # as real models are: only a collection ends it

    def bytes_needed(self, job: Mapping[str, Any]) -> int:
        return int(job.get("need", 0)) * MIB

    def size(self, job: Mapping[str, Any]) -> tuple[int, int]:
        return 1, 1

    def run(self, job: Mapping[str, Any], _cancelled: Callable[[], bool]) -> Result:
        self.weights += [fake_torch.Tensor(job["keep"] * MIB)] if "keep" in job else []
        taken = [fake_torch.Tensor(job["take"] * MIB)] if "take" in job else []
        live = driver("live").value // MIB
        return Result(
            {
                "live": live,
                "taken": len(taken),
                "pid": os.getpid(),
                "spin": driver("flags", ctypes.c_uint * 4)[0],
            }
        )


def libraries(_settings: Settings) -> Load:
    fake_torch.install()

    def load(
        kind: str, path: str, *, device: str, dtype: str, progress: Callable[[str, float], None]
    ) -> OnDevice:
        assert (device, dtype) == ("cuda", "auto")
        progress("reading", 0.5)
        return OnDevice(kind, Path(path))

    return load


if __name__ == "__main__":
    if any(argument.startswith("--lifeline") for argument in sys.argv):
        sys.exit(zygote.main(bring=lambda: libraries(Settings())))
    sys.exit(engine.main(libraries=libraries, zygote="tests.serve.scripted_device"))
