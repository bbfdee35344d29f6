"""C29: what a client is told when there is too much to do, or too little to do it with."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon.running import ROOT, Daemon, eventually
from tests.demo import ask
from tests.demo.fixtures import checkpoints
from tests.demo.run import free_port

pytestmark = [pytest.mark.slow, pytest.mark.models, pytest.mark.timeout(240)]

CONFIG = """
[daemon]
socket = "{socket}"
[memory]
reserve = "64MiB"
budget = "2GiB"
interval = "100ms"
[serve]
listen = "{address}"
runtime_quota = "1GiB"
wait_max = "2s"
{serve}
[[model]]
name = "{name}"
kind = "{kind}"
path = "{path}"
quota = "96MiB"
instances = {instances}
"""


class Served:
    """A daemon and an umad-serve, each a process of its own."""

    def __init__(self, folder: Path, name: str, kind: str, instances: int, serve: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.daemon = Daemon(
            folder,
            text=CONFIG.format(
                socket=folder / "umad.sock",
                address=self.address,
                name=name,
                kind=kind,
                path=checkpoints() / name,
                instances=instances,
                serve=serve,
            ),
        ).start()
        self.front = subprocess.Popen(
            [sys.executable, "-m", "umad.serve.main", "--config", str(self.daemon.config)],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )


@contextmanager
def served(
    folder: Path, name: str = "llama", kind: str = "chat", instances: int = 1, serve: str = ""
) -> Iterator[Served]:
    made = Served(folder, name, kind, instances, serve)
    try:
        eventually(lambda: ask.get(made.address, "/readyz").status == 200, within_s=90)
        yield made
    finally:
        made.front.terminate()
        made.front.wait(20)
        made.daemon.stop()


def many(count: int, request: "type[object] | object") -> list[ask.Answer]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: request(), range(count)))  # type: ignore[operator]


def code(answer: ask.Answer) -> str:
    return str(answer.body["error"]["code"])


def test_a_machine_short_of_memory_is_503_and_what_never_fits_is_413(folder: Path) -> None:
    with served(folder, "sdxl", "image") as running, running.daemon.client() as client:
        big = ask.paint(running.address, "sdxl", "8192x8192")
        assert (big.status, code(big)) == (413, "never_fits")
        assert big.body["error"]["details"]["asked_bytes"] > 2 << 30
        assert big.retry_after is None

        # Somebody else holds what is left: an image that needs more than the quota must wait.
        rest = client.call("status")["pools"][0]["free"]
        hog = client.worker("hog", quota=rest)
        held = hog.load(threading.Event)
        denied = many(10, lambda: ask.paint(running.address, "sdxl", "512x512"))
        assert {(answer.status, code(answer)) for answer in denied} <= {
            (503, "quota_denied"),
            (429, "waited_too_long"),
        }
        short = [answer for answer in denied if answer.status == 503]
        assert short
        assert short[0].body["error"]["details"]["holders"]
        waits = {answer.retry_after for answer in denied}
        assert all(wait is not None and int(wait) >= 1 for wait in waits)
        assert len(waits) > 1

        hog.close()
        del held
        eventually(lambda: client.call("status")["pools"][0]["free"] >= rest)
        assert ask.paint(running.address, "sdxl", "512x512").status == 200


def test_without_the_daemon_inference_goes_on_and_what_needs_it_is_told_at_once(
    folder: Path,
) -> None:
    with served(folder, "sdxl", "image") as running:
        ask.paint(running.address, "sdxl")
        running.daemon.kill()
        taken_s = []
        for _ in range(5):
            before_s = time.monotonic()
            denied = ask.paint(running.address, "sdxl", "512x512")
            taken_s.append(time.monotonic() - before_s)
            assert (denied.status, code(denied)) == (503, "arbiter_unavailable")
            assert denied.retry_after is not None
        assert min(taken_s) < 0.25, taken_s  # a busy machine may hold up some
        assert ask.paint(running.address, "sdxl").status == 200
        running.daemon.start()
        eventually(lambda: running.daemon.status()["workers_total"] == 2)
        eventually(lambda: ask.paint(running.address, "sdxl", "512x512").status == 200, 30)


def test_a_client_over_its_share_is_429(folder: Path) -> None:
    with served(folder, serve="requests_per_client_max = 3") as running:
        answers = many(12, lambda: ask.chat(running.address, "llama", "hello", 64))
        statuses = {answer.status for answer in answers}
        assert statuses == {200, 429}
        refused = [answer for answer in answers if answer.status == 429]
        assert {code(answer) for answer in refused} == {"overloaded"}
        assert all(answer.retry_after for answer in refused)


def test_200_requests_at_once_on_five_instances(folder: Path) -> None:
    limits = "queue_max = 100\nrequests_per_client_max = 400"
    with served(folder, instances=5, serve=limits) as running:
        names = {"runtime", "llama", *(f"llama/{index}" for index in range(1, 5))}

        def ready() -> set[str]:
            workers = running.daemon.status()["workers"]
            return {worker["name"] for worker in workers if worker["state"] == "ready"}

        eventually(lambda: ready() == names, within_s=60)
        answers = many(200, lambda: ask.chat(running.address, "llama", "hello", 4))
        statuses = [answer.status for answer in answers]
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 100
        assert all(answer.retry_after for answer in answers if answer.status == 429)
        done = sum(worker["forwards"] for worker in running.daemon.status()["workers"])
        # Answers that grow together are one forward, and who is refused makes none.
        assert 0 < done <= statuses.count(200)
        malformed = ask.post(running.address, "/v1/chat/completions", model="llama", messages=3)
        assert malformed.status == 400


def test_real_weights_under_a_quota_make_sense(folder: Path) -> None:
    """all-MiniLM-L6-v2: what means the same lies closer than what does not."""
    from tests.demo import fixtures

    text = CONFIG.format(
        socket=folder / "umad.sock",
        address=(address := f"127.0.0.1:{free_port()}"),
        name="minilm",
        kind="embedding",
        path=fixtures.minilm(),
        instances=1,
        serve="",
    ).replace('quota = "96MiB"', 'quota = "160MiB"')
    daemon = Daemon(folder, text=text).start()
    front = subprocess.Popen(
        [sys.executable, "-m", "umad.serve.main", "--config", str(daemon.config)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"UMAD_SOCKET": str(daemon.socket)},
    )
    try:
        eventually(lambda: ask.get(address, "/readyz").status == 200, within_s=90)
        texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose."]
        answer = ask.post(address, "/v1/embeddings", model="minilm", input=texts)
        assert answer.status == 200
        cat, kitten, rates = (entry["embedding"] for entry in answer.body["data"])
        assert dot(cat, kitten) > 0.5 > dot(cat, rates)
        [worker] = [one for one in daemon.status()["workers"] if one["name"] == "minilm"]
        # The weights are 87 MiB in float32, and they are in the books, mapped or not.
        assert 85 << 20 < worker["measured"] <= worker["quota"]
    finally:
        front.terminate()
        front.wait(20)
        daemon.stop()


def dot(left: list[float], right: list[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))
