"""This process's memory: how much it holds, and giving back what it no longer needs.

Knows nothing of torch or of the daemon.
"""

import ctypes
import gc
import traceback
from pathlib import Path
from typing import Final

from umad.guard import account

_STATUS: Final = Path("/proc/self/status")
_COUNTED: Final = ("RssAnon:", "RssShmem:")


def process_bytes() -> int:
    """Bytes of DRAM that only this process keeps in use: anonymous and shared-memory pages.

    File mappings are left out, because the kernel drops them by itself when memory runs short;
    weights that are to count must be anonymous (``torch_hooks.privatise``).
    """
    total = 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(_COUNTED):
            total += int(line.split()[1]) * 1024
    return total


def _find_trim() -> "ctypes._NamedFuncPointer | None":
    try:
        return ctypes.CDLL(None).malloc_trim
    except AttributeError:  # not glibc
        return None


_TRIM: Final = _find_trim()


def give_back(slot: int | None = None) -> None:
    """Collect garbage once and return free pages to the kernel; see ``settle`` for what it costs.

    Without the trims glibc keeps the high-water mark of a model that is long gone, and the guard
    the blocks that an account (``slot``) may reuse.
    """
    gc.collect()
    if _TRIM is not None:
        _TRIM(0)
    if slot is not None:
        account.trim(slot)


def settle() -> None:
    """Collect once, then leave alone for good what is there: after the imports, before a model.

    torch and transformers are some 450,000 objects that never go away.  A full collection walks
    over all of them with the interpreter's lock held: 170 ms in which no thread of the process
    gets on, at each load, unload and failed request.  Without them it is 1 ms (measured, 2 cores).
    And a collection in a forked child must not touch, and so copy, what it shares with its parent.
    What is left alone is never collected: a model that is there already would not be, if it is in
    a cycle.
    """
    give_back()
    gc.freeze()


def shared() -> account.account:
    """For a ``with`` statement: what this thread allocates meanwhile belongs to no worker.

    For tensors that more than one worker uses.  All others are taken from the account of the
    worker that made them when that worker is fenced, and read as zeros then, whoever holds them.
    No quota holds these back, but they count in the process's bytes: register a worker for them,
    whose quota covers what they take.  Blocks until now are where they are; copy them inside.
    """
    return account.account(account.SHARED)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that an allocation was refused: Python's, numpy's and torch's do.

    Told by name and text, since this library does not import torch.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    texts = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def drop_frames(error: BaseException) -> None:
    """What a refused forward held, without a pause for everybody else: see ``settle``.

    The error may be kept, and would keep the tensors of its frames; cycles that the forward made
    are young.
    """
    forget_frames(error)
    gc.collect(1)


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of the frames that an error left, and of what caused it.

    They would keep the tensors of a failed load alive for as long as somebody keeps the error.
    The lines of the traceback stay.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]
