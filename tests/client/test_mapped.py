"""What lies in a mapped file is read from the file, where it is certain to be the file's."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from umad.client.mapped import MappedFiles

PAGES = 8
SIZE = PAGES * mmap.PAGESIZE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "weights of a model"
    made.write_bytes(os.urandom(SIZE))
    return made


@pytest.fixture
def mapped(file: Path) -> Iterator[mmap.mmap]:
    """As torch maps a checkpoint: private, and to be written to."""
    with file.open("rb") as opened:
        made = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    yield made
    made.close()


def address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def read(mapped: mmap.mmap, at: int = 0, size: int = SIZE, part: int = SIZE) -> bytes | None:
    into = ctypes.create_string_buffer(size)
    with MappedFiles() as files:
        source = files.source(address_of(mapped) + at, size)
        if source is None:
            return None
        for begins, one in source.parts(part):
            one.read(ctypes.addressof(into) + begins)
    return into.raw


@pytest.mark.parametrize(("at", "size"), [(0, SIZE), (1, 10), (5000, 4096), (SIZE - 1, 1)])
def test_it_is_what_the_mapping_shows(mapped: mmap.mmap, at: int, size: int) -> None:
    for part in (SIZE, mmap.PAGESIZE, 1000):
        assert read(mapped, at, size, part) == mapped[at : at + size]


def test_a_page_that_was_read_is_still_the_files(mapped: mmap.mmap) -> None:
    assert sum(mapped[:]) > 0
    assert read(mapped) == mapped[:]


def test_what_was_written_to_is_not_read(mapped: mmap.mmap) -> None:
    mapped[3 * mmap.PAGESIZE] = mapped[3 * mmap.PAGESIZE] ^ 1
    assert read(mapped) is None
    assert read(mapped, 0, 3 * mmap.PAGESIZE) == mapped[: 3 * mmap.PAGESIZE]
    assert read(mapped, 3 * mmap.PAGESIZE + 9, 1) is None


def test_another_file_of_its_name_is_not_read(mapped: mmap.mmap, file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(bytes(SIZE))
    other.replace(file)
    assert read(mapped) is None
    file.unlink()
    assert read(mapped) is None


def test_a_file_that_has_become_shorter_is_an_error_and_no_signal(
    mapped: mmap.mmap, file: Path
) -> None:
    os.truncate(file, SIZE // 2)
    assert read(mapped, 0, 100) is not None
    with pytest.raises(OSError, match=r"weights of a model has become shorter"):
        read(mapped)


def test_it_begins_where_the_mapping_does(file: Path) -> None:
    with file.open("rb") as opened:
        part = mmap.mmap(
            opened.fileno(), 0, mmap.MAP_PRIVATE, offset=mmap.ALLOCATIONGRANULARITY
        )  # to be written to, or ctypes gives no address
    with part:
        assert read(part, 7, 100) == file.read_bytes()[mmap.PAGESIZE + 7 :][:100]


def test_what_is_in_no_file_or_reaches_beyond_it_is_not_read(mapped: mmap.mmap) -> None:
    assert read(mapped, 0, SIZE + mmap.PAGESIZE) is None
    anonymous = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE)
    assert read(anonymous) is None
    with MappedFiles() as files:
        assert files.at(address_of(anonymous)) is None
        assert files.at(0) is None
        found = files.at(address_of(mapped))
        assert found is not None
        assert found.path.endswith("weights of a model")


def test_nothing_is_left_open(mapped: mmap.mmap) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    assert read(mapped) is not None
    assert sorted(Path("/proc/self/fd").iterdir()) == before
