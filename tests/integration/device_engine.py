"""umad-serve whose models lie on a device that the tests drive, or on the CPU.

``python -m tests.integration.device_engine front ...`` is the front, without the word its engine.
On ``cuda`` the allocator, its quota and the guard are real, torch and the driver stand-ins.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests.serve import fake_torch
from umad.config import Settings
from umad.serve import berth, engine, supervisor
from umad.serve import main as front
from umad.serve.kinds.base import Result
from umad.serve.loaded import Load

WEIGHTS_BYTES = 8 << 20


class Placed:
    """A model whose answer is what lies on the device, in MiB."""

    kind = "chat"
    resident_bytes = WEIGHTS_BYTES

    def __init__(self, device: str) -> None:
        on_device = device != "cpu"
        self.weights = fake_torch.Tensor(WEIGHTS_BYTES) if on_device else bytes(WEIGHTS_BYTES)

    def bytes_needed(self, job: Mapping[str, Any]) -> int:
        return 0

    def size(self, job: Mapping[str, Any]) -> tuple[int, int]:
        return 1, 1

    def run(self, job: Mapping[str, Any], cancelled: Callable[[], bool]) -> Result:
        driver = ctypes.CDLL(os.environ["UMAD_DEVICE_RUNTIME"])
        live = ctypes.c_uint64.in_dll(driver, "fake_live").value
        return Result(
            {
                "text": str(live >> 20),
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "finish_reason": "stop",
            }
        )


def libraries(_settings: Settings) -> Load:
    fake_torch.install()

    def load(
        kind: str, path: str, *, device: str, dtype: str, progress: Callable[[str, float], None]
    ) -> Placed:
        progress("reading", 0.5)
        return Placed(device)

    return load


def _own_command(config_fd: int, log_format: str) -> list[str]:
    command = _engine_command(config_fd, log_format)
    command[command.index("umad.serve.engine")] = "tests.integration.device_engine"
    return command


if __name__ == "__main__":
    if sys.argv[1:2] == ["front"]:
        _engine_command, supervisor.engine_command = supervisor.engine_command, _own_command
        sys.exit(front.main(sys.argv[2:]))
    berth.FALLBACK_WAIT_S = 0.5
    sys.exit(engine.main(libraries=libraries))
