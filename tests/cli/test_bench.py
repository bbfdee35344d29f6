"""umadctl bench: what is sent, how it is timed, and what is said of it."""

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from rich.console import Console

from tests.daemon.running import ROOT
from tests.serve.standin import make_settings, run, serving
from umad.cli import bench, load
from umad.cli.load import Measured, Outcome, Plan
from umad.errors import QuotaDenied
from umad.serve.link import pack_vector

PLAN = Plan(
    url="http://127.0.0.1:1", kind="chat", model="talk", mix=((8, 3.0), (100, 1.0)), rate=10.0
)


def outcomes() -> list[Outcome]:
    return [
        Outcome(8, at_s=number / 10, seconds=number / 100, first_s=number / 200, tokens=4)
        for number in range(1, 101)
    ]


def shown(report: Mapping[str, Any]) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        for part in bench.as_text(report):
            console.print(part)
    return captured.get()


def test_percentiles_are_times_that_were_measured():
    values = [number / 100 for number in range(1, 101)]
    random.shuffle(values)
    assert bench.percentiles(values) == {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    assert bench.percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert bench.percentiles([]) == {}


def test_errors_are_no_answers_and_every_figure_says_of_what():
    failed = [Outcome(100, at_s=1, seconds=0.001, error="429 overloaded")] * 20
    late = [Outcome(8, at_s=29.9, seconds=5)]  # ended after it was measured
    report = bench.judged(PLAN, Measured([*outcomes(), *failed, *late], 3.0, 30.0), 0.5)
    assert (report["requests"], report["answered"]) == (121, 101)
    assert report["errors"] == {"429 overloaded": 20}
    assert report["answered_per_s"] == pytest.approx(100 / 30)
    assert report["goodput_per_s"] == pytest.approx(50 / 30)
    assert report["goodput_ratio"] == pytest.approx(50 / 121)
    assert report["seconds"]["8"]["p50"] == 0.51
    assert report["seconds"]["100"] == {}
    text = shown(report)
    assert "answered 101 of 121" in text
    assert "20  429 overloaded" in text
    assert "lags" not in text
    assert "core itself" not in text
    json.dumps(report)


def test_figures_that_the_program_itself_may_have_spoilt_are_said_to_be():
    late = [Outcome(8, at_s=1, seconds=0.1, late_s=0.5)] * 3
    text = shown(bench.judged(PLAN, Measured(late, 29.0, 30.0), 1))
    for doubt in ("this program lags", "97% of a core itself", "measure for longer"):
        assert doubt in text


def test_arrivals_are_a_poisson_process():
    times = list(load.due_times(50, 200, random.Random(1)))
    assert len(times) == pytest.approx(10_000, rel=0.05)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert spread == pytest.approx(mean**2, rel=0.1)  # an exponential's
    assert times == list(load.due_times(50, 200, random.Random(1)))


def test_no_two_inputs_are_the_same_and_the_mix_is_kept():
    def text(number: int) -> str:
        made = load.request_of(PLAN, 8, random.Random(number))
        return str(made["json"]["messages"][0]["content"])

    assert len({text(number) for number in range(100)}) == 100
    assert len(text(0).split()) == 8
    assert bench._Mix().convert("8:80,100:20", None, None) == ((8, 80.0), (100, 20.0))
    for wrong in ("x", "0", "8:0", "8:nan", "8:1,"):
        with pytest.raises(click.BadParameter):
            bench._Mix().convert(wrong, None, None)


async def handler(model: str, job: Mapping[str, Any], emit: Any) -> Any:
    if model == "embed":
        return {"vectors": [pack_vector([0.5])], "tokens": 4}
    if model == "hear":
        assert job["audio"].startswith(b"RIFF")
        return {"text": "said", "duration_s": 1.0}
    if model == "paint":
        raise QuotaDenied("no room")
    emit("a")
    await asyncio.sleep(0.02)
    return {"text": "ab", "prompt_tokens": 3, "completion_tokens": 2, "finish_reason": "stop"}


def measured_against(answer: Any, **plan: Any) -> list[Outcome]:
    """What is measured of a server that answers so, without a network."""

    async def scenario() -> list[Outcome]:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            made = replace(PLAN, **{"rate": None, "warm_up_s": 0.0, "duration_s": 0.2, **plan})
            return (await load.generate(client, made)).outcomes

    return asyncio.run(scenario())


@pytest.mark.slow
def test_a_time_counts_from_when_the_request_was_due():
    def holds_up_everything(_: httpx.Request) -> httpx.Response:
        until_s = time.monotonic() + 0.05
        while time.monotonic() < until_s:
            pass
        return httpx.Response(200)

    found = measured_against(holds_up_everything, kind="embeddings", rate=100.0)
    assert max(one.late_s for one in found) > 0.2  # who is due waits for this program itself
    assert all(one.seconds >= one.late_s for one in found)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ('data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "the stream was cut"),
        ('data: {"error": {"code": "worker_lost"}}\n\n', "within the stream: worker_lost"),
        ("data: nonsense\n\n", "answer not understood"),
        ("", "the stream was cut"),
    ],
)
def test_a_stream_that_does_not_end_well_is_no_answer(sent, says):
    found = measured_against(lambda _: httpx.Response(200, text=sent))
    assert {one.error for one in found} == {says}


