"""systemd keeps the account pages: a daemon that was killed finds them again."""

from typing import Any

import pytest

from tests.systemd.conftest import ENVIRONMENT, INSIDE, PROJECT, PYTHON, Installed
from tests.systemd.container import wait_until
from tests.systemd.test_units import journal, kill, main_pid, status
from umad.guard import preload

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.slow]

MIB = 1 << 20
QUOTA = 64 * MIB
STANDIN = f"""\
[Service]
Type=notify
NotifyAccess=main
User=umad-serve
SupplementaryGroups=umad
Environment={ENVIRONMENT} LD_PRELOAD={INSIDE}/{preload.LIBRARY.relative_to(PROJECT)}
ExecStart={PYTHON} {INSIDE}/tests/systemd/standin.py standin 32
"""


def events(umad: Installed, name: str) -> list[dict[str, Any]]:
    return [entry for entry in journal(umad) if entry.get("UMAD_EVENT") == name]


def processes(umad: Installed) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = status(umad)["processes"]
    return found


def test_a_killed_daemon_finds_the_pages_again(umad: Installed) -> None:
    preload.build()
    umad.unit("standin.service", STANDIN)
    umad.run("systemctl start umad standin")
    worker = main_pid(umad, "standin.service")
    assert [one["guard"] for one in processes(umad)] == [True]
    assert umad.show("umad", "NFileDescriptorStore") == "1"
    # It cannot come back by itself, as if it were in a long call with the interpreter's lock.
    umad.run(f"kill -STOP {worker}")
    kill(umad)
    wait_until(lambda: bool(events(umad, "page_found")), 10.0, "the page")
    wait_until(lambda: not status(umad)["recovering"], 10.0, "the end of the recovery")
    state = status(umad)
    [process] = state["processes"]
    assert (process["pid"], process["workers"], process["guard"]) == (worker, 0, True)
    assert process["unclaimed"] == QUOTA
    assert state["pools"][0]["booked"] == 0
    umad.run(f"kill -CONT {worker}")
    wait_until(lambda: status(umad)["pools"][0]["booked"] == QUOTA, 10.0, "the worker's return")
    assert [one["unclaimed"] for one in processes(umad)] == [0]
    assert umad.show("umad", "NFileDescriptorStore") == "1"

    umad.run("systemctl stop standin")
    wait_until(
        lambda: umad.show("umad", "NFileDescriptorStore") == "0", 5.0, "the store to be empty"
    )


def test_the_page_of_a_process_that_died_meanwhile_is_dropped(umad: Installed) -> None:
    preload.build()
    umad.drop_in("umad.service", "[Service]\nRestartSec=1s\n")
    umad.unit("standin.service", STANDIN)
    umad.run("systemctl start umad standin")
    kill(umad, beside="standin")
    wait_until(lambda: bool(events(umad, "page_dropped")), 10.0, "the word of the page")
    assert processes(umad) == []
    wait_until(
        lambda: umad.show("umad", "NFileDescriptorStore") == "0", 5.0, "the store to be empty"
    )
