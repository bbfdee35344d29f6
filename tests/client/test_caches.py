"""What a client does with ``shrink`` and ``recycle``, and what it tells of a device."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client.conftest import Daemon
from umad.client import caches, connect
from umad.core.fragmentation import Level, judge_segments
from umad.units import MIB
from umad.values import Segments


def segment(device: int, *blocks: tuple[int, str], rounding: int = 0) -> dict[str, Any]:
    """A segment as torch describes it; ``rounding`` is in each block that is in use."""
    shown = [
        {"size": size, "state": state}
        | ({} if state == "inactive" else {"requested_size": size - rounding})
        for size, state in blocks
    ]
    return {"device": device, "total_size": sum(size for size, _ in blocks), "blocks": shown}


TWO_DEVICES = [
    segment(0, (20 * MIB, "active_allocated"), (2 * MIB, "inactive"), (30 * MIB, "inactive")),
    segment(0, (10 * MIB, "active_pending_free"), (10 * MIB, "inactive"), rounding=100),
    segment(1, (4 * MIB, "inactive")),
]


class Device:
    """Stands in for torch.cuda."""

    def __init__(self, *, fails: bool = False) -> None:
        self.emptied = 0
        self.fails = fails

    def is_initialized(self) -> bool:
        return True

    def empty_cache(self) -> None:
        if self.fails:
            raise RuntimeError("device-side assert")
        self.emptied += 1

    def memory_snapshot(self) -> list[dict[str, Any]]:
        self.empty = self.emptied
        if self.fails:
            raise RuntimeError("device-side assert")
        return TWO_DEVICES


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=device))
    return device


def test_the_device_with_most_free_in_large_blocks_is_told_of() -> None:
    sums = caches.summarise(TWO_DEVICES)
    assert sums == {
        "reserved": 72 * MIB,
        "allocated": 30 * MIB - 100,
        "internal_free": 100,
        "external_free": 42 * MIB,
        "blocks_free": 40 * MIB,
        "largest_free": 30 * MIB,
    }
    assert judge_segments(Segments(**sums)).level is not Level.UNKNOWN  # it adds up
    assert caches.summarise([]) is None


def test_without_a_device_in_use_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    half = SimpleNamespace()  # a module that another thread is importing
    unused = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    for torch in (half, unused):
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert caches.device_segments() is None
        caches.release([None])
    monkeypatch.delitem(sys.modules, "torch")
    assert caches.device_segments() is None


def test_a_device_that_fails_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Device(fails=True)))
    caches.release([])
    assert caches.device_segments() is None


def test_shrink_releases_first_and_reports_then(daemon: Daemon, device: Device) -> None:
    with connect(daemon.path) as client, client.worker("a", quota=1000):
        heard: list[dict[str, Any]] = []
        client.on("shrink", heard.append)
        daemon.tell("shrink", reason="crumbs")
        daemon.wait(lambda: bool(daemon.of("segments")))
        assert daemon.of("segments") == [caches.summarise(TWO_DEVICES)]
        assert (device.emptied, device.empty) == (1, 1)
        client.report_segments()  # within 10 s of the last
        daemon.tell("shrink", reason="crumbs")
        daemon.wait(lambda: len(daemon.of("segments")) == 2)
        assert heard[0] == {"reason": "crumbs"}


def test_a_process_without_a_worker_reports_nothing(daemon: Daemon, device: Device) -> None:
    with connect(daemon.path) as client:
        client.report_segments(at_once=True)
        client.call("ping")
        assert daemon.of("segments") == []


def test_only_who_can_recycle_says_so_and_hears_of_it(daemon: Daemon, until: Any) -> None:
    heard: list[dict[str, Any]] = []
    with (
        connect(daemon.path) as client,
        client.worker("a", quota=1000, on_recycle=heard.append) as able,
        client.worker("b", quota=1000) as unable,
    ):
        assert [one["recycle"] for one in daemon.of("register")] == [True, False]
        for worker in (unable, able):
            daemon.tell("recycle", worker=worker.id, process=False, reason="crumbs")
        until(lambda: heard)
        assert [told["worker"] for told in heard] == [able.id]
