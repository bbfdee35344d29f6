"""The routes: right answers, right refusals, over a real socket."""

import asyncio
import base64
import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.serve.standin import KINDS, make_settings, run, serving, text_handler, until
from umad.errors import DaemonUnavailable, NeverFits, QuotaDenied, RemoteProtocolError
from umad.serve import app
from umad.serve.link import ModelState, pack_vector

PNG = b"\x89PNG\r\n\x1a\nnot really"


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "details"}
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    return dict(error)


def test_chat_answers_in_openai_form():
    async def scenario():
        async with serving() as front:
            response = await front.chat(
                "hi", temperature=0.5, top_p=0.9, seed=-1, stop="end", max_tokens=7, user="x"
            )
            assert response.status_code == 200
            body = response.json()
            assert body["object"] == "chat.completion"
            assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
            assert body["choices"][0]["finish_reason"] == "stop"
            assert body["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            assert front.engine.jobs == [
                (
                    "talk",
                    {
                        "messages": [{"role": "user", "content": "hi"}],
                        "max_tokens": 7,
                        "temperature": 0.5,
                        "top_p": 0.9,
                        "seed": 2**63 - 1,
                        "stop": ["end"],
                    },
                )
            ]

    run(scenario())


def test_vision_gets_the_image_and_chat_refuses_it():
    content = [
        {"type": "text", "text": "what is this?"},
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()},
        },
    ]

    async def handler(_model: str, _job: Mapping[str, Any]) -> Any:
        return {"text": "a", "prompt_tokens": 1, "completion_tokens": 1, "finish_reason": "length"}

    async def scenario():
        async with serving(handler=handler) as front:
            assert (await front.chat(content, model="see")).status_code == 200
            parts = front.engine.jobs[0][1]["messages"][0]["content"]
            assert parts == [
                {"type": "text", "text": "what is this?"},
                {"type": "image", "image": PNG},
            ]
            error = error_of(await front.chat(content, model="talk"), 400)
            assert "vision" in error["message"]
            content[1]["image_url"] = {"url": "http://example.org/cat.png"}
            error = error_of(await front.chat(content, model="see"), 400)
            assert error["param"] == "messages.0.content.1.image_url.url"
            assert error["message"] == (
                "messages.0.content.1.image_url.url: umad fetches nothing from the network: send "
                'the image itself as "data:image/png;base64,..."'
            )

    run(scenario())


SEGMENTS = [{"id": 0, "start": 0.5, "end": 1.25, "text": " s\u00e4id", "tokens": [5, 6]}]


def test_completions_embeddings_images_and_speech():
    vector = [0.5, -1.25, 3.0]

    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        if model == "embed":
            return {"vectors": [pack_vector(vector) for _ in job["texts"]], "tokens": 4}
        if model == "paint":
            return {"images": [PNG] * job["n"]}
        if model == "hear":
            assert job["audio"] == b"RIFFsound"
            heard = {"text": "said", "duration_s": 1.5, "language": "english"}
            return heard | ({"segments": json.dumps(SEGMENTS).encode()} if job["segments"] else {})
        return await text_handler(model, job)

    async def scenario():
        async with serving(handler=handler) as front:
            post = front.client.post
            body = (await post("/v1/completions", json={"model": "talk", "prompt": ["go"]})).json()
            assert body["choices"][0]["text"] == "go"
            assert body["object"] == "text_completion"
            ask = {"model": "embed", "input": ["a", "b"]}
            body = (await post("/v1/embeddings", json=ask)).json()
            assert [row["embedding"] for row in body["data"]] == [vector, vector]
            assert [row["index"] for row in body["data"]] == [0, 1]
            body = (await post("/v1/embeddings", json={**ask, "encoding_format": "base64"})).json()
            raw = base64.b64decode(body["data"][1]["embedding"])
            assert list(struct.unpack("<3f", raw)) == vector
            body = (
                await post(
                    "/v1/images/generations",
                    json={"model": "paint", "prompt": "x", "n": 2, "size": "64x128", "seed": 5},
                )
            ).json()
            assert [base64.b64decode(image["b64_json"]) for image in body["data"]] == [PNG, PNG]
            job = front.engine.jobs[-1][1]
            assert (job["width"], job["height"], job["seed"]) == (64, 128, 5)
            for form, answer in (
                ("json", {"text": "said"}),
                ("text", "said\n"),
                (
                    "verbose_json",
                    {
                        "text": "said",
                        "task": "transcribe",
                        "language": "english",
                        "duration": 1.5,
                        "segments": SEGMENTS,
                    },
                ),
            ):
                response = await post(
                    "/v1/audio/transcriptions",
                    files={"file": ("a.wav", b"RIFFsound")},
                    data={"model": "hear", "language": "en", "response_format": form},
                )
                assert response.status_code == 200
                assert (response.text if form == "text" else response.json()) == answer

    run(scenario())


