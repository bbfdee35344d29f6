"""Field cases of admission over the real socket and over HTTP: who waits, who gives way, how long.

What needs a clock of its own (two hundred seeds, thirty seconds of rivalry) is in tests/core.
"""

import asyncio
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.running import ROOT, Daemon, Raw, eventually
from tests.demo import ask
from tests.demo.fixtures import runner
from tests.integration.plain_stack import QUOTA_MIB, RUNTIME_MIB, plain_stack
from umad.config import ServeSettings
from umad.errors import InvalidParams
from umad.serve.gate import Gate, GateMiddleware
from umad.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CONFIG = """
[daemon]
socket = "{folder}/umad.sock"
[memory]
reserve = "64MiB"
budget = "{budget}"
"""
ROOM_FOR_ONE = RUNTIME_MIB + QUOTA_MIB + QUOTA_MIB // 2


# ------------------------------------------------------------------------- C22


@pytest.mark.parametrize("first", ["release", "hang-up"])
def test_c22_a_waiter_that_leaves_as_it_is_granted_swallows_nothing(
    folder: Path, first: str
) -> None:
    """The holder lets go and the first waiter hangs up, one right after the other."""
    daemon = Daemon(folder, text=CONFIG.format(folder=folder, budget="1000MiB")).start()
    try:
        with ExitStack() as stack:
            holder, *waiters = (stack.enter_context(Raw(daemon.socket)) for _ in range(4))
            held = holder.answer(reserve(holder, "holder", 1000))
            asked = [
                reserve(waiter, f"w{size}", size)
                for waiter, size in zip(waiters, (600, 400, 1000), strict=True)
            ]
            eventually(lambda: len(daemon.status()["queue"]) == 3)
            if first == "hang-up":
                waiters[0].close()
            send(holder, "void", lease=held["lease"], token=held["token"])
            waiters[0].close()
            second = waiters[1].answer(asked[1])
            assert second["bytes"] == 400 * MIB
            send(waiters[1], "void", lease=second["lease"], token=second["token"])
            assert waiters[2].answer(asked[2])["bytes"] == 1000 * MIB
        eventually(lambda: daemon.booked() == 0)
    finally:
        daemon.stop()


def send(peer: Raw, method: str, **params: Any) -> int:
    """Ask without waiting; the request."""
    key, data = peer.wire.send_request(method, params)
    peer.socket.sendall(data)
    return key


def reserve(peer: Raw, model: str, size_mib: int) -> int:
    worker = peer.call("register", model=model, quota=size_mib * MIB)["worker"]
    return send(peer, "reserve", worker=worker, wait_s=60.0)


# ------------------------------------------------------------------- C24, C25


def told_to_come_again(answer: ask.Answer) -> bool:
    return answer.status == 503 and answer.retry_after is not None and int(answer.retry_after) >= 1


