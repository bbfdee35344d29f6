"""The figures for Prometheus: what they say, their bounds, and the listener that serves them."""

import asyncio
import contextlib
import gzip
import os
import random
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from tests.daemon.running import Daemon, Raw, eventually, running
from tests.daemon.shown import Shown, names, parsed, rich, value
from tests.promtool import check_metrics
from umad import __version__
from umad.core.histogram import Histogram
from umad.daemon import exporter
from umad.daemon.exporter import CONNECTIONS_MAX, Exporter
from umad.daemon.metrics import RENDER_EVERY_S
from umad.daemon.state_metrics import SERIES_MAX
from umad.errors import ConfigError
from umad.units import MIB
from umad.values import HISTORY_MODELS_MAX, AccountFigures
from umad.wire.frames import Limits


@pytest.fixture
def shown() -> Shown:
    return Shown(Drive(engine()))


def test_the_figures_are_the_states(shown: Shown) -> None:
    rich(shown)
    series = shown.series()
    for name, expected in (
        ("umad_up", 1),
        ("umad_generation", 1),
        ("umad_recovering", 0),
        ("umad_connections", 2),
        ("umad_workers", 3),
        ("umad_workers_without_series", 0),
        ("umad_processes", 3),
        ("umad_unclaimed_bytes", 50 * MB),
        ("umad_looks_total", 1),
        ("umad_anomalies_total", 0),
        ("umad_grants_total", 3),
        ("umad_revocations_total", 1),
        ("umad_returns_total", 1),
        ("umad_kills_total", 0),
        ("umad_sample_age_seconds", pytest.approx(2 * RENDER_EVERY_S)),
    ):
        assert value(series, name) == expected, name
    assert value(series, "umad_build_info", version=__version__) == 1
    assert value(series, "umad_refusals_total", code="invalid_params") == 1
    assert value(series, "umad_queue_waiting", queue="load") == 0
    pool = {
        kind: value(series, f"umad_pool_{kind}_bytes", pool="system")
        for kind in ("capacity", "budget", "booked", "reserve")
    }
    assert pool == {
        "capacity": 16384 * MB,
        "budget": 2048 * MB,
        "booked": 600 * MB,
        "reserve": 1024 * MB,
    }
    assert value(series, "umad_pool_headroom_bytes", pool="system") == (2048 - 600 - 50) * MB
    assert value(series, "umad_pool_binding_info", pool="system", limit="budget") == 1
    assert value(series, "umad_worker_quota_bytes", worker="good/1") == 200 * MB
    assert value(series, "umad_worker_booked_bytes", worker="plain") == 100 * MB
    assert value(series, "umad_worker_measured_bytes", worker="plain") == 50 * MB
    assert value(series, "umad_worker_state", worker="greedy", state="fenced") == 1
    assert value(series, "umad_worker_held_bytes", worker="greedy") == 0
    assert value(series, "umad_worker_peak_bytes", worker="greedy") == 450 * MB
    assert value(series, "umad_worker_refused_allocations_total", worker="greedy") == 3
    assert value(series, "umad_guard_info", process="7", state="on", reason="") == 1
    off = 'no "guard": \\ here\n' + "x" * 150
    assert value(series, "umad_guard_info", process="8", state="off", reason=off[:80]) == 1
    assert value(series, "umad_process_bytes", process="7") == 100 * MB


def test_what_is_not_known_is_not_there(shown: Shown) -> None:
    rich(shown)
    shown.drive.look({7: None, 8: None}, safe=None)
    series = shown.series()
    assert value(series, "umad_process_bytes", process="7") is None
    assert value(series, "umad_pool_headroom_bytes", pool="system") is None
    assert value(series, "umad_pool_capacity_bytes", pool="system") == 16384 * MB
    assert value(series, "umad_worker_held_bytes", worker="greedy") is None
    assert value(series, "umad_broken_readings", of="pool") == 1
    assert value(series, "umad_broken_readings", of="process") == 2


