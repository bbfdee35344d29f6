import os
import select
from pathlib import Path

import pytest

from umad.host.files import Unreadable
from umad.host.pressure import PRESSURE, PressureAlarm, measure_fill_rate, parse_psi
from umad.units import GIB, MIB

TEXT = (
    b"some avg10=34.25 avg60=1.00 avg300=0.00 total=3120202\n"
    b"full avg10=18.70 avg60=0.00 avg300=0.00 total=1498300\n"
)


def test_pressure():
    figures = parse_psi(TEXT)
    assert figures.some_ratio_avg10 == pytest.approx(0.3425)
    assert figures.full_ratio_avg10 == pytest.approx(0.187)
    assert (figures.some_us_total, figures.full_us_total) == (3120202, 1498300)


def test_a_kernel_without_the_full_line():
    assert parse_psi(TEXT.splitlines(keepends=True)[0]).full_us_total == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"some\n",
        b"some avg10=nan total=1\n",
        b"some avg10=1.2.3 avg60=0 total=1\n",
        b"some avg10=101 avg60=0 total=1\n",
        b"some avg10=1\n",
        b"some avg10=-1 avg60=0 total=1\n",
        TEXT[:-4],
        TEXT.splitlines(keepends=True)[1],
    ],
)
def test_damaged_pressure_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        parse_psi(data)


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_the_fill_rate_is_believable_and_leaves_nothing_behind():
    measure_fill_rate()
    before = resident()
    rate = measure_fill_rate()
    assert 10 * MIB < rate <= 8 * 24 * GIB
    assert resident() - before < MIB


@pytest.mark.skipif(not Path(PRESSURE).exists(), reason="a kernel without pressure figures")
def test_the_kernel_takes_one_of_the_alarms():
    alarm = PressureAlarm(PRESSURE)
    try:
        assert select.select([alarm], [], [], 0)[0] == []  # readable by POLLPRI alone
    finally:
        alarm.close()


@pytest.mark.parametrize("there", [False, True])
def test_where_there_is_no_alarm_it_says_which_file(tmp_path, there):
    path = tmp_path / "memory"
    if there:
        path.write_bytes(TEXT)  # a plain file never alarms
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(Unreadable, match="memory"):
        PressureAlarm(str(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
