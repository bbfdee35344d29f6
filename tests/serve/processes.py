"""Real engine processes for tests: their configuration, their start, their end."""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from tests.serve.standin import until
from umad.config import Settings
from umad.serve.link import EngineLink
from umad.serve.main import check_config
from umad.serve.supervisor import engine_environment

ROOT = Path(__file__).resolve().parents[2]


def write_config(folder: Path, models: Mapping[str, Mapping[str, Any]], serve: str = "") -> Path:
    """A configuration of models ``{name: {key: value}}``, each with a folder of its own."""
    lines = ["[daemon]", f'socket = "{folder}/umad.sock"', "[serve]", 'listen = "127.0.0.1:0"']
    lines += [serve]
    for name, keys in models.items():
        path = folder / name
        path.mkdir(exist_ok=True)
        whole = {"kind": "chat", "path": str(path), "quota": "2000B", **keys}
        lines += ["[[model]]", f'name = "{name}"']
        lines += [
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {str(value).lower()}"
            for key, value in whole.items()
        ]
    config = folder / "umad.toml"
    config.write_text("\n".join(lines) + "\n")
    return config


def read_settings(config: Path) -> Settings:
    return check_config(config.read_text(), str(config))


def scripted_command(config: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tests.serve.scripted",
        f"--config={config}",
        "--log-format=json",
        f"--parent={os.getpid()}",
    ]


class EngineProcess:
    """One engine and the front's end of its link."""

    def __init__(self, settings: Settings, process: asyncio.subprocess.Process) -> None:
        self.link = EngineLink(settings)
        self.process = process
        self.log: list[str] = []
        self._numbers = 0

    async def run(self, model: str, deadline_s: float = 10.0, **job: Any) -> Mapping[str, Any]:
        self._numbers += 1
        return await self.link.run(model, job, request=f"r{self._numbers}", deadline_s=deadline_s)

    async def ready(self, *models: str) -> None:
        await until(lambda: all(self.state(model) == "ready" for model in models))

    def state(self, model: str) -> str:
        return str(self.link.status(model)["state"])

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Its lines of this event, so far."""
        lines = [json.loads(line) for line in self.log if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())


@contextlib.asynccontextmanager
async def engine_process(
    config: Path, command: list[str] | None = None, *extra: str
) -> AsyncIterator[EngineProcess]:
    settings = read_settings(config)
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(command or scripted_command(config)),
            f"--fd={theirs.fileno()}",
            *extra,
            pass_fds=[theirs.fileno()],
            env=engine_environment(os.environ, "auto"),
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
    engine = EngineProcess(settings, process)
    reading = asyncio.ensure_future(engine.read_log())
    await engine.link.attach(ours)
    try:
        yield engine
    finally:
        engine.link.drop()  # an engine without a front ends by itself
        async with asyncio.timeout(10):
            await process.wait()
            await reading
