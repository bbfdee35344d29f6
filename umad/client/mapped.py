"""Files that are mapped into this process, and reading what lies in them from the file itself.

A copy out of a mapping first maps each page and unmaps it at the end: seven times as long as a read
of the same bytes, which are in the kernel's cache either way.  (Our measurement: 600 MiB, 2 cores,
350 and 46 ms.)  But only what is as it is in the file may be read so: a private mapping can have
been written to.

Source: proc(5), /proc/pid/maps and /proc/pid/pagemap.
"""

import ctypes
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

_MAPS: Final = Path("/proc/self/maps")
_PAGEMAP: Final = Path("/proc/self/pagemap")
_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ ([0-9]+) *(.*)")
_ENTRY: Final = 8  # bytes of a page's entry, the flags in the last one
_THERE, _OF_FILE = 0xC0, 0x20  # in memory or in swap; a page of a file


@dataclass(frozen=True, slots=True)
class Mapping:
    """``start`` to ``end`` show the file ``path`` from ``offset`` on."""

    start: int
    end: int
    offset: int
    inode: int
    path: str


class MappedFiles:
    """The mapped files of this process as they are now; a context that closes what it opened."""

    def __init__(self) -> None:
        found = (_LINE.match(line) for line in _MAPS.read_text().splitlines())
        self._mappings = [
            Mapping(int(one[1], 16), int(one[2], 16), int(one[3], 16), int(one[4]), one[5])
            for one in found
            if one is not None and one[4] != "0"  # anonymous memory has no inode
        ]
        self._starts = [one.start for one in self._mappings]
        self._opened: dict[str, int | None] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def at(self, address: int) -> Mapping | None:
        """The mapping that an address lies in."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._mappings[index].end:
            return None
        return self._mappings[index]

    def source(self, address: int, size: int) -> "Source | None":
        """Where these can be read instead; None: they are not known to be the file's."""
        mapping = self.at(address)
        if mapping is None or address + size > mapping.end or _changed(address, size):
            return None
        file = self._open(mapping)
        if file is None:
            return None
        return Source(file, mapping.path, mapping.offset + address - mapping.start, size)

    def _open(self, mapping: Mapping) -> int | None:
        """The mapping's file, if it is still that one."""
        path = mapping.path
        if path not in self._opened:
            self._opened[path] = None
            with suppress(OSError):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, file)
                if os.fstat(file).st_ino == mapping.inode:
                    self._opened[path] = file
        return self._opened[path]


@dataclass(frozen=True, slots=True)
class Source:
    """``size`` bytes of an open file, from ``offset`` on; may be read in any thread."""

    file: int
    path: str
    offset: int
    size: int

    def read(self, to: int) -> None:
        """Read them to an address, where there must be as much room.

        Raises:
            OSError: the file has become shorter, or cannot be read.
        """
        into = memoryview((ctypes.c_char * self.size).from_address(to)).cast("B")
        done = 0
        while done < self.size:
            got = os.preadv(self.file, [into[done:]], self.offset + done)
            if not got:
                raise OSError(f"{self.path} has become shorter while it was read")
            done += got

    def parts(self, size: int) -> "Iterator[tuple[int, Source]]":
        """It in parts of so many bytes at most: where each begins, from 0 on, and the part."""
        for at in range(0, self.size, size):
            part = replace(self, offset=self.offset + at, size=min(size, self.size - at))
            yield at, part


def _changed(address: int, size: int) -> bool:
    """Whether a page of these is not the file's, or that cannot be told."""
    first, last = address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE
    try:
        with _PAGEMAP.open("rb", buffering=0) as pages:
            pages.seek(first * _ENTRY)
            entries = pages.read((last - first + 1) * _ENTRY)
    except OSError:
        return True
    if entries is None or len(entries) != (last - first + 1) * _ENTRY:
        return True
    return any(
        flags & _THERE and not flags & _OF_FILE for flags in set(entries[_ENTRY - 1 :: _ENTRY])
    )
