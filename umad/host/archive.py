"""The archive of a bug report: what ``umadctl snapshot`` packs and ``umad --replay`` unpacks.

One folder in a .tar.gz, of plain files alone::

    about.json        who took it, when, on what, and what could not be read
    status.json       the daemon's state, as ``umadctl status --json`` shows it
    events.json       its latest events
    recording.jsonl   its books, and what it was told and did in the last minute
    tree/             the files it reads, as they lie below / (``collect``)

An archive comes from anybody: nothing in it chooses where a file goes, none is larger or are more
than the limits here say, and what is no plain file makes all of it bad.  Files are written one by
one instead of by ``tarfile``'s extraction, whose filters Python has from 3.11.4 on only.
"""

import gzip
import io
import os
import re
import tarfile
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from umad.errors import BadArchive
from umad.units import MIB

ABOUT: Final = "about.json"
STATUS: Final = "status.json"
EVENTS: Final = "events.json"
RECORDING: Final = "recording.jsonl"
TREE: Final = "tree"

PACKED_BYTES_MAX: Final = 32 * MIB
BYTES_MAX: Final = 48 * MIB
FILES_MAX: Final = 5000
_NAMES: Final = (ABOUT, STATUS, EVENTS, RECORDING)
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9_.:+@-]{0,99}"
_IN_TREE: Final = re.compile(rf"{TREE}/(proc|run|sys)(/{_PART}){{1,12}}")


@dataclass(frozen=True, slots=True)
class About:
    """What ``about.json`` says.

    ``no_daemon`` is why the daemon told nothing, "" where it did; ``unreadable`` are the files of
    the tree that could not be read, each with the reason.
    """

    umad: str
    taken_unix_s: float
    system: str
    page_bytes: int
    no_daemon: str = ""
    unreadable: dict[str, str] = field(default_factory=dict)


def pack(target: Path, folder: str, files: Iterable[tuple[str, bytes]]) -> None:
    """Write an archive that only its owner can read.

    Args:
        target: must not exist.
        folder: what all names begin with.
        files: names and contents.

    Raises:
        FileExistsError: ``target`` exists.
        OSError: it cannot be written; then there is none.
    """
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, data in files:
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
                archive.addfile(member, io.BytesIO(data))
    except BaseException:
        target.unlink()
        raise


def unpack(source: Path, target: Path) -> None:
    """Lay an archive's files out below an empty folder, without the folder they are in.

    Raises:
        BadArchive: with what is wrong with it.
        OSError: the source cannot be read, or the files not be written.
    """
    tar = io.BytesIO(_expanded(source))
    try:
        with tarfile.open(fileobj=tar, mode="r:") as archive:
            for number, member in enumerate(archive):
                if number >= FILES_MAX:
                    raise BadArchive(f"it holds more than {FILES_MAX} files")
                if not member.isdir():
                    _write(target / _name(member), archive, member)
    except (tarfile.TarError, ValueError, ArithmeticError, RecursionError) as error:
        raise BadArchive(f"it is damaged: {error}") from error
    if not (target / ABOUT).is_file():
        raise BadArchive(f"it has no {ABOUT}")


def _expanded(source: Path) -> bytes:
    with source.open("rb") as file:
        packed = file.read(PACKED_BYTES_MAX + 1)
    if len(packed) > PACKED_BYTES_MAX:
        raise BadArchive(f"it is larger than {PACKED_BYTES_MAX // MIB} MiB")
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as expanding:
            data = expanding.read(BYTES_MAX + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadArchive(f"it is no .tar.gz, or damaged: {error}") from error
    if len(data) > BYTES_MAX:
        raise BadArchive(f"it would be larger than {BYTES_MAX // MIB} MiB")
    return data


def _name(member: tarfile.TarInfo) -> str:
    """The name below the archive's folder."""
    # A sparse file may be of any size and take no room in the archive.
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
        raise BadArchive(f"{member.name[:100]!r} is no plain file")
    _, _, name = member.name.partition("/")
    if name not in _NAMES and not _IN_TREE.fullmatch(name):
        raise BadArchive(f"{member.name[:100]!r} has no place in it")
    return name


def _write(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    content = archive.extractfile(member)
    assert content is not None, "plain files have a content"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content.read())
    except (FileExistsError, NotADirectoryError) as error:
        raise BadArchive(f"{member.name[:100]!r} is there twice") from error
