"""DeviceQuota as far as it goes without a GPU: what it says where it cannot work, and errors.

What needs a GPU is in tests/gpu.
"""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.guard_device import rig
from umad.errors import ConfigError, PreflightError, QuotaExceeded
from umad.guard import device
from umad.guard.device import DeviceQuota
from umad.guard.page import SLOTS

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")


@pytest.fixture
def loaded(card: rig.Rig, monkeypatch: pytest.MonkeyPatch) -> rig.Rig:
    """The library over the fake driver stands in for this process's own."""
    monkeypatch.setattr(device, "library", lambda: card.library)
    return card


@pytest.mark.slow
def test_importing_it_and_making_a_quota_loads_neither_torch_nor_the_library() -> None:
    code = (
        "import sys; from umad.guard import device; quota = device.DeviceQuota(3);"
        "assert 'torch' not in sys.modules and device.library.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", code], cwd=rig.ROOT, check=True)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_there_are_63_accounts(slot: int) -> None:
    with pytest.raises(ValueError, match="no account"):
        DeviceQuota(slot)


@CPU_ONLY
def test_a_torch_without_a_gpu_is_a_configuration_error(loaded: rig.Rig) -> None:
    loaded.attach(rig.MIB)
    with pytest.raises(ConfigError, match="sees no CUDA or ROCm GPU"), DeviceQuota(0).use():
        pytest.fail("unreachable")
    with pytest.raises(ConfigError, match="sees no CUDA or ROCm GPU"):
        device.prepare_device(0)


def test_without_a_page_it_says_so(loaded: rig.Rig) -> None:
    with pytest.raises(ConfigError, match="no account page"), DeviceQuota(0).use():
        pytest.fail("unreachable")


def test_a_library_that_was_not_built_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "LIBRARY", tmp_path / "libumaddevice.so")
    device.library.cache_clear()
    with pytest.raises(ConfigError, match="not built"):
        DeviceQuota(0).held  # noqa: B018  (the property is what is tested)
    (tmp_path / "libumaddevice.so").write_bytes(b"no library")
    with pytest.raises(ConfigError, match="off"):
        device.attach(0)


def test_a_compiler_that_is_missing_or_fails_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "LIBRARY", tmp_path / "libumaddevice.so")
    with pytest.raises(ConfigError, match="no C compiler"):
        device.build("no-such-compiler")
    with pytest.raises(ConfigError, match="cannot be built"):
        device.build("false")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_page_is_a_configuration_error(loaded: rig.Rig) -> None:
    with Path(__file__).open("rb") as file, pytest.raises(ConfigError, match="no sealed"):
        device.attach(file.fileno())


def test_releasing_what_was_never_used_returns_nothing() -> None:
    assert DeviceQuota(0).release() == 0


def test_a_refusal_becomes_a_quota_error_with_the_numbers(loaded: rig.Rig) -> None:
    loaded.attach(10 * rig.MIB)
    loaded.library.enter(0)
    quota = DeviceQuota(0, 1)
    assert loaded.alloc(8 * rig.MIB)
    before = loaded.library.reading(0)
    assert before is not None
    assert loaded.alloc(4 * rig.MIB) is None
    denied = quota.denied(torch.OutOfMemoryError("CUDA out of memory"), before)
    assert isinstance(denied, QuotaExceeded)
    assert isinstance(denied, MemoryError)
    assert "asked for 4.0 MiB more, with 8.0 MiB of its 10.0 MiB in use" in denied.message
    assert denied.details == {
        "account": 0,
        "device": 1,
        "by_quota": True,
        "closed": False,
        "asked_bytes": 4 * rig.MIB,
        "used_bytes": 8 * rig.MIB,
        "device_bytes": 8 * rig.MIB,
        "quota_bytes": 10 * rig.MIB,
    }


def test_a_full_device_is_told_apart_from_a_full_quota(loaded: rig.Rig) -> None:
    loaded.attach(10 * rig.MIB)
    before = loaded.library.reading(0)
    assert before is not None
    denied = DeviceQuota(0).denied(torch.OutOfMemoryError("CUDA out of memory"), before)
    assert denied is not None
    assert denied.details["by_quota"] is False
    assert "from the driver" in denied.message


def test_torch_on_jetson_fails_while_it_words_the_error(loaded: rig.Rig) -> None:
    loaded.attach(rig.MIB)
    before = loaded.library.reading(0)
    assert before is not None
    error = RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED")
    assert DeviceQuota(0).denied(error, before) is None  # nothing was refused: not ours
    loaded.library.enter(0)
    assert loaded.alloc(2 * rig.MIB) is None
    assert DeviceQuota(0).denied(error, before) is not None
    assert DeviceQuota(0).denied(RuntimeError("shapes differ"), before) is None


@pytest.mark.parametrize(
    ("version", "backend", "conf", "match"),
    [
        ("2.7.1+cu126", "native", "", "need torch 2.8"),
        ("2.9.0", "cudaMallocAsync", "", "backend"),
        ("2.9.0", "native", "max_split_size_mb:64, expandable_segments: True", "expandable"),
        ("2.13.0+cu130", "native", "expandable_segments:False", None),
    ],
)
def test_settings_that_exclude_pools_are_named(
    monkeypatch: pytest.MonkeyPatch, version: str, backend: str, conf: str, match: str | None
) -> None:
    fake = SimpleNamespace(
        __version__=version, cuda=SimpleNamespace(get_allocator_backend=lambda: backend)
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    if match is None:
        device._require_pools(fake)
        return
    with pytest.raises(ConfigError, match=match):
        device._require_pools(fake)


def test_rocm_wants_its_environment_from_the_launcher(
    loaded: rig.Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setenv("HSA_XNACK", "0")
    monkeypatch.delenv("HSA_ENABLE_SDMA", raising=False)
    with pytest.raises(PreflightError, match=r"starts: HSA_ENABLE_SDMA=0$"):
        device.prepare_device(0)
    monkeypatch.setenv("HSA_ENABLE_SDMA", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ConfigError, match="torch wants hip, and the library that was found is cuda"
    ):
        device.prepare_device(0)
    monkeypatch.setattr(loaded.library, "runtime", lambda: b"hip")
    device.prepare_device(0)
    loaded.fake("fail_peer", ctypes.c_int).value = 711
    with pytest.raises(ConfigError, match=r"device 0 is refused access to device 1: .* error 711"):
        device.prepare_device(0, [1])
    monkeypatch.setattr(loaded.library, "spin", lambda _: 36)
    with pytest.raises(ConfigError, match="driver error 36"):
        device.prepare_device(0)
