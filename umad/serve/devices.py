"""Models on a GPU: what the engine does about the device under a model, in one place.

Rules:
1. nothing here touches a device before a model's load, so a process may fork until then;
2. ``place`` runs inside the load's init mutex.  It sets each device up once for the process, and
   binds the process's account page, and every later one, to the device allocator as well as to
   the guard;
3. the load and each run of the model happen inside ``Place.use``;
4. the bytes are given back before the daemon hears that they are: torch keeps freed segments in
   its pool, and what it keeps stays charged.

Host and device bytes of a worker share one account, whose limit is what the daemon has booked for
it.  Where CPU and GPU share one DRAM that is the truth; on a card with memory of its own the
staging buffers of the host are counted against the card's quota, which errs on the safe side.

None of this has run on GPU hardware yet.  The tests run it over a fake driver, with a stand-in
for torch's pools; ``tests/gpu/device_checks.py`` is the check for real ones.
"""

import gc
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import structlog

from umad.client.accounts import process_page
from umad.errors import ConfigError, ModelFailed, PreflightError
from umad.guard import device
from umad.guard.device import DeviceQuota
from umad.settings import ModelSettings

_NAME: Final = re.compile(r"cuda(?::(\d+))?")  # torch's name for both makers' GPUs
_prepared: Final[set[int]] = set()  # devices of this process; changed under the init mutex
log = structlog.get_logger()


class Place:
    """Where one instance of a model runs.

    Args:
        quota: what bounds it there; None on the CPU, and where that is not to be had.
        status: "" on the CPU, "on", or "off: " and the reason.
    """

    def __init__(self, quota: DeviceQuota | None = None, status: str = "") -> None:
        self.status = status
        self._quota = quota

    def use(self) -> AbstractContextManager[None]:
        """What this thread allocates on the device meanwhile is charged to the model.

        Raises:
            QuotaExceeded: torch got no memory.
        """
        return nullcontext() if self._quota is None else self._quota.use()

    def release(self) -> int:
        """Give device memory without a live tensor back to the driver.

        Returns:
            Bytes that the model still holds on the device; 0 where nothing counts them.
        """
        if self._quota is None:
            return 0
        gc.collect()  # a model is full of cycles, and each tensor keeps its whole segment
        try:
            self._quota.release()
        except RuntimeError as error:  # a device that has failed: the next job says so, too
            log.error("model.device_release_failed", kind=type(error).__name__)
        return self._quota.held


def place(model: ModelSettings, slot: int | None, guard: str) -> Place:
    """Find a model its place; to be called inside the load, under the init mutex.

    Args:
        model: its ``device`` is what counts.
        slot: its worker's account; None where no guard enforces quotas in this process.
        guard: the setting ``serve.guard``.

    Raises:
        ModelFailed: the device cannot be used, or has no quota though the guard is required.
    """
    if model.device == "cpu":
        return Place()
    name = _NAME.fullmatch(model.device)
    if name is None:
        return _unbounded(model, f"umad has no allocator for {model.device}", guard)
    index = int(name[1] or 0)
    try:
        if index not in _prepared:
            device.prepare_device(index, _prepared)
            _prepared.add(index)
    except (ConfigError, PreflightError) as error:
        raise ModelFailed(
            f"{model.name} cannot run on {model.device}: {error.message.removeprefix(device.OFF)}"
        ) from error
    if slot is None:
        return _unbounded(model, process_page.off or "the daemon gave it no account", guard)
    try:
        device.prepare_pools()
        process_page.attach_with(device.attach)
    except ConfigError as error:
        return _unbounded(model, error.message.removeprefix(device.OFF), guard)
    return Place(DeviceQuota(slot, index), "on")


def _unbounded(model: ModelSettings, why: str, guard: str) -> Place:
    """A place without a quota, where that is allowed."""
    if guard == "required":
        raise ModelFailed(
            f'serve.guard is "required", and {model.name} has no quota on {model.device}: {why}'
        )
    log.warning("model.device_quota_off", model=model.name, device=model.device, reason=why)
    return Place(status=f"off: {why}")