MALFORMED: list[tuple[str, Any, str]] = [
    ("/v1/chat/completions", b"{not json", "JSON"),
    ("/v1/chat/completions", b"[]", ""),
    ("/v1/completions", b'{"model": "talk", "prompt": "\xff"}', ""),
    ("/v1/completions", b'{"model": "talk", "prompt": "\\ud800"}', ""),
    ("/v1/completions", b'{"model": "talk", "prompt": "x", "temperature": NaN}', "temperature"),
    ("/v1/completions", b"[" * 100_000, ""),
    ("/v1/completions", b'{"model": "talk", "prompt": ["\\ud800"]}', ""),
    ("/v1/chat/completions", {"model": "talk"}, "messages"),
    ("/v1/chat/completions", {"model": "talk", "messages": []}, "messages"),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream=true"),
    (
        "/v1/chat/completions",
        {"frequency_penalty": 0.5},
        "frequency_penalty: penalties are not supported; leave it out",
    ),
    ("/v1/chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("/v1/completions", {"model": "talk", "prompt": "x", "logprobs": 0}, "logprobs"),
    (
        "/v1/chat/completions",
        {"tools": [{"type": "function"}]},
        "tools: not supported; leave it out",
    ),
    ("/v1/chat/completions", {"logprobs": True}, "logprobs"),
    ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {"max_tokens": True}, "max_tokens"),
    ("/v1/chat/completions", {"max_tokens": "5"}, "max_tokens"),
    ("/v1/chat/completions", {"temperature": 2.1}, "temperature"),
    ("/v1/chat/completions", {"top_p": 0}, "top_p"),
    ("/v1/chat/completions", {"n": 9}, "n"),
    ("/v1/chat/completions", {"stop": ["a"] * 5}, "stop"),
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, 'only {"type": "text"}'),
    ("/v1/completions", {"model": "talk", "prompt": ["a", "b"]}, "one prompt"),
    ("/v1/embeddings", {"model": "embed", "input": []}, "input"),
    ("/v1/embeddings", {"model": "embed", "input": [1, 2]}, "token numbers"),
    ("/v1/embeddings", {"model": "embed", "input": "a", "dimensions": 8}, "dimensions"),
    ("/v1/images/generations", {"model": "paint", "prompt": "x", "size": "big"}, "size"),
    ("/v1/images/generations", {"model": "paint", "prompt": "x", "size": "64x20000"}, "side"),
    (
        "/v1/images/generations",
        {"model": "paint", "prompt": "x", "response_format": "url"},
        "b64_json",
    ),
    ("/v1/audio/transcriptions", {"model": "hear"}, "file"),
    ("/v1/embeddings", {"model": "talk", "input": "a"}, "kind chat"),
    # Small on the wire, and some fifty times as large once read.
    ("/v1/embeddings", b'{"model": "embed", "input": [' + b"{}," * 70_000 + b'""]}', "elements"),
    ("/v1/embeddings", b'{"model": "embed", "input": [' + b'"",' * 70_000 + b'""]}', "elements"),
]


def test_a_malformed_body_is_a_400_that_says_what_is_wrong():
    whole = {"model": "talk", "messages": [{"role": "user", "content": "secret"}]}

    async def scenario():
        async with serving() as front:
            for path, body, says in MALFORMED:
                if isinstance(body, dict) and "model" not in body:
                    body = {**whole, **body}
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                response = await front.client.post(
                    path, content=content, headers={"content-type": "application/json"}
                )
                error = error_of(response, 400)
                assert error["type"] == "invalid_request_error"
                assert says in error["message"] or says in (error["param"] or ""), error
                assert "secret" not in response.text
            assert front.engine.jobs == []

    run(scenario())


def test_unknown_routes_methods_and_models():
    async def scenario():
        async with serving() as front:
            assert error_of(await front.client.get("/v2/x"), 404)["code"] == "unknown_route"
            response = await front.client.get("/v1/chat/completions")
            assert error_of(response, 405)["code"] == "method_not_allowed"
            error = error_of(await front.chat(model="nobody"), 404)
            assert error["code"] == "model_not_found"
            assert error["details"]["models"] == list(KINDS)
            error_of(await front.client.get("/v1/models/nobody"), 404)
            assert (await front.client.get("/v1/models/talk")).json()["kind"] == "chat"
            listed = (await front.client.get("/v1/models")).json()
            assert [card["id"] for card in listed["data"]] == list(KINDS)

    run(scenario())


