"""What the two programs really export: at their start, and after something of everything."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.core.drive import Drive
from tests.core.fakes import MB, engine, snapshot
from tests.daemon.shown import Shown, rich
from tests.serve.standin import Front, make_settings, run, serving, text_handler
from umad.core.batching import Why
from umad.errors import QuotaDenied
from umad.serve import metrics
from umad.serve.figures import Figures
from umad.values import AccountFigures, Segments, Zone, Zones

ZONES = Zones(1.0, 4096, (Zone(0, "Normal", (65536, *[0] * 9, 900)),))


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


@cache
def daemon_texts() -> tuple[str, str]:
    """(of a daemon that has just started, of one that has seen much)."""
    shown = Shown(Drive(engine()))
    first = shown.text().decode()
    rich(shown)
    drive = shown.drive
    worker = drive.loaded(10, "llama", 300 * MB, guard=True)
    forward = {"tokens": 8, "batch": 1, "seconds": 0.1, "exact": True}
    for predicted, peak in ((10, 8), (10, 9), (10, 12)):
        lease = drive.call(10, "admit", worker=worker, bytes=predicted * MB)
        more = {"predicted": predicted * MB, "peak": peak * MB, "lease": lease["lease"]}
        drive.tell(10, "forward_done", worker=worker, token=lease["token"], **forward, **more)
    drive.call(10, "init_lock", worker=worker)
    big = drive.call(8, "register", model="big", quota=2000 * MB)["worker"]
    drive.ask(8, "reserve", worker=big, wait_s=60.0)
    for process in drive.engine.state.processes.values():
        process.segments = Segments(2000 * MB, 500 * MB, 0, 1500 * MB, 1500 * MB, 300 * MB)
    account = AccountFigures(used=150 * MB, peak=200 * MB, refused=1)
    shot = snapshot(drive.now_s, {7: 100 * MB, 8: 200 * MB, 10: 190 * MB})
    shot = replace(shot, zones=ZONES, info={"mem_unexplained": 90 * MB})
    drive.engine.observe(shot, drive.now_s, {worker: account})
    shown.metrics.looked(replace(shot, anomalies=("more used than there is",)), 0.0003)
    stopped = {"seen_to_revoke_s": 0.001, "seen_to_kill_s": 0.06, "seen_to_gone_s": 0.07}
    shown.metrics.stopped({"fence": "sigkill", **stopped})
    return first, shown.text().decode()


async def _answer(model: str, job: Mapping[str, Any], emit: Any) -> Any:
    if job["messages"][-1]["content"] == "denied":
        raise QuotaDenied("no room")
    emit("a")
    return {**await text_handler(model, job), "text": "a", "queued_s": 0.02}


async def _work(front: Front) -> None:
    await front.chat("hi", stream=True)
    await front.chat("denied")
    assert front.engine is not None
    figures = Figures(lambda _: None)
    figures.batches.update({Why.ALL: 2, Why.WINDOW: 1})
    for rows in (1, 3, 8):
        figures.forward(rows)
    figures.growing = 1
    front.engine.peer.notify("work", {"model": "talk", "instance": 0, **figures.shown()})


@cache
def front_texts() -> tuple[str, str]:
    """(of an umad-serve that has just started, of one that has answered), the daemon's behind."""
    found: list[str] = []

    async def scenario() -> None:
        async with serving(make_settings(), _answer) as front:
            found.append((await front.client.get("/metrics")).text)
            await _work(front)
            async with asyncio.timeout(10):
                while 'umad_serve_generating{model="talk"} 1' not in (  # noqa: ASYNC110
                    text := (await front.client.get("/metrics")).text
                ):
                    await asyncio.sleep(0.01)
            found.append(text)

    answers = iter([text.encode() for text in daemon_texts()])
    later = daemon_texts()[1].encode()
    with (
        patch.object(metrics, "_ask", lambda _: next(answers, later)),
        patch.object(metrics, "KEPT_S", 0.0),
    ):
        run(scenario())
    return found[0], found[1]


def front_alone() -> str:
    """What umad-serve itself exports."""
    return front_texts()[1].removesuffix(daemon_texts()[1])
