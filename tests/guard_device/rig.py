"""The device allocator over a fake driver: fresh copies of both for each test."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from umad.guard import device, preload
from umad.guard.page import AccountPage

ROOT = Path(__file__).parents[2]
NATIVE = Path(__file__).parent / "native"
CC = shutil.which("cc")
MIB = 1 << 20
Row = ctypes.c_uint * 4  # one value for each of the driver's devices
STRICT = ("-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-fPIC")


def compile_c(output: Path, *arguments: str | Path) -> Path:
    assert CC is not None
    includes = f"-I{device.FOLDER.parent}"
    command = [CC, *STRICT, includes, "-o", str(output), *map(str, arguments), "-lpthread", "-ldl"]
    subprocess.run(command, check=True)
    return output


def compile_fake(folder: Path, prefix: str, name: str) -> Path:
    """A driver library; ``prefix`` is "cuda" or "hip", ``name`` the file it is found as."""
    return compile_c(
        folder / name,
        f"-DPREFIX={prefix}",
        "-shared",
        f"-Wl,-soname,{name}",
        NATIVE / "fake_runtime.c",
    )


def compile_blank(folder: Path, name: str) -> Path:
    """A library that is found under this name and has none of the functions."""
    (folder / "blank.c").write_text("int cudaMalloc(void) { return 0; }\n")
    return compile_c(folder / name, "-shared", f"-Wl,-soname,{name}", folder / "blank.c")


class Rig:
    """One loaded allocator with its driver and an account page; ``page`` is not attached yet."""

    def __init__(self, folder: Path, driver: Path) -> None:
        # Copies, because a library that is loaded already would keep the last test's state.
        shutil.copy(device.LIBRARY, folder / "device.so")
        shutil.copy(driver, folder / "driver.so")
        os.environ["UMAD_DEVICE_RUNTIME"] = str(folder / "driver.so")
        try:
            self.library = device.Library(folder / "device.so")
            self.runtime = self.library.runtime()  # sought once, so the variable may go again
        finally:
            del os.environ["UMAD_DEVICE_RUNTIME"]
        raw = ctypes.CDLL(str(folder / "device.so"))
        self._alloc, self._free = raw.umad_device_alloc, raw.umad_device_free
        self._alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._alloc.restype = ctypes.c_void_p
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.restype = None
        self._driver = ctypes.CDLL(str(folder / "driver.so"))
        self.page = AccountPage.create(1)

    def attach(self, *limits: int) -> None:
        """Open accounts 0, 1, ... with these limits and attach the page."""
        for slot, limit in enumerate(limits):
            self.page.open(slot, limit)
        assert self.library.attach(self.page.fd) == 0

    def alloc(self, size: int, device: int = 0) -> int | None:
        block: int | None = self._alloc(size, device, None)
        return block

    def free(self, block: int | None, size: int = 0, device: int = 0) -> None:
        self._free(block, size, device, None)

    def fake(self, name: str, kind: type[Any] = ctypes.c_uint64) -> Any:
        """A variable of the driver's; read and set its ``value``."""
        return kind.in_dll(self._driver, f"fake_{name}")

    @property
    def calls(self) -> tuple[int, int]:
        """How often the driver was asked to allocate and to free."""
        return self.fake("mallocs").value, self.fake("frees").value

    @property
    def driver_error(self) -> int:
        """What the driver would tell the next caller who asks for the last error."""
        return int(self._driver.fake_peek_error())

    @property
    def current_device(self) -> int:
        now = ctypes.c_int()
        self._driver.cudaGetDevice(ctypes.byref(now))
        return now.value


def launch_environment() -> dict[str, str]:
    """For a child with the guard preloaded."""
    added, why = preload.launch_environment(os.environ)
    assert not why, why
    return {**os.environ, **added}
