"""umad-serve with models that load at once and take what they are told to.

``python -m tests.integration.plain_engine front ...`` is the front, without the word its engine.
A chat's message is the MiB of tensors that the answer takes, and for how many seconds it stops
between the two halves of them: "96 1.5".  The answer is a product's sum, so that memory somebody
else wrote to would show.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from umad.config import Settings
from umad.serve import engine, supervisor
from umad.serve import main as front
from umad.serve.kinds.base import Result
from umad.serve.loaded import Load

MIB = 1 << 20


class Plain:
    """A model with 4 MiB of weights."""

    kind = "chat"

    def __init__(self, folder: Path) -> None:
        import torch

        torch.manual_seed(sum(folder.name.encode()))
        self.weights = torch.randn(1024, 1024)
        self.resident_bytes = self.weights.nbytes

    def bytes_needed(self, job: Mapping[str, Any]) -> int:
        return (_wanted(job)[0] + 4) * MIB

    def size(self, job: Mapping[str, Any]) -> tuple[int, int]:
        return _wanted(job)[0], 1

    def run(self, job: Mapping[str, Any], cancelled: Callable[[], bool]) -> Result:
        import torch

        size_mib, pause_s = _wanted(job)
        rows = size_mib * MIB // 4096 // 2
        first = torch.ones(rows, 1024)
        threading.Event().wait(pause_s)
        second = torch.ones(rows, 1024)
        total = float((first[:64] @ self.weights).double().sum())
        total += float(first.sum()) + float(second.sum())
        return Result(
            {
                "text": repr(total),
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "finish_reason": "stop",
            }
        )


def _wanted(job: Mapping[str, Any]) -> tuple[int, float]:
    size_mib, _, pause_s = str(job["messages"][-1]["content"]).partition(" ")
    return int(size_mib), float(pause_s or 0)


def libraries(_settings: Settings) -> Load:
    import torch

    torch.set_num_threads(1)

    def load(
        kind: str, path: str, *, device: str, dtype: str, progress: Callable[[str, float], None]
    ) -> Plain:
        progress("reading", 0.5)
        return Plain(Path(path))

    return load


def _own_command(config_fd: int, log_format: str) -> list[str]:
    command = _engine_command(config_fd, log_format)
    command[command.index("umad.serve.engine")] = "tests.integration.plain_engine"
    return command


if __name__ == "__main__":
    if sys.argv[1:2] == ["front"]:
        _engine_command, supervisor.engine_command = supervisor.engine_command, _own_command
        sys.exit(front.main(sys.argv[2:]))
    sys.exit(engine.main(libraries=libraries))
