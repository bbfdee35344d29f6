"""The front's /metrics: its own figures, the daemon's behind them."""

import asyncio
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.daemon.running import running
from tests.promtool import check_metrics
from tests.serve.standin import make_settings, run, serving, text_handler, until
from umad import __version__
from umad.config import Settings
from umad.errors import QuotaDenied
from umad.serve import metrics

CHAT = "/v1/chat/completions"


def beside(socket: Path | str, **serve: Any) -> Settings:
    settings = make_settings(**serve)
    return replace(settings, daemon=replace(settings.daemon, socket=str(socket)))


NOBODY = beside("/nowhere/umad.sock")


def requests_of(text: str) -> dict[tuple[str, str, str], float]:
    return {
        (labels["route"], labels["model"], labels["status"]): sample
        for (name, sample, labels) in samples(text)
        if name == "umad_serve_requests_total"
    }


def samples(text: str) -> list[tuple[str, float, Mapping[str, str]]]:
    return [
        (sample.name, sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def value(text: str, name: str, **labels: str) -> float:
    [found] = [sample for (its, sample, has) in samples(text) if (its, dict(has)) == (name, labels)]
    return found


async def seen(front: Any) -> str:
    answer = await front.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return str(answer.text)


async def counted(front: Any, *key: str) -> str:
    """The text as soon as one such request is in it."""
    async with asyncio.timeout(10):
        while requests_of(text := await seen(front)).get(key) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return text


def test_every_request_is_counted_by_route_model_and_status():
    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        said = job["messages"][-1]["content"]
        if said == "denied":
            raise QuotaDenied("no room")
        if said == "bug":
            return {"no": "text"}
        return await text_handler(model, job)

    async def scenario():
        async with serving(NOBODY, handler) as front:
            for _ in range(2):
                assert (await front.chat("hi")).status_code == 200
            await front.chat("denied")
            await front.chat("bug")
            await front.chat(model="see")
            await front.chat(model='evil\n"}name')
            await front.client.post(CHAT, content=b"{")
            await front.client.get("/v1/models/talk")
            await front.client.get("/v1/models/whatever-a-client-writes")
            await front.client.get("/also/what/a/client/writes")
            text = await seen(front)
            assert requests_of(text) == {
                (CHAT, "talk", "200"): 2,
                (CHAT, "talk", "503"): 1,
                (CHAT, "talk", "500"): 1,
                (CHAT, "see", "200"): 1,
                (CHAT, "", "404"): 1,
                (CHAT, "", "400"): 1,
                ("/v1/models/{name}", "", "200"): 1,
                ("/v1/models/{name}", "", "404"): 1,
                ("other", "", "404"): 1,
            }
            seconds = "umad_serve_request_seconds_count"
            assert value(text, seconds, route=CHAT, model="talk") == 4
            assert value(text, "umad_serve_refusals_total", code="quota_denied") == 1
            assert value(text, "umad_serve_model_ready", model="talk") == 1
            assert value(text, "umad_serve_engine_up") == 1
            assert "_created" not in text
            for layer in ("gate", "body", "queue", "engine", "send"):
                layers = value(text, "umad_serve_layer_seconds_count", layer=layer, model="talk")
                assert layers == (3 if layer == "send" else 4)  # a 500 is sent from outside
            front.link.restarts = 3
            assert value(await seen(front), "umad_serve_engine_restarts_total") == 3

    run(scenario())


def test_who_is_turned_away_and_who_hangs_up_are_counted_too():
    async def handler(_model: str, _job: Mapping[str, Any]) -> Any:
        await asyncio.Event().wait()

    async def scenario():
        settings = beside("/nowhere/umad.sock", requests_per_client_max=1)
        async with serving(settings, handler) as front:
            body = json.dumps({"model": "talk", "prompt": "x"}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            await until(lambda: len(front.engine.jobs) == 1)
            assert value(await seen(front), "umad_serve_requests_waiting", model="talk") == 1
            assert (await front.chat()).status_code == 429  # by the gate, before any route
            writer.close()
            await writer.wait_closed()
            text = await counted(front, "/v1/completions", "talk", "499")
            assert requests_of(text)[CHAT, "", "429"] == 1
            assert value(text, "umad_serve_requests_waiting", model="talk") == 0

    run(scenario())


def test_without_the_daemon_the_fronts_own_figures_are_there():
    async def scenario():
        async with serving(NOBODY, None) as front:
            text = await seen(front)
            assert value(text, "umad_up") == 0
            assert value(text, "umad_serve_engine_up") == 0

    run(scenario())


def test_however_many_ask_the_daemon_is_asked_once(monkeypatch):
    asked: list[str] = []

    def ask(socket: str) -> bytes:
        asked.append(socket)
        return b"daemon_says 1\n"

    monkeypatch.setattr(metrics, "_ask", ask)
    monkeypatch.setattr(metrics, "KEPT_S", 60)

    async def scenario():
        async with serving(NOBODY, None) as front:
            texts = await asyncio.gather(*(seen(front) for _ in range(20)))
            assert all(text.endswith("daemon_says 1\n") for text in texts)

    run(scenario())
    assert asked == ["/nowhere/umad.sock"]


@pytest.mark.slow
def test_the_daemons_figures_are_shown_too_and_prometheus_finds_no_fault():
    async def scenario(socket: Path) -> str:
        async with serving(beside(socket)) as front:
            await front.chat("hi")
            return await seen(front)

    with (
        tempfile.TemporaryDirectory(prefix="umad-") as folder,
        running(Path(folder)) as daemon,
        daemon.client() as client,
        client.worker("llama", quota="64MiB"),
    ):
        text = asyncio.run(scenario(daemon.socket))
    assert value(text, "umad_build_info", version=__version__) == 1
    assert value(text, "umad_worker_quota_bytes", worker="llama") == 64 << 20
    assert requests_of(text) == {(CHAT, "talk", "200"): 1}
    assert check_metrics(text.encode()) == ""


def test_the_log_has_one_line_for_a_request_that_says_where_it_waited():
    async def handler(model: str, job: Mapping[str, Any], emit: Any) -> Any:
        if job["messages"][-1]["content"] == "denied":
            raise QuotaDenied("no room", details={"reason": "pool_full"})
        emit("a")
        await asyncio.sleep(0.05)
        return {**await text_handler(model, job), "text": "a", "queued_s": 0.02}

    async def scenario():
        async with serving(NOBODY, handler) as front:
            answer = await front.chat("secret", stream=True)
            assert answer.status_code == 200
            await front.chat("denied")
            (served, denied) = [line for line in lines if line["event"] == "request.end"]
            assert served["request"] == answer.headers["x-request-id"]
            assert (served["route"], served["model"], served["status"]) == (CHAT, "talk", 200)
            assert served["queue_s"] == 0.02
            assert served["engine_s"] >= 0.02
            assert 0 < served["first_s"] < served["seconds"]
            layers = ("gate_s", "body_s", "queue_s", "engine_s")
            assert sum(served[name] for name in layers) <= served["seconds"] + 0.001
            assert (denied["code"], denied["reason"]) == ("quota_denied", "pool_full")
            assert (denied["status"], denied["log_level"]) == (503, "info")
            text = await seen(front)
            assert value(text, "umad_serve_first_token_seconds_count", model="talk") == 1

    with capture_logs() as lines:
        run(scenario())
    assert "secret" not in str(lines)
