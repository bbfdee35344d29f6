import os
import time

import pytest

from umad.errors import ProbeError
from umad.host.store import next_generation


def test_every_start_counts_one_up(tmp_path):
    assert next_generation(tmp_path) == (1, False)
    assert next_generation(tmp_path) == (2, True)
    assert next_generation(tmp_path) == (3, True)
    assert [path.name for path in tmp_path.iterdir()] == ["generation"]


@pytest.mark.parametrize("text", ["", "garbage", "-4", "9" * 30, "1.5", "nan"])
def test_a_damaged_file_still_rises(tmp_path, text):
    (tmp_path / "generation").write_text(text)
    before = int(time.time())
    generation, restarted = next_generation(tmp_path)
    assert generation >= before
    assert restarted
    assert next_generation(tmp_path) == (generation + 1, True)


@pytest.mark.timeout(5)
def test_a_fifo_in_its_place_stops_nobody(tmp_path):
    os.mkfifo(tmp_path / "generation")
    assert next_generation(tmp_path)[1]
    assert (tmp_path / "generation").is_file()


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ProbeError, match="generation"):
        next_generation(tmp_path / "none")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "generation").mkdir()
    with pytest.raises(ProbeError, match="generation"):
        next_generation(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["generation"]
