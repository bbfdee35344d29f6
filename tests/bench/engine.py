"""A benchmark's part that runs as the engine runs: its environment, and its guard."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.daemon.running import ROOT
from umad.guard import preload
from umad.serve.supervisor import engine_environment


def as_engine(module: str, *args: str) -> Any:
    """What a module prints last, as JSON, in a process like the engine's.

    Raises:
        ConfigError: this machine cannot have the guard; the figure would be another one.
        CalledProcessError: it failed.
    """
    preload.build()
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env=engine_environment(os.environ, "required"),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
