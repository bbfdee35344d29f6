"""The status page, without a browser: what it says, how it is served, that it trusts nobody."""

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import eventually, running
from tests.serve.standin import KINDS, make_settings, run, serving, until
from umad.config import Settings
from umad.errors import QuotaDenied
from umad.serve import page
from umad.serve.link import ModelState
from umad.serve.picture import Heard, draw

MIB = 1 << 20
LOOK: dict[str, Any] = {
    "engine": {"running": True},
    "configuration": {"problem": ""},
    "models": {},
    "requests": {"in_work": 0, "waiting": 0, "limit": 8},
}
EVIL = "<img src=x onerror=alert(1)>"


def beside(socket: Path | str) -> Settings:
    settings = make_settings()
    return replace(settings, daemon=replace(settings.daemon, socket=str(socket)))


NOBODY = beside("/nowhere/umad.sock")


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html.partition("<main>")[2]).split())


def a_worker(**more: Any) -> dict[str, Any]:
    sizes = {"quota": 64 * MIB, "peak": 96 * MIB, "booked": 64 * MIB}
    return {"id": 1, "name": "llama", "pid": 7, "state": "ready", **sizes, **more}


def a_process(**more: Any) -> dict[str, Any]:
    return {"pid": 7, "comm": "python", "bytes": None, "limit": None, "verdict": "ok", **more}


def a_state(**more: Any) -> dict[str, Any]:
    pool = {"name": "system", "capacity": None, "used": None, "budget": None, "booked": None}
    pool |= {"reserve": None, "free": None, "binding": "MemAvailable", "problem": "it is broken"}
    return {
        "pools": [pool],
        "workers": [a_worker()],
        "workers_total": 1,
        "processes": [a_process()],
        "queue": [],
        **more,
    }


def test_without_a_daemon_there_is_a_page_that_says_so():
    async def scenario():
        async with serving(NOBODY) as front:
            await front.chat("a secret prompt")
            answer = await front.client.get("/", headers={"accept": "application/json"})
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert answer.headers["cache-control"] == "no-store"
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none';")
            assert "unsafe" not in policy
            said = words(answer.text)
            assert "The memory daemon does not answer" in said
            assert "no umad daemon answers at /nowhere/umad.sock" in said
            assert "secret" not in answer.text
            assert all(name in said for name in KINDS)
            assert said.count("Not known.") == 4  # memory, workers, who waits, what happened
            assert " 0 B" not in said
            head = await front.client.head("/")
            assert (head.status_code, head.content) == (200, b"")
            assert (await front.client.post("/", json={})).status_code == 405

    run(scenario())


def test_it_needs_nothing_but_its_own_three_files():
    async def scenario():
        async with serving(NOBODY) as front:
            html = (await front.client.get("/")).text
            wanted = set(re.findall(r'(?:src|href)="([^"]+)"', html))
            parts = {"page/status.css", "page/status.js", "page/icon.svg"}
            assert wanted == {*parts, "status", "metrics"}
            assert not re.search(r"<style|<script>| style=| on[a-z]+=", html)
            for name in wanted:
                assert (await front.client.get(f"/{name}")).status_code == 200
            types = [(await front.client.get(f"/{name}")).headers["content-type"] for name in parts]
            assert {one.partition(";")[0] for one in types} == {
                "text/css",
                "text/javascript",
                "image/svg+xml",
            }
            assert (await front.client.get("/page/status.html")).status_code == 404
            assert (await front.client.get("/page/..%2Fpage.py")).status_code == 404

    run(scenario())


def test_however_many_look_the_daemon_is_asked_once(monkeypatch):
    asked: list[str] = []

    def ask(socket: str, before: Heard) -> Heard:
        asked.append(socket)
        return before

    monkeypatch.setattr(page, "_ask", ask)
    monkeypatch.setattr(page, "KEPT_S", 60)

    async def scenario():
        async with serving(NOBODY) as front:
            await asyncio.gather(*(front.client.get("/") for _ in range(20)))
            assert len(asked) == 1
            monkeypatch.setattr(page, "KEPT_S", 0)
            await front.client.get("/")
            assert len(asked) == 2

    run(scenario())


def test_a_daemon_that_hangs_holds_up_the_page_and_nothing_else(tmp_path, monkeypatch):
    hung = asyncio.Event()
    began = asyncio.Event()

    async def scenario():
        loop = asyncio.get_running_loop()

        def ask(_socket: str, before: Heard) -> Heard:
            loop.call_soon_threadsafe(began.set)
            asyncio.run_coroutine_threadsafe(hung.wait(), loop).result(20)
            return before

        monkeypatch.setattr(page, "_ask", ask)
        async with serving(NOBODY) as front:
            looking = asyncio.ensure_future(front.client.get("/"))
            await began.wait()
            assert (await front.chat("hi")).status_code == 200
            assert not looking.done()
            hung.set()
            assert (await looking).status_code == 200

    run(scenario())