def test_a_model_that_is_not_ready_is_a_503_that_says_why():
    async def scenario():
        async with serving() as front:
            engine = front.engine
            for state, code, says in (
                (ModelState("loading", "reading", 0.25), "model_loading", "25%"),
                (
                    ModelState("waiting", error=QuotaDenied("no room").to_wire()),
                    "quota_denied",
                    "no room",
                ),
                # What never fits is the configuration's fault, not this request's.
                (
                    ModelState("failed", error=NeverFits("too big").to_wire()),
                    "model_failed",
                    "too big",
                ),
                (
                    ModelState("waiting", error=DaemonUnavailable("start it").to_wire()),
                    "arbiter_unavailable",
                    "start it",
                ),
            ):
                engine.tell("talk", state)
                await until(lambda code=code: front.link.status("talk")["state"] != "ready")
                for _ in range(200):
                    error = error_of(await front.chat(), 503)
                    if error["code"] == code:
                        break
                assert error["code"] == code
                assert says in error["message"]
                ready = await front.client.get("/readyz")
                assert ready.status_code == 503
                assert ready.json()["models"]["talk"]["state"] == state.state
                assert ready.json()["models"]["see"]["state"] == "ready"
                assert (await front.client.get("/healthz")).status_code == 200
            assert engine.jobs == []

    run(scenario())


def test_without_an_engine_the_front_answers_503_at_once():
    async def scenario():
        async with serving(handler=None) as front:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            assert error_of(await front.chat(), 503)["code"] == "worker_lost"
            assert loop.time() - began_s < 0.25
            assert (await front.client.get("/healthz")).status_code == 200
            assert (await front.client.get("/status")).json()["engine"]["running"] is False

    run(scenario())


def test_an_engine_that_dies_mid_request_is_a_503_and_the_next_one_serves():
    async def stuck(_model: str, _job: Mapping[str, Any]) -> Any:
        await asyncio.Event().wait()

    async def scenario():
        settings = make_settings()
        async with serving(settings, stuck) as front:
            first = front.engine
            asked = [asyncio.ensure_future(front.chat()) for _ in range(5)]
            await until(lambda: len(first.jobs) == 5)
            first.end()
            for answer in await asyncio.gather(*asked):
                assert error_of(answer, 503)["code"] == "worker_lost"
            assert error_of(await front.chat(), 503)["code"] == "worker_lost"
            await front.attach(settings, text_handler)
            assert (await front.chat()).status_code == 200

    run(scenario())


def test_refusals_of_the_engine_keep_their_status_and_details():
    async def handler(_model: str, job: Mapping[str, Any]) -> Any:
        raise {
            "never": NeverFits("larger than the pool", details={"asked": 9, "budget": 5}),
            "denied": QuotaDenied("no room", retry_after_s=3, details={"asked": 2, "free": 1}),
            "odd": RemoteProtocolError("the daemon spoke nonsense"),
        }[job["messages"][0]["content"]]

    async def scenario():
        async with serving(handler=handler) as front:
            error = error_of(await front.chat("never"), 413)
            assert (error["code"], error["details"]["budget"]) == ("never_fits", 5)
            answers = [await front.chat("denied") for _ in range(10)]
            assert {error_of(answer, 503)["code"] for answer in answers} == {"quota_denied"}
            waits = [int(answer.headers["retry-after"]) for answer in answers]
            assert min(waits) >= 3
            assert len(set(waits)) > 1
            error_of(await front.chat("odd"), 503)
            refused = (await front.client.get("/status")).json()["requests"]["refused"]
            assert refused["quota_denied"] == 10

    run(scenario())


def test_every_request_gets_its_own_answer():
    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        await asyncio.sleep(int(job["prompt"]) % 7 / 1000)
        return await text_handler(model, job)

    async def scenario():
        settings = make_settings(requests_per_client_max=1000, queue_max=1000)
        async with serving(settings, handler) as front:

            async def ask(number: int) -> str:
                body = {"model": "talk", "prompt": str(number)}
                answer = await front.client.post("/v1/completions", json=body)
                return str(answer.json()["choices"][0]["text"])

            answers = await asyncio.gather(*(ask(number) for number in range(300)))
            assert answers == [str(number) for number in range(300)]

    run(scenario())


