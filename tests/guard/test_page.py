import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guard import guarded
from umad.errors import ProbeError
from umad.guard import page as layout
from umad.guard.page import AccountPage, AccountState


@pytest.fixture
def page() -> Iterator[AccountPage]:
    made = AccountPage.create(11)
    yield made
    made.close()


@pytest.mark.slow
def test_the_header_file_and_the_module_agree(tmp_path: Path) -> None:
    lines = [
        *(f"H({name})" for name in layout.HEADER_OFFSETS),
        *(f"A({name})" for name in layout.ACCOUNT_OFFSETS),
    ]
    source = tmp_path / "offsets.c"
    header = guarded.ROOT / "umad" / "guard" / "page.h"
    source.write_text(
        f'#include "{header}"\n#include <stddef.h>\n#include <stdio.h>\n'
        '#define H(n) printf(#n " %zu\\n", offsetof(struct umad_header, n));\n'
        '#define A(n) printf(#n " %zu\\n", offsetof(struct umad_account, n));\n'
        "int main(void) {\n" + "\n".join(lines) + "\n"
        'printf("%d %d %d %d %s %d %d\\n", UMAD_FREE, UMAD_OPEN, UMAD_CLOSED, UMAD_RETURNED,'
        " UMAD_PAGE_MAGIC, UMAD_PAGE_VERSION, UMAD_PAGE_SLOTS); }\n"
    )
    program = tmp_path / "offsets"
    subprocess.run([str(guarded.CC), "-o", str(program), str(source)], check=True)
    out = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    *offsets, last = out.splitlines()
    ours = {**layout.HEADER_OFFSETS, **{f"a {n}": at for n, at in layout.ACCOUNT_OFFSETS.items()}}
    assert [int(line.split()[1]) for line in offsets] == list(ours.values())
    states = " ".join(str(int(state)) for state in AccountState)
    assert last == f"{states} {layout.MAGIC.decode()} {layout.VERSION} {layout.SLOTS}"
    assert layout.HEADER.size == layout.ACCOUNT.size == layout.LINE_BYTES


def test_a_page_is_sealed_and_seen_by_both(page: AccountPage) -> None:
    seals = fcntl.fcntl(page.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    assert seals & fcntl.F_SEAL_SEAL
    assert os.get_inheritable(page.fd) is False
    other = AccountPage.from_fd(page.fd)
    try:
        assert other.fd != page.fd
        assert other.generation == 11
        page.open(62, 1 << 40)
        reading = other.read(62)
        assert (reading.limit, reading.state, reading.sequence) == (1 << 40, AccountState.OPEN, 1)
        other.adopt(12)
        assert page.generation == 12
        assert not page.guarded
    finally:
        other.close()
        other.close()


def test_an_account_is_opened_closed_and_freed(page: AccountPage) -> None:
    assert page.vacant() == 0
    assert page.open(0, 1000) == 1
    assert page.vacant() == 1
    with pytest.raises(ValueError, match="not free"):
        page.open(0, 1000)
    page.set_limit(0, 500)
    page.close_account(0)
    assert page.read(0)[:2] == (500, 0)
    assert page.read(0).state == AccountState.CLOSED
    page.close_account(0)
    page.free(0)
    assert page.open(0, 7) == 2


def test_closing_rings_once_and_touches_no_other_state(page: AccountPage) -> None:
    page.open(3, 1)
    page.close_account(3)
    page.close_account(3)
    page.close_account(4)
    assert page.read(4).state == AccountState.FREE
    (doorbell,) = struct.unpack("@I", os.pread(page.fd, 4, layout.HEADER_OFFSETS["doorbell"]))
    assert doorbell == 1


@pytest.mark.parametrize("slot", [-1, 63])
def test_there_are_63_slots(page: AccountPage, slot: int) -> None:
    for call in (page.read, page.close_account, page.free, lambda at: page.open(at, 1)):
        with pytest.raises(ValueError, match="no account"):
            call(slot)


@pytest.mark.parametrize("limit", [-1, (1 << 62) + 1, 1 << 64])
def test_a_limit_is_a_size(page: AccountPage, limit: int) -> None:
    with pytest.raises(ValueError, match="no limit"):
        page.open(0, limit)
    assert page.read(0).state == AccountState.FREE


@pytest.mark.parametrize(
    ("name", "value"),
    [("used", -5), ("used", 1 << 63), ("peak", -1), ("state", 9), ("warm", 10)],
)
def test_a_lie_is_flagged(page: AccountPage, name: str, value: int) -> None:
    page.open(5, 100)
    assert page.read(5).problem == ""
    kind = "@I" if name == "state" else "@Q"
    raw = struct.pack(kind, value & 0xFFFFFFFFFFFFFFFF)
    os.pwrite(page.fd, raw, 64 * 6 + layout.ACCOUNT_OFFSETS[name])
    assert page.read(5).problem
    assert page.read(5).held >= 0


def test_a_slot_with_bytes_of_its_former_holder_comes_last(page: AccountPage) -> None:
    os.pwrite(page.fd, struct.pack("@Q", 4096), 64 + layout.ACCOUNT_OFFSETS["used"])
    assert page.vacant() == 1
    for slot in range(1, 63):
        page.open(slot, 1)
    assert page.vacant() == 0
    page.open(0, 1)
    assert page.vacant() is None


def damaged(offset: int, raw: bytes) -> int:
    fd = os.memfd_create("damaged", os.MFD_ALLOW_SEALING)
    page = AccountPage.create(1)
    os.pwrite(fd, os.pread(page.fd, 4096, 0), 0)
    page.close()
    os.pwrite(fd, raw, offset)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def test_a_damaged_page_is_an_error_and_no_crash(tmp_path: Path) -> None:
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, 4096)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    reading, writing = os.pipe()
    bad = [
        *(reading, writing, plain, unsealed),
        *(damaged(0, b"X"), damaged(8, b"\xff"), damaged(12, b"\0"), damaged(4096, b"more")),
    ]
    for fd in bad:
        with pytest.raises(ProbeError):
            AccountPage.from_fd(fd)
        os.close(fd)
    with pytest.raises(ProbeError):
        AccountPage.from_fd(reading)  # closed


def test_reading_costs_less_than_2_us(page: AccountPage) -> None:
    page.open(0, 100)
    took = []
    for _ in range(200):
        before = time.perf_counter()
        for _ in range(20):
            page.read(0)
        took.append((time.perf_counter() - before) / 20)
    assert sorted(took)[100] < 2e-6
