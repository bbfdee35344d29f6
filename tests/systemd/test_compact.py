"""The one privileged deed: a file of the daemon's user has memory compacted, and nothing else."""

import pytest

from tests.systemd.conftest import ENVIRONMENT, PYTHON, Installed
from tests.systemd.container import wait_until

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.slow]

ASK = "from pathlib import Path; from umad.host.zones import ask_for_compaction as ask; "


def test_the_daemons_request_writes_the_kernels_file(umad: Installed) -> None:
    stand_in = umad.machine.path("/run/compact_memory")  # not the real one: it is the machine's
    stand_in.write_text("")
    umad.drop_in(
        "umad-compact.service",
        "[Service]\nBindPaths=/run/compact_memory:/proc/sys/vm/compact_memory\n",
    )
    checked = umad.run("systemd-analyze verify --man=no umad-compact.path umad-compact.service")
    assert checked.stdout + checked.stderr == ""
    umad.run("systemctl start umad-compact.path")
    asked = umad.run(
        f"{ENVIRONMENT} {PYTHON} -c '{ASK} print(repr(ask(Path(\"/run/umad\"))))'", user="umad"
    )
    assert asked.stdout.strip() == "''"
    wait_until(lambda: stand_in.read_text() == "1\n", 10, "the write")
    assert umad.show("umad-compact.service", "Result") == "success"
    umad.run("systemctl stop umad-compact.path")
