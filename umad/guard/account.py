"""The guard inside this process: whether it is there, and which account a thread is in.

Owns the binding to the preloaded library.  The account is a property of the *native thread*:
threads inherit it from whoever starts them, and it stays until it is set back.  So never leave
``with account(...)`` open across an ``await`` or a ``yield``: the code that runs meanwhile on that
thread would be charged.  ``within`` steps a generator inside an account, ``bind`` carries one into
an executor.  Without the guard everything here does nothing and costs next to nothing.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

from umad.errors import ConfigError
from umad.guard import page, preload

SHARED: Final = -1
GUARD_OFF: Final = "UMAD_GUARD_OFF"
"""Environment: why whoever started this process did not preload the guard."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GuardState:
    """Whether the guard works in this process.

    ``active``: it is preloaded and nothing speaks against it; ``why``: the reason when it is
    not; ``attached``: it has an account page, so quotas bind.
    """

    active: bool
    why: str
    attached: bool = False


@dataclass(frozen=True, slots=True)
class AccountRange:
    """Where an account's blocks lie; addresses and bytes.

    Only ``tensor_base`` .. ``tensor_base + tensor_bytes`` may be taken away by force.
    """

    base: int
    bytes: int
    tensor_base: int
    tensor_bytes: int
    tensor_charged: int
    other_charged: int
    warm: int


class _Info(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in AccountRange.__slots__)


class _Library:
    """The exported functions.  PyDLL: they end at once, so the lock is not worth giving up."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self.enter = library.umad_guard_enter
        self.enter.argtypes, self.enter.restype = [ctypes.c_int], ctypes.c_uint64
        self.leave = library.umad_guard_leave
        self.leave.argtypes, self.leave.restype = [ctypes.c_uint64], None
        self.current = library.umad_guard_current
        self.active = library.umad_guard_active
        self.page_version = library.umad_guard_page_version
        self.info = library.umad_guard_info
        self.info.argtypes = [ctypes.c_int, ctypes.POINTER(_Info)]
        self.mark = library.umad_guard_mark
        self.mark.argtypes, self.mark.restype = [ctypes.c_int], ctypes.c_uint64
        self.high = library.umad_guard_high
        self.high.argtypes, self.high.restype = [ctypes.c_int], ctypes.c_uint64
        slow = ctypes.CDLL(None)  # these may take milliseconds
        self.attach = slow.umad_guard_attach
        self.trim = slow.umad_guard_trim


def _find() -> _Library | None:
    try:
        return _Library(ctypes.PyDLL(None))
    except AttributeError:  # not preloaded
        return None


_library: Final = _find()


def guard_state() -> GuardState:
    """Whether the guard works here, and why not."""
    maps = Path("/proc/self/maps")
    reason = preload.obstacle(maps.read_text("utf-8", "replace") if maps.exists() else "")
    if _library is None:
        return GuardState(active=False, why=reason or "the guard is not preloaded (LD_PRELOAD)")
    attached = bool(_library.active())
    version = _library.page_version()
    if version != page.VERSION:
        reason = f"the guard has page version {version}, this umad {page.VERSION}"
    return GuardState(
        active=attached or not reason, why="" if attached else reason, attached=attached
    )


def attach(fd: int) -> None:
    """Bind this process to its account page; ``fd`` stays the caller's and may be closed.

    Attaching the same page again does nothing.  Another page (of a new daemon) takes the counts
    over: each worker must have been opened in the slot it had.

    Raises:
        ConfigError: the guard is off, or the page or the machine are not fit for it.
    """
    if _library is None:
        raise ConfigError(f"guard: off, {guard_state().why}")
    result = _library.attach(fd)
    if result != 0:
        raise ConfigError(f"guard: off, {page.describe(result)}")


def enter(slot: int) -> int:
    """Put this thread into an account (``SHARED``: none); returns what ``leave`` restores."""
    return _library.enter(slot) if _library is not None else 0


def leave(previous: int) -> None:
    """Set this thread back to where it was before ``enter``."""
    if _library is not None:
        _library.leave(previous)


def current() -> int:
    """The slot this thread is in, ``SHARED`` for none."""
    return int(_library.current()) if _library is not None else SHARED


class account:  # noqa: N801  (reads as the verb it is: ``with account(slot):``)
    """Charge what this thread allocates to an account while the block runs.

    May be nested; each use needs an object of its own.
    """

    __slots__ = ("_previous", "_slot")

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._previous = 0

    def __enter__(self) -> None:
        self._previous = enter(self._slot)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave(self._previous)


def within(slot: int, steps: Iterable[_T]) -> Generator[_T, None, None]:
    """Step an iterator inside an account; its consumer runs outside of it."""
    iterator = iter(steps)
    done = object()
    try:
        while True:
            with account(slot):
                item = next(iterator, done)
            if item is done:
                return
            yield item  # type: ignore[misc]
    finally:
        if isinstance(iterator, Generator):
            with account(slot):
                iterator.close()


def bind(slot: int, function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, to be called in an account by whatever thread: for executors, callbacks."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with account(slot):
            return function(*args, **kwargs)

    return call


def trim(slot: int) -> None:
    """Give the freed blocks an account keeps warm back to the system; milliseconds."""
    if _library is not None:
        _library.trim(slot)


def mark(slot: int) -> int:
    """Have an account's high-water mark count anew; returns its bytes in live blocks now.

    Those that are freed and kept warm are not among them; 0 without the guard.
    """
    return int(_library.mark(slot)) if _library is not None else 0


def high(slot: int) -> int:
    """The most bytes an account had in live blocks since ``mark``; 0 without the guard."""
    return int(_library.high(slot)) if _library is not None else 0


def account_range(slot: int) -> AccountRange | None:
    """Where an account's blocks lie; None without an attached guard.

    Raises:
        ValueError: there is no such slot.
    """
    if not 0 <= slot < page.SLOTS:
        raise ValueError(f"there is no account {slot}")
    info = _Info()
    if _library is None or _library.info(slot, ctypes.byref(info)) != 0:
        return None
    return AccountRange(**{name: getattr(info, name) for name in AccountRange.__slots__})
