import os

import pytest

from umad.host.kernel import KernelParameters, preflight, read_parameters

GOOD = KernelParameters(1, 50, 0, 4096)


def settings(root, **values: str) -> None:
    folder = root / "proc/sys/vm"
    folder.mkdir(parents=True)
    for name, text in values.items():
        (folder / name).write_text(text + "\n")


def test_what_umad_needs():
    assert preflight(GOOD) == []


@pytest.mark.parametrize(
    ("name", "value", "severity", "fix"),
    [
        ("swappiness", 60, "hard", "1"),
        ("swappiness", 0, "hard", "1"),
        ("swappiness", None, "hard", "1"),
        ("vfs_cache_pressure", 100, "hard", "50"),
        ("vfs_cache_pressure", 51, "hard", "50"),
        ("vfs_cache_pressure", None, "hard", "50"),
        ("overcommit_memory", 2, "advice", "0"),
    ],
)
def test_a_setting_that_is_off(name, value, severity, fix):
    fields = {field: getattr(GOOD, field) for field in GOOD.__slots__}
    (finding,) = preflight(KernelParameters(**{**fields, name: value}))
    assert finding.name == f"vm.{name}"
    assert finding.severity == severity
    assert finding.found == ("unreadable" if value is None else str(value))
    assert finding.fix_now == f"sysctl -w vm.{name}={fix}"
    assert finding.fix_forever == f"vm.{name} = {fix}"
    assert finding.why


def test_the_fix_is_a_fix(tmp_path):
    settings(tmp_path, swappiness="60", vfs_cache_pressure="100", overcommit_memory="2")
    for finding in preflight(read_parameters(str(tmp_path))):
        name, value = finding.fix_now.removeprefix("sysctl -w vm.").split("=")
        (tmp_path / "proc/sys/vm" / name).write_text(value)
    assert preflight(read_parameters(str(tmp_path))) == []


def test_reading_them(tmp_path):
    settings(tmp_path, swappiness="1", vfs_cache_pressure="lots")
    assert read_parameters(str(tmp_path)) == KernelParameters(
        1, None, None, os.sysconf("SC_PAGE_SIZE")
    )


def test_reading_the_real_ones():
    real = read_parameters()
    assert real.swappiness is not None
    assert real.vfs_cache_pressure is not None
    assert real.page_bytes >= 4096