def test_how_long_a_stop_took_is_in_the_histograms(shown: Shown) -> None:
    shown.metrics.stopped(
        {
            "fence": "sigkill",
            "seen_to_revoke_s": 0.0012,
            "seen_to_kill_s": 0.06,
            "seen_to_gone_s": 9.0,
        }
    )
    shown.metrics.stopped(
        {
            "fence": "return",
            "seen_to_revoke_s": 0.001,
            "seen_to_kill_s": None,
            "seen_to_gone_s": 0.02,
        }
    )
    series = shown.series()
    name = "umad_stop_seconds"
    assert value(series, f"{name}_bucket", step="revoke", le="0.001") == 1
    assert value(series, f"{name}_bucket", step="revoke", le="0.002") == 2
    assert value(series, f"{name}_count", step="kill") == 1
    assert value(series, f"{name}_sum", step="gone") == pytest.approx(9.02)
    assert value(series, f"{name}_bucket", step="gone", le="5.0") == 1
    assert value(series, "umad_stops_total", fence="sigkill") == 1
    assert value(series, "umad_stops_total", fence="revoke") == 0


def test_a_bucket_holds_what_is_at_its_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.1, 0.1001, 1.0, 2.0):
        histogram.observe(seconds)
    assert histogram.buckets() == [("0.1", 1), ("1.0", 3), ("+Inf", 4)]


def test_a_worker_that_is_gone_has_no_series(shown: Shown) -> None:
    rich(shown)
    assert {"greedy", "good/1", "plain"} <= names(shown.series(), "worker")
    shown.drive.exit(7)
    shown.drive.exit(8)
    series = shown.series()
    assert names(series, "worker") == set()
    assert names(series, "process") == {"9"}
    assert value(series, "umad_grants_total") == 3


def test_one_name_twice_is_one_series(shown: Shown) -> None:
    drive = shown.drive
    worker = drive.loaded(7, "llama", 300 * MB)
    drive.look({7: 300 * MB})
    drive.call(7, "unregister", worker=worker)
    drive.call(7, "register", model="llama", quota=100 * MB)
    series = shown.series()
    assert value(series, "umad_worker_quota_bytes", worker="llama") == 100 * MB
    assert value(series, "umad_worker_booked_bytes", worker="llama") == 300 * MB
    assert value(series, "umad_workers") == 2


def test_a_counter_that_nobody_described_is_shown_too(shown: Shown) -> None:
    shown.drive.engine.state.counters["things_found"] += 2
    assert value(shown.series(), "umad_things_found_total") == 2


def test_a_crowd_has_bounded_series_and_fits_in_a_message(shown: Shown) -> None:
    letters = random.Random(1)
    drive = shown.drive
    accounts = {}
    for pid in range(SERIES_MAX + 50):
        drive.connect(pid + 10)
        name, why = (
            "".join(letters.choices(string.ascii_letters + string.digits, k=length))
            for length in (64, 200)
        )
        at = drive.call(pid + 10, "register", model=name, quota=pid + 1, guard_off=why)
        accounts[at["worker"]] = AccountFigures(
            *(letters.randrange(1 << size) for size in (36, 36, 10))
        )
        forward = {"tokens": 8, "batch": 1, "seconds": 0.1, "exact": True, "predicted": 1 << 30}
        drive.tell(
            pid + 10,
            "forward_done",
            worker=at["worker"],
            peak=letters.randrange(1 << 31),
            **forward,
        )
    held = {pid + 10: letters.randrange(1 << 40) for pid in range(SERIES_MAX + 50)}
    drive.look(held, accounts=accounts)
    series = shown.series()
    assert len(names(series, "worker")) == len(names(series, "process")) == SERIES_MAX
    assert 0 < len(names(series, "model")) <= HISTORY_MODELS_MAX
    assert value(series, "umad_workers") == SERIES_MAX + 50
    assert value(series, "umad_workers_without_series") == 50
    compressed = shown.metrics.compressed()
    assert len(compressed) < 3 / 4 * Limits().message_bytes
    assert gzip.decompress(compressed) == shown.metrics.text()


def test_asking_all_the_time_costs_one_rendering(shown: Shown) -> None:
    first = shown.metrics.text()
    shown.drive.now_s += RENDER_EVERY_S / 2
    assert shown.metrics.text() is first
    assert shown.metrics.compressed() is shown.metrics.compressed()
    assert shown.text() is not first
    assert gzip.decompress(shown.metrics.compressed()) == shown.metrics.text()


@pytest.mark.slow
def test_prometheus_finds_no_fault(shown: Shown) -> None:
    rich(shown)
    assert check_metrics(shown.text()) == ""


