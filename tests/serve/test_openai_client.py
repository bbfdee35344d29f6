"""The official client against the front: every route, streams, and the errors it knows."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.serve.standin import Front, make_settings, run, serving
from umad.errors import NeverFits, QuotaDenied, WaitedTooLong
from umad.serve.link import pack_vector

PNG = b"\x89PNG\r\n\x1a\nnot really"
VECTOR = [0.5, -1.25, 3.0]
REFUSALS = {
    "never": NeverFits("larger than the pool", details={"asked": 9}),
    "denied": QuotaDenied("no room", retry_after_s=3),
    "waited": WaitedTooLong("too long", retry_after_s=5),
}


async def handler(model: str, job: Mapping[str, Any], emit: Any) -> Any:
    if model == "embed":
        return {"vectors": [pack_vector(VECTOR) for _ in job["texts"]], "tokens": 4}
    if model == "paint":
        return {"images": [PNG] * job["n"]}
    if model == "hear":
        segments = json.dumps([{"id": 0, "start": 0.0, "end": 1.5, "text": "said"}]).encode()
        return {"text": "said", "duration_s": 1.5, "language": "english", "segments": segments}
    said = job["prompt"] if "prompt" in job else job["messages"][-1]["content"]
    if said == "bug":
        return {"no": "text"}
    if isinstance(said, str) and said in REFUSALS:
        raise REFUSALS[said]
    text = said if isinstance(said, str) else f"{len(said)} parts"
    for letter in text:
        emit(letter)
        await asyncio.sleep(0)
    counted = {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2}
    return {"text": text, **counted, "finish_reason": "stop"}


@contextlib.asynccontextmanager
async def client_of(front: Front) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"http://127.0.0.1:{front.port}/v1",
        api_key="unused",
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False, timeout=30),
    ) as client:
        yield client


def say(content: Any) -> Any:
    return [{"role": "user", "content": content}]


@pytest.mark.slow
def test_every_route_answers_the_official_client():
    async def scenario():
        async with serving(handler=handler) as front, client_of(front) as client:
            assert (await client.models.list()).data[0].id == "talk"
            assert (await client.models.retrieve("embed")).id == "embed"
            ignored = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "user": "me"}
            said = await client.chat.completions.create(
                model="talk",
                messages=say("hi"),
                n=2,
                max_completion_tokens=5,
                frequency_penalty=0,
                **ignored,
            )
            assert [one.message.content for one in said.choices] == ["hi", "hi"]
            assert said.usage.total_tokens == 7
            assert said._request_id
            url = "data:image/png;base64," + base64.b64encode(PNG).decode()
            parts = [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": url}},
            ]
            seen = await client.chat.completions.create(model="see", messages=say(parts))
            assert seen.choices[0].message.content == "2 parts"
            stream = await client.chat.completions.create(
                model="talk",
                messages=say("hello"),
                stream=True,
                stream_options={"include_usage": True},
            )
            pieces = [piece async for piece in stream]
            assert pieces[0].choices[0].delta.role == "assistant"
            text = "".join(one.choices[0].delta.content or "" for one in pieces[:-1])
            assert text == "hello"
            assert pieces[-2].choices[0].finish_reason == "stop"
            assert pieces[-1].usage.completion_tokens == 2
            assert pieces[-1].usage.prompt_tokens_details.cached_tokens == 1
            stream = await client.completions.create(model="talk", prompt="hello", stream=True)
            assert "".join([piece.choices[0].text async for piece in stream]) == "hello"
            # Without a format the client asks for base64 and reads it as numbers.
            for more in ({}, {"encoding_format": "float"}):
                rows = await client.embeddings.create(model="embed", input=["a", "b"], **more)
                assert [row.embedding for row in rows.data] == [VECTOR, VECTOR]
            drawn = await client.images.generate(
                model="paint", prompt="x", n=2, size="64x64", quality="standard"
            )
            assert base64.b64decode(drawn.data[1].b64_json) == PNG
            heard = await client.audio.transcriptions.create(
                model="hear", file=("a.mp3", b"sound"), response_format="text", temperature=0
            )
            assert heard == "said\n"
            heard = await client.audio.transcriptions.create(
                model="hear", file=("a.wav", b"sound"), response_format="verbose_json"
            )
            assert (heard.duration, heard.language) == (1.5, "english")
            assert [(one.start, one.end, one.text) for one in heard.segments] == [(0, 1.5, "said")]

    run(scenario())


@pytest.mark.slow
def test_refusals_are_the_clients_own_errors():
    async def refused(kind: type[openai.APIStatusError], work: Any) -> openai.APIStatusError:
        with pytest.raises(kind) as caught:
            await work
        return caught.value

    async def scenario():
        settings = make_settings(requests_per_client_max=1)
        async with serving(handler=handler) as front, client_of(front) as client:
            ask = client.chat.completions.create
            bad = openai.BadRequestError
            for more, param in (
                ({"logprobs": True}, "logprobs"),
                ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
                ({"response_format": {"type": "json_object"}}, "response_format"),
                ({"temperature": 3}, "temperature"),
                ({"n": 100}, "n"),
            ):
                error = await refused(bad, ask(model="talk", messages=say("hi"), **more))
                assert (error.param, error.type) == (param, "invalid_request_error")
            error = await refused(openai.NotFoundError, ask(model="gpt-4o", messages=say("hi")))
            assert (error.code, error.param) == ("model_not_found", "model")
            error = await refused(
                openai.InternalServerError, ask(model="talk", messages=say("denied"))
            )
            assert (error.status_code, error.code) == (503, "quota_denied")
            assert int(error.response.headers["retry-after"]) >= 3
            await refused(openai.RateLimitError, ask(model="talk", messages=say("waited")))
            error = await refused(openai.APIStatusError, ask(model="talk", messages=say("never")))
            assert error.status_code == 413
            error = await refused(
                openai.InternalServerError, ask(model="talk", messages=say("bug"))
            )
            assert (error.status_code, error.code) == (500, "internal")
            # A transcription's fields, and an embedding's.
            hear = client.audio.transcriptions.create
            for form in ("srt", "vtt"):
                error = await refused(
                    bad, hear(model="hear", file=("a.wav", b"x"), response_format=form)
                )
                assert error.param == "response_format"
            error = await refused(
                bad, client.embeddings.create(model="embed", input="a", dimensions=8)
            )
            assert error.param == "dimensions"
            error = await refused(bad, client.embeddings.create(model="embed", input=[[1, 2]]))
            assert error.param == "input"
            error = await refused(
                bad,
                client.images.generate(model="paint", prompt="x", response_format="url"),
            )
            assert error.param == "response_format"
        async with serving(settings, handler) as front, client_of(front) as client:
            front.link.drop()
            error = await refused(
                openai.InternalServerError,
                client.completions.create(model="talk", prompt="hi", stream=True),
            )
            assert (error.status_code, error.code) == (503, "worker_lost")

    run(scenario())


@pytest.mark.slow
def test_an_error_within_a_stream_is_raised_by_the_client():
    async def breaks(_model: str, _job: Mapping[str, Any], emit: Any) -> Any:
        emit("so far")
        raise QuotaDenied("no room")

    async def scenario():
        async with serving(handler=breaks) as front, client_of(front) as client:
            stream = await client.chat.completions.create(
                model="talk", messages=say("hi"), stream=True
            )
            with pytest.raises(openai.APIError, match="no room") as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "quota_denied"

    run(scenario())
