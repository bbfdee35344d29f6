"""The device allocator and the fake drivers, built once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guard_device import rig
from umad.guard import device


@pytest.fixture(scope="session", autouse=True)
def built() -> Path:
    if rig.CC is None:
        pytest.skip("there is no C compiler")
    return device.build()


@pytest.fixture(scope="session")
def cuda_driver(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Path:
    return rig.compile_fake(tmp_path_factory.mktemp("cuda"), "cuda", "libcudart.so.12")


@pytest.fixture(scope="session")
def hip_driver(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Path:
    return rig.compile_fake(tmp_path_factory.mktemp("hip"), "hip", "libamdhip64.so.6")


@pytest.fixture
def card(tmp_path: Path, cuda_driver: Path) -> Iterator[rig.Rig]:
    made = rig.Rig(tmp_path, cuda_driver)
    yield made
    made.page.close()
