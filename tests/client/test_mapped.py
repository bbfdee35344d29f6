"""What lies in a mapped file is read from the file, where it is certain to be the file's."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from umad.client.mapped import MappedFiles

PAGES = 8
SIZE = PAGES * mmap.PAGESIZE
ROOT = Path(__file__).parents[2]
OVER = """
import ctypes, mmap, os, subprocess, sys
from pathlib import Path
from umad.client.mapped import MappedFiles

file = Path(sys.argv[1], "weights")

def mount(content):
    subprocess.run(["mount", "-t", "tmpfs", "none", sys.argv[1]], check=True)
    file.write_bytes(content)
    return file.stat().st_ino

inode = mount(b"a" * 4096)
with file.open("rb") as opened:
    mapped = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE)
same = mount(b"b" * 4096) == inode
print(same, MappedFiles().source(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), 4096))
"""


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
    found = MappedFiles().at(address_of(made))
    if found is None or found.device != file.stat().st_dev:
        pytest.skip("mappings show another device here (btrfs, overlayfs)")
    yield made
    made.close()


def address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def read(mapped: mmap.mmap, at: int = 0, size: int = SIZE, part: int = SIZE) -> bytes | None:
    into = ctypes.create_string_buffer(size)
    source = MappedFiles().source(address_of(mapped) + at, size)
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
    os.mkfifo(file)
    assert read(mapped) is None, "and nobody waits for who writes to it"


def test_a_file_of_its_inode_on_another_device_is_not_read(
    mapped: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file system mounted over it; or one whose mappings show another device."""
    maps = tmp_path / "maps"
    real = Path("/proc/self/maps").read_text()
    monkeypatch.setattr("umad.client.mapped._MAPS", maps)
    maps.write_text(real)
    assert read(mapped) == mapped[:]
    device = tmp_path.stat().st_dev
    shown = f" {os.major(device):02x}:{os.minor(device):02x} "
    assert shown in real
    maps.write_text(real.replace(shown, f" {os.major(device):02x}:{os.minor(device) + 1:02x} "))
    assert read(mapped) is None


@pytest.mark.parametrize("name", [b"mod\xe8le", "a\u2028b\x85c\rd".encode(), b"a\nb", b"a\\012b"])
@pytest.mark.usefixtures("mapped")
def test_a_name_may_be_any(tmp_path: Path, name: bytes) -> None:
    file = tmp_path / os.fsdecode(name)
    file.write_bytes(os.urandom(SIZE))
    with file.open("rb") as opened:
        named = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE)
    with named:
        assert read(named) == (None if b"\n" in name else named[:]), "its \\012 may be either"


@pytest.mark.root
def test_a_file_system_mounted_over_it_changes_nothing(tmp_path: Path) -> None:
    """Each tmpfs begins its inodes anew: only the device tells the two files apart."""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", OVER, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True None\n"


def test_a_file_that_has_become_shorter_is_an_error_and_no_signal(
    mapped: mmap.mmap, file: Path
) -> None:
    os.truncate(file, SIZE // 2)
    assert read(mapped, 0, 100) is not None
    with pytest.raises(OSError, match=r"weights of a model' has become shorter"):
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
    files = MappedFiles()
    assert files.at(address_of(anonymous)) is None
    assert files.at(0) is None
    found = files.at(address_of(mapped))
    assert found is not None
    assert found.path.endswith("weights of a model")


def test_nothing_is_left_open(mapped: mmap.mmap) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    assert read(mapped) is not None
    assert sorted(Path("/proc/self/fd").iterdir()) == before
