"""Building the guard's library and the environment that preloads it.

Owns where the library lies (beside this file, in the wheel and in a working copy alike), how it
is compiled, and the reasons for which a process must run without it.  The library is only ever
named in the LD_PRELOAD of a child's environment, never in a system-wide place.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from umad.errors import ConfigError

_HERE: Final = Path(__file__).parent
LIBRARY: Final = _HERE / "libumadguard.so"
FLAGS: Final = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC"),
    *("-fvisibility=hidden", "-fexceptions", "-fno-plt"),
    # The compiler must not turn our own malloc + memset into a call of calloc.
    *("-fno-builtin-malloc", "-fno-builtin-calloc"),
)
LINK: Final = ("-shared", "-Wl,-z,now", "-Wl,-z,relro", "-lpthread", "-ldl")
OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_OTHER_ALLOCATORS: Final = re.compile(r"(jemalloc|tcmalloc|mimalloc|libasan|libtsan)[^/\s:]*")
# Source: freed small blocks stay in glibc's heap at its default; at this threshold an unload left
# 0-5 MiB of 350-650 (our measurement).
_TRIM_THRESHOLD: Final = str(128 << 10)


def sources() -> list[Path]:
    """The files the library is compiled from."""
    return sorted(_HERE.glob("*.c"))


def library_path() -> Path | None:
    """The compiled library, or None where it was not built."""
    return LIBRARY if LIBRARY.is_file() else None


def build(cc: str | None = None) -> Path:
    """Compile the library into its place; nothing is done when it is newer than its sources.

    Args:
        cc: the C compiler; ``$CC`` or ``cc`` when None.

    Raises:
        ConfigError: there is no compiler, or it failed; its words are in the message.
    """
    inputs = [*sources(), *_HERE.glob("*.h"), Path(__file__)]
    newest = max(path.stat().st_mtime_ns for path in inputs)
    if LIBRARY.is_file() and LIBRARY.stat().st_mtime_ns > newest:
        return LIBRARY
    compiler = cc or os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise ConfigError(f"the guard cannot be built: there is no C compiler {compiler!r}")
    with tempfile.TemporaryDirectory(dir=_HERE, prefix=".build-") as folder:
        fresh = Path(folder) / LIBRARY.name
        command = [compiler, *FLAGS, "-o", str(fresh), *map(str, sources()), *LINK]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"the guard cannot be built: {done.stderr.strip()[-2000:]}")
        fresh.replace(LIBRARY)  # a process that has the old one mapped keeps it
    return LIBRARY


def launch_environment(own: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """What to add to a child's environment so that the guard is preloaded into it.

    Args:
        own: the environment the child would have; its LD_PRELOAD is kept, ours comes first.

    Returns:
        The additions and an empty text, or nothing and the reason why the guard stays off.
    """
    reason = obstacle(own.get("LD_PRELOAD", ""))
    library = library_path()
    if not reason and library is None:
        reason = "the guard's library was not built (no C compiler?)"
    if not reason and re.search(r"[\s:]", str(library)):
        reason = f"LD_PRELOAD cannot name a path with blanks or colons: {library}"
    if reason:
        return {}, reason
    others = [
        part for part in re.split(r"[\s:]+", own.get("LD_PRELOAD", "")) if part != str(library)
    ]
    return {
        "LD_PRELOAD": ":".join([str(library), *filter(None, others)]),
        "MALLOC_TRIM_THRESHOLD_": own.get("MALLOC_TRIM_THRESHOLD_", _TRIM_THRESHOLD),
    }, ""


def obstacle(preloaded: str) -> str:
    """Why this machine or user cannot have the guard; empty when nothing speaks against it.

    Args:
        preloaded: an LD_PRELOAD, or the names of libraries that are loaded.
    """
    other = _OTHER_ALLOCATORS.search(preloaded)
    if other:
        return f"another allocator is preloaded: {other[0]}"
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return "the guard needs Linux and glibc"
    for flag, kind in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA)):
        if resource.getrlimit(kind)[0] != resource.RLIM_INFINITY:
            return f"ulimit {flag} is set, and the guard reserves terabytes of addresses"
    try:
        overcommit = OVERCOMMIT.read_text("ascii").strip()
    except OSError as error:
        return f"vm.overcommit_memory cannot be read: {error}"
    if overcommit == "2":
        return "vm.overcommit_memory is 2, and the guard reserves terabytes of addresses"
    return ""
