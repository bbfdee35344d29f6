"""Answers that were let in together and do not fit: the newest give way, and nobody fails."""

import asyncio
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import Daemon
from tests.demo.fixtures import checkpoints
from tests.demo.words import DEEDS
from tests.serve.processes import engine_process, write_config
from umad.guard import preload

pytestmark = [pytest.mark.slow, pytest.mark.models, pytest.mark.timeout(240)]
AT_ONCE = 12


def asked(number: int) -> dict[str, Any]:
    """A long prompt of its own."""
    prompt = " ".join(random.Random(number).choices(DEEDS.split(","), k=900))
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0.0, "deadline_s": 120.0}


def test_what_does_not_fit_together_is_answered_all_the_same(folder: Path) -> None:
    preload.build()
    model = {"quota": "48MiB", "path": str(checkpoints() / "llama"), "isolation": "thread"}
    config = write_config(folder, {"llama": model}, 'runtime_quota = "1GiB"')
    text = config.read_text() + '[memory]\nreserve = "64MiB"\nbudget = "2GiB"\n'
    program = [sys.executable, "-m", "tests.integration.optimist_engine", f"--config={config}"]
    command = [*program, "--log-format=json", f"--parent={os.getpid()}"]
    daemon = Daemon(folder, text=text).start()

    async def scenario() -> None:
        async with engine_process(config, command) as engine:

            async def ask(number: int) -> Mapping[str, Any]:
                answer = dict(await engine.run("llama", **asked(number)))
                return {key: answer[key] for key in ("text", "completion_tokens")}

            async with asyncio.timeout(60):
                await engine.ready("llama")
            alone = [await ask(number) for number in range(AT_ONCE)]
            work = engine.link.status("llama")["work"]
            assert work["set_aside"] == 0
            together = await asyncio.gather(*map(ask, range(AT_ONCE)))
            assert together == alone
            shown = engine.link.status("llama")
            assert shown["state"] == "ready"
            assert shown["work"]["set_aside"] > 0
            assert shown["work"]["restarts"] == 0
            assert not [line for line in engine.log if "batch.split" in line]

    try:
        asyncio.run(scenario())
    finally:
        daemon.stop()
    loads = [line for line in daemon.log if line["event"] == "loaded" and line["worker"] == "llama"]
    assert len(loads) == 1  # it was never loaded afresh
    assert not [line for line in daemon.log if line["event"] in ("stopped", "leaked")]