# --------------------------------------------------------------- the listener


def served(
    shown: Shown, scenario: Callable[[str, Exporter], Awaitable[None]], folder: Path
) -> None:
    """Run a scenario beside a listener on a Unix socket."""

    async def run() -> None:
        listener = exporter.bind(str(folder / "m.sock"), None)
        assert listener is not None
        made = Exporter(asyncio.get_running_loop(), listener.socket, shown.metrics)
        try:
            async with asyncio.timeout(10):
                await scenario(str(folder / "m.sock"), made)
        finally:
            made.close()
            listener.close()

    asyncio.run(run())
    assert [path.name for path in folder.iterdir()] == ["m.sock.lock"]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  what is waited for sets no event
        await asyncio.sleep(0.001)


async def said(path: str, *pieces: bytes) -> bytes:
    """All that is answered until the listener closes."""
    reader, writer = await asyncio.open_unix_connection(path)
    for piece in pieces:
        writer.write(piece)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
    try:
        return await reader.read()
    finally:
        writer.close()


def test_the_listener_serves_the_figures(shown: Shown, folder: Path) -> None:
    async def scenario(path: str, made: Exporter) -> None:
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(transport=transport, base_url="http://umad") as client:
            plain = await client.get("/metrics?x=1", headers={"Accept-Encoding": "identity"})
            packed = await client.get("/metrics", headers={"Accept-Encoding": "br, gzip"})
            assert "content-encoding" not in plain.headers
            assert packed.headers["content-encoding"] == "gzip"
            for answer in (plain, packed):
                assert answer.status_code == 200
                assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
                assert answer.content == shown.metrics.text()
            head = await client.head("/metrics", headers={"Accept-Encoding": "identity"})
            assert (head.status_code, head.content) == (200, b"")
            assert int(head.headers["content-length"]) == len(shown.metrics.text())
            assert (await client.get("/")).status_code == 404
            refused = await client.post("/metrics", content=b"x")
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert not made.open

    served(shown, scenario, folder)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"rubbish\r\n\r\n"], b"400"),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"], b"400"),
        ([b"GET /metrics HTTP/1.1\r\n\r\n"], b"400"),  # no Host
        ([b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 9000], b"431"),
        ([b"GET /metr", b"ics HTTP/1.1\r\nHo", b"st: x\r\n\r\n"], b"200"),
        ([b"GET /metrics HTTP/1.0\r\n\r\n"], b"200"),
        ([b"HEAD /metrics HTTP/1.0\r\n\r\n"], b"200"),
    ],
)
def test_odd_requests(shown: Shown, folder: Path, pieces: list[bytes], status: bytes) -> None:
    async def scenario(path: str, _: Exporter) -> None:
        answer = await said(path, *pieces)
        assert answer.split(b" ")[1] == status
        assert answer.endswith(b"\r\n\r\n") == pieces[0].startswith(b"HEAD")

    served(shown, scenario, folder)


def test_who_says_nothing_or_reads_nothing_is_sent_away(
    shown: Shown, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "WITHIN_S", 0.05)
    monkeypatch.setattr(shown.metrics, "text", lambda: b"x" * (8 << 20))  # more than a socket takes

    async def scenario(path: str, made: Exporter) -> None:
        assert await said(path) == b""
        reader, writer = await asyncio.open_unix_connection(path, limit=1024)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        await until(lambda: bool(made.open))
        await until(lambda: not made.open)
        assert len(await reader.read()) < 8 << 20
        writer.close()

    served(shown, scenario, folder)


def test_a_crowd_is_turned_away_and_the_listener_goes_on(shown: Shown, folder: Path) -> None:
    async def scenario(path: str, made: Exporter) -> None:
        crowd = [await asyncio.open_unix_connection(path) for _ in range(CONNECTIONS_MAX)]
        await until(lambda: len(made.open) == CONNECTIONS_MAX)
        async with asyncio.timeout(exporter.WITHIN_S / 2):
            assert await said(path) == b""
        for _, writer in crowd:
            writer.close()
        await until(lambda: not made.open)
        assert b"umad_up 1" in await said(path, b"GET /metrics HTTP/1.0\r\n\r\n")

    served(shown, scenario, folder)


