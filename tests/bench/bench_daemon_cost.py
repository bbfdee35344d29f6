"""What watching costs: the daemon with 5 workers at 200 ms, earlyoom and nohang beside it."""

import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from tests.bench.figures import Figure
from tests.daemon.running import running

SECONDS = float(os.environ.get("BENCH_SECONDS", "60"))
TICK_S = 0.2
# Both watch only: thresholds that are never reached, and nobody is killed.
RIVALS = {
    "earlyoom": ["earlyoom", "-m", "1", "--dryrun", "-r", "0"],
    "nohang": ["nohang", "--monitor", "--config", "/etc/nohang/nohang.conf"],
}


def run() -> list[Figure]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="umad-")))
        daemon = stack.enter_context(running(folder, "", "--dry-run"))
        daemon.config.write_text(daemon.config.read_text().replace("100ms", "200ms"))
        daemon.stop()
        daemon.start()
        client = stack.enter_context(daemon.client())
        for index in range(5):
            client.worker(f"m{index}", quota="64MiB")
        rivals = {}
        for name, command in RIVALS.items():
            if shutil.which(command[0]):
                process = subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                rivals[name] = process.pid
        threading.Event().wait(2)  # starting up is not watching
        before = {pid: cpu_s(pid) for pid in (daemon.pid, *rivals.values())}
        threading.Event().wait(SECONDS)
        shares = {pid: 100 * (cpu_s(pid) - used) / SECONDS for pid, used in before.items()}
        ours, rss = shares[daemon.pid], rss_mib(daemon.pid)
        beside = {name: shares[pid] for name, pid in rivals.items()}
        beside_rss = {name: rss_mib(pid) for name, pid in rivals.items()}
    tick_us = ours / 100 * TICK_S * 1e6
    best = min(beside.values(), default=None)
    note = ", ".join(
        f"{name} {share:.2f} %, {beside_rss[name]:.0f} MiB" for name, share in beside.items()
    )
    note = f" (beside it: {note})" if note else " (neither earlyoom nor nohang is installed)"

    def one(figure: str, value: float, unit: str, limit: float, rival: float | None) -> Figure:
        return Figure(
            "daemon_cost",
            figure,
            value,
            unit,
            f"<= {limit}",
            rival,
            1,
            value,
            value,
            value <= limit,
        )

    return [
        one("CPU of one core with 5 workers at 200 ms" + note, ours, "%", 0.5, best),
        one("resident memory", rss, "MiB", 40, min(beside_rss.values(), default=None)),
        one("CPU of one tick, all that the daemon does included", tick_us, "us", 300, None),
    ]


def cpu_s(pid: int) -> float:
    """CPU time from the scheduler's own nanosecond clock; stat's ticks are too coarse."""
    return (
        sum(
            int(path.read_text().split()[0])
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )
        / 1e9
    )


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")
