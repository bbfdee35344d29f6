"""What does not come back: a fenced thread, a broken device.  Another takes its place."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.daemon.running import Daemon
from tests.serve.processes import (
    ROOT,
    EngineProcess,
    engine_process,
    read_settings,
    write_config,
)
from tests.serve.standin import until
from umad.errors import ModelFailed, UmadError, WorkerRevoked
from umad.guard import preload
from umad.serve.link import EngineLink
from umad.serve.supervisor import Supervisor, engine_environment
from umad.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.models, pytest.mark.timeout(120)]


@pytest.fixture
def config(folder: Path) -> Path:
    models = {name: {"quota": "96MiB"} for name in ("greedy", "neighbour")}
    return write_config(folder, models, 'runtime_quota = "1GiB"')


@pytest.fixture
def daemon(folder: Path, config: Path) -> Iterator[Daemon]:
    text = config.read_text() + '[memory]\nreserve = "64MiB"\nbudget = "2GiB"\n'
    made = Daemon(folder, text=text).start()
    yield made
    made.stop()


def command(config: Path) -> list[str]:
    program = [sys.executable, "-m", "tests.integration.greedy_engine", f"--config={config}"]
    return [*program, "--log-format=json", f"--parent={os.getpid()}"]


@contextlib.asynccontextmanager
async def fenced(daemon: Daemon, config: Path, mode: str) -> AsyncIterator[EngineProcess]:
    """The model is in that mode and over its quota, which was lowered under it."""
    preload.build()
    async with engine_process(config, command(config)) as engine:
        async with asyncio.timeout(60):
            await engine.ready("greedy", "neighbour")
        job = asyncio.ensure_future(engine.run("greedy", prompt=mode, deadline_s=60.0))
        await until((daemon.folder / "greedy" / "at work").exists)
        with daemon.client() as client:
            [key] = [w["id"] for w in client.call("status")["workers"] if w["name"] == "greedy"]
            client.call("set_quota", {"worker": key, "quota": 16 * MIB})
        with pytest.raises(WorkerRevoked):
            await job
        assert daemon.wait_for("stopped", worker="greedy")["fence"] == "return"
        yield engine


def test_who_sleeps_is_left_alone_and_another_thread_takes_its_place(
    daemon: Daemon, config: Path
) -> None:
    async def scenario() -> None:
        async with fenced(daemon, config, "asleep") as engine:
            before = (await engine.run("neighbour", prompt="work"))["text"]
            await until(lambda: engine.state("greedy") == "ready", timeout_s=30)
            assert (await engine.run("greedy", prompt="work"))["text"]
            assert (await engine.run("neighbour", prompt="work"))["text"] == before
            assert engine.process.returncode is None

    asyncio.run(scenario())


def test_who_burns_a_core_costs_the_engine_a_restart(daemon: Daemon, config: Path) -> None:
    async def scenario() -> None:
        async with fenced(daemon, config, "burning") as engine:
            with contextlib.suppress(UmadError):  # served until then
                await engine.run("neighbour", prompt="work")
            assert await asyncio.wait_for(engine.process.wait(), 30) == 70
            assert any("engine.poisoned" in line for line in engine.log)

    asyncio.run(scenario())


def test_r6_a_broken_device_costs_one_job_and_the_engine_is_replaced(
    daemon: Daemon, config: Path
) -> None:
    async def scenario() -> None:
        link = EngineLink(read_settings(config))
        environment = engine_environment({**os.environ, "PYTHONPATH": str(ROOT)}, "auto")
        supervisor = Supervisor(link, command(config), environment)
        supervision = asyncio.ensure_future(supervisor.run())
        lost = []
        for number in range(11):
            await until(lambda: link.ready() == (2, 2), timeout_s=60)
            job = {"prompt": "sticky"}
            try:
                await link.run("greedy", job, request=f"r{number}", deadline_s=5)
            except ModelFailed:
                lost.append(number)
                await until(lambda: link.restarts == 1, timeout_s=30)
        supervisor.stop()
        await supervision
        assert lost == [5]

    asyncio.run(scenario())
