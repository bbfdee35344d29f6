"""Five models in one process under load; each in turn goes greedy in a different way.

Every time that model alone fails, the other four have no error and the same answers as before,
and its bytes are back.
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from tests.daemon.running import Daemon
from tests.serve.processes import EngineProcess, engine_process, write_config
from tests.serve.standin import until
from umad.errors import UmadError
from umad.guard import preload
from umad.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.models, pytest.mark.timeout(240)]

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
WAYS = ("giant", "leak", "cache", "helper", "pinned")
NOISE = 16 * MIB


def held(daemon: Daemon) -> int:
    [process] = daemon.status()["processes"]
    return int(process["bytes"])


class Crowd:
    """Keeps asking some models; every answer must be what it was before."""

    def __init__(self, engine: EngineProcess, expected: dict[str, str]) -> None:
        self._engine = engine
        self._expected = expected
        self._stopping = False
        self.answered = 0
        self.wrong: list[str] = []

    async def ask(self, name: str) -> None:
        while not self._stopping:
            try:
                answer = await self._engine.run(name, prompt="work")
            except UmadError as error:
                self.wrong.append(f"{name}: {error.code} {error.message}")
                return
            if answer["text"] != self._expected[name]:
                self.wrong.append(f"{name}: {answer['text']}")
                return
            self.answered += 1

    def end(self) -> None:
        self._stopping = True


async def again(engine: EngineProcess, name: str) -> str:
    """Its answer, as soon as it gives one: it may be loaded afresh first."""
    pause = asyncio.Event()
    async with asyncio.timeout(40):
        while True:
            try:
                return str((await engine.run(name, prompt="work"))["text"])
            except UmadError as error:
                if error.code not in ("model_loading", "quota_exceeded"):
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pause.wait(), 0.05)


async def everything(daemon: Daemon, engine: EngineProcess, folder: Path) -> None:
    async with asyncio.timeout(90):
        await engine.ready(*NAMES)
    expected = {name: (await engine.run(name, prompt="work"))["text"] for name in NAMES}
    state = await asyncio.to_thread(daemon.status)
    assert state["processes"][0]["guard"] is True
    # What a first failure under load leaves for good (a thread's arena, a reload's buffers) is no
    # model's: it is there before anything is measured.
    crowd = Crowd(engine, expected)
    everybody = [asyncio.ensure_future(crowd.ask(name)) for name in NAMES]
    await until(lambda: crowd.answered > 50 or bool(crowd.wrong))
    crowd.end()
    await asyncio.gather(*everybody)
    with pytest.raises(UmadError):
        await engine.run(NAMES[0], deadline_s=60.0, prompt="leak")
    assert await again(engine, NAMES[0]) == expected[NAMES[0]]
    before = await asyncio.to_thread(held, daemon)
    for name, way in zip(NAMES, WAYS, strict=True):
        crowd = Crowd(engine, expected)
        others = [asyncio.ensure_future(crowd.ask(other)) for other in NAMES if other != name]
        with pytest.raises(UmadError) as refused:
            await engine.run(name, deadline_s=60.0, prompt=way)
        assert refused.value.code == "quota_exceeded", way
        assert await again(engine, name) == expected[name], way
        answered = crowd.answered
        await until(lambda crowd=crowd, n=answered: crowd.answered > n + 8 or bool(crowd.wrong))
        crowd.end()
        await asyncio.gather(*others)
        assert crowd.wrong == [], way
        after = await asyncio.to_thread(held, daemon)
        assert after - before < NOISE, f"{way}: {(after - before) / MIB:.0f} MiB are not back"
    # The sixth way, during its load: it alone fails, and comes back.
    crowd = Crowd(engine, expected)
    others = [asyncio.ensure_future(crowd.ask(other)) for other in NAMES[1:]]
    greedy = folder / NAMES[0] / "greedy"  # the next load is, and takes the file away
    greedy.touch()
    with pytest.raises(UmadError):
        await engine.run(NAMES[0], deadline_s=60.0, prompt="leak")
    await until(lambda: not greedy.exists() and engine.state(NAMES[0]) == "failed")
    assert engine.link.status(NAMES[0])["error"]["code"] == "quota_exceeded"
    assert await again(engine, NAMES[0]) == expected[NAMES[0]]
    answered = crowd.answered
    await until(lambda: crowd.answered > answered + 8 or bool(crowd.wrong))
    crowd.end()
    await asyncio.gather(*others)
    assert crowd.wrong == []
    after = await asyncio.to_thread(held, daemon)
    assert after - before < NOISE, f"load: {(after - before) / MIB:.0f} MiB are not back"
    assert not [line for line in daemon.log if line["event"] in ("revoked", "stopped")]
    assert engine.process.returncode is None


def test_each_in_turn_goes_greedy_and_fails_alone(folder: Path) -> None:
    preload.build()
    config = write_config(
        folder, {name: {"quota": "96MiB"} for name in NAMES}, 'runtime_quota = "1GiB"'
    )
    text = config.read_text() + '[memory]\nreserve = "64MiB"\nbudget = "3GiB"\n'
    daemon = Daemon(folder, text=text)
    daemon.start()
    command = [
        sys.executable,
        "-m",
        "tests.integration.greedy_engine",
        f"--config={config}",
        "--log-format=json",
        f"--parent={os.getpid()}",
    ]

    async def scenario() -> None:
        async with engine_process(config, command) as engine:
            try:
                await everything(daemon, engine, folder)
            except BaseException:
                print("".join(engine.log[-30:]))
                raise

    try:
        asyncio.run(scenario())
    finally:
        daemon.stop()