def test_without_a_free_descriptor_the_listener_waits(
    shown: Shown, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "PAUSE_S", 0.02)

    class Full:
        """As the listener is while the process has no descriptor left."""

        tries = 0
        until_s = time.monotonic() + 0.05

        def __init__(self, real: socket.socket) -> None:
            self.fileno = real.fileno
            self.real = real

        def accept(self) -> Any:
            self.tries += 1
            if time.monotonic() < self.until_s:
                raise OSError(24, "Too many open files")
            return self.real.accept()

    async def scenario(path: str, made: Exporter) -> None:
        full = Full(made._listener)
        monkeypatch.setattr(made, "_listener", full)
        answer = await said(path, b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"umad_up 1" in answer
        assert 2 <= full.tries <= 4  # not again and again meanwhile
        monkeypatch.undo()

    served(shown, scenario, folder)


def test_an_address_that_is_taken_is_told() -> None:
    assert exporter.bind(None, None) is None
    first = exporter.bind(("127.0.0.1", 0), None)
    assert first is not None
    with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+ for metrics"):
        exporter.bind(first.socket.getsockname(), None)
    first.close()


# ----------------------------------------------------------- a running daemon


def over_the_wire(daemon: Daemon) -> bytes:
    with daemon.client() as client:
        return gzip.decompress(client.call("metrics")["gzip"])


def test_any_peer_may_read_them(daemon: Daemon) -> None:
    with daemon.client() as client, client.worker("llama", quota="64MiB"):
        with Raw(daemon.socket) as peer:
            answer = peer.call("metrics")
        assert answer["type"].startswith("text/plain")
        series = parsed(gzip.decompress(answer["gzip"]))
    assert value(series, "umad_worker_quota_bytes", worker="llama") == 64 * MIB
    assert names(series, "process") == {str(os.getpid())}
    assert names(series, "state") == {"registered", "off", "ok"}
    assert value(series, "umad_look_seconds_count") == value(series, "umad_looks_total")


def test_a_daemon_with_a_listener_of_its_own(folder: Path) -> None:
    path = folder / "metrics.sock"
    with running(folder, f'[metrics]\nlisten = "unix:{path}"') as daemon:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert "umad_up 1.0" in client.get("http://umad/metrics").text
        assert path.stat().st_mode & 0o777 == 0o660
        assert daemon.rss() < 40 * MIB
    assert not path.exists()


def test_a_listener_that_cannot_be_had_does_not_keep_the_daemon_from_its_work(
    folder: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(folder, f'[metrics]\nlisten = "127.0.0.1:{port}"') as daemon:
            assert f"127.0.0.1:{port}" in daemon.wait_for("metrics_not_served")["why"]
            assert daemon.status()["generation"] == 1


VICTIM = """
import sys, threading
from umad.client import connect
client = connect(sys.argv[1], name="victim")
worker = client.worker("victim", quota="64MiB")
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def victim(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(daemon.socket)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
        child.kill()


@pytest.mark.slow
def test_r5_a_killed_workers_series_are_gone_within_one_sample(
    daemon: Daemon, victim: subprocess.Popen[str]
) -> None:
    assert "victim" in names(parsed(over_the_wire(daemon)), "worker")
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    # An interval of 100 ms, and a rendering that may be 200 ms old.
    eventually(lambda: "victim" not in names(parsed(over_the_wire(daemon)), "worker"), 0.5)


@pytest.mark.slow
def test_r5_thousands_of_random_names_leave_nothing_behind(daemon: Daemon) -> None:
    letters = random.Random(2)

    def come_and_go(peer: Raw, count: int) -> None:
        for _ in range(count):
            name = "".join(letters.choices(string.ascii_lowercase, k=40))
            worker = peer.call("register", model=name, quota=MIB)["worker"]
            assert peer.call("unregister", worker=worker) == {}

    with Raw(daemon.socket) as peer:
        come_and_go(peer, 200)
        before, few = daemon.rss(), len(parsed(over_the_wire(daemon)))
        come_and_go(peer, 5000)
        began_s = time.monotonic()
        text = over_the_wire(daemon)
        assert time.monotonic() - began_s < 0.2
        assert len(parsed(text)) <= few + 16 * 64  # what has not been looked away yet
        eventually(lambda: names(parsed(over_the_wire(daemon)), "worker") == set())
        assert daemon.rss() - before < 20 * MIB
    assert daemon.rss() < 40 * MIB
