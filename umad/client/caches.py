"""What this process keeps warm for reuse: giving it back, and how a device's share of it lies.

torch is never imported here, only spoken to where the program itself has it in use: its caching
allocator is what keeps a device's memory.
"""

import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from umad.client.memory import give_back
from umad.guard import account
from umad.units import MIB

# Smaller free blocks are no use to a large tensor: the daemon's bound, see PROTOCOL.md.
_BLOCK_BYTES: Final = 4 * MIB
logger = logging.getLogger("umad.client")


def release(slots: Iterable[int | None]) -> None:
    """Give back what allocators keep for reuse: Python's, glibc's, the guard's, a device's.

    Live objects are not touched, and what is given back is only slower to get again.

    Args:
        slots: of this process's accounts.
    """
    give_back()
    for slot in slots:
        if slot is not None:
            account.trim(slot)
    if (cuda := _cuda()) is not None:
        try:
            cuda.empty_cache()
        except RuntimeError as error:  # the device has failed: its user will hear of it
            logger.warning("the device's cache was not given back: %s", error)


def device_segments() -> dict[str, int] | None:
    """How the device allocator's memory lies, as the message ``segments`` tells it.

    Milliseconds for a large model.  None where no device is in use, or it cannot be asked.
    """
    if (cuda := _cuda()) is None:
        return None
    try:
        return summarise(cuda.memory_snapshot())
    except RuntimeError as error:
        logger.warning("the device's segments cannot be read: %s", error)
        return None


def summarise(snapshot: Iterable[Mapping[str, Any]]) -> dict[str, int] | None:
    """The sums of torch's ``memory_snapshot`` for the device with most free in large blocks.

    Args:
        snapshot: segments, each with its ``device``, ``total_size`` and ``blocks``.

    Returns:
        The parameters of ``segments`` in bytes, which must add up; None without a segment.
    """
    devices: dict[int, dict[str, int]] = {}
    names = ("reserved", "allocated", "internal_free", "external_free", "blocks_free")
    for segment in snapshot:
        sums = devices.setdefault(segment["device"], dict.fromkeys((*names, "largest_free"), 0))
        sums["reserved"] += segment["total_size"]
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] != "inactive":  # a block that waits for its stream is in use too
                asked = block.get("requested_size", size)
                sums["allocated"] += asked
                sums["internal_free"] += size - asked
                continue
            sums["external_free"] += size
            if size >= _BLOCK_BYTES:
                sums["blocks_free"] += size
                sums["largest_free"] = max(sums["largest_free"], size)
    return max(devices.values(), key=lambda sums: sums["blocks_free"], default=None)


def _cuda() -> Any:
    """torch.cuda (ROCm has the same name) once this process uses a device; None before."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # Half a module while another thread is importing it.
    in_use = getattr(cuda, "is_initialized", None)
    return cuda if in_use is not None and in_use() else None
