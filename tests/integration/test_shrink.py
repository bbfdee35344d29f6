"""From free lists in crumbs to warm memory given back: a real daemon, a real guarded worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.running import ROOT, Daemon
from umad.guard import preload
from umad.host.zones import REQUEST
from umad.units import MIB

pytestmark = pytest.mark.slow

# The daemon as it is, but for the files its free lists are read from, and for a patience of
# minutes, which no test has.
QUICK = """
import sys
from umad.core import ladder
from umad.host import memory, zones
tree = sys.argv.pop(1)
ladder.DWELL_S = 0.2
ladder._RUNGS = tuple(rung._replace(settle_s=0.2) for rung in ladder._RUNGS)
zones.INTERVAL_S = 0.05
memory.ZoneProbe = lambda root: zones.ZoneProbe(tree, page_bytes=4096)
from umad.daemon.main import main
sys.exit(main())
"""
ZONEINFO = """\
Node 0, zone   Normal
  pages free     524288
        min      100
        low      200
        high     300
        managed  4194304
        protection: (0, 0)
"""
WORKER = """
import sys
from umad.client import connect
from umad.guard.account import account, account_range
class Model:
    pass
with connect(sys.argv[1]) as client, client.worker("warm", quota="200MiB") as worker:
    model = worker.load(Model)
    with account(worker.account):
        block = bytearray(32 << 20)
        del block
    print(account_range(worker.account).warm, flush=True)
    def after(told):
        print(account_range(worker.account).warm, flush=True)
    client.on("shrink", after)
    sys.stdin.readline()
"""


class QuickDaemon(Daemon):
    def command(self) -> list[str]:
        tree = str(self.folder / "tree")
        return [sys.executable, "-c", QUICK, tree, *super().command()[3:]]


def lay(folder: Path, *, pages: int, blocks: int) -> None:
    """Free single pages, and free blocks of 4 MiB; replaced at once, as the kernel does it."""
    proc = folder / "tree/proc"
    proc.mkdir(parents=True, exist_ok=True)
    (proc / "zoneinfo").write_text(ZONEINFO)
    (proc / "vmstat").write_text("compact_stall 0\ncompact_fail 0\ncompact_migrate_scanned 7\n")
    counts = " ".join(["0"] * 9)
    (proc / "new").write_text(f"Node 0, zone   Normal {pages} {counts} {blocks} \n")
    (proc / "new").rename(proc / "buddyinfo")


def test_crumbs_lead_up_the_ladder(folder: Path) -> None:
    preload.build()
    environment, why = preload.launch_environment(os.environ)
    assert not why
    lay(folder, pages=0, blocks=512)
    daemon = QuickDaemon(folder)
    try:
        daemon.start()
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(daemon.socket)],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with worker:
            assert worker.stdout is not None
            assert worker.stdin is not None
            assert int(worker.stdout.readline()) >= 32 * MIB
            assert daemon.status()["fragmentation"]["risk"] == "low"
            lay(folder, pages=524288, blocks=0)
            daemon.wait_for("fragmentation_step", step="release")
            assert int(worker.stdout.readline()) == 0, "the warm memory is given back"
            # It did not help, so the next step follows, after a reading.
            asked = daemon.wait_for("fragmentation_step", step="compact")
            assert asked["ratio"] == 1.0
            assert daemon.log.index(daemon.wait_for("fragmentation_step_seen")) < daemon.log.index(
                asked
            )
            # Nobody compacts here, and the worker cannot be recycled: told, and no more.
            daemon.wait_for("fragmentation_stays")
            assert (folder / REQUEST).exists()
            state = daemon.status()["fragmentation"]
            assert (state["risk"], state["step"]) == ("high", None)
            worker.stdin.write("\n")
    finally:
        daemon.stop()
