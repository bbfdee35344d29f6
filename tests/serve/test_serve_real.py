"""umad-serve whole: the real daemon, real models, the openai client, and a kill."""

import base64
import concurrent.futures
import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI
from PIL import Image, ImageChops

from tests.demo.fixtures import checkpoints, tone
from tests.serve.processes import ROOT, write_config
from umad.client import connect
from umad.client.blocking import Client

pytestmark = [pytest.mark.slow, pytest.mark.models, pytest.mark.timeout(300)]


def wait_for(condition: Callable[[], bool], timeout_s: float = 90, every_s: float = 0.05) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        threading.Event().wait(every_s)


@contextlib.contextmanager
def program(log: Path, module: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", module, "--log-format=json", *arguments]
    with log.open("wb") as sink, subprocess.Popen(command, stderr=sink, cwd=ROOT) as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()


class Served:
    """A running umad-serve."""

    def __init__(self, log: Path, socket: Path) -> None:
        self.log = log
        self.socket = str(socket)
        wait_for(lambda: "serve.listening" in log.read_text())
        self.base = f"http://127.0.0.1:{self.events('serve.listening')[0]['port']}"
        self.http = httpx.Client(base_url=self.base, trust_env=False, timeout=60)

    def events(self, name: str) -> list[dict]:
        lines = (json.loads(line) for line in self.log.read_text().splitlines())
        return [line for line in lines if line["event"] == name]

    def ready(self) -> bool:
        return self.http.get("/readyz").status_code == 200

    def booked(self, worker: str, look: Client) -> tuple[int, int]:
        """What the daemon has booked for a worker, and its quota."""
        (found,) = [one for one in look.call("status")["workers"] if one["name"] == worker]
        return found["booked"], found["quota"]

    def client(self) -> OpenAI:
        return OpenAI(
            base_url=self.base + "/v1",
            api_key="unused",
            max_retries=0,
            http_client=httpx.Client(trust_env=False, timeout=60),
        )

    @property
    def engine_pid(self) -> int:
        return int(self.events("engine.start")[-1]["pid"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("real")
    places = checkpoints()
    kinds = {"llama": "chat", "vision": "vision", "sdxl": "image", "whisper": "speech"}
    models = {
        name: {"kind": kind, "path": str(places / name), "quota": "200MiB", "peak": "300MiB"}
        for name, kind in kinds.items()
    }
    # Little beyond its weights: a long answer needs more than the quota, for as long as it grows.
    models["tight"] = {**models["llama"], "quota": "20MiB"}
    config = write_config(folder, models, serve='runtime_quota = "1GiB"')
    text = config.read_text().replace("[serve]", '[memory]\nbudget = "3GiB"\n[serve]')
    # The groups of a packaged umad need not exist on the machine that runs the tests.
    config.write_text(text.replace("[daemon]", '[daemon]\ngroup = "root"\nadmin_group = "root"'))
    socket = folder / "umad.sock"
    with (
        program(folder / "daemon.log", "umad.daemon.main", f"--config={config}", "--permissive"),
        program(folder / "serve.log", "umad.serve.main", f"--config={config}"),
    ):
        served = Served(folder / "serve.log", socket)
        with served.http:
            wait_for(served.ready)
            yield served


def test_the_openai_client_gets_every_kind_of_answer(served):
    with served.client() as client:
        assert {model.id for model in client.models.list()} == {
            "llama",
            "vision",
            "sdxl",
            "whisper",
            "tight",
        }
        said = client.chat.completions.create(
            model="llama", messages=[{"role": "user", "content": "hello"}], max_tokens=9
        )
        assert said.usage is not None
        assert 1 <= said.usage.completion_tokens <= 9
        system = {"role": "system", "content": "You keep a ledger, and say so. " * 30}
        cached = []
        for number in range(3):
            stream = client.chat.completions.create(
                model="llama",
                messages=[system, {"role": "user", "content": f"What is in {number}?"}],
                max_tokens=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            usage = list(stream)[-1].usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        assert cached[0] < 100 < cached[1] == cached[2] < usage.prompt_tokens
        told = 'umad_serve_prompt_tokens_cached_total{model="llama"} ' + str(float(sum(cached)))
        wait_for(lambda: told in served.http.get("/metrics").text)
        png = io.BytesIO()
        Image.new("RGB", (64, 64), "red").save(png, "PNG")
        url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
        seen = client.chat.completions.create(
            model="vision",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "what?"},
                        {"type": "image_url", "image_url": {"url": url}},
                    ],
                }
            ],
            max_tokens=3,
        )
        assert seen.choices[0].message.role == "assistant"
        drawn = client.images.generate(
            model="sdxl", prompt="a cat", size="64x64", extra_body={"steps": 1}
        )
        assert drawn.data is not None
        image = Image.open(io.BytesIO(base64.b64decode(drawn.data[0].b64_json or "")))
        assert image.size == (64, 64)
        sound = io.BytesIO()
        with wave.open(sound, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(bytes(32000))
        heard = client.audio.transcriptions.create(
            model="whisper",
            file=("a.wav", sound.getvalue()),
            language="de",
            response_format="verbose_json",
        )
        assert (heard.duration, heard.language) == (1.0, "german")
        assert heard.segments is not None
        assert 0 <= heard.segments[0].start <= heard.segments[-1].end <= 1


def left(served: Served, client: OpenAI, messages: Any) -> float:
    """Seconds until the bytes of a stream that is left are free."""
    stream = client.chat.completions.create(
        model="tight", messages=messages, max_tokens=1500, stream=True
    )
    next(stream)
    with connect(served.socket) as look:
        booked, quota = served.booked("tight", look)
        assert booked > quota
        began_s = time.monotonic()
        stream.close()
        wait_for(lambda: served.booked("tight", look)[0] <= quota, 2, every_s=0.002)
        return time.monotonic() - began_s


def test_a_stream_says_what_the_whole_answer_says_and_one_that_is_left_frees_its_bytes(served):
    asked: dict[str, Any] = {
        "model": "llama",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
    }
    with served.client() as client:
        whole = client.chat.completions.create(**asked, max_tokens=12)
        *pieces, last = client.chat.completions.create(
            **asked, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert said == whole.choices[0].message.content
        assert last.usage == whole.usage
        assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        took_s = [left(served, client, asked["messages"]) for _ in range(5)]
        assert statistics.median(took_s) < 0.1, took_s  # the machine may be busy in between
        requests = served.http.get("/status").json()
        assert requests["models"]["tight"]["requests"] == 0
        assert requests["requests"]["client_gone"] == 5
        assert client.chat.completions.create(**asked, max_tokens=2).choices
        with pytest.raises(NotFoundError):
            client.chat.completions.create(model="nobody", messages=asked["messages"])
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        asked["messages"] = [{"role": "user", "content": [image]}]
        with pytest.raises(BadRequestError, match="vision"):
            client.chat.completions.create(**asked)
        with pytest.raises(APIStatusError) as caught:
            client.images.generate(model="sdxl", prompt="x", size="16384x16384")
        assert caught.value.status_code == 413


def test_images_and_files_that_wait_are_done_together(served):
    def paint(seed: int) -> bytes:
        body = {"model": "sdxl", "prompt": "a cat", "size": "64x64", "steps": 12, "seed": seed}
        answer = served.http.post("/v1/images/generations", json=body)
        assert answer.status_code == 200, answer.text
        return base64.b64decode(answer.json()["data"][0]["b64_json"])

    def hear(seconds: int) -> str:
        answer = served.http.post(
            "/v1/audio/transcriptions",
            data={"model": "whisper", "language": "en"},
            files={"file": ("a.wav", tone(seconds))},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["text"]

    alone = {call: [call(number) for number in (1, 2, 3, 4)] for call in (paint, hear)}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for call, model in ((paint, "sdxl"), (hear, "whisper")):
            for _ in range(5):  # until they have come before the first of them was done
                together = list(pool.map(call, (1, 2, 3, 4)))
                work = served.http.get("/status").json()["models"][model]["work"]
                if work["rows_sum"] > sum(work["rows"]):
                    break
            else:
                pytest.fail(f"{model} did each alone: {work}")
            if call is hear:
                assert together == alone[call]
            for ours, theirs in zip(together, alone[call], strict=True) if call is paint else ():
                difference = ImageChops.difference(
                    Image.open(io.BytesIO(ours)), Image.open(io.BytesIO(theirs))
                )
                assert max(high for _, high in difference.getextrema()) <= 1


def test_threads_stay_few_after_forwards_of_every_worker(served):
    for _ in range(3):
        body = {"model": "llama", "prompt": "x", "max_tokens": 2}
        assert served.http.post("/v1/completions", json=body).status_code == 200
    threads = list(Path(f"/proc/{served.engine_pid}/task").iterdir())
    assert len(threads) <= 8 + 2 * (os.cpu_count() or 1)


def test_a_killed_engine_costs_503s_and_comes_back_with_all_models(served):
    # By chance an answer may end soon; the likeliest tokens go on to the end of the context.
    body = {"model": "llama", "prompt": "x", "max_tokens": 100_000, "temperature": 0}
    first = served.engine_pid
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(served.http.post, "/v1/completions", json=body) for _ in range(6)]
        wait_for(lambda: served.http.get("/status").json()["models"]["llama"]["requests"] == 6)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: all(answer.done() for answer in answers), 5)
    for answer in answers:
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["code"] == "worker_lost"
        assert int(answer.result().headers["retry-after"]) >= 1
    assert served.http.get("/healthz").status_code == 200
    wait_for(served.ready)
    assert served.engine_pid != first
    body["max_tokens"] = 2
    assert served.http.post("/v1/completions", json=body).status_code == 200
