"""What only a GPU can tell about device quotas; each check returns its figures.

    python -m tests.gpu.device_checks

prints one line of JSON per check and ends with 1 when one of them failed.  It needs torch with
CUDA or ROCm and umad's own files, no network, no other package (nvidia-ml-py is used where it
is), about 4 GiB of device memory and about two minutes.  The check ``engine`` is skipped where
umad-serve is not installed with all it needs.
"""

import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch

from umad.errors import ConfigError, QuotaExceeded, UmadError
from umad.guard import device
from umad.guard.device import DeviceQuota
from umad.guard.page import AccountPage

MIB = 1 << 20
CARD = 0
ROOT = Path(__file__).parents[2]
Figures = dict[str, Any]


@contextmanager
def quotas(*limits: int) -> Iterator[tuple[AccountPage, list[DeviceQuota]]]:
    """Fresh accounts 0, 1, ... with these limits; the page is the process's only one."""
    page = _page()
    for slot, limit in enumerate(limits):
        page.open(slot, limit)
    made = [DeviceQuota(slot, CARD) for slot in range(len(limits))]
    try:
        yield page, made
    finally:
        gc.collect()
        for slot, quota in enumerate(made):
            quota.release()
            page.free(slot)


_pages: list[AccountPage] = []


def _page() -> AccountPage:
    if not _pages:
        _pages.append(AccountPage.create(1))
        device.attach(_pages[0].fd)
    return _pages[0]


def driver_used() -> int:
    """Bytes of the card in use: NVML's figure where it can be asked, else the driver's."""
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):  # no such driver here: ROCm, Jetson
            pynvml.nvmlInit()
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(CARD)
                return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            finally:
                pynvml.nvmlShutdown()
    free, total = torch.cuda.mem_get_info(CARD)
    return total - free


def tensor(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8, device=f"cuda:{CARD}")


def check_refusal() -> Figures:
    """NULL becomes torch's own out-of-memory error, that a QuotaExceeded; the device lives on."""
    with quotas(256 * MIB) as (page, (quota,)):
        raw, denied = "", None
        try:
            with quota.use():
                kept = tensor(100)
                try:
                    tensor(1024)
                except RuntimeError as error:
                    raw = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
                    raise
        except QuotaExceeded as error:
            denied = error
        line = page.read(0)
        with quota.use():
            alive = int((kept.sum(dtype=torch.int64) + tensor(10).sum(dtype=torch.int64)).item())
        torch.cuda.synchronize(CARD)
        return {
            "ok": raw.startswith("torch.OutOfMemoryError")
            and denied is not None
            and denied.details["by_quota"]
            and line.peak <= line.limit
            and alive == 110 * MIB,
            "torch_said": raw[:160],
            "umad_said": denied and denied.message,
            "peak_bytes": line.peak,
            "calls_refused": line.refused,
        }


def check_neighbour() -> Figures:
    """One thread is refused again and again, another allocates and computes without an error."""
    with quotas(128 * MIB, 512 * MIB) as (page, (greedy, quiet)):
        stop = threading.Event()

        def grab() -> int:
            refusals = 0
            while not stop.is_set():
                kept: list[torch.Tensor] = []
                with suppress(QuotaExceeded), greedy.use():
                    while not stop.is_set():
                        kept.append(tensor(24))
                refusals += 1
            return refusals

        def compute() -> tuple[int, int]:
            rounds = wrong = 0
            until = time.monotonic() + 5
            while time.monotonic() < until:
                with quiet.use():
                    block = tensor(32 + rounds % 64)
                    wrong += int(block.sum(dtype=torch.int64).item()) != block.numel()
                    a = torch.eye(512, device=block.device) * 3
                    wrong += int((a @ a).sum().item()) != 9 * 512
                    del block, a
                rounds += 1
            stop.set()
            return rounds, wrong

        with ThreadPoolExecutor(2) as pool:
            grabbing, computing = pool.submit(grab), pool.submit(compute)
            try:
                rounds, wrong = computing.result(timeout=60)
            finally:
                stop.set()
            refusals = grabbing.result(timeout=60)
        lines = [page.read(slot) for slot in (0, 1)]
        return {
            "ok": wrong == 0
            and rounds > 10
            and refusals > 10
            and lines[1].refused == 0
            and all(line.peak <= line.limit for line in lines),
            "rounds": rounds,
            "wrong": wrong,
            "refusals": refusals,
            "peak_over_limit": [line.peak / line.limit for line in lines],
        }


def check_bytes_back() -> Figures:
    """What is charged is what the driver says is used; a release brings it back to both."""
    with quotas(2048 * MIB) as (page, (quota,)):
        torch.cuda.empty_cache()
        torch.cuda.synchronize(CARD)
        before = driver_used()
        with quota.use():
            kept = [tensor(64) for _ in range(16)] + [tensor(1) for _ in range(40)]
        torch.cuda.synchronize(CARD)
        charged, taken = page.read(0).used, driver_used() - before
        del kept
        gc.collect()
        cached = page.read(0).used
        started = time.perf_counter()
        returned = quota.release()
        seconds = time.perf_counter() - started
        left = driver_used() - before
        return {
            "ok": page.read(0).used == 0
            and returned == cached
            and abs(taken - charged) <= 0.02 * charged + 4 * MIB
            and left <= 0.02 * charged,
            "charged_bytes": charged,
            "driver_bytes": taken,
            "cached_bytes": cached,
            "returned_bytes": returned,
            "left_bytes": left,
            "release_ms": seconds * 1e3,
        }


