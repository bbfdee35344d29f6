import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data import fake_nvml
from umad.host.nvml import STALE_S, NvmlReader, NvmlSample
from umad.testing.clock import ManualClock
from umad.units import GIB
from umad.values import Figure

CARD = f"driver 570.133.07\ndevice 00000000:01:00.0 {24 * GIB} {10 * GIB}\n"


@pytest.fixture
def answers(tmp_path) -> Path:
    path = tmp_path / "nvml.txt"
    path.write_text(CARD)
    fake_nvml.use(path)
    return path


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def reader(answers, clock) -> Iterator[NvmlReader]:
    reader = NvmlReader(clock)
    yield reader
    reader.close()


def asked(reader: NvmlReader) -> NvmlSample:
    if not reader.started:
        reader.start()
    sample = reader.fresh(10.0)
    assert sample is not None
    return sample


def test_the_memory_of_a_card_and_who_holds_it(reader, answers):
    answers.write_text(CARD + f"compute 6001 {9 * GIB}\ngraphics 1999 -\n")
    sample = asked(reader)
    (device,) = sample.devices
    assert (sample.driver, sample.problem, device.problem) == ("570.133.07", "", "")
    assert device.pdev == "0000:01:00.0"
    assert (device.total.value, device.used.value) == (24 * GIB, 10 * GIB)
    assert device.held == {6001: 9 * GIB, 1999: None}


def test_a_process_in_two_lists_counts_once(reader, answers):
    both = (
        "compute 7 500\ngraphics 7 500\ncompute 8 -\ngraphics 8 300\ncompute 9 40\ngraphics 9 -\n"
    )
    answers.write_text(CARD + both)
    assert asked(reader).devices[0].held == {7: 500, 8: 300, 9: 40}


@pytest.mark.parametrize(
    ("line", "state"),
    [("error 3", Figure.ABSENT), ("error 999", Figure.BROKEN), (f"{1 << 60} 0", Figure.BROKEN)],
)
def test_a_card_that_tells_no_memory(reader, answers, line, state):
    answers.write_text(f"device 0000000F:01:00.0 {line}\ncompute 7 500\n")
    (device,) = asked(reader).devices
    assert device.pdev == "000f:01:00.0"
    assert device.total.state is state
    assert device.held == {7: 500}


def test_lists_that_cannot_be_had_are_not_empty(reader, answers):
    answers.write_text(CARD + "lists 4\n")
    (device,) = asked(reader).devices
    assert "0000:01:00.0" in device.problem
    assert device.total.value == 24 * GIB


@pytest.mark.parametrize("trouble", ["fail 15\n", "device nonsense 1 1\n", None])
def test_after_any_trouble_the_driver_is_opened_anew(reader, answers, trouble):
    asked(reader)
    opened = fake_nvml.library().fake_nvml_inits()
    answers.unlink() if trouble is None else answers.write_text(trouble)
    sample = asked(reader)
    assert "NVML" in sample.problem or "PCI" in sample.problem
    assert sample.devices == ()
    answers.write_text(CARD)
    assert asked(reader).problem == ""
    assert fake_nvml.library().fake_nvml_inits() > opened


def test_a_driver_that_is_stuck_holds_nobody_up_and_grows_old(reader, answers, clock):
    assert reader.latest().problem == "NVML has not answered yet"
    sound = asked(reader)
    answers.unlink()
    os.mkfifo(answers)
    assert reader.fresh(0.05) is None
    assert reader.latest().devices == sound.devices
    clock.advance(STALE_S + 0.5)
    stale = reader.latest()
    assert "3.5 s" in stale.problem
    assert stale.devices == ()
    assert reader.age_ms() == 3500
    answers.write_text(CARD)  # its reader goes on
    answers.unlink()
    answers.write_text(CARD)
    assert asked(reader).devices == sound.devices
    assert reader.latest().problem == ""


def test_nobody_is_asked_before_the_start_and_after_the_end(answers, clock):
    reader = NvmlReader(clock)
    reader.close()
    assert not reader.started
    reader.start()
    reader.close()
    number = reader.latest().number
    assert reader.fresh(0.05) is None
    assert reader.latest().number == number


RSS = """
import re
import umad.daemon.main
from tests.data import fake_nvml
from umad.host.memory import MachineProbe
from pathlib import Path

def rss():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

fake_nvml.use(Path({root!r}) / "nvml.txt")
before = rss()
probe = MachineProbe({root!r})
assert "unified" in probe.sample([], 0.0).pools
print(rss() - before)
probe.close()
"""


@pytest.mark.slow
def test_the_daemon_stays_small_with_the_binding(machine):
    """The binding and its thread: 2 MiB beside the 40 that the daemon may have in all."""
    root = str(machine("gb10"))
    done = subprocess.run(
        [sys.executable, "-c", RSS.format(root=root)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 4 * 1024
