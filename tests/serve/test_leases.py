"""A burst is booked for as long as its work lasts, however that ends: a real daemon's books."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import Daemon
from tests.serve.processes import EngineProcess, engine_process, write_config
from tests.serve.standin import run, until
from umad.errors import ModelFailed, NeverFits, QuotaExceeded, UmadError, WorkerLost
from umad.units import MIB

pytestmark = pytest.mark.slow
TTL_S = 0.5
QUOTA, NEED = 64 * MIB, 256 * MIB
MEMORY = '[memory]\nreserve = "64MiB"\nbudget = "2GiB"\ninterval = "50ms"\n'
LEASES = f'[leases]\nburst_ttl = "{TTL_S}s"\n'
GROUP = '[daemon]\ngroup = "root"\nadmin_group = "root"'


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, Daemon]]:
    models = {name: {"quota": f"{QUOTA}B"} for name in ("one", "alone", "joins", "together")}
    models["alone"]["isolation"] = "process"
    config = write_config(tmp_path, models, 'runtime_quota = "256MiB"')
    config.write_text(config.read_text().replace("[daemon]", GROUP) + MEMORY + LEASES)
    daemon = Daemon(tmp_path, text=config.read_text()).start()
    yield config, daemon
    daemon.stop()


def booked(daemon: Daemon, model: str) -> int:
    """0 for a worker that is gone."""
    return sum(one["booked"] for one in daemon.status()["workers"] if one["name"] == model)


@pytest.mark.parametrize("model", ["one", "alone"])
def test_a_burst_ends_with_its_work(
    served: tuple[Path, Daemon], tmp_path: Path, model: str
) -> None:
    config, daemon = served
    waiting, release = tmp_path / model / "waiting", tmp_path / model / "release"

    async def at_work(engine: EngineProcess) -> asyncio.Future[Any]:
        """A run that waits inside its forward, with its burst booked."""
        work = asyncio.ensure_future(engine.run(model, prompt="wait", need=NEED))
        await until(waiting.exists)
        assert booked(daemon, model) > QUOTA + NEED // 2
        return work

    async def given_back() -> None:
        await until(lambda: booked(daemon, model) == QUOTA)
        waiting.unlink(missing_ok=True)

    async def refused(engine: EngineProcess, error: type[UmadError], **job: Any) -> None:
        with pytest.raises(error):
            await engine.run(model, **job)
        await given_back()

    async def scenario() -> None:
        async with engine_process(config) as engine:
            await engine.ready("one", "alone")
            await given_back()

            work = await at_work(engine)  # it goes well
            release.touch()
            assert (await work)["text"] == "wait"
            release.unlink()
            await given_back()

            work = await at_work(engine)  # the client hangs up
            work.cancel()
            await given_back()

            await refused(engine, ModelFailed, prompt="raise", need=NEED)
            await refused(engine, QuotaExceeded, prompt="memory", need=NEED)
            await refused(engine, NeverFits, prompt="on", need=8 << 30)

            work = await at_work(engine)  # its process dies
            pids = {one["name"]: one["pid"] for one in daemon.status()["workers"]}
            if model == "one":
                engine.process.kill()
            else:
                work.cancel()
                await given_back()
                work = asyncio.ensure_future(engine.run(model, prompt="die", need=NEED))
            with pytest.raises(WorkerLost):
                await work
            daemon.wait_for("exited", pid=pids[model])
            assert booked(daemon, model) in (0, QUOTA)  # QUOTA: it is back already

    run(scenario())
    assert not [line for line in daemon.log if line["event"] in ("lease_expired", "leaked")]


@pytest.mark.parametrize("model", ["one", "together", "joins", "alone"])
def test_a_forward_that_outlives_its_lease_keeps_it(
    served: tuple[Path, Daemon], tmp_path: Path, model: str
) -> None:
    config, daemon = served

    async def scenario() -> None:
        async with engine_process(config) as engine:
            await engine.ready(model)
            if model == "together":  # its forward waits
                (tmp_path / model / "hold").touch()
            prompt = "wait" if model in ("one", "alone") else "on"
            work = engine.run(model, prompt=prompt, need=NEED, max_tokens=1 << 30)
            at_work = asyncio.ensure_future(work)
            await until(lambda: booked(daemon, model) > QUOTA + NEED // 2)
            ends_s = time.monotonic() + 3 * TTL_S
            await until(lambda: time.monotonic() > ends_s)
            assert booked(daemon, model) > QUOTA + NEED // 2
            at_work.cancel()
            await until(lambda: booked(daemon, model) == QUOTA)

    run(scenario())
    assert not [line for line in daemon.log if line["event"] == "lease_expired"]
