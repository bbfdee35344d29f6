"""Every figure that is known of a recorded machine, reproduced to the byte."""

import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.data.machine_tree import NAMES, expected, lay_out
from umad.host.drm import DrmScanner
from umad.host.files import read_as, read_text
from umad.host.memory import MachineProbe
from umad.host.procs import ProcessTable, comm, parse_proportional, process_identity
from umad.values import SYSTEM_POOL, Identity, PoolReading, Snapshot

DIRTY = 12288 * 1024
"""Dirty pages on all of the machines: the ceilings leave them in, what may be granted does not."""

UNEXPLAINED = {"gb10": 620 << 20, "jetson-orin-8g": 40 << 20}
"""What the drivers keep for themselves; elsewhere the GPUs explain the residual to the byte."""


@pytest.mark.parametrize("name", NAMES)
def test_every_expected_figure(tmp_path, name):
    root, truth = lay_out(name, tmp_path / "machine"), expected(name)
    truth.pop("notes", None)
    identities = {pid: identified(pid, root) for pid in truth["procs"]}
    with closing(MachineProbe(str(root))) as probe:
        assert probe.check() == []
        snapshot = probe.sample(list(identities.values()), 7.0)
    assert figures(root, snapshot, identities, truth) == truth
    assert snapshot.info["mem_unexplained"] == UNEXPLAINED.get(name, 0)


def identified(pid: str, root: Path) -> Identity:
    identity = process_identity(int(pid), str(root))
    assert identity
    return identity


def figures(
    root: Path, snapshot: Snapshot, identities: dict[str, Identity], truth: dict[str, Any]
) -> dict[str, Any]:
    """What the probe says, in the form of the truth."""
    info, pools = snapshot.info, snapshot.pools
    gpu = next((pools[pool] for pool in ("gtt", "unified", "vram") if pool in pools), None)
    by_pid = {pid: snapshot.processes[who].gpu_bytes for pid, who in identities.items()}
    every = {
        "kind": info.get("gpu_kind", "cpu"),
        "uma": any(pool.parent == SYSTEM_POOL for pool in pools.values()),
        "prefer_gtt": "gtt" in pools,
        "osrelease": read_text(str(root / "proc/sys/kernel/osrelease")),
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "mem_total": info["mem_total"],
        "mem_free": info["mem_free"],
        "mem_available": info["mem_available"],
        "cma_free": info.get("cma_free", 0),
        "gpu_active": info.get("gpu_active"),
        "gpu_reclaim": info.get("gpu_reclaim"),
        "nvmap_used": info.get("nvmap_used"),
        "meminfo_residual": info["mem_residual"],
        "limits": {key: info.get(f"limit_{key}") for key in truth.get("limits", ())},
        "cpu_alloc_ceiling_bytes": ceiling(pools["system"]),
        "gpu_alloc_ceiling_bytes": gpu and ceiling(gpu),
        "gpu_by_pid_dedup": {
            pid: size for pid, size in by_pid.items() if size or pid in truth["gpu_by_pid_dedup"]
        },
        "gpu_by_client": by_client(root, identities),
        "gpu_used_sum": gpu and gpu.used.value,
        "gpus": [
            {
                "pdev": info.get("gpu"),
                "kfd_gpu_id": info.get("kfd_gpu_id"),
                "gtt_total": info.get("gtt_total"),
                "gtt_used": info.get("gtt_used"),
                "vram_total": pools["vram"].capacity.value if "vram" in pools else None,
                "vram_used": pools["vram"].used.value if "vram" in pools else None,
            }
        ],
        "procs": {pid: process(root, who) for pid, who in identities.items()},
    }
    return {key: every[key] for key in truth}


def ceiling(pool: PoolReading) -> int | None:
    assert pool.safe.value is not None
    return pool.safe.value + (DIRTY if pool.binding == "MemAvailable" else 0)


def by_client(root: Path, identities: dict[str, Identity]) -> dict[str, int]:
    scanner = DrmScanner(str(root))
    return {
        str(client.client): client.bytes
        for identity in identities.values()
        for client in scanner.clients(identity, 0.0)
    }


def process(root: Path, identity: Identity) -> dict[str, Any]:
    folder = root / f"proc/{identity.pid}"
    rollup = str(folder / "smaps_rollup")
    file_kib = re.search(r"^Pss_File: +(\d+) kB", read_text(rollup), re.MULTILINE)
    assert file_kib
    return {
        "comm": comm(identity.pid, str(root)),
        "cgroup": read_text(str(folder / "cgroup")).removeprefix("0::"),
        "rss": ProcessTable(str(root)).resident(identity),
        "pss": read_as(rollup, parse_proportional) + int(file_kib[1]) * 1024,
    }
