"""Requests together against each alone, through real engines that take turns at the cores.

The real all-MiniLM-L6-v2, 32 askers; and a small Llama, 16 new tokens, 16 askers.  The engines
differ in nothing but the batching (``tests.bench.alone``).

And 8 askers whose prompts begin with the same 600 tokens or so, against an engine that keeps
nothing of prompts (``tests.bench.unkept``).  Expected before the first run: 8 answers took 0.92 s
with prompts of 11 tokens and 3.45 s with 675, so of 2.5 s of reading a tenth is left, and what 16
steps over so many keys take: 0.4 of the time.
"""

import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure, ratio
from tests.daemon.running import Daemon
from tests.demo.fixtures import checkpoints, minilm
from tests.serve.processes import EngineProcess, engine_process, write_config
from tests.serve.standin import until

ROUNDS = 5
MEMORY = '[memory]\nreserve = "64MiB"\nbudget = "6GiB"\n'
WORDS = "the harbour master paints a small blue boat before the captain sails at noon".split()  # noqa: SIM905
ENGINES = {
    "together": "umad.serve.engine",
    "alone": "tests.bench.alone",
    "unkept": "tests.bench.unkept",
}


@dataclass(frozen=True)
class Load:
    """What is asked in one round: ``askers`` at a time, each again when it has its answer."""

    name: str
    model: str
    askers: int
    count: int
    jobs: Sequence[Mapping[str, Any]]
    time_max: float
    """The time of all requests, ours over the rival's; what the design asks for."""
    p95_max: float
    rival: str = "alone"
    """Of ``ENGINES``."""


@dataclass
class Seen:
    """Seconds a request, over all askers, and the 95th percentile of one; by round."""

    each_s: list[float] = field(default_factory=list)
    p95_s: list[float] = field(default_factory=list)


def loads() -> list[Load]:
    chance = random.Random(6)

    def words(count: int) -> str:
        return " ".join(chance.choices(WORDS, k=count))

    short = [{"texts": [words(8)]} for _ in range(256)]
    mixed = [{"texts": [words(100 if at % 5 == 4 else 8)]} for at in range(256)]
    talk = [
        {"prompt": words(8), "max_tokens": 16, "temperature": 0.0, "seed": at} for at in range(64)
    ]
    system = words(440)
    # Each once, or more than what they begin with would be the same.
    alike = [{**talk[0], "prompt": f"{system} {words(50)}"} for _ in range(32 * (ROUNDS + 1))]
    return [
        Load("embeddings of 8 words", "embed", 32, 256, short, 1 / 2.8, 0.34),
        Load("embeddings, each fifth of 100 words", "embed", 32, 160, mixed, 1 / 1.8, 1.0),
        Load("answers of 16 tokens", "talk", 16, 64, talk, 1 / 2.8, 0.34),
        Load("answers, 600 tokens before each the same", "talk", 8, 32, alike, 0.5, 0.5, "unkept"),
    ]


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="umad-") as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(folder: Path) -> list[Figure]:
    pairs = [(load, engine) for load in loads() for engine in ("together", load.rival)]
    seen = {(load.name, engine): Seen() for load, engine in pairs}
    async with AsyncExitStack() as stack:
        engines = {}
        for name, module in ENGINES.items():
            (own := folder / name).mkdir()
            engines[name] = await _engine(own, module, stack)
        for number in range(ROUNDS + 1):
            for load, name in pairs:
                each_s, p95_s = await _ask(engines[name], load, number)
                if number:  # the first warms up
                    seen[load.name, name].each_s.append(each_s)
                    seen[load.name, name].p95_s.append(p95_s)
    figures = []
    for load in loads():
        us, them = (seen[load.name, name] for name in ("together", load.rival))
        title = f"{load.name}, {load.askers} askers: %s, together over {load.rival}"
        figures += [
            ratio("batching", title % "time a request", us.each_s, them.each_s, load.time_max),
            ratio("batching", title % "p95", us.p95_s, them.p95_s, load.p95_max),
        ]
    return figures


async def _engine(folder: Path, module: str, stack: AsyncExitStack) -> EngineProcess:
    paths = {"embed": ("embedding", minilm()), "talk": ("chat", checkpoints() / "llama")}
    models = {
        name: {"kind": kind, "path": str(path), "quota": "400MiB"}
        for name, (kind, path) in paths.items()
    }
    config = write_config(folder, models, 'runtime_quota = "1500MiB"')
    config.write_text(config.read_text() + MEMORY)
    daemon = Daemon(folder, text=config.read_text()).start()
    stack.callback(daemon.stop)
    command = [
        sys.executable,
        "-m",
        module,
        f"--config={config}",
        "--log-format=json",
        f"--parent={os.getpid()}",
    ]
    engine = await stack.enter_async_context(engine_process(config, command))
    await until(lambda: all(engine.state(model) == "ready" for model in models), 60)
    return engine


async def _ask(engine: EngineProcess, load: Load, turn: int) -> tuple[float, float]:
    took: list[float] = []
    numbers = iter(range(turn * load.count, (turn + 1) * load.count))

    async def asker() -> None:
        for number in numbers:
            began_s = time.perf_counter()
            await engine.run(load.model, 60.0, **load.jobs[number % len(load.jobs)])
            took.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    await asyncio.gather(*itertools.starmap(asker, [()] * load.askers))
    each_s = (time.perf_counter() - began_s) / load.count
    return each_s, sorted(took)[int(0.95 * len(took))]
