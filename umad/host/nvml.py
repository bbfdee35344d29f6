"""NVML, asked in a thread of its own, because a call blocks for as long as the driver is stuck.

Owns the thread and the last answer with its age.  Rules: nobody waits for the driver, except the
very first look and a look that would stop a process, both with a deadline; no CUDA context is
ever made; an answer older than ``STALE_S`` is no answer.
Stays out: what the answers mean (``nvidia``).

Source: NVML API reference, driver 570 and 580; nvidia-ml-py is the maker's own binding.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from umad.host.clock import Clock
from umad.host.files import LARGEST
from umad.host.pci import normal
from umad.values import Reading

SOURCE: Final = "nvml"
PERIOD_S: Final = 0.5
"""Between two questions; longer, up to ``PERIOD_MAX_S``, where they cost much CPU."""
PERIOD_MAX_S: Final = 2.0
STALE_S: Final = 3.0
"""An answer that is older is broken."""

_CPU_SHARE: Final = 1 / 200  # DESIGN: the daemon takes half a percent of a core


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One GPU: its memory (absent where the GPU has none of its own), and who holds how much.

    ``held`` are bytes by pid, None where NVML does not tell them; ``problem`` says why there is
    no list at all.
    """

    pdev: str
    total: Reading
    used: Reading
    held: Mapping[int, int | None] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NvmlSample:
    """One answer.  ``taken_s`` is when the question was asked; ``problem`` why it failed."""

    number: int
    taken_s: float
    devices: tuple[NvmlDevice, ...] = ()
    driver: str = ""
    problem: str = ""


class NvmlReader:
    """Asks for as long as it is open; ``start`` begins.

    Args:
        clock: dates the answers.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._asked = 0  # questions begun
        self._wanted = 0  # the question that somebody waits for
        self._last: NvmlSample | None = None

    @property
    def started(self) -> bool:
        """Whether anybody asked for answers yet."""
        return self._thread is not None

    def start(self) -> None:
        """Begin to ask."""
        # A daemon thread: one that is stuck in the driver must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def latest(self) -> NvmlSample:
        """The last answer; one with a problem when it is too old."""
        now_s = self._clock.now_s()
        last = self._last
        if last is None:
            return NvmlSample(0, now_s, problem="NVML has not answered yet")
        age_s = now_s - last.taken_s
        if age_s > STALE_S:
            why = f"NVML has not answered for {age_s:.1f} s; is the driver stuck?"
            return NvmlSample(last.number, last.taken_s, problem=why)
        return last

    def fresh(self, within_s: float) -> NvmlSample | None:
        """The answer to a question asked from now on; None when it takes longer than that."""
        with self._changed:
            self._wanted = wanted = self._asked + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._number() >= wanted, within_s)
            return self._last if self._number() >= wanted else None

    def age_ms(self) -> int:
        """How old the last answer is."""
        last = self._last
        return 0 if last is None else round((self._clock.now_s() - last.taken_s) * 1000)

    def close(self) -> None:
        """Stop asking; a thread that is stuck in the driver is left to itself."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _number(self) -> int:
        return 0 if self._last is None else self._last.number

    def _run(self) -> None:
        library = _Library()
        while True:
            with self._changed:
                if self._closing:
                    break
                self._asked += 1
            taken_s, cpu_s = self._clock.now_s(), time.thread_time()
            devices, driver, problem = library.ask()
            period_s = (time.thread_time() - cpu_s) / _CPU_SHARE
            with self._changed:
                self._last = NvmlSample(self._asked, taken_s, devices, driver, problem)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._closing or self._wanted > self._asked,
                    min(max(PERIOD_S, period_s), PERIOD_MAX_S),
                )
        library.close()


class _Library:
    """The binding, in the hands of one thread."""

    def __init__(self) -> None:
        # Here and not above: 2 MiB that only a machine with an NVIDIA GPU pays for.
        import pynvml

        self._nvml: Any = pynvml
        self._ready = False
        self._no_such = frozenset(
            {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        )

    def ask(self) -> tuple[tuple[NvmlDevice, ...], str, str]:
        """All devices, the driver's version, and the problem that left both empty."""
        nvml = self._nvml
        try:
            if not self._ready:
                nvml.nvmlInit()
                self._ready = True
            count = nvml.nvmlDeviceGetCount()
            driver = str(nvml.nvmlSystemGetDriverVersion())
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            return tuple(self._device(handle) for handle in handles), driver, ""
        except (nvml.NVMLError, ValueError) as error:
            # A lost GPU or an updated driver is found again by a new start only.
            self.close()
            return (), "", f"NVML: {error}"

    def close(self) -> None:
        """Let go of the driver."""
        if self._ready:
            self._ready = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                return  # the driver is gone: nothing left to let go of

    def _device(self, handle: Any) -> NvmlDevice:
        nvml = self._nvml
        pdev = normal(nvml.nvmlDeviceGetPciInfo(handle).busId)
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            total, used = _size(memory.total), _size(memory.used)
        except nvml.NVMLError as error:
            if error.value in self._no_such:
                total = used = Reading.absent(SOURCE)
            else:
                total = used = Reading.broken(SOURCE, f"{pdev}: NVML: {error}")
        try:
            return NvmlDevice(pdev, total, used, self._held(handle))
        except nvml.NVMLError as error:
            return NvmlDevice(pdev, total, used, problem=f"{pdev}: NVML: {error}")

    def _held(self, handle: Any) -> dict[int, int | None]:
        """Bytes by pid.  A process in several lists is shown in each with all that it holds."""
        nvml = self._nvml
        parts: dict[tuple[int, int], int | None] = {}
        for number, ask in enumerate(
            (
                nvml.nvmlDeviceGetComputeRunningProcesses_v3,
                nvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
                nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
            )
        ):
            try:
                listed = ask(handle)
            except nvml.NVMLError as error:
                # Only the first list is there on every GPU.
                if number and error.value in self._no_such:
                    continue
                raise
            for process in listed:
                key = (process.pid, process.gpuInstanceId)  # one process may use several slices
                sizes = (parts.get(key), process.usedGpuMemory)
                parts[key] = max((size for size in sizes if size is not None), default=None)
        held: dict[int, int | None] = {}
        for (pid, _), size in parts.items():
            before = held.get(pid, 0)
            held[pid] = None if size is None or before is None else before + size
        return held


def _size(found: int) -> Reading:
    if found >= LARGEST:
        return Reading.broken(SOURCE, f"NVML: {found} bytes are more than a GPU can have")
    return Reading.of(found, SOURCE)
