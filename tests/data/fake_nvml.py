"""Stands in for NVIDIA's library, below the maker's own binding: see fake_nvml.c."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("fake_nvml.c")


@functools.cache
def library() -> ctypes.CDLL:
    """Compile it and load it; from then on the binding finds it by its name."""
    with tempfile.TemporaryDirectory() as folder:
        built = f"{folder}/libnvidia-ml.so.1"
        flags = ["-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
        subprocess.run(["cc", *flags, "-o", built, str(_SOURCE)], check=True)
        return ctypes.CDLL(built)


def use(path: Path | None) -> None:
    """Answer from this file from now on; None: there is no driver."""
    library().fake_nvml_use(b"" if path is None else bytes(path))
