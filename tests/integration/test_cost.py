"""C12, C32: what forwards of a real model take is measured, fitted, booked, and shown."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import ROOT, eventually
from tests.demo import ask
from tests.integration.stack import Stack, stack
from umad.core.cost import SAMPLES_MIN, Sample
from umad.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.models, pytest.mark.timeout(240)]

LARGE = 60
FORWARDS = 7 * SAMPLES_MIN


def speak(running: Stack, times: int, tokens: int = 8) -> None:
    answer = ask.post(
        running.address,
        "/v1/chat/completions",
        model="llama",
        messages=[{"role": "user", "content": "What does a ledger do? " * times}],
        max_tokens=tokens,
        temperature=0,
    )
    assert answer.status == 200, ask.gist(answer)


def samples(running: Stack) -> list[Sample]:
    with running.client() as client:
        answer: dict[str, Any] = client.call("cost", {"model": "llama"})
    return [Sample(*row) for row in answer["samples"]]


def worker(running: Stack) -> dict[str, Any]:
    (found,) = (one for one in running.status()["workers"] if one["name"] == "llama")
    return dict(found)


def booked_beyond(running: Stack) -> int:
    """Bytes booked beyond the quota, at most, while a large request runs."""
    eventually(lambda: worker(running)["booked"] == worker(running)["quota"])
    work = threading.Thread(target=speak, args=(running, LARGE, 40))
    work.start()
    most = 0
    with running.client() as client:
        while work.is_alive():
            (found,) = (one for one in client.call("status")["workers"] if one["name"] == "llama")
            most = max(most, found["booked"] - found["quota"])
    work.join()
    return most


def test_predictions_come_within_twice_of_what_is_measured(folder: Path) -> None:
    with stack(folder, {"llama": "30MiB"}) as running:  # 6 of them for kernels
        running.wait_ready()
        first = booked_beyond(running)
        for at in range(FORWARDS):
            speak(running, (25, 40, LARGE)[at % 3])
        last = booked_beyond(running)
        # The worst case is no more than twice what is true: a prompt is read 512 tokens at a time.
        assert 0 < last < first * 2 / 3, f"{first / MIB:.1f} MiB, {last / MIB:.1f} MiB"

        taken = samples(running)
        assert len(taken) >= FORWARDS
        for sample in taken[FORWARDS // 2 :]:
            assert sample.predicted / 2 <= sample.bytes <= sample.predicted, sample
        # C12: an increment above what the worker holds, so the same request costs the same again.
        again = {one.bytes for one in taken[FORWARDS // 2 :] if one.tokens == taken[-2].tokens}
        assert max(again) - min(again) < 0.15 * max(again)

        # Every lease has ended.
        eventually(lambda: worker(running)["booked"] == worker(running)["quota"])
        assert running.status()["counters"].get("leases_leaked", 0) == 0

        shown = subprocess.run(
            [sys.executable, "-m", "umad.cli.main", "--socket", running.socket, "fit", "llama"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
        assert "x tokens" in shown
        assert f"{len(taken)} forwards measured" in shown
        assert "chat cpu auto" in shown
