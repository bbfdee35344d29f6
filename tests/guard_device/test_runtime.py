"""Which driver library is found, and the allocator beside the preloaded guard."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.guard_device import rig
from umad.guard import preload

pytestmark = pytest.mark.slow  # each starts an interpreter
PRELUDE = """
import ctypes, json, sys
from umad.guard import account, device
from umad.guard.page import AccountPage
MIB = 1 << 20
library = device.library()
raw = ctypes.CDLL(str(device.LIBRARY))
raw.umad_device_alloc.restype = ctypes.c_void_p
raw.umad_device_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
raw.umad_device_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
def alloc(size): return raw.umad_device_alloc(size, 0, None)
def free(block): raw.umad_device_free(block, 0, 0, None)
def answer(**values): print(json.dumps(values))
"""


def python(code: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        cwd=rig.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FOUND = """
runtime = library.runtime()
block = alloc(MIB)
answer(runtime=runtime and runtime.decode(), got=bool(block), held=library.held(-1))
free(block)
"""


NAMES = {
    **{f"libcudart.so{version}": "cuda" for version in ("", ".12", ".13")},
    **{f"libamdhip64.so{version}": "hip" for version in ("", ".6", ".7")},
}


@pytest.mark.parametrize("name", NAMES)
def test_the_driver_is_found_by_its_name(tmp_path: Path, name: str) -> None:
    prefix = NAMES[name]
    for other in NAMES:  # this machine may have a real one
        rig.compile_blank(tmp_path, other)
    rig.compile_fake(tmp_path, prefix, name)
    said = python(FOUND, LD_LIBRARY_PATH=str(tmp_path))
    assert said == {"runtime": prefix, "got": True, "held": rig.MIB}


def test_what_is_loaded_already_comes_before_what_is_newer(
    tmp_path: Path, hip_driver: Path
) -> None:
    rig.compile_fake(tmp_path, "cuda", "libcudart.so.13")
    code = f"ctypes.CDLL({str(hip_driver)!r})\n" + FOUND
    assert python(code, LD_LIBRARY_PATH=str(tmp_path))["runtime"] == "hip"


def test_without_a_driver_everything_is_refused(tmp_path: Path) -> None:
    code = (
        "answer(runtime=library.runtime(), block=alloc(MIB), spin=library.spin(0),"
        "peer=library.peer(0, 1))"
    )
    said = python(code, UMAD_DEVICE_RUNTIME=str(tmp_path / "libcudart.so.12"))
    assert said == {"runtime": None, "block": None, "spin": -38, "peer": -38}


def test_a_library_without_the_functions_is_no_driver(tmp_path: Path) -> None:
    other = rig.compile_blank(tmp_path, "libcudart.so.12")
    assert python(FOUND, UMAD_DEVICE_RUNTIME=str(other))["runtime"] is None


@pytest.fixture(scope="module")
def guarded(built: Path) -> dict[str, str]:
    """The environment that preloads the guard."""
    preload.build()
    added, why = preload.launch_environment(os.environ)
    if why:
        pytest.skip(f"the guard cannot be preloaded: {why}")
    return added


PAGE = """
page = AccountPage.create(1)
page.open(0, 100 * MIB)
page.open(1, 100 * MIB)
device.attach(page.fd)
"""


def test_host_and_device_share_the_limit_and_the_threads_account(
    guarded: dict[str, str], cuda_driver: Path
) -> None:
    code = """
with account.account(0):
    host = bytearray(60 * MIB)
    of_host = page.read(0).used
    small, big = alloc(30 * MIB), alloc(30 * MIB)  # nothing bound: the guard's account
    of_both = page.read(0).used
    try:
        bytearray(30 * MIB)
        refused = False
    except MemoryError:
        refused = True
    within = account.current()
outside = alloc(MIB)
free(small)
answer(small=bool(small), big=big, refused=refused, count=page.read(0).refused, within=within,
       host=of_host >= 60 * MIB, device=of_both - of_host, rest=page.read(0).used - of_host,
       shared=library.held(-1))
"""
    assert python(PAGE + code, UMAD_DEVICE_RUNTIME=str(cuda_driver), **guarded) == {
        "small": True,
        "big": None,
        "refused": True,
        "count": 2,
        "within": 0,
        "host": True,
        "device": 30 * rig.MIB,
        "rest": 0,
        "shared": rig.MIB,
    }


def test_a_new_page_takes_over_host_and_device_bytes_once(
    guarded: dict[str, str], cuda_driver: Path
) -> None:
    code = """
with account.account(1):
    host, block = bytearray(10 * MIB), alloc(20 * MIB)
before = page.read(1)
fresh = AccountPage.create(2)
fresh.open(1, 100 * MIB)
device.attach(fresh.fd)
after = fresh.read(1)
free(block)
answer(same=before.used == after.used, guarded=fresh.guarded, old=page.read(1).used - before.used,
       freed=after.used - fresh.read(1).used)
"""
    assert python(PAGE + code, UMAD_DEVICE_RUNTIME=str(cuda_driver), **guarded) == {
        "same": True,
        "guarded": True,
        "old": 0,
        "freed": 20 * rig.MIB,
    }
