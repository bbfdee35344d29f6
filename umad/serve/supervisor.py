"""Keeps one engine running behind the front, and says what became of it.

Owns the engine's process: its environment, its start, the wait between two starts, its end.
Rules: umad may SIGKILL the engine at any moment and that is no fault of the front, which starts
the next one at once; an engine that dies again and again is started with a wait that doubles; a
model that was revoked for breaking its quota comes back later than its neighbours.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Final

import structlog

from umad.errors import ConfigError
from umad.guard import device
from umad.guard.account import GUARD_OFF
from umad.guard.preload import launch_environment
from umad.serve.link import EngineLink, ModelState

BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 30.0
HEALTHY_S: Final = 30.0
STOP_S: Final = 5.0
HOLD_MIN_S: Final = 5.0
HOLD_MAX_S: Final = 300.0
# What the engine's libraries read at import; a user's own value stands.
_DEFAULTS: Final = {
    "MALLOC_TRIM_THRESHOLD_": "131072",  # freed memory goes back to the kernel, and to the books
    # Kernels that torch and oneDNN each keep, one for each shape: 1024 of 0.6 MiB by themselves.
    # Five models' linear layers have some 150 between them (``linear``).
    "LRU_CACHE_CAPACITY": "256",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    # On ROCm, for pages to stay where they were put, and since SDMA copies hang on APUs of the
    # gfx11 family; nobody else reads them.
    **device.HIP_ENVIRONMENT,
}
# What the engine's own rules depend on.
_FIXED: Final = {
    "OMP_NUM_THREADS": "1",  # until the engine has divided the cores among its workers
    "OMP_WAIT_POLICY": "PASSIVE",  # idle teams must not spin beside busy ones
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
log = structlog.get_logger()


def engine_environment(
    own: Mapping[str, str], guard: str, *, on_device: bool = False
) -> dict[str, str]:
    """The engine's environment, with the guard preloaded where it can be.

    Args:
        own: the front's; what systemd means for the front alone is left out.
        guard: the setting: "auto", "required" or "off".
        on_device: a model runs on a GPU.

    Raises:
        ConfigError: the guard is required and cannot be had; the message says why.
    """
    kept = {
        key: value
        for key, value in own.items()
        if key != "NOTIFY_SOCKET" and not key.startswith(("WATCHDOG_", "LISTEN_"))
    }
    added, why = ({}, 'serve.guard is "off"') if guard == "off" else launch_environment(kept)
    without = why
    if not why and on_device and not device.LIBRARY.is_file():
        without = "the device allocator was not built (no C compiler?)"
    if without and guard == "required":
        raise ConfigError(f'serve.guard is "required", but {without}')
    return {**_DEFAULTS, **kept, **_FIXED, **added, GUARD_OFF: why}


class Supervisor:
    """Runs engines, one after the other, until it is told to stop.

    Args:
        link: gets each new engine attached.
        command: what to start; the link's file descriptor is added as ``--fd N``.
        environment: as ``engine_environment`` makes it.
        keep_fds: what the command refers to.
    """

    def __init__(
        self,
        link: EngineLink,
        command: list[str],
        environment: Mapping[str, str],
        keep_fds: tuple[int, ...] = (),
    ) -> None:
        self._link = link
        self._command = command
        self._environment = dict(environment)
        self._keep_fds = keep_fds
        self._stopping = asyncio.Event()
        self._offences: dict[str, int] = {}
        self._held: set[str] = set()  # offenders that an engine has been told of already
        self.pid: int | None = None

    async def run(self) -> None:
        """Supervise until ``stop``; returns when the engine has ended."""
        backoff_s = BACKOFF_MIN_S
        if wanted := device.unsettled({**_DEFAULTS, **self._environment}):
            # The user's own stands: it harms nobody but models on ROCm, whose loads are refused.
            log.warning(
                "engine.environment", wanted=wanted, reason="pages may move between devices"
            )
        now_s = asyncio.get_running_loop().time
        while not self._stopping.is_set():
            began_s = now_s()
            status = await self._run_once()
            if self._stopping.is_set():
                return
            self._note_loss(status)
            lived_s = now_s() - began_s
            if lived_s >= HEALTHY_S:
                backoff_s = BACKOFF_MIN_S
            wait_s, backoff_s = backoff_s, min(2 * backoff_s, BACKOFF_MAX_S)
            self._link.restarts += 1
            self._link.back_in_s = max(1.0, wait_s)
            log.warning("engine.ended", status=status, lived_s=round(lived_s, 3), wait_s=wait_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    def stop(self) -> None:
        """Have ``run`` end the engine and return."""
        self._stopping.set()

    def note_state(self, model: str, state: ModelState) -> None:
        """Remember a model that was revoked: the engine may not live to hold it back itself."""
        revoked = state.error is not None and state.error.get("code") == "worker_revoked"
        # Told twice: when it is revoked, and with a wait when its thread has ended.
        if revoked and state.retry_after_s is None:
            self._offend(model, "it was revoked")

    def _note_loss(self, status: int) -> None:
        """An engine has ended unasked: what it was loading may be to blame, if it was one model.

        One that was revoked before is counted already.
        """
        loading = self._link.lost_loading
        if status == 0 or len(loading) != 1:
            return
        (model,) = loading
        if model not in self._offences or model in self._held:
            self._offend(model, "the inference process ended while it was loaded")

    def _offend(self, model: str, reason: str) -> None:
        self._offences[model] = self._offences.get(model, 0) + 1
        self._held.discard(model)
        log.warning("model.offended", model=model, offences=self._offences[model], reason=reason)

    async def _run_once(self) -> int:
        """One engine from its start to its end; returns its status, negative for a signal."""
        ours, theirs = socket.socketpair()
        try:
            holds = [f"--hold={model}={wait_s}" for model, wait_s in self._holds().items()]
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    f"--fd={theirs.fileno()}",
                    *holds,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *self._keep_fds],
                    env=self._environment,
                )
            except OSError as error:  # no memory for a fork, most of all
                log.error("engine.no_start", reason=str(error))
                ours.close()
                return error.errno or 1
        finally:
            theirs.close()
        self.pid = process.pid
        log.info("engine.start", pid=process.pid, held=holds)
        lost = await self._link.attach(ours)
        ended = asyncio.ensure_future(process.wait())
        waits = [asyncio.ensure_future(event.wait()) for event in (lost, self._stopping)]
        try:
            await asyncio.wait({ended, *waits}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                await self._link.stop(STOP_S)
            # A closed link without an end of the process is an engine nobody can reach.
            return await _end(process)
        finally:
            self.pid = None
            self._link.drop()
            for task in (ended, *waits):
                task.cancel()

    def _holds(self) -> dict[str, float]:
        """How long the next engine holds back each model that was revoked since the last."""
        holds = {
            model: min(HOLD_MAX_S, HOLD_MIN_S * 2 ** (count - 1))
            for model, count in self._offences.items()
            if model not in self._held
        }
        self._held |= holds.keys()
        return holds


async def _end(process: asyncio.subprocess.Process) -> int:
    """See a process to its end: a moment for itself, then SIGTERM, then SIGKILL."""
    ended = asyncio.ensure_future(process.wait())
    for grace_s, number in ((0.2, signal.SIGTERM), (STOP_S, signal.SIGKILL)):
        done, _ = await asyncio.wait({ended}, timeout=grace_s)
        if done:
            break
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
    return await ended


def engine_command(config_fd: int, log_format: str) -> list[str]:
    """How the engine is started; ``config_fd`` holds its configuration."""
    return [
        sys.executable,
        "-m",
        "umad.serve.engine",
        f"--config=/proc/self/fd/{config_fd}",
        f"--log-format={log_format}",
        f"--parent={os.getpid()}",
    ]
