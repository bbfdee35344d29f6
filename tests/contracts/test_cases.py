"""What users reported of other programs, from the files of a machine to the answer of a grant."""

from pathlib import Path
from typing import Any

import pytest

from tests.core.drive import Drive
from tests.core.fakes import engine, snapshot
from tests.data.machine_tree import lay_out
from umad.errors import UmadError
from umad.host.memory import MachineProbe
from umad.units import GIB, MIB


def meminfo(root: Path, **kib: int) -> None:
    text = "".join(f"{key}: {size} kB\n" for key, size in kib.items())
    (root / "proc/meminfo").write_text(text)


class Machine:
    """A tree, a probe on it, and an engine that believes the probe."""

    def __init__(self, root: Path, config: str, gpu: str = "auto") -> None:
        self.root = root
        self.probe = MachineProbe(str(root), gpu)
        self.drive = Drive(engine(config))
        self.look()

    def look(self) -> None:
        self.drive.now_s += 0.2
        self.drive.engine.observe(self.probe.sample([], self.drive.now_s), self.drive.now_s)

    def write(self, place: str, text: str) -> None:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def pool(self, name: str) -> dict[str, Any]:
        pools = self.drive.engine.status(self.drive.now_s)["pools"]
        return next(pool for pool in pools if pool["name"] == name)

    def asks(self, pid: int, size: int, pool: str = "system") -> dict[str, Any] | UmadError | None:
        """The answer to a load of that size."""
        self.drive.connect(pid)
        worker = self.drive.call(pid, "register", model=f"m{pid}", quota=size, pool=pool)["worker"]
        return self.drive.answer(self.drive.ask(pid, "reserve", worker=worker))


def test_c01_page_cache_is_room_and_pinned_cache_is_not(tmp_path):
    root = lay_out("cpu-only", tmp_path / "m")
    before = {"MemTotal": 124780544, "MemFree": 6291456, "Cached": 109051904}
    meminfo(root, **before, MemAvailable=113246208, Shmem=524288)
    (root / "proc/pressure/memory").write_text("some avg10=0.00 total=0\n")
    machine = Machine(root, '[memory]\nreserve = "8GiB"\n')
    grant = machine.asks(1, 40 * GIB)
    assert isinstance(grant, dict)
    machine.drive.call(1, "void", lease=grant["lease"], token=grant["token"])
    machine.drive.exit(1)
    meminfo(root, **before, MemAvailable=16777216, Shmem=94371840)
    machine.look()
    denied = machine.asks(2, 40 * GIB)
    assert isinstance(denied, UmadError)
    assert denied.retryable
    assert denied.details["free_bytes"] == 8 * GIB


def test_c04_the_unused_part_of_a_cap_is_no_memory(tmp_path):
    root = lay_out("strix-halo-128g", tmp_path / "m")
    device = "sys/class/drm/card1/device"
    (root / device / "mem_info_gtt_total").write_text(f"{90 * GIB}\n")
    (root / device / "mem_info_gtt_used").write_text(f"{1 * GIB}\n")
    meminfo(root, MemTotal=125 << 20, MemFree=2 << 20, MemAvailable=13 << 20)
    machine = Machine(root, '[memory]\nreserve = "4GiB"\n')
    assert machine.pool("gtt")["free"] == 9 * GIB
    assert machine.pool("gtt")["binding"] == "MemAvailable"
    assert isinstance(machine.asks(1, 9 * GIB + 1, "gtt"), UmadError)
    assert isinstance(machine.asks(2, 9 * GIB, "gtt"), dict)


def test_c06_more_used_than_there_is_leaves_nothing_and_is_told(tmp_path):
    machine = Machine(lay_out("strix-halo-128g", tmp_path / "m"), "")
    device = "sys/class/drm/card1/device"
    machine.write(f"{device}/mem_info_vram_used", "601882624\n")
    machine.look()
    assert machine.pool("vram")["free"] == 0
    status = machine.drive.engine.status(machine.drive.now_s)
    assert [text for text in status["sample"]["anomalies"] if "601882624" in text]


def test_c06_a_card_is_its_address_whatever_it_is_called(tmp_path):
    root = lay_out("strix-halo-128g", tmp_path / "m")
    drm = root / "sys/class/drm"
    machine = Machine(root, "", gpu="0000:c5:00.0")
    machine.write("sys/class/drm/card0/device/vendor", "0x8086\n")
    machine.write("sys/class/drm/card0/device/uevent", "PCI_SLOT_NAME=0000:00:02.0\n")
    before = machine.pool("gtt")
    assert before["free"]
    (drm / "card1").rename(drm / "card2")
    machine.look()
    assert machine.pool("gtt") == before
    # while it is nowhere, nothing is granted on what it last said
    (drm / "card2").rename(root / "away")
    machine.look()
    assert machine.pool("gtt")["free"] is None
    refused = machine.asks(1, MIB, "gtt")
    assert isinstance(refused, UmadError)
    assert refused.code == "memory_unknown"
    (root / "away").rename(drm / "card5")
    machine.look()
    assert machine.pool("gtt") == before


@pytest.mark.parametrize("whole", [False, True])
def test_c12_what_fitted_once_fits_again(whole):
    """A worker's own 420 MiB are its quota's; a forward asks for what comes on top of them."""
    drive = Drive(engine('[memory]\nreserve = "1MiB"\nbudget = "4096MiB"\n'))
    drive.connect(7)
    worker = drive.call(7, "register", model="m", quota=420 * MIB)["worker"]
    lease = drive.call(7, "reserve", worker=worker)
    drive.call(7, "commit", lease=lease["lease"], token=lease["token"], measured=420 * MIB)

    def free(held: int) -> int:
        drive.now_s += 0.2
        drive.engine.observe(snapshot(drive.now_s, {7: held}), drive.now_s)
        (pool,) = drive.engine.status(drive.now_s)["pools"]
        return int(pool["free"])

    at_first = free(420 * MIB)
    assert at_first == (4096 - 420) * MIB
    increment = 3900 * MIB - 420 * MIB if whole else 3480 * MIB
    for _ in range(50):
        burst = drive.call(7, "admit", worker=worker, bytes=increment)
        assert free(3900 * MIB) == (4096 - 3900) * MIB
        drive.tell(
            7,
            "forward_done",
            worker=worker,
            lease=burst["lease"],
            token=burst["token"],
            predicted=increment,
            peak=increment,
            tokens=1,
            batch=1,
            seconds=0.1,
        )
        assert free(420 * MIB) == at_first
