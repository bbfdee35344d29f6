"""Where the guard cannot be: the product runs on the auditor alone, says so and why, or refuses."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.running import ROOT, Daemon
from tests.guard.guarded import CC
from tests.serve.processes import write_config
from umad.guard import preload
from umad.serve.supervisor import engine_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
LIMITED = ["bash", "-c", 'ulimit -v 8000000; exec "$@"', "-"]
GROW = [sys.executable, "-m", "tests.integration.workers", "grow"]
CASES = {
    "jemalloc": "another allocator is preloaded: jemalloc.so.2",
    "ulimit": "ulimit -v is set, and the guard reserves terabytes of addresses",
    "other libc": "the guard is not preloaded (LD_PRELOAD)",
}


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    made = Daemon(folder).start()
    yield made
    made.stop()


def obstructed(folder: Path, case: str) -> tuple[dict[str, str], list[str]]:
    """The environment of such a machine, and what a command there begins with."""
    preload.build()
    if case == "jemalloc":
        assert CC is not None
        library = folder / "libjemalloc.so.2"
        empty = [CC, "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(library)]
        subprocess.run(empty, check=True)
        return {**os.environ, "LD_PRELOAD": str(library)}, []
    return dict(os.environ), LIMITED if case == "ulimit" else []


@pytest.mark.parametrize("case", CASES)
def test_status_says_that_it_is_off_and_why(daemon: Daemon, folder: Path, case: str) -> None:
    own, before = obstructed(folder, case)
    environment = engine_environment(own, "auto")  # as the front starts the engine
    if case == "other libc":
        # The loader says that it cannot be loaded, and goes on without it.
        useless = folder / "libumadguard.so"
        useless.write_bytes(b"of another libc")
        environment["LD_PRELOAD"] = str(useless)
    worker = subprocess.Popen(
        [*before, *GROW, daemon.socket, "small", "64MiB", "8"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "loaded\n", "it serves all the same"
        [process] = daemon.status()["processes"]
        assert process["guard"] is False
        assert process["guard_off"] == CASES[case]
        shown = subprocess.run(
            [sys.executable, "-m", "umad.cli.main", "--socket", daemon.socket, "status"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        said = " ".join(shown.stdout.split())  # lines are as wide as the terminal
        assert f"guard: off in pid {process['pid']}: {CASES[case]}" in said
    finally:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize("case", ["jemalloc", "ulimit"])
def test_umad_serve_refuses_to_start_where_the_guard_is_required(folder: Path, case: str) -> None:
    environment, before = obstructed(folder, case)
    config = write_config(folder, {"one": {}}, 'guard = "required"')
    done = subprocess.run(
        [*before, sys.executable, "-m", "umad.serve.main", "--config", str(config)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    assert f'serve.guard is "required", but {CASES[case]}' in done.stderr
