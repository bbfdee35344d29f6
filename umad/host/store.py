"""What outlives a daemon: the generation that fences off clients of an earlier one.

Rules: it rises with every start, whatever became of the file; it lives in the runtime folder, a
tmpfs, because a reboot ends every client as well.
Stays out: the books, which clients bring back themselves, and the account pages
(daemon/pages.py).
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Final

from umad.errors import ProbeError
from umad.host.files import Unreadable, inside, parse_decimal, read_as, read_text

_NAME: Final = "generation"
_GENERATION_MAX: Final = (1 << 53) - 1  # a JSON or float reader must not round it


def boot_id(root: str = "/") -> str:
    """This boot's own number, 32 hexadecimal digits; "" where the kernel does not say.

    Pids and start times begin anew with every boot, this does not come again.
    """
    try:
        return read_text(inside(root, "proc/sys/kernel/random/boot_id")).strip().replace("-", "")
    except Unreadable:
        return ""


def next_generation(runtime_dir: Path) -> tuple[int, bool]:
    """Count this start.

    Returns:
        The generation, above every earlier one, and whether there was one (a restart).

    Raises:
        ProbeError: the folder cannot be written.
    """
    path = runtime_dir / _NAME
    generation, restarted = _after(path)
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{_NAME}-", dir=runtime_dir)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(f"{generation}\n")
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ProbeError(f"cannot write {path}: {error.strerror}") from error
    return generation, restarted


def _after(path: Path) -> tuple[int, bool]:
    try:
        stored = read_as(str(path), parse_decimal)
    except Unreadable as error:
        if error.absent:
            return 1, False
    else:
        if stored < _GENERATION_MAX:
            return stored + 1, True
    # Damaged: seconds of wall time are above any count of starts, and rise.
    return int(time.time()), True
