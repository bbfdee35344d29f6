import os
import subprocess
from pathlib import Path

import pytest

from umad.host.files import SIZE_MAX, KernelFile, Unreadable, parse_decimal, read_as, read_file
from umad.values import Figure


def problem(path: Path) -> Unreadable:
    with pytest.raises(Unreadable) as caught:
        read_file(str(path))
    return caught.value


def test_a_missing_file_is_absent_and_named(tmp_path):
    error = problem(tmp_path / "none")
    assert error.absent
    assert str(tmp_path / "none") in str(error)
    assert error.reading("x").state is Figure.ABSENT


def test_a_folder_is_broken_and_named(tmp_path):
    error = problem(tmp_path)
    assert not error.absent
    reading = error.reading("x")
    assert reading.state is Figure.BROKEN
    assert reading.value is None
    assert str(tmp_path) in reading.problem


def test_a_forbidden_file_is_broken(tmp_path):
    path = tmp_path / "secret"
    path.write_text("1")
    path.chmod(0)
    me = os.geteuid()
    if me == 0:  # root may read everything, nobody may not
        os.seteuid(65534)
    try:
        error = problem(path)
    finally:
        os.seteuid(me)
    assert not error.absent
    assert "Permission denied" in str(error)


@pytest.mark.timeout(5)
def test_a_fifo_without_a_writer_is_empty_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert read_file(str(tmp_path / "fifo")) == b""


@pytest.mark.timeout(5)
def test_a_fifo_with_a_silent_writer_is_broken_at_once(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    try:
        assert not problem(path).absent
    finally:
        os.close(writer)
        os.close(reader)


def test_a_file_too_large_is_broken(tmp_path):
    (tmp_path / "big").write_bytes(b"1" * (SIZE_MAX + 1))
    assert "larger" in str(problem(tmp_path / "big"))
    (tmp_path / "big").write_bytes(b"1" * SIZE_MAX)
    assert len(read_file(str(tmp_path / "big"))) == SIZE_MAX


@pytest.mark.parametrize("text", ["", "-1", "+1", "1 2", "0x10", "1e3", "nan", "\u0661", "1.0"])
def test_what_is_no_whole_number_is_refused(tmp_path, text):
    path = tmp_path / "figure"
    path.write_text(text)
    with pytest.raises(Unreadable, match="figure"):
        read_as(str(path), parse_decimal)


def test_a_kept_descriptor_sees_new_content():
    path = f"/proc/{os.getpid()}/comm"
    before = Path(path).read_text()
    file = KernelFile(path, keep=True)
    try:
        assert file.read().decode() == before
        Path(path).write_text("another")
        assert file.read() == b"another\n"
    finally:
        Path(path).write_text(before.strip())
        file.close()


def test_a_kept_descriptor_of_a_dead_process_says_gone():
    child = subprocess.Popen(["sleep", "60"])
    file = KernelFile(f"/proc/{child.pid}/status", keep=True)
    assert b"State:" in file.read()
    child.kill()
    child.wait()
    with pytest.raises(Unreadable) as caught:
        file.read()
    assert caught.value.gone


def test_a_file_of_a_copied_tree_is_looked_up_each_time(tmp_path):
    path = tmp_path / "figure"
    path.write_text("1")
    file = KernelFile(str(path), keep=False)
    assert file.read() == b"1"
    path.unlink()
    path.write_text("2")
    assert file.read() == b"2"
    path.unlink()
    with pytest.raises(Unreadable):
        file.read()
