"""The gate: bodies, shares and queues, and what a denied client is told (C28, C29)."""

import asyncio
import contextlib
import json
import random
import resource
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from tests.serve.standin import make_settings, run, serving, text_handler, until
from umad.config import ServeSettings
from umad.errors import UmadError, WaitedTooLong, leaves
from umad.serve import gate as gate_module
from umad.serve.gate import BODIES_HELD, Gate, GateMiddleware, refusal, retry_after_s
from umad.serve.spans import Span

MIB = 1 << 20


async def raw(port: int, *pieces: bytes) -> tuple[int, dict[str, Any], int]:
    """Send pieces until the server answers or all are sent: (status, error, pieces sent)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    head = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        sent += 1
        await asyncio.sleep(0)
        if head.done():
            break
    lines = (await head).decode().lower().split("\r\n")
    status = int(lines[0].split()[1])
    length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length"))
    body = await reader.readexactly(length)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return status, json.loads(body)["error"], sent


def head(*lines: str) -> bytes:
    first = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*first, *lines, "", ""]).encode()


def test_a_declared_body_above_the_limit_is_refused_before_it_is_read():
    async def scenario():
        async with serving(make_settings(body_max=8 * MIB)) as front:
            status, error, _ = await raw(front.port, head(f"Content-Length: {9 * MIB}"))
            assert (status, error["code"]) == (413, "body_too_large")
            assert error["details"]["limit"] == 8 * MIB
            status, error, _ = await raw(front.port, head("Content-Length: 1" + "0" * 18))
            assert status == 413

    run(scenario())


def test_a_chunked_body_is_cut_off_at_the_limit():
    async def scenario():
        async with serving(make_settings(body_max=8 * MIB)) as front:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            chunk = b"%x\r\n" % MIB + bytes(MIB) + b"\r\n"
            status, error, sent = await raw(
                front.port, head("Transfer-Encoding: chunked"), *[chunk] * 40
            )
            assert (status, error["code"]) == (413, "body_too_large")
            # What the kernel's socket buffers took was never read.
            assert sent < 30
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown_kib < 32 * 1024  # this process is client and server at once
            assert (await front.client.get("/status")).json()["requests"]["body_bytes"] == 0

    run(scenario())


def test_more_than_was_declared_is_cut_off():
    async def scenario():
        async with serving() as front:
            whole = json.dumps({"model": "talk", "prompt": "x" * 1000}).encode()
            status, _, _ = await raw(
                front.port, head("Content-Length: 1024"), whole[:1024].ljust(1024), bytes(64 << 10)
            )
            assert status in (200, 400)  # the first 1 KiB, and nothing more
            assert all(len(job["prompt"]) <= 1024 for _, job in front.engine.jobs)

    run(scenario())


def test_a_body_that_drips_is_timed_out():
    async def application(scope, receive, send):
        body = await Request(scope, receive).body()
        await JSONResponse({"read": len(body)})(scope, receive, send)

    async def scenario():
        gate = Gate(ServeSettings())
        guarded = GateMiddleware(application, gate, body_timeout_s=0.05)
        sent: list[Mapping[str, Any]] = []
        held: list[int] = []

        async def receive():
            held.append(gate.body_bytes)
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b"x", "more_body": True}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "headers": [(b"content-length", b"1000")],
            "client": ("10.0.0.1", 1),
        }
        await guarded(scope, receive, send)
        assert sent[0]["status"] == 408
        assert json.loads(sent[1]["body"])["error"]["code"] == "body_timeout"
        assert len(held) < 50
        assert set(held) == {1000, 0}  # what was declared, not more; nothing once refused
        assert gate.body_bytes == 0
        assert not gate.clients

    run(scenario())


def test_all_bodies_together_are_bounded():
    gate = Gate(ServeSettings(body_max=MIB, requests_max=100))

    async def scenario():
        async with contextlib.AsyncExitStack() as visits:
            for number in range(BODIES_HELD):
                await visits.enter_async_context(gate.visit(f"client{number}", MIB, Span()))
            assert gate.body_bytes == BODIES_HELD * MIB
            with pytest.raises(UmadError, match=r"hold 4\.0 MiB"):
                async with gate.visit("another", 1, Span()):
                    pass
            async with gate.visit("no body", None, Span()):
                pass

    run(scenario())
    assert gate.body_bytes == 0
    assert not gate.clients


def test_a_clients_share_is_its_own_and_comes_back():
    release = asyncio.Event()

    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        await release.wait()
        return await text_handler(model, job)

    async def scenario():
        async with serving(make_settings(requests_per_client_max=3), handler) as front:
            held = [asyncio.ensure_future(front.chat()) for _ in range(3)]
            await until(lambda: len(front.engine.jobs) == 3)
            denied = [await front.chat() for _ in range(10)]
            assert {answer.status_code for answer in denied} == {429}
            error = denied[0].json()["error"]
            assert (error["code"], error["details"]["reason"]) == ("overloaded", "client_share")
            assert error["type"] == "rate_limit_error"
            waits = [int(answer.headers["retry-after"]) for answer in denied]
            assert min(waits) >= 1
            assert len(set(waits)) > 1  # ten denied clients do not come back as one
            # Looking is always allowed.
            assert (await front.client.get("/healthz")).status_code == 200
            release.set()
            assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}
            assert (await front.chat()).status_code == 200

    run(scenario())


def test_a_full_queue_is_a_429_for_its_model_alone():
    release = asyncio.Event()

    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        if model == "talk":
            await release.wait()
        return await text_handler(model, job)

    async def scenario():
        async with serving(make_settings(queue_max=2), handler) as front:
            held = [asyncio.ensure_future(front.chat()) for _ in range(3)]  # 1 at work, 2 wait
            await until(lambda: len(front.engine.jobs) == 3)
            denied = await front.chat()
            assert denied.status_code == 429
            assert denied.json()["error"]["details"]["reason"] == "queue_full"
            assert (await front.chat(model="see")).status_code == 200
            release.set()
            assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}

    run(scenario())


def test_200_parallel_requests_end_in_200_or_429_and_none_hangs():
    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0.002)
        return await text_handler(model, job)

    async def scenario():
        settings = make_settings(queue_max=4, requests_per_client_max=100)
        async with serving(settings, handler) as front:
            answers = await asyncio.gather(*(front.chat() for _ in range(200)))
            counts = {
                status: sum(answer.status_code == status for answer in answers)
                for status in {answer.status_code for answer in answers}
            }
            assert set(counts) <= {200, 429}
            assert counts[200] >= 5
            assert front.engine.at_work_max <= 5
            gate = (await front.client.get("/status")).json()["requests"]
            assert (gate["in_work"], gate["body_bytes"]) == (0, 0)

    run(scenario())


def test_no_refusal_is_a_500_and_none_lacks_its_retry_after():
    for leaf in leaves():
        answer = refusal(leaf("no"))
        assert answer.status_code in {400, 404, 408, 413, 429, 503}, leaf
        assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503)), leaf


def test_retry_after_is_whole_seconds_from_the_base_on():
    for base_s in (None, 0.1, 1, 2.5, 30):
        drawn = [retry_after_s(base_s) for _ in range(200)]
        assert min(drawn) >= max(1, base_s or 1)
        assert len(set(drawn)) > 3
    assert gate_module.BODY_TIMEOUT_S > 0


def test_requests_beyond_the_limit_wait_in_order_before_their_body_is_read():
    release = asyncio.Event()

    async def handler(model: str, job: Mapping[str, Any]) -> Any:
        await release.wait()
        return await text_handler(model, job)

    async def scenario():
        async with serving(make_settings(requests_max=2), handler) as front:
            asked = []
            for number in range(5):
                asked.append(asyncio.ensure_future(front.chat(str(number))))
                await until(lambda least=number + 1: front_state(front)[0] == least)
            assert front_state(front) == (5, 3)
            assert [job["messages"][0]["content"] for _, job in front.engine.jobs] == ["0", "1"]
            status = (await front.client.get("/status")).json()["requests"]  # looks never wait
            assert (status["in_work"], status["waiting"], status["limit"]) == (2, 3, 2)
            release.set()
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
            order = [job["messages"][0]["content"] for _, job in front.engine.jobs]
            assert order == ["0", "1", "2", "3", "4"]

    def front_state(front: Any) -> tuple[int, int]:
        return front.gate.clients.total(), front.gate.waiting

    run(scenario())


def test_who_waits_too_long_for_its_turn_is_a_429():
    async def handler(_model: str, _job: Mapping[str, Any]) -> Any:
        await asyncio.Event().wait()

    async def scenario():
        settings = make_settings(requests_max=1, wait_max=0.1)
        async with serving(settings, handler) as front:
            held = asyncio.ensure_future(front.chat())
            await until(lambda: len(front.engine.jobs) == 1)
            answer = await front.chat()
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert (error["code"], error["details"]["reason"]) == (
                "waited_too_long",
                "requests_max",
            )
            held.cancel()
            await until(lambda: not front.gate.clients)
            assert front.gate.waiting == 0

    run(scenario())


def test_a_waiter_that_is_cancelled_as_its_turn_comes_gives_it_on():
    """C22."""

    async def scenario():
        gate = Gate(ServeSettings(requests_max=1))
        entered: list[str] = []
        end = asyncio.Event()

        async def visit(name: str) -> None:
            async with gate.visit(name, None, Span()):
                entered.append(name)
                await end.wait()

        first = asyncio.ensure_future(visit("first"))
        await until(lambda: entered == ["first"])
        second, third = (asyncio.ensure_future(visit(name)) for name in ("second", "third"))
        await until(lambda: gate.waiting == 2)
        end.set()
        while gate.waiting == 2:  # noqa: ASYNC110  to the very step in which second's turn comes
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert "third" in entered
        assert not gate.clients

    run(scenario())


def test_turns_come_back_whatever_becomes_of_who_has_or_awaits_them():
    """C22, by chance: cancels, time-outs and ends in any order."""

    async def scenario():
        chance = random.Random(22)
        settings = ServeSettings(requests_max=3, wait_max=0.01, requests_per_client_max=1000)
        gate = Gate(settings)
        inside = most = 0

        async def visit() -> None:
            nonlocal inside, most
            async with gate.visit("one", None, Span()):
                inside += 1
                most = max(most, inside)
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks: list[asyncio.Task[None]] = []
        for _ in range(2000):
            tasks.append(asyncio.ensure_future(visit()))
            if chance.random() < 0.3:
                chance.choice(tasks[-8:]).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in done} <= {type(None), asyncio.CancelledError, WaitedTooLong}
        assert most == 3
        assert (inside, gate.waiting, gate.clients.total()) == (0, 0, 0)
        async with asyncio.timeout(1), gate.visit("one", None, Span()):
            pass

    run(scenario())