@pytest.mark.slow
def test_each_kind_is_asked_answered_and_timed():
    async def scenario():
        async with serving(make_settings(), handler) as front, httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{front.port}"

            async def measured(kind: str, model: str, **more: Any) -> list[Outcome]:
                times: dict[str, Any] = {"warm_up_s": 0.1, "duration_s": 0.3, "timeout_s": 5.0}
                plan = Plan(url, kind, model, ((1, 1.0),), **{**times, **more})
                return (await load.generate(client, plan)).outcomes

            for one in await measured("chat", "talk", rate=50.0):
                assert (one.error, one.tokens) == ("", 2)
                assert 0 < one.first_s < one.seconds
                assert one.seconds >= 0.02
            for kind, model, tokens in (
                ("completions", "talk", 2),
                ("embeddings", "embed", 0),
                ("transcriptions", "hear", 0),
            ):
                found = await measured(kind, model, clients=2)
                assert {(one.error, one.tokens) for one in found} == {("", tokens)}, kind
            denied = await measured("images", "paint", clients=1)
            assert {one.error for one in denied} == {"503 quota_denied"}
            assert len(denied) <= 4  # it does not ask again at once
            absent = await measured("completions", "nobody", clients=1)
            assert {one.error for one in absent} == {"404 model_not_found"}
            slow = await measured("completions", "talk", clients=1, timeout_s=0.001)
            assert {one.error for one in slow} == {"timed out"}
            front.engine.end()
        closed = await load.generate(
            httpx.AsyncClient(), Plan(url, "chat", "talk", ((1, 1.0),), None, 1, 0.0, 0.1)
        )
        assert {one.error for one in closed.outcomes} == {"no connection"}

    run(scenario())


@pytest.mark.slow
def test_the_command_against_a_server(tmp_path: Path):
    async def bench_of(*words: object) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "umad.cli.main", "bench", *map(str, words)),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, wrong = await process.communicate()
        return process.returncode or 0, said.decode(), wrong.decode()

    async def scenario():
        async with serving(make_settings(), handler) as front:
            url, short = f"http://127.0.0.1:{front.port}/v1", ["--warm-up=100ms", "--duration=1s"]
            picture = tmp_path / "bench.svg"
            code, said, wrong = await bench_of(
                url, *short, "--rate=20", "--lengths=8:80,100:20", "--json", "--plot", picture
            )
            assert code == 0, wrong
            report = json.loads(said)
            assert report["plan"]["model"] == "talk"  # the server's first of that kind
            assert report["answered"] == report["requests"] > 5
            assert report["count"]["8"] + report["count"]["100"] == report["answered"]
            assert report["tokens_per_s"] > 0
            assert picture.read_bytes().startswith(b"<?xml")
            code, said, _ = await bench_of(url, *short, "--kind=images", "--clients=2")
            assert code == 1
            assert "503 quota_denied" in said
            for words, says in (
                (["--rate=1", "--clients=1"], "choose one"),
                (["--plot=a.txt"], ".svg or .png"),
                (["--lengths=many"], "LENGTH:WEIGHT"),
            ):
                code, _, wrong = await bench_of(url, *words)
                assert code == 2
                assert says in wrong
        code, _, wrong = await bench_of(url, *short)
        assert code == 1
        assert "gives no models" in wrong

    run(scenario())
