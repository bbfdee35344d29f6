"""A server of a benchmark, with all that it starts: its start, its end, what it costs."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.daemon.running import ROOT
from tests.serve.processes import write_config

STOP_S = 20.0


@contextmanager
def started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """A server; what it said last is printed where its user fails."""
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=sink, stderr=sink
        )
    try:
        yield process
    except BaseException:
        print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        _end(process)


def umad_up(
    folder: Path, port: int, models: Mapping[str, Mapping[str, Any]], serve: str, memory: str
) -> list[str]:
    """The command of the whole product, with a configuration of these models."""
    config = write_config(folder, models, serve)
    text = config.read_text().replace("127.0.0.1:0", f"127.0.0.1:{port}")
    config.write_text(f'{text}[memory]\nreserve = "64MiB"\n{memory}\n')
    return [sys.executable, "-m", "umad.daemon.main", "up", f"--config={config}"]


def family_of(pid: int) -> list[psutil.Process]:
    """It and whom it has started."""
    me = psutil.Process(pid)
    return [me, *me.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """CPU time of a family, of those that run now."""
    return sum(sum(one.cpu_times()[:2]) for one in family_of(pid))


def _end(process: "subprocess.Popen[bytes]") -> None:
    family = family_of(process.pid) if process.poll() is None else []
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(STOP_S)
