"""The last rungs of the ladder: an engine that loads a model, or starts itself, afresh."""

import asyncio
from pathlib import Path

import pytest

from tests.client.conftest import Daemon
from tests.serve.processes import engine_process, write_config
from tests.serve.standin import run, until

pytestmark = pytest.mark.slow


@pytest.fixture
def daemon(tmp_path: Path):
    daemon = Daemon(tmp_path / "umad.sock").start()
    yield daemon
    daemon.stop()


def test_a_model_is_loaded_afresh_and_its_neighbour_is_not(tmp_path, daemon):
    async def scenario():
        async with engine_process(write_config(tmp_path, {"one": {}, "two": {}})) as engine:
            await engine.ready("one", "two")
            registered = daemon.of("register")
            assert [one["recycle"] for one in registered] == [False, True, True]  # the runtime
            ids = iter(range(1, 100))
            daemon.handlers["register"] = lambda _: {
                "worker": 1000 + next(ids),
                "generation": 1,
                "baseline": 0,
            }
            # Workers are numbered in the order of their registration, runtime first.
            worker = min(params["worker"] for params in daemon.of("progress"))
            daemon.tell("recycle", worker=worker, process=False, reason="crumbs")
            await until(lambda: (tmp_path / "loads").read_text().split() == ["one", "two", "one"])
            await engine.ready("one", "two")
            assert (await engine.run("one", prompt="on"))["text"] == "on"
            assert worker in [params["worker"] for params in daemon.of("unregister")]
            assert engine.process.returncode is None

    run(scenario())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_idle_process_starts_afresh(tmp_path, daemon, isolation):
    async def scenario():
        config = write_config(tmp_path, {"one": {"isolation": isolation}})
        async with engine_process(config) as engine:
            await engine.ready("one")
            worker = max(params["worker"] for params in daemon.of("progress"))
            daemon.tell("recycle", worker=worker, process=True, reason="crumbs")
            if isolation == "thread":  # the front starts the next one
                assert await engine.process.wait() == 0
            else:  # the engine forks another
                await until(lambda: engine.state("one") != "ready")
                assert engine.process.returncode is None
            await until(lambda: any("recycled" in line for line in engine.log))

    run(scenario())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_process_at_work_goes_on(tmp_path, daemon, isolation):
    async def scenario():
        config = write_config(tmp_path, {"one": {"isolation": isolation}})
        async with engine_process(config) as engine:
            await engine.ready("one")
            worker = max(params["worker"] for params in daemon.of("progress"))
            answer = asyncio.ensure_future(engine.run("one", prompt="wait"))
            await until((tmp_path / "one" / "waiting").exists)
            daemon.tell("recycle", worker=worker, process=True, reason="crumbs")
            await until(lambda: any("not_recycled" in line for line in engine.log))
            (tmp_path / "one" / "release").touch()
            assert (await answer)["text"] == "wait"
            assert engine.state("one") == "ready"

    run(scenario())
