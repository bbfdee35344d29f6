"""The state as it is shown, where there is most of everything."""

import msgpack
import pytest

from tests.core.drive import Drive
from tests.core.fakes import MB, engine
from umad.values import AccountFigures
from umad.wire.frames import Limits


@pytest.mark.slow
def test_a_crowd_with_the_longest_texts_fits_in_a_message() -> None:
    drive = Drive(engine())
    accounts = {}
    for at in range(130):
        pid = drive.connect(4_000_000 + at)
        wanted = {"model": f"{at:064}", "quota": 10 * MB, "guard_off": "x" * 200}
        worker = drive.call(pid, "register", **wanted)["worker"]
        lease = drive.call(pid, "reserve", worker=worker)
        drive.call(pid, "commit", lease=lease["lease"], token=lease["token"], measured=10 * MB)
        forward = {"predicted": 1 << 40, "peak": 1 << 40, "tokens": 1 << 40, "batch": 1 << 40}
        drive.tell(pid, "forward_done", worker=worker, seconds=1.2345, **forward)
        accounts[worker] = AccountFigures(1 << 40, 1 << 40, 0)
    for at in range(60):
        pid = drive.connect(3_000_000 + at)
        worker = drive.call(pid, "register", model=f"w{at:063}", quota=2000 * MB)["worker"]
        drive.ask(pid, "reserve", worker=worker, wait_s=60.0)
    for process in drive.engine.state.processes.values():
        process.comm = "c" * 15
    drive.look({4_000_000 + at: 20 * MB for at in range(130)}, accounts=accounts)
    state = drive.engine.status(drive.now_s)
    assert state["workers_total"] == 190
    assert state["queue"]
    assert state["workers"][0]["holds"] == 1 << 40
    # The shell adds its own, a few KiB at most.
    assert len(msgpack.packb(state)) < Limits().message_bytes - 4096
