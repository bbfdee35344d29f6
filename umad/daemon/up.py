"""``umad up``: the daemon and umad-serve in one terminal, for a laptop, a container, a first try.

Supervises the two as their units would: a program that ends is started again after a moment,
except where its exit code says that the same would happen again.  Ctrl-C ends umad-serve first,
then the daemon.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Final

from umad.config import Settings

RESTART_AFTER_S: Final = 0.2  # as RestartSec= of the units
STOP_WITHIN_S: Final = 15.0
# Configuration and preflight (see main.py), and an address that is in use: no restart mends them.
FINAL_CODES: Final = frozenset({1, 69, 78})
# As umad.service has it: the watchman must run when everybody else wants to.
DAEMON_NICE: Final = -10
_PR_SET_PDEATHSIG: Final = 1


def run(config: Path, settings: Settings, daemon_flags: list[str]) -> int:
    """Run both until Ctrl-C or SIGTERM; returns the exit code."""
    return asyncio.run(_run(config, settings, daemon_flags))


async def _run(config: Path, settings: Settings, daemon_flags: list[str]) -> int:
    module = [sys.executable, "-m"]
    daemon = [*module, "umad.daemon.main", "--config", str(config), *daemon_flags]
    serve = [*module, "umad.serve.main", "--config", str(config)]
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ending.set)
    programs = [_Program("umad", daemon, nice=DAEMON_NICE)]
    if not settings.models:
        _say("no [[model]] in the configuration: only the daemon runs")
    elif importlib.util.find_spec("starlette") is None:
        _say("umad-serve is not installed (pip install 'umad[serve]'): only the daemon runs")
    else:
        programs.append(_Program("umad-serve", serve))
    tasks = [asyncio.create_task(program.supervise(ending)) for program in programs]
    await ending.wait()
    for program in reversed(programs):
        await program.stop()
    return max(await asyncio.gather(*tasks))


class _Program:
    """One supervised child."""

    def __init__(self, name: str, command: list[str], nice: int = 0) -> None:
        self._name = name
        self._command = command
        self._nice = nice
        self._child: asyncio.subprocess.Process | None = None
        self._stopping = False

    async def supervise(self, ending: asyncio.Event) -> int:
        """Start it, and start it again; returns the code that ended it for good."""
        while True:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                process_group=0,  # Ctrl-C is for us; we stop the two in order
                preexec_fn=self._in_child,
                # A Debian package's modules lie where only its own programs look.
                env=os.environ | {"UMAD_UP": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            code = await self._child.wait()
            if self._stopping:
                return 0 if code in (0, -signal.SIGTERM) else abs(code)
            if code in FINAL_CODES:
                _say(f"{self._name} ended with code {code}: giving up")
                ending.set()
                return code
            _say(f"{self._name} ended ({_how(code)}), starting it again")
            try:
                await asyncio.wait_for(ending.wait(), RESTART_AFTER_S)
            except TimeoutError:
                continue
            return 0

    def _in_child(self) -> None:
        """Before exec: end with the supervisor, and take the priority that the unit would give."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        with contextlib.suppress(PermissionError):  # an ordinary user may not be nice to himself
            os.nice(self._nice)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not end it."""
        self._stopping = True
        if self._child is None or self._child.returncode is not None:
            return
        self._child.terminate()
        try:
            await asyncio.wait_for(self._child.wait(), STOP_WITHIN_S)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()


def _how(code: int) -> str:
    return f"code {code}" if code >= 0 else signal.Signals(-code).name


def _say(text: str) -> None:
    sys.stderr.write(f"umad up: {text}\n")