def check_workspace() -> Figures:
    """What cuBLAS keeps for a thread is charged to its worker, and a release ends it."""
    with quotas(512 * MIB) as (page, (quota,)):
        with quota.use():
            a = torch.randn(1024, 1024, device=f"cuda:{CARD}", dtype=torch.float16)
            b = a @ a
            torch.cuda.synchronize(CARD)
        used = page.read(0).used
        del a, b
        gc.collect()
        quota.release()
        return {
            "ok": page.read(0).used == 0 or device._version(torch) < (2, 10),
            "used_bytes": used,
            "left_bytes": page.read(0).used,
        }


def check_late_tensor() -> Figures:
    """A tensor that outlives its pool keeps its bytes charged, and another thread's release
    credits the right account."""
    with quotas(256 * MIB, 256 * MIB) as (page, (mine, other)):
        with mine.use():
            kept = tensor(64)
        mine.release()
        held, alive = page.read(0).used, int(kept.sum(dtype=torch.int64).item())
        del kept
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other.release).result()
        return {
            "ok": held >= 64 * MIB and alive == 64 * MIB and page.read(0).used == 0,
            "held_bytes": held,
            "left_bytes": page.read(0).used,
        }


def check_two_threads() -> Figures:
    """Two threads of one worker at once share its account; each gets a pool of its own."""
    with quotas(256 * MIB) as (page, (quota,)):
        both = threading.Barrier(2)

        def work() -> int:
            with quota.use(), quota.use():
                both.wait(timeout=30)
                total = int(tensor(64).sum(dtype=torch.int64).item())
                both.wait(timeout=30)
                return total

        with ThreadPoolExecutor(2) as pool:
            totals = [done.result() for done in [pool.submit(work) for _ in range(2)]]
        used = page.read(0).used
        return {"ok": totals == [64 * MIB] * 2 and used >= 128 * MIB, "used_bytes": used}


def check_closed() -> Figures:
    """The daemon closes the account by one store: the next segment is refused."""
    with quotas(1024 * MIB) as (page, (quota,)):
        denied = None
        try:
            with quota.use():
                kept = tensor(64)
                page.close_account(0)
                tensor(128)
        except QuotaExceeded as error:
            denied = error
        del kept
        return {"ok": denied is not None and denied.details["closed"], "said": str(denied)}


def check_overhead() -> Figures:
    """A forward and a loop of allocations, inside a quota and outside, interleaved."""
    with quotas(2048 * MIB) as (_, (quota,)):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to("cuda")
        rows = torch.randn(64, 1024, device="cuda")

        def forward() -> None:
            with torch.inference_mode():
                model(rows)
            torch.cuda.synchronize(CARD)

        def allocate() -> None:
            for size in (1 << 10, 64 << 10, MIB, 16 * MIB):
                torch.empty(size, dtype=torch.uint8, device="cuda")

        figures: Figures = {}
        for name, act, times in (("forward", forward, 400), ("allocate", allocate, 400)):
            taken: dict[str, list[float]] = {"plain": [], "quota": []}
            for turn in range(times):
                for kind in ("plain", "quota"):
                    started = time.perf_counter()
                    with quota.use() if kind == "quota" else nullcontext():
                        act()
                    if turn >= times // 10:  # the first ones fill the caches
                        taken[kind].append(time.perf_counter() - started)
            plain, inside = (statistics.median(taken[kind]) for kind in ("plain", "quota"))
            figures |= {f"{name}_us": plain * 1e6, f"{name}_ratio": inside / plain}
        entered = time.perf_counter()
        for _ in range(1000):
            with quota.use():
                pass
        figures["use_us"] = (time.perf_counter() - entered) * 1e3
        return {"ok": figures["forward_ratio"] <= 1.05, **figures}


def check_spin() -> Figures:
    """The driver takes spin scheduling, before and after the device was first used."""
    device.prepare_device(CARD)
    return {"ok": True, "runtime": (device.library().runtime() or b"").decode()}


def check_exit() -> Figures:
    """A process that ends inside a quota, with tensors alive, ends cleanly."""
    code = (
        "from tests.gpu import device_checks as d\n"
        "page = d._page(); page.open(0, 256 << 20); quota = d.DeviceQuota(0)\n"
        "with quota.use(): kept = d.tensor(64)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {"ok": done.returncode == 0, "rc": done.returncode, "stderr": done.stderr[-300:]}


def check_engine() -> Figures:
    """The engine as umad-serve starts it, with a small Llama on the card: see engine_check."""
    from tests.gpu import engine_check

    if missing := engine_check.missing():
        return {"ok": True, "skipped": f"not installed here: {', '.join(missing)}"}
    return engine_check.figures(f"cuda:{CARD}")


CHECKS: dict[str, Callable[[], Figures]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        *(check_spin, check_refusal, check_neighbour, check_bytes_back, check_workspace),
        *(check_late_tensor, check_two_threads, check_closed, check_overhead, check_exit),
        check_engine,
    )
}


def obstacle() -> str:
    """Why the checks cannot run here; empty when they can."""
    try:
        if not device.LIBRARY.is_file():
            device.build()
        device._require_device(torch)
        device._require_pools(torch)
    except ConfigError as error:
        return error.message
    return ""


def main() -> int:
    """Run every check, whatever becomes of the others."""
    why = obstacle()
    if why:
        print(json.dumps({"check": "device", "ok": False, "why": why}))
        return 1
    properties = torch.cuda.get_device_properties(CARD)
    print(json.dumps({"torch": torch.__version__, "device": properties.name}))
    failed = 0
    for name, check in CHECKS.items():
        started = time.perf_counter()
        try:
            figures = check()
        except (RuntimeError, UmadError, OSError, AssertionError, SubprocessError) as error:
            figures = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
        failed += not figures["ok"]
        seconds = round(time.perf_counter() - started, 3)
        print(json.dumps({"check": name, "seconds": seconds, **figures}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
