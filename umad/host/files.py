"""Reads small kernel files, and says which file it was when one cannot be read.

Rules: a file that is missing is *absent*, any other trouble is *broken*, and neither ever turns
into a number here.  Nothing blocks: files are opened with O_NONBLOCK, so that a FIFO in the place
of a file is an empty file and not a stopped daemon.  Nothing is read without an upper bound.
Stays out: what the bytes mean.
"""

import errno
import os
from collections.abc import Callable
from typing import Final, TypeVar

from umad.values import Reading

SIZE_MAX: Final = 1 << 20
"""No file read here comes near this (bytes); more is damage or a trap."""

LARGEST: Final = 1 << 50
"""No figure read here comes near this; more is damage, and must not reach the books."""

# EOPNOTSUPP: the feature is switched off at boot (pressure files under psi=0).
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP})
# The object behind a kept descriptor is gone (driver unbound, process dead): look again by path.
_STALE: Final = frozenset({errno.ESTALE, errno.ENODEV, errno.ENOENT, errno.ENXIO, errno.EIO})

T = TypeVar("T")


class Unreadable(Exception):
    """A file gave no usable figure; the text names it.

    Raised to the parser's caller inside ``host`` only, where it becomes a ``Reading``.

    Args:
        path: the file.
        why: what was wrong, for a person.
        code: the errno, 0 when the content was at fault.
    """

    def __init__(self, path: str, why: str, code: int = 0) -> None:
        super().__init__(f"{path}: {why}")
        self.absent = code in _ABSENT
        self.gone = code == errno.ESRCH
        self.code = code

    @classmethod
    def from_os(cls, path: str, error: OSError) -> "Unreadable":
        """The same for an OS error."""
        return cls(path, os.strerror(error.errno or 0), error.errno or 0)

    def reading(self, source: str) -> Reading:
        """The reading this makes: absent or broken."""
        return Reading.absent(source) if self.absent else Reading.broken(source, str(self))


def inside(root: str, place: str) -> str:
    """The path of ``place`` under a root folder; plain text, since this runs at every look."""
    return f"{root.rstrip('/')}/{place}"


def read_file(path: str) -> bytes:
    """The whole of a small file.

    Raises:
        Unreadable: it cannot be opened or read, would block, or is larger than ``SIZE_MAX``.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            chunks = []
            size = 0
            while chunk := os.read(fd, SIZE_MAX + 1 - size):
                chunks.append(chunk)
                size += len(chunk)
                if size > SIZE_MAX:
                    raise Unreadable(path, f"larger than {SIZE_MAX} bytes")
        finally:
            os.close(fd)
    except OSError as error:
        raise Unreadable.from_os(path, error) from error
    return b"".join(chunks)


def read_as(path: str, parse: Callable[[bytes], T]) -> T:
    """Read a file and parse it.

    Raises:
        Unreadable: no bytes, or ``parse`` raised ValueError.
    """
    return parsed(path, read_file(path), parse)


def parsed(path: str, data: bytes, parse: Callable[[bytes], T]) -> T:
    """``parse(data)``, its ValueError turned into ``Unreadable`` with the path."""
    try:
        return parse(data)
    except ValueError as error:
        raise Unreadable(path, f"not understood ({error})") from error


def parse_decimal(data: bytes) -> int:
    """A whole number from 0 to 2^64 that stands alone in its file.

    Raises:
        ValueError: anything else, a sign and digits of other scripts included.
    """
    text = data.strip()
    if not text.isdigit() or len(text) > 20:
        raise ValueError(f"{text[:40]!r} is no whole number")
    return int(text)


def parse_line(data: bytes) -> int:
    """A whole number >= 0 in a line of its own, as sysfs has it.

    Raises:
        ValueError: anything else, or an absurd one; a number without its line end lost digits.
    """
    if not data.endswith(b"\n"):
        raise ValueError(f"{data[:40]!r} is cut short")
    if (value := parse_decimal(data)) >= LARGEST:
        raise ValueError(f"{value} is absurd")
    return value


def read_text(path: str) -> str:
    """A short text without its line end; bytes that are no UTF-8 are replaced.

    Raises:
        Unreadable: see ``read_file``.
    """
    return read_file(path).decode("utf-8", "replace").strip()


class KernelFile:
    """A file of one record that is read again and again.

    Args:
        path: the file.
        keep: keep the descriptor and use ``pread``, half the cost of open and read.  Right for
            proc and sysfs, which render their content anew at every read of offset 0; wrong for
            a copy of a tree on disk, where a kept descriptor would outlive a replaced file.
        parts: the kernel hands it out a page at a time (files of many records: vmstat).
    """

    __slots__ = ("_fd", "_keep", "_parts", "path")

    def __init__(self, path: str, *, keep: bool, parts: bool = False) -> None:
        self.path = path
        self._keep = keep
        self._parts = parts
        self._fd = -1

    def read(self) -> bytes:
        """The content now.

        Raises:
            Unreadable: see ``read_file``; ``gone`` is set when it belonged to a dead process.
        """
        if not self._keep:
            return read_file(self.path)
        try:
            if self._fd >= 0:
                try:
                    return self._pread()
                except OSError as error:
                    if error.errno not in _STALE:
                        raise
                    self.close()
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            return self._pread()
        except OSError as error:
            self.close()
            raise Unreadable.from_os(self.path, error) from error

    def _pread(self) -> bytes:
        # One call: most files are single records, which the kernel hands out in one piece.
        data = os.pread(self._fd, 65536, 0)
        if not self._parts:
            return data
        chunks, size = [data], len(data)
        while chunk := os.pread(self._fd, 65536, size):
            chunks.append(chunk)
            size += len(chunk)
            if size > SIZE_MAX:
                raise Unreadable(self.path, f"larger than {SIZE_MAX} bytes")
        return b"".join(chunks)

    def close(self) -> None:
        """Give the descriptor back; the next read opens the file again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()
