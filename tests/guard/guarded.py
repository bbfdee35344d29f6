"""Children with the guard preloaded: Python code and small C programs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from umad.guard import preload

ROOT = Path(__file__).parents[2]
NATIVE = Path(__file__).parent / "native"
PRELUDE = """
import ctypes, json, sys, threading, time
from umad.guard.account import SHARED, account, account_range, attach, bind, current
from umad.guard.account import enter, guard_state, leave, trim, within
from umad.guard.page import AccountPage, AccountState
MIB = 1 << 20
page = AccountPage.create(1)
attach(page.fd)
def answer(**values): print(json.dumps(values))
"""
TORCH = PRELUDE + "import torch\ntorch.set_num_threads(1)\n"
CC = shutil.which("cc")


def environment(**more: str) -> dict[str, str]:
    added, why = preload.launch_environment(os.environ)
    assert not why, why
    return {**os.environ, **added, **more}


def python(code: str, *arguments: str, prelude: str = PRELUDE, **more: str) -> Any:
    """What the code gave to ``answer``."""
    done = subprocess.run(
        [sys.executable, "-c", prelude + code, *arguments],
        cwd=ROOT,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compile_native(folder: Path, name: str, *flags: str, guard_inside: bool = False) -> Path:
    """A native test beside its libc10.so; with the guard's sources in it when asked for."""
    assert CC is not None
    base = [CC, "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g"]
    base += ["-fno-builtin"]
    inside = ["-DUMAD_GUARD_EMBEDDED"] if guard_inside else []
    library = ["-shared", "-fPIC", "-o", str(folder / "libc10.so"), str(NATIVE / "fake_c10.c")]
    subprocess.run([*base, *inside, *library], check=True)
    program = folder / name
    parts = [str(NATIVE / f"{name}.c")]
    if guard_inside:
        parts += [*map(str, preload.sources()), "-rdynamic"]
    links = ["-lpthread", "-ldl"]
    subprocess.run([*base, *inside, *flags, "-o", str(program), *parts, *links], check=True)
    return program


def native(
    program: Path, *arguments: object, guarded: bool = True, timeout_s: float = 100, **more: str
) -> subprocess.CompletedProcess[str]:
    env = environment(**more) if guarded else {**os.environ, **more}
    return subprocess.run(
        [str(program), *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
