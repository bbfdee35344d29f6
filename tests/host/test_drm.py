import pytest

from tests.host.gpu_trees import C3, fdinfo, write_process
from umad.host.drm import SLOW_S, Bill, DrmClient, DrmScanner, bill, parse_fdinfo
from umad.units import GIB, MIB
from umad.values import Identity


@pytest.mark.parametrize(
    ("line", "dram", "own"),
    [
        ("drm-memory-gtt: 21504000 KiB", 22020096000, 0),
        ("drm-memory-gtt:\t4096", 4096, 0),
        ("drm-resident-gtt:  24 MiB", 25165824, 0),
        ("drm-resident-vram:\t0", 0, 0),
        ("drm-memory-vram:\t1 MiB", 0, MIB),
    ],
)
def test_units_of_fdinfo(line, dram, own):
    assert parse_fdinfo(fdinfo(line)) == DrmClient(C3, "17", dram, own)


def test_resident_stands_above_memory_and_is_never_added_to_it():
    data = fdinfo("drm-memory-gtt: 9 MiB", "drm-resident-gtt: 2 MiB", "drm-memory-vram: 5 MiB")
    assert parse_fdinfo(data) == DrmClient(C3, "17", 2 * MIB, 5 * MIB)


def test_the_regions_of_intels_drivers():
    xe = fdinfo(
        "drm-total-system: 9 MiB",
        "drm-resident-system: 8 MiB",
        "drm-shared-system: 3 MiB",
        "drm-resident-gtt: 260 MiB",
        "drm-resident-vram0: 5 MiB",
        "drm-resident-stolen: 1 MiB",
        "drm-cycles-ccs: 0",
        driver="xe",
    )
    assert parse_fdinfo(xe) == DrmClient(C3, "17", 268 * MIB, 6 * MIB, 3 * MIB, slow=True)
    i915 = fdinfo("drm-total-system0: 96 MiB", "drm-total-local0: 7 MiB", driver="i915")
    assert parse_fdinfo(i915) == DrmClient(C3, "17", 96 * MIB, 7 * MIB, slow=True)


def test_a_region_that_nobody_knows_is_not_counted():
    data = fdinfo("drm-memory-gtt: 1 MiB", "drm-memory-cpu: 5 MiB", "drm-resident-doorbell: 8 KiB")
    assert parse_fdinfo(data) == DrmClient(C3, "17", MIB)


def test_figures_that_were_cut_short_are_refused():
    with pytest.raises(ValueError, match="cut short"):
        parse_fdinfo(fdinfo("drm-memory-gtt: 1234567")[:-5])


@pytest.mark.parametrize(
    "text", ["-1 KiB", "4 kib", "1e3", "", "nan", "1.5", "1048576 GiB", "9" * 20]
)
def test_figures_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_fdinfo(fdinfo(f"drm-memory-gtt: {text}"))


def test_a_client_without_figures_is_refused():
    with pytest.raises(ValueError, match="without memory figures"):
        parse_fdinfo(fdinfo())


def test_a_plain_file_is_no_client():
    assert parse_fdinfo(b"pos:\t0\nflags:\t02\n") is None


A, B = Identity(5000, 10), Identity(5001, 20)


def paid(held: dict[Identity, list[DrmClient]]) -> dict[Identity, int]:
    return {
        identity: sum(each.dram + each.own for each in bills.values())
        for identity, bills in bill(held).bills.items()
    }


def test_c10_a_client_counts_once_and_another_device_is_another_client():
    one = DrmClient(C3, "17", 8 * GIB)
    other = DrmClient("0000:01:00.0", "17", 1 * GIB)
    assert paid({A: [one, one, one]}) == {A: 8 * GIB}
    billing = bill({A: [one, one, one, other]})
    assert billing.bills == {A: {C3: Bill(8 * GIB), "0000:01:00.0": Bill(1 * GIB)}}
    assert billing.odd == []


def test_c10_a_client_of_two_processes_is_billed_to_the_older_and_told():
    one = DrmClient(C3, "17", 8 * GIB)
    assert paid({B: [one], A: [one]}) == {A: 8 * GIB, B: 0}
    assert bill({B: [one], A: [one]}, kin={B: A}).odd == []
    (odd,) = bill({B: [one], A: [one]}).odd
    assert "5000" in odd
    assert "5001" in odd


def test_c10_files_without_a_client_count_once_per_process_and_device():
    nameless = DrmClient(C3, None, 1 * GIB)
    held = {A: [nameless, nameless], B: [nameless]}
    assert paid(held) == {A: 1 * GIB, B: 1 * GIB}
    assert len(bill(held).odd) == 2


def test_a_fork_is_not_billed_while_its_parent_cannot_be_read():
    one = DrmClient(C3, "17", 8 * GIB)
    first = bill({A: [one], B: [one]})
    then = bill({B: [one]}, hidden={A}, former=first.payers)
    assert then.bills == {B: {}}
    assert then.unknown == {}
    assert bill({B: [one]}, hidden={A}, former=then.payers) == then
    # and with no bill before, nobody can tell whose it is
    assert "5000" in bill({B: [one]}, hidden={A}).unknown[B]
    assert bill({A: [one]}, hidden={B}).unknown == {}
    # who paid before goes on paying, whoever else cannot be read
    assert bill({B: [one]}, hidden={A}, former={(C3, "17"): B}).unknown == {}
    # the parent has ended: the fork is what holds it now
    assert bill({B: [one]}, former=first.payers).bills == {B: {C3: Bill(8 * GIB)}}


def test_what_is_shared_is_summed_beside():
    one = DrmClient(C3, "11", 132 * MIB, 60 * MIB, 48 * MIB)
    two = DrmClient(C3, "13", 88 * MIB, 0, 48 * MIB)
    assert bill({A: [one, two]}).bills == {A: {C3: Bill(220 * MIB, 60 * MIB, 96 * MIB)}}


def test_slow_figures_keep_for_a_while_and_tell_their_age(tmp_path):
    def write(size: int) -> None:
        path = tmp_path / "proc/5000/fdinfo/9"
        path.write_bytes(fdinfo(f"drm-resident-gtt: {size} MiB", driver="xe"))

    write_process(tmp_path, 5000, 10, {9: b""})
    write(1)
    scanner = DrmScanner(str(tmp_path))
    assert scanner.clients(A, 0.0)[0].bytes == MIB
    assert scanner.age_ms(0.0) is None
    write(2)
    assert scanner.clients(A, 1.4)[0].bytes == MIB
    assert scanner.old(A, 1.4)
    assert scanner.age_ms(1.4) == 1400
    assert scanner.clients(A, 1.4, fresh=True)[0].bytes == 2 * MIB
    assert not scanner.old(A, 1.4)
    write(3)
    assert scanner.clients(A, 1.4 + SLOW_S)[0].bytes == 3 * MIB
