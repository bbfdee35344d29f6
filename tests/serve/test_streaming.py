"""Streams: their form on the wire, their failures, and clients that leave or do not read."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from tests.serve.standin import Front, make_settings, run, serving, until
from umad.errors import QuotaDenied
from umad.serve import http
from umad.serve.link import ModelState

ENDED = {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": "stop"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ASKED = {"model": "talk", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def two_pieces(_model: str, job: Mapping[str, Any], emit: Any) -> Any:
    emit("hel")
    await asyncio.sleep(0)
    emit("lo ☺")
    return {"text": "hello ☺", **ENDED}


@contextlib.asynccontextmanager
async def asked(front: Front, path: str, body: Any) -> AsyncIterator[httpx.Response]:
    async with front.client.stream("POST", path, json=body) as answer:
        yield answer


async def events(front: Front, path: str, body: Any) -> list[Any]:
    """A whole stream, each event read as JSON; the last one, [DONE], as it is."""
    async with asked(front, path, body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = (await answer.aread()).decode()
    *lines, rest = text.split("\n\n")
    assert rest == ""
    assert all(line.startswith("data: ") for line in lines)
    said = [line.removeprefix("data: ") for line in lines]
    return [one if one == "[DONE]" else json.loads(one) for one in said]


def test_a_chat_stream_has_openais_form():
    async def scenario():
        async with serving(handler=two_pieces) as front:
            body = {**ASKED, "stream_options": {"include_usage": True}}
            *pieces, used, done = await events(front, CHAT, body)
            assert done == "[DONE]"
            assert {piece["object"] for piece in [*pieces, used]} == {"chat.completion.chunk"}
            assert len({piece["id"] for piece in [*pieces, used]}) == 1
            assert {piece["model"] for piece in pieces} == {"talk"}
            assert all(piece["usage"] is None for piece in pieces)
            choices = [piece["choices"][0] for piece in pieces]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(one["delta"].get("content", "") for one in choices) == "hello ☺"
            assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
            assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
            assert used["choices"] == []
            assert used["usage"]["total_tokens"] == 5
            plain = await events(front, CHAT, ASKED)
            assert all("usage" not in piece for piece in plain[:-1])
            assert front.engine.streamed == [True, True]

    run(scenario())


def test_a_completion_stream_and_an_engine_that_gives_no_pieces():
    async def at_once(_model: str, job: Mapping[str, Any]) -> Any:
        return {"text": job["prompt"], **ENDED}

    async def scenario():
        async with serving(handler=at_once) as front:
            body = {"model": "talk", "prompt": "go", "stream": True}
            first, last, done = await events(front, COMPLETION, body)
            assert (first["object"], done) == ("text_completion", "[DONE]")
            assert first["choices"][0]["text"] == "go"
            assert last["choices"][0] == {
                "index": 0,
                "text": "",
                "logprobs": None,
                "finish_reason": "stop",
            }

    run(scenario())


def test_a_stream_says_where_else_it_is_made_before_its_first_piece():
    async def elsewhere(_model: str, _job: Mapping[str, Any], emit: Any) -> Any:
        emit("hel", "cpu")
        await ended.wait()
        emit("lo", "cpu")
        return {"text": "hello", "device": "cpu", **ENDED}

    ended = asyncio.Event()

    async def scenario():
        async with serving(handler=elsewhere) as front:
            async with asked(front, CHAT, ASKED) as answer:
                assert answer.headers["x-umad-device"] == "cpu"
                ended.set()
                await answer.aread()
            front.engine.handler = two_pieces
            async with asked(front, CHAT, ASKED) as answer:
                assert "x-umad-device" not in answer.headers

    run(scenario())


def test_several_choices_are_jobs_of_their_own_with_seeds_of_their_own():
    async def handler(_model: str, job: Mapping[str, Any], emit: Any) -> Any:
        emit(f"{job['seed']}")
        await asyncio.sleep((10 - job["seed"]) / 1000)
        return {"text": f"{job['seed']}!", "cached_tokens": 10 - job["seed"], **ENDED}

    async def scenario():
        async with serving(handler=handler) as front:
            answer = (await front.chat(n=3, seed=7)).json()
            said = [(one["index"], one["message"]["content"]) for one in answer["choices"]]
            assert said == [(0, "7!"), (1, "8!"), (2, "9!")]
            assert answer["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 6,
                "total_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 1},
            }
            texts = {0: "", 1: "", 2: ""}
            *pieces, _ = await events(front, CHAT, {**ASKED, "n": 3, "seed": 7})
            for piece in pieces:
                (one,) = piece["choices"]
                texts[one["index"]] += one["delta"].get("content", "")
            assert texts == {0: "7!", 1: "8!", 2: "9!"}
            places = (await front.client.get("/status")).json()["models"]["talk"]["requests"]
            assert places == 0

    run(scenario())


def test_a_refusal_before_the_first_piece_has_its_status_and_a_later_one_is_an_event():
    async def handler(_model: str, job: Mapping[str, Any], emit: Any) -> Any:
        if job["messages"][0]["content"] == "late":
            emit("so far")
        raise QuotaDenied("no room", details={"asked": 2})

    async def scenario():
        async with serving(handler=handler) as front:
            early = await front.client.post(CHAT, json=ASKED)
            assert early.status_code == 503
            assert early.json()["error"]["code"] == "quota_denied"
            late = {**ASKED, "messages": [{"role": "user", "content": "late"}]}
            *pieces, last = await events(front, CHAT, late)
            assert pieces[-1]["choices"][0]["delta"]["content"] == "so far"
            assert last["error"]["code"] == "quota_denied"
            assert last["error"]["type"] == "service_unavailable_error"
            refused = (await front.client.get("/status")).json()["requests"]["refused"]
            assert refused == {"quota_denied": 2}
            front.engine.tell("talk", ModelState("loading"))
            await until(lambda: front.link.status("talk")["state"] == "loading")
            assert (await front.client.post(CHAT, json=ASKED)).status_code == 503

    run(scenario())


def test_an_engine_that_dies_within_a_stream_is_an_event():
    async def handler(_model: str, job: Mapping[str, Any], emit: Any) -> Any:
        emit("so far")
        await asyncio.Event().wait()

    async def scenario():
        async with serving(handler=handler) as front:
            async with asked(front, CHAT, ASKED) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                front.engine.end()
                rest = [line async for line in lines if line]
            assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "worker_lost"

    run(scenario())


def test_a_hang_up_within_a_stream_cancels_every_job_of_it():
    async def handler(_model: str, job: Mapping[str, Any], emit: Any) -> Any:
        emit("so far")
        await asyncio.Event().wait()

    async def scenario():
        async with serving(handler=handler) as front:
            async with asked(front, CHAT, {**ASKED, "n": 2}) as answer:
                await anext(answer.aiter_lines())
                began_s = asyncio.get_running_loop().time()
            await until(lambda: len(front.engine.cancelled) == 2)
            assert asyncio.get_running_loop().time() - began_s < 1
            await until(lambda: not front.link._streams)
            status = (await front.client.get("/status")).json()
            assert status["requests"]["client_gone"] == 1
            assert status["requests"]["in_work"] == 0
            assert status["models"]["talk"]["requests"] == 0

    run(scenario())


def test_no_part_of_an_answer_waits_for_the_clients_acknowledgement():
    """Nagle's algorithm and a delayed acknowledgement would cost 40 ms for each answer."""

    async def scenario():
        async with serving() as front:
            assert (await front.chat()).status_code == 200
            (connection,) = front.server.server_state.connections
            sock = connection.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(scenario())


@pytest.mark.slow
def test_a_client_that_does_not_read_is_dropped_and_costs_no_more_than_its_answer(monkeypatch):
    monkeypatch.setattr(http, "STALL_S", 0.2)
    emitted = 0

    async def handler(_model: str, job: Mapping[str, Any], emit: Any) -> Any:
        nonlocal emitted
        while True:
            emit("x" * 1000)
            emitted += 1000
            await asyncio.sleep(0)

    async def scenario():
        async with serving(make_settings(), handler) as front:
            body = json.dumps(ASKED).encode()
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode()
            with socket.create_connection(("127.0.0.1", front.port)) as reader:
                reader.sendall(head + body)
                await until(lambda: emitted > 1 << 20)
                await until(lambda: len(front.engine.cancelled) == 1, 30)
                status = (await front.client.get("/status")).json()
                assert status["requests"]["in_work"] == 0
                assert status["requests"]["client_gone"] == 1
                # Others are served all the while.
            front.engine.end()

    run(scenario())