def test_a_client_that_hangs_up_cancels_its_work():
    hold = asyncio.Event()

    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        await hold.wait()
        return await text_handler(model, job)

    async def scenario():
        async with serving(handler=handler) as front:
            body = json.dumps({"model": "talk", "prompt": "x"}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                "Content-Type: application/json\r\n\r\n"
            ).encode()
            writers = []
            for _ in range(5):
                _, writer = await asyncio.open_connection("127.0.0.1", front.port)
                writer.write(head + body)
                writers.append(writer)
            await until(lambda: len(front.engine.jobs) == 5)
            for writer in writers[:4]:
                writer.close()
                await writer.wait_closed()
            await until(lambda: len(front.engine.cancelled) == 4)
            assert len(set(front.engine.cancelled)) == 4
            status = (await front.client.get("/status")).json()
            assert status["requests"]["client_gone"] == 4
            assert status["models"]["talk"]["requests"] == 1
            hold.set()
            writers[4].close()
            await writers[4].wait_closed()

    run(scenario())


def test_a_bug_of_ours_is_a_500_without_internals(caplog):
    async def handler(_model: str, _job: Mapping[str, Any]) -> Any:
        return {"no": "text"}

    async def scenario():
        async with serving(handler=handler) as front:
            error = error_of(await front.chat("secret"), 500)
            assert error["code"] == "internal"
            assert "text" not in error["message"]
            assert (await front.chat("secret")).status_code == 500  # and it goes on

    run(scenario())
    assert "secret" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("umad.serve.main", {"torch", "starlette", "uvicorn", "transformers"}),
        ("umad.serve.app", {"torch", "transformers", "numpy"}),
        ("umad.serve.supervisor", {"torch", "transformers", "numpy"}),
    ],
)
def test_the_front_holds_no_torch(module, unwanted):
    code = f"import {module}, sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not unwanted & set(done.stdout.split())


def test_a_cold_model_is_ready_and_an_answer_says_where_else_it_was_made():
    async def handler(model, job):
        return {**await text_handler(model, job), "device": "cpu"}

    async def scenario():
        async with serving(handler=handler) as front:
            engine = front.engine
            engine.tell("talk", ModelState("cold"))
            await until(lambda: front.link.status("talk")["state"] == "cold")
            assert (await front.client.get("/readyz")).status_code == 200
            card = (await front.client.get("/v1/models/talk")).json()
            assert card["state"] == "cold"
            answer = await front.chat()
            assert (answer.status_code, answer.headers["x-umad-device"]) == (200, "cpu")
            answer = await front.chat(stream=True)  # though no piece came before the result
            assert (answer.status_code, answer.headers["x-umad-device"]) == (200, "cpu")
            engine.tell("talk", ModelState("loading"))  # not asked for by anybody
            await until(lambda: front.link.status("talk")["state"] == "loading")
            assert (await front.client.get("/readyz")).status_code == 503
            assert (await front.chat()).status_code == 503

    run(scenario())


def test_an_answer_from_the_models_own_device_says_nothing_of_it():
    async def scenario():
        async with serving() as front:
            assert "x-umad-device" not in (await front.chat()).headers

    run(scenario())


@pytest.mark.slow
def test_an_answer_of_millions_of_numbers_holds_up_nobody():
    vector = pack_vector(number / 7 for number in range(1024))

    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        if model == "embed":
            return {"vectors": [vector] * len(job["texts"]), "tokens": 4}
        return await text_handler(model, job)

    async def scenario():
        async with serving(handler=handler) as front:
            ask = {"model": "embed", "input": ["x"] * 2048}
            large = asyncio.ensure_future(front.client.post("/v1/embeddings", json=ask))
            await until(lambda: bool(front.engine.jobs))
            slowest_s, loop = 0.0, asyncio.get_running_loop()
            while not large.done():
                began_s = loop.time()
                await asyncio.sleep(0)
                slowest_s = max(slowest_s, loop.time() - began_s)
            assert (await large).status_code == 200
            assert len((await large).content) > 2048 * 1024 * 10
            # Written in one go it takes seconds.
            assert slowest_s < 0.5

    run(scenario())


def test_an_engine_whose_loop_hangs_is_not_ready(monkeypatch):
    monkeypatch.setattr(app, "PING_S", 0.05)

    async def scenario():
        async with serving() as front:
            assert (await front.client.get("/readyz")).status_code == 200
            front.engine.awake = False
            answer = await front.client.get("/readyz")
            assert (answer.status_code, answer.json()["engine_answers"]) == (503, False)
            assert (await front.client.get("/healthz")).status_code == 200
            front.engine.awake = True
            assert (await front.client.get("/readyz")).status_code == 200

    run(scenario())
