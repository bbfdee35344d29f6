"""The account page: what the daemon and the guard share, one sealed memfd per process.

Owns the Python side of ``page.h``: creating, checking, opening and closing accounts, reading
them.  The daemon makes the page, keeps the file descriptor and hands it over with ``register``;
``limit``, ``state``, ``sequence`` and the doorbell are its to write, the counts are the guard's.
Every word is read and written as one aligned store or load (native formats of ``struct`` and
``memoryview`` do that); nothing here takes a lock or, but for the wake-up, a system call.
The page is writable by the process it describes: what it says is a claim.  A figure that cannot
be is flagged in ``AccountReading.problem``, and the auditor's physical figure stands above all.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import stat
import struct
from enum import IntEnum
from typing import Final, NamedTuple, Self

from umad.errors import ProbeError

MAGIC: Final = b"UMADPAGE"
VERSION: Final = 1
SLOTS: Final = 63
PAGE_BYTES: Final = 4096
LINE_BYTES: Final = 64
BELIEVABLE_MAX: Final = 1 << 62

HEADER: Final = struct.Struct("@8sIIQIIQQ16x")
ACCOUNT: Final = struct.Struct("@QQQQIIQQQ")
# name -> offset, as page.h has them; a test compiles the header and compares.
HEADER_OFFSETS: Final = {
    "magic": 0,
    "version": 8,
    "slots": 12,
    "generation": 16,
    "doorbell": 24,
    "guard": 28,
    "shared": 32,
    "beats": 40,
}
ACCOUNT_OFFSETS: Final = {
    "limit": 0,
    "used": 8,
    "peak": 16,
    "refused": 24,
    "state": 32,
    "sequence": 36,
    "requested": 40,
    "returned": 48,
    "warm": 56,
}

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FUTEX_WAKE: Final = 1
_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


class AccountState(IntEnum):
    """Where an account is in its life."""

    FREE = 0
    OPEN = 1
    CLOSED = 2  # refuses everything; its tensor pages are being taken away
    RETURNED = 3  # closed, and they were taken at least once


class AccountReading(NamedTuple):
    """One account as the page shows it; all sizes in bytes.

    ``used`` is what live blocks and the warm cache may occupy; ``returned`` is the part of it that
    was taken away by force, so that ``held`` is what the process can still have; ``requested`` is
    the size of the last refused call.  ``problem`` is empty, or says why this cannot be believed.
    """

    limit: int
    used: int
    peak: int
    refused: int
    state: int
    sequence: int
    requested: int
    returned: int
    warm: int

    @property
    def held(self) -> int:
        """What is charged and has not been taken away, >= 0."""
        return max(0, self.used - self.returned)

    @property
    def problem(self) -> str:
        """Why the figures cannot be true; empty when they can."""
        if max(self.used, self.peak, self.returned, self.warm) > BELIEVABLE_MAX:
            return "a count above 2^62: it went below zero or was overwritten"
        if self.state > AccountState.RETURNED:
            return f"state {self.state} does not exist"
        if self.warm > self.used:
            return "more is kept warm than used"
        return ""


class AccountPage:
    """A mapped account page; make one with ``create`` or ``from_fd``.

    Not locked: the daemon's loop is the only one that opens and closes accounts.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._halves = memoryview(self._map).cast("I")
        pinned = ctypes.c_uint32.from_buffer(self._map, HEADER_OFFSETS["doorbell"])
        self._doorbell = pinned
        self._doorbell_address = ctypes.addressof(pinned)

    @classmethod
    def create(cls, generation: int) -> Self:
        """A new page of this daemon generation (0 .. 2^64-1), sealed at its size.

        Raises:
            ProbeError: the kernel gave no memfd.
        """
        try:
            fd = os.memfd_create("umad-accounts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ProbeError(f"no account page: {error}") from error
        try:
            os.ftruncate(fd, PAGE_BYTES)
            os.pwrite(fd, HEADER.pack(MAGIC, VERSION, SLOTS, generation, 0, 0, 0, 0), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            return cls(fd)
        except OSError as error:
            os.close(fd)
            raise ProbeError(f"no account page: {error}") from error

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """Map a page somebody else made; ``fd`` stays the caller's, a copy of it is kept.

        Raises:
            ProbeError: this is no sealed account page of our layout; nothing was mapped.
        """
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != PAGE_BYTES:
                raise ProbeError(f"an account page has {PAGE_BYTES} bytes, not {status.st_size}")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ProbeError("the account page is not sealed: its owner could cut it short")
            magic, version, slots, *_ = HEADER.unpack(os.pread(fd, HEADER.size, 0))
            if (magic, version, slots) != (MAGIC, VERSION, SLOTS):
                raise ProbeError(
                    f"the account page is damaged or of another version: "
                    f"{magic!r} version {version}, {slots} slots"
                )
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError as error:
            raise ProbeError(f"this is no account page: {error}") from error
        try:
            return cls(own)
        except (OSError, ValueError) as error:
            os.close(own)
            raise ProbeError(f"the account page cannot be mapped: {error}") from error

    @property
    def generation(self) -> int:
        """Of the daemon that made or adopted the page."""
        return self._words[HEADER_OFFSETS["generation"] // 8]

    def adopt(self, generation: int) -> None:
        """A restarted daemon takes the page over."""
        self._words[HEADER_OFFSETS["generation"] // 8] = generation

    @property
    def guarded(self) -> bool:
        """Whether a guard of this layout says that it is attached."""
        return self._halves[HEADER_OFFSETS["guard"] // 4] == 1 + VERSION

    @property
    def shared(self) -> int:
        """Bytes in blocks >= 64 KiB of the process that have no account."""
        return self._words[HEADER_OFFSETS["shared"] // 8]

    @property
    def beats(self) -> int:
        """Rounds of the guard's thread; it stands still when that thread does."""
        return self._words[HEADER_OFFSETS["beats"] // 8]

    def vacant(self) -> int | None:
        """The free slot with the fewest bytes of a former holder; None when all are taken.

        Libraries keep buffers of threads that outlive a model (some MiB); they stay charged to
        the slot, so the least loaded one comes first.
        """
        readings = ((self.read(slot), slot) for slot in range(SLOTS))
        free = [(was.used, slot) for was, slot in readings if was.state == AccountState.FREE]
        return min(free)[1] if free else None

    def open(self, slot: int, limit: int) -> int:
        """Give a free slot to a new holder.

        Args:
            slot: 0 .. 62; threads that entered it under a former holder stay shut out.
            limit: bytes, 0 .. 2^62.

        Returns:
            The sequence of this opening.

        Raises:
            ValueError: the slot is not free, or slot or limit are out of range.
        """
        line = self._line(slot)
        if self.read(slot).state != AccountState.FREE:
            raise ValueError(f"account {slot} is not free")
        sequence = (self._halves[line * 2 + 9] + 1) & 0xFFFFFFFF
        self.set_limit(slot, limit)
        self._words[line + 2] = self._words[line + 1]  # peak starts at what is still used
        for word in (3, 5, 6):  # refused, requested, returned
            self._words[line + word] = 0
        self._halves[line * 2 + 9] = sequence
        self._halves[line * 2 + 8] = AccountState.OPEN
        return sequence

    def set_limit(self, slot: int, limit: int) -> None:
        """Change a limit; below what is used, every further allocation is refused.

        Raises:
            ValueError: slot or limit are out of range.
        """
        if not 0 <= limit <= BELIEVABLE_MAX:
            raise ValueError(f"{limit} is no limit in bytes")
        self._words[self._line(slot)] = limit

    def close_account(self, slot: int) -> None:
        """Refuse everything from now on and have the tensor pages taken away.

        One store; the wake-up only spares the guard's thread its 50 ms round.  It works whatever
        the other process is doing.  A slot that is not open stays as it is.
        """
        line = self._line(slot)
        if self._halves[line * 2 + 8] != AccountState.OPEN:
            return
        self._halves[line * 2 + 8] = AccountState.CLOSED
        doorbell = HEADER_OFFSETS["doorbell"] // 4
        self._halves[doorbell] = (self._halves[doorbell] + 1) & 0xFFFFFFFF
        if _SYS_FUTEX is not None:
            wake_all = ctypes.c_int(0x7FFFFFFF)
            address = ctypes.c_void_p(self._doorbell_address)
            _libc.syscall(ctypes.c_long(_SYS_FUTEX), address, _FUTEX_WAKE, wake_all, None, None, 0)

    def free(self, slot: int) -> None:
        """The holder is gone: end the sweeps and make the slot free."""
        self._halves[self._line(slot) * 2 + 8] = AccountState.FREE

    def read(self, slot: int) -> AccountReading:
        """One account now, without a system call.

        The words are read one after the other while the guard writes them: each is right, the
        set may be a few allocations apart.
        """
        if not 0 <= slot < SLOTS:
            raise ValueError(f"there is no account {slot}")
        return AccountReading._make(ACCOUNT.unpack_from(self._map, LINE_BYTES * (slot + 1)))

    def close(self) -> None:
        """Unmap and close; idempotent."""
        if self.fd < 0:
            return
        del self._doorbell
        self._words.release()
        self._halves.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1

    @staticmethod
    def _line(slot: int) -> int:
        if not 0 <= slot < SLOTS:
            raise ValueError(f"there is no account {slot}")
        return LINE_BYTES // 8 * (slot + 1)


def describe(code: int) -> str:
    """What a negative result of the guard's attach means."""
    return {
        -errno.EINVAL: "this file descriptor is no sealed account page",
        -errno.EPROTO: "the account page has another version than the guard",
        -errno.ENOMEM: "the address ranges could not be reserved (ulimit -v, overcommit_memory=2)",
        -errno.EAGAIN: "the guard's thread could not be started",
    }.get(code, os.strerror(-code))
