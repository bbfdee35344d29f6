"""Committing promised memory before a load: conservative mode (``memory.conservative``).

Where memory is virtual, a host backs a page when it is first touched and not before, so what was
booked may not be there.  The bytes of a load are touched and held until all of them are there,
then handed to the loader at once: the pages are then the guest's own, free and backed, and the
load takes them over.  A host that wants them back in between (a balloon, free page reporting)
gets them; nothing inside the guest can forbid that.
"""

import errno
import mmap
from collections.abc import Callable
from typing import Final

from umad.errors import QuotaDenied
from umad.units import MIB, format_bytes

_POPULATE_WRITE: Final = 23  # madvise(2), Linux 5.14; Python has no name for it yet
# The interpreter's lock is held for one step: a few milliseconds, so that other threads get on.
_STEP_BYTES: Final = 4 * MIB
_MARGIN_MIN_BYTES: Final = 16 * MIB
_MARGIN_RATIO: Final = 16


def prefault(size: int, check: Callable[[], None]) -> int:
    """Touch and hold a load's bytes, then give them up for the loader.

    All but a sixteenth, at least 16 MiB: meanwhile the process needs pages of its own, and it is
    judged as a whole.

    Args:
        size: what was booked for the load, in bytes.
        check: called between steps; what it raises ends the matter.

    Returns:
        Bytes that were touched; 0 where the load is too small to matter.

    Raises:
        QuotaDenied: the machine does not have what was promised.
    """
    wanted = (size - max(_MARGIN_MIN_BYTES, size // _MARGIN_RATIO)) // mmap.PAGESIZE * mmap.PAGESIZE
    if wanted <= 0:
        return 0
    try:
        with mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
            for start in range(0, wanted, _STEP_BYTES):
                check()
                _touch(held, start, min(_STEP_BYTES, wanted - start))
    except OSError as error:
        raise QuotaDenied(
            f"{format_bytes(size)} were booked for this load, and the machine cannot back them: "
            f"{error.strerror}",
            retry_after_s=5.0,
            details={"asked_bytes": size},
        ) from error
    return wanted


def _touch(held: mmap.mmap, start: int, size: int) -> None:
    try:
        held.madvise(_POPULATE_WRITE, start, size)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel does not know it
            raise
        pages = range(start, start + size, mmap.PAGESIZE)
        held[start : start + size : mmap.PAGESIZE] = bytes(len(pages))
