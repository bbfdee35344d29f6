"""The allocator's C code under load: plain, and with each sanitizer compiled in."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.guard_device import rig
from umad.guard import device

pytestmark = pytest.mark.slow
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


@pytest.mark.parametrize("kind", SANITIZERS)
def test_random_load_over_two_accounts(tmp_path: Path, cuda_driver: Path, kind: str) -> None:
    flags = SANITIZERS[kind]
    program = rig.compile_c(
        tmp_path / "stress", *flags, rig.NATIVE / "stress.c", *device.FOLDER.glob("*.c")
    )
    rounds = 40_000 if kind == "plain" else 4_000
    done = subprocess.run(
        [str(program), str(rounds)],
        env={**os.environ, "UMAD_DEVICE_RUNTIME": str(cuda_driver)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if kind == "thread" and "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run with this kernel's address layout")
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > rounds // 10
