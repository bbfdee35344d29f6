"""Interrupting a thread by an exception: a courtesy, with its limits.

``PyThreadState_SetAsyncExc`` reaches a thread between two bytecodes only: not in a C call, and a
bare ``except`` swallows it.  So nothing depends on it.  Rule: the exception never reaches what
the thread does *after* the block: leaving the block and raising exclude each other, and what was
raised and not delivered is taken back.
"""

import ctypes
import threading
from types import TracebackType

from umad.errors import WorkerRevoked


class Stopped(WorkerRevoked):
    """Raised in the worker's thread; a class of its own, since only a class can be raised so."""

    def __init__(self) -> None:
        super().__init__("this worker was told to stop", retry_after_s=5)


_set = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set.argtypes = [ctypes.c_ulong, ctypes.py_object]
_clear = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


class Interruptible:
    """A block that another thread may interrupt; one thread at a time is in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._raised = False

    def __enter__(self) -> None:
        with self._lock:
            self._thread, self._raised = threading.get_ident(), False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if self._raised and kind is None and thread is not None:
                _clear(thread, None)  # not delivered yet: the block is over

    def interrupt(self) -> bool:
        """Raise ``Stopped`` in the thread inside the block; False where there is none."""
        with self._lock:
            if self._thread is None:
                return False
            # More than one thread was hit: a bug of ours, or of the interpreter; take it back.
            hit = int(_set(self._thread, ctypes.py_object(Stopped)))
            self._raised = hit == 1
            if hit > 1:
                _clear(self._thread, None)
            return self._raised
