"""An engine process whose models do what the prompt says: ``python -m tests.serve.scripted``."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from umad.config import Settings
from umad.core.batching import Bounds
from umad.errors import InvalidParams
from umad.serve import engine
from umad.serve.kinds.base import Prepared, Result
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


class Several(Scripted):
    """Reads jobs of ``tokens`` and ``need`` bytes, and notes each forward in the file ``forwards``.

    While there is a file ``hold`` a forward waits, and with a prompt "stuck" until it is cancelled;
    a prompt "memory" fails in company alone.
    """

    def prepare(self, job: Mapping[str, Any]) -> Prepared:
        if job["prompt"] == "nonsense":
            raise InvalidParams("it means nothing")
        needed, alike = int(job.get("need", 10)), job.get("alike")
        return Prepared(job.get("tokens", 5), 1, needed, dict(job), alike)

    def bytes_together(self, _tokens: int, rows: int) -> int:
        return 10 * rows if not (self.path / "large").exists() else 300 * rows

    def forward(self, prompts: list[str], cancelled: Callable[[], bool]) -> None:
        (self.path / "waiting").touch()
        tick = threading.Event()
        stuck = "stuck" in prompts
        while (stuck or (self.path / "hold").exists()) and not cancelled():
            tick.wait(0.002)
        with (self.path / "forwards").open("a") as log:
            log.write(json.dumps(prompts) + "\n")
        if "raise" in prompts:
            raise ValueError
        if "memory" in prompts and len(prompts) > 1:
            raise MemoryError


class Together(Several):
    bounds = Bounds()
    unit = 1

    def run_together(self, jobs: Sequence[Prepared], cancelled: Callable[[], bool]) -> list[Result]:
        prompts = [job.inputs["prompt"] for job in jobs]
        self.forward(prompts, cancelled)
        return [Result({"text": prompt, "pid": os.getpid()}) for prompt in prompts]


class Joins(Several):
    joins = True

    def generation(self) -> "Growing":
        return Growing(self)


class Growing:
    """Each answer is its prompt, ``max_tokens`` times.

    At its first it keeps ``keeps`` bytes of its prompt, and is spared ``spares``.  A prompt "tight"
    gets no memory while there is any of those, and one "late" none beside two others from its
    third token on.
    """

    def __init__(self, runner: Joins) -> None:
        self._runner = runner
        self._rows: dict[object, tuple[dict[str, Any], Any, Any, list[str]]] = {}
        self.fresh = self.kept_bytes = self.spared_bytes = 0

    def keep(self, most: int) -> None:
        self.kept_bytes = min(most, self.kept_bytes + self.fresh)
        self.fresh = self.spared_bytes = 0

    def shrink(self, most: int) -> None:
        self.kept_bytes = min(most, self.kept_bytes)

    def size(self, names: Collection[object] | None = None) -> tuple[int, int]:
        return 5, len(self._rows if names is None else names)

    def set_aside(self, name: object) -> None:
        assert name in self._rows

    def join(self, job: Prepared, cancelled: Callable[[], bool], emit: Any) -> object:
        name = object()
        self._rows[name] = (job.inputs, cancelled, emit, [])
        return name

    def leave(self, name: object) -> None:
        self._rows.pop(name, None)

    def step(self, names: Collection[object] | None = None) -> list[tuple[object, Result]]:
        chosen = list(self._rows if names is None else names)
        asked = [self._rows[name][0]["prompt"] for name in chosen]
        self._runner.forward(asked, lambda: any(self._rows[name][1]() for name in chosen))
        if "tight" in asked and self.kept_bytes:
            raise MemoryError
        if len(chosen) > 2 and any(said[1:] == ["late"] for *_, said in self._rows.values()):
            raise MemoryError
        done = []
        for name in chosen:
            job, _, emit, said = self._rows[name]
            if not said:
                self.fresh += job.get("keeps", 0)
                self.spared_bytes += job.get("spares", 0)
            said.append(job["prompt"])
            if emit is not None:
                emit(job["prompt"])
            if len(said) == job["max_tokens"]:
                del self._rows[name]
                done.append((name, Result({"text": "".join(said)}, (5, 1))))
        return done


def libraries(settings: Settings) -> Load:
    for model in settings.models:
        if (refused := Path(model.path) / "refused").exists():
            refused.unlink()  # as the guard refuses an import in the middle
            raise MemoryError

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
        ways = {"together": Together, "joins": Joins}
        return ways.get(folder.name, Scripted)(kind, folder)

    return load


if __name__ == "__main__":
    sys.exit(engine.main(libraries=libraries, zygote="tests.serve.scripted_zygote"))