def test_how_each_model_stands_and_what_waits_for_it():
    async def scenario():
        async with serving(NOBODY) as front:
            denied = QuotaDenied(f"no room {EVIL}").to_wire()
            front.engine.tell("see", ModelState("failed", error=denied))
            front.engine.tell("paint", ModelState("waking", "reading", 0.42))
            front.engine.tell("hear", ModelState("draining", takes=2))
            front.engine.tell("embed", ModelState("cold"))
            front.gate.places |= {"paint": 3, "hear": 5}
            await until(lambda: front.link.status("embed")["state"] == "cold")
            html = (await front.client.get("/")).text
            rows = dict(re.findall(r'id="model-(\w+)">(.*?)</tr>', html, re.DOTALL))
            said = {name: words("<main>" + row) for name, row in rows.items()}
            assert said["talk"] == "talk chat ready 0 0 1.0 GiB"
            assert said["see"].startswith("see vision stopped no room &lt;img")
            assert said["paint"] == "paint image loading 42% reading 0 3 1.0 GiB"
            assert said["hear"] == "hear speech draining 2 3 1.0 GiB"
            assert said["embed"] == "embed embedding cold 0 0 1.0 GiB"
            assert EVIL not in html

    run(scenario())


def test_what_comes_from_outside_is_escaped():
    state = a_state(queue=[{"worker": EVIL, "what": "admit", "waited_s": 1.0, "reason": EVIL}])
    for key, where in (("name", "pools"), ("comm", "processes"), ("state", "workers")):
        state[where][0][key] = EVIL
    events = [{"seq": 1, "unix_s": time.time(), "name": EVIL, "worker": EVIL}]
    look = {**LOOK, "configuration": {"problem": EVIL}}
    html = draw(look, Heard(state, events), time.time())
    assert "<img src=x" not in html
    assert html.count("&lt;img src=x") >= 7


def test_what_is_not_known_is_not_zero_and_has_no_bar():
    html = draw(LOOK, Heard(a_state()), time.time())
    said = words(html)
    assert "? can be granted" in said
    assert "Bound by it is broken." in said
    assert " 0 B" not in said
    assert '<rect class="used"' not in html  # of the pool, and of the worker, who tells nothing
    assert '<rect class="booked"' in html
    worker = a_worker(holds=32 * MIB, charged_most=48 * MIB)
    html = draw(LOOK, Heard(a_state(workers=[worker])), time.time())
    assert '<rect class="used" width="33.33%"' in html  # of the peak, the widest
    assert '<rect class="mark" x="50.00%"' in html


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"recovering": True}, "former workers may come back first"),
        ({"drained": True}, "Drained"),
        ({"closed": True}, "nothing is granted"),
        ({"pressed": True}, "Tasks stall on memory"),
        ({"daemon": {"conservative": True}}, "Conservative mode"),
        ({"sample": {"age_s": 7.0, "anomalies": []}}, "last look at memory was 7.0 s ago"),
        ({"sample": {"age_s": 0.1, "anomalies": ["MemFree"]}}, "contradicts itself: MemFree"),
        ({"fragmentation": {"risk": "high", "reason": "in crumbs"}}, "fragmented: in crumbs"),
        ({"workers_total": 3}, "And 2 more."),
        ({"processes": [a_process(guard_off="no preload")]}, "guard off: no preload"),
    ],
)
def test_what_somebody_should_know_is_told(more, said):
    assert said in words(draw(LOOK, Heard(a_state(**more)), time.time()))


@pytest.mark.slow
def test_a_real_daemons_memory_workers_and_events(tmp_path):
    async def scenario(socket: Path) -> None:
        async with serving(beside(socket)) as front:
            said = words((await front.client.get("/")).text)
            assert "The memory daemon" not in said
            assert re.search(r"Budget 2\.0 GiB", said)
            assert re.search(r"llama registered [0-9.]+ \w+ 0 B 1\.0 GiB 1\.5 GiB", said)
            assert "llama registered: quota 1.0 GiB, peak 1.5 GiB" in said
            assert "Nobody." in said
            assert "?" not in said

    with (
        running(tmp_path) as daemon,
        daemon.client() as client,
        client.worker("llama", quota="1GiB", peak="1.5GiB"),
    ):
        eventually(lambda: daemon.status()["processes"][0]["bytes"])
        run(scenario(daemon.socket))