@pytest.mark.models
def test_c24_requests_for_the_victim_keep_nobody_waiting(folder: Path) -> None:
    """Room for one; the other one is asked for without a pause."""
    ended = threading.Event()
    with plain_stack(
        folder,
        ("victim", "rival"),
        budget_mib=ROOM_FOR_ONE,
        leases='residence_min = "0s"\nrival_rest = "1s"',
        serve='wait_max = "2s"',
        model='load = "request"',
    ) as running:
        assert running.chat("victim").status == 200
        answers: list[ask.Answer] = []

        def hammer() -> None:
            while not ended.is_set():
                answers.append(running.chat("victim"))
                ended.wait(0.005)

        threads = [threading.Thread(target=hammer) for _ in range(6)]  # one always waits
        for thread in threads:
            thread.start()
        came = []
        for _ in range(3):
            began_s = time.monotonic()
            answer = running.chat("rival")
            assert time.monotonic() - began_s < 2.0 + 1.5  # its bound, and a busy machine
            assert answer.status == 200 or told_to_come_again(answer), answer
            came.append(answer.status)
        ended.set()
        for thread in threads:
            thread.join()
        assert 200 in came
        assert all(one.status == 200 or told_to_come_again(one) for one in answers)
        for name in ("rival", "victim"):
            eventually(lambda name=name: running.chat(name).status == 200, within_s=20)

        # A daemon that hangs: who needs it hears so in time, who does not goes on.
        os.kill(running.daemon.pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            answer = running.chat("rival")
            assert told_to_come_again(answer), answer
            assert time.monotonic() - began_s < 2.0 + 1.5
            assert running.chat("victim").status == 200
        finally:
            os.kill(running.daemon.pid, signal.SIGCONT)
        eventually(lambda: running.chat("rival").status == 200, within_s=30)


@pytest.mark.models
def test_c25_a_model_too_young_to_go_is_a_503_that_says_how_long(folder: Path) -> None:
    with plain_stack(
        folder,
        ("young", "rival"),
        budget_mib=ROOM_FOR_ONE,
        leases='residence_min = "4s"\nrival_rest = "0s"',
        serve='wait_max = "1s"',
        model='load = "request"',
    ) as running:
        assert running.chat("young").status == 200
        loaded_s = time.monotonic()  # or a moment before
        answer = running.chat("rival")
        answered_s = time.monotonic()
        assert told_to_come_again(answer), answer
        assert running.states()["young"] == "ready"
        assert answer.retry_after is not None
        assert answered_s + int(answer.retry_after) >= loaded_s + 4.0 - 0.5
        eventually(lambda: running.chat("rival").status == 200, within_s=20)
        assert time.monotonic() >= loaded_s + 4.0 - 0.5
        eventually(lambda: running.states()["young"] == "cold")


# ------------------------------------------------------------------------- C28


@pytest.mark.models
def test_c28_a_chunked_body_costs_the_front_no_more_than_its_limit(folder: Path) -> None:
    with plain_stack(
        folder, ["m"], budget_mib=RUNTIME_MIB + 128, serve='body_max = "8MiB"'
    ) as running:
        assert running.chat("m").status == 200
        before = psutil.Process(running.front.pid).memory_info().rss
        assert chunked(running.address, 40) == 413
        assert high_water(running.front.pid) - before < 16 * MIB
        assert running.chat("m").status == 200


def chunked(address: str, count: int) -> int:
    """The answer to a body of that many pieces of 1 MiB, as far as it is taken."""
    connection = HTTPConnection(address, timeout=30)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    try:
        for _ in range(count):
            connection.send(b"%x\r\n" % MIB + bytes(MIB) + b"\r\n")
    except ConnectionError:
        pass  # the answer is there
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def high_water(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def test_c28_nothing_is_read_beyond_the_limit() -> None:
    read = 0
    answered: list[int] = []  # what had been read by then

    async def receive() -> Mapping[str, Any]:
        nonlocal read
        if answered:
            return {"type": "http.disconnect"}
        read += 64 << 10
        return {"type": "http.request", "body": bytes(64 << 10), "more_body": True}

    async def application(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] == "http.request":
            pass

    async def answer(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 413
            answered.append(read)

    scope = {"type": "http", "method": "POST", "headers": [], "client": ("10.0.0.1", 1)}
    gate = Gate(ServeSettings(body_max=8 * MIB))
    asyncio.run(GateMiddleware(application, gate)(scope, receive, answer))
    assert answered == [8 * MIB + (64 << 10)]


@pytest.mark.models
def test_c28_a_picture_is_weighed_by_what_it_becomes() -> None:
    """24000 x 24000 in black and white: some 70 kB, and 1.7 GB as the model would see it."""
    side = 24_000
    rows = zlib.compress(bytes(side // 8 + 1) * side, 9)
    picture = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)),
            (b"IDAT", rows),
            (b"IEND", b""),
        )
    )
    assert len(picture) < 100_000
    content = [{"type": "text", "text": "?"}, {"type": "image", "image": picture}]
    job = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    model = runner("vision")
    before = high_water(os.getpid())
    for weigh in (model.bytes_needed, model.size, lambda job: model.run(job, lambda: False)):
        with pytest.raises(InvalidParams, match=r"24000x24000 pixels|more than \d+ pixels"):
            weigh(job)
    assert high_water(os.getpid()) - before < 64 * MIB  # as it is not, by far, when it is decoded


# ------------------------------------------------------------------------- C30


def test_c30_a_limit_is_one_for_all_processes(folder: Path) -> None:
    """Room for five; sixty threads of four processes ask, and never are there more than five."""
    unit_mib, processes = 200, 4
    budget = f"{5 * unit_mib + processes}MiB"  # each of them has loaded 1 MiB
    daemon = Daemon(folder, text=CONFIG.format(folder=folder, budget=budget)).start()
    programs = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integration.sharers", str(daemon.socket)),
                *(f"m{number}", f"{unit_mib}MiB", "0.1"),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        with ThreadPoolExecutor(processes) as pool:
            told = list(pool.map(lambda one: one.communicate("\n", timeout=60)[0], programs))
        moments = sorted(
            (float(at), -1 if what == "leave" else 1)
            for what, at in (line.split() for text in told for line in text.splitlines())
        )
        at_work = most = 0
        for _, step in moments:
            at_work += step
            most = max(most, at_work)
        assert (len(moments), most) == (120, 5)
        eventually(lambda: daemon.booked() == 0)
    finally:
        for program in programs:
            program.kill()
            program.communicate()
        daemon.stop()


def test_c30_every_front_shows_the_same_books(folder: Path) -> None:
    """Two umad-serve on one daemon, each with a model of its own."""
    with (
        plain_stack(
            folder, ["alpha"], budget_mib=2 * ROOM_FOR_ONE, model='isolation = "thread"'
        ) as stack,
        stack.second() as second,
    ):
        shown = [books(address) for address in (stack.address, second)]
        assert shown[0] == shown[1]
        booked = {key: value for key, value in shown[0].items() if "worker_booked" in key[0]}
        assert {dict(labels)["worker"] for _, labels in booked} >= {"alpha", "second-alpha"}
        mine = {name for name, _ in shown[0]}
        assert {"umad_pool_budget_bytes", "umad_pool_booked_bytes", "umad_workers"} <= mine
        assert sum(booked.values()) == shown[0]["umad_pool_booked_bytes", (("pool", "system"),)]


def books(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a front shows of the daemon's ledger."""
    with urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if re.fullmatch(
            r"umad_(workers|pool_(budget|booked)_bytes|worker_(quota|booked)_.*)", one.name
        )
    }
