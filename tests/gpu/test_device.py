"""Device quotas on a real GPU: the checks of device_checks.py, one test each."""

import pytest

from tests.gpu import device_checks

_WHY = device_checks.obstacle()
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(bool(_WHY), reason=_WHY)]


@pytest.mark.parametrize("name", device_checks.CHECKS)
def test_on_the_device(name: str) -> None:
    figures = device_checks.CHECKS[name]()
    if "skipped" in figures:
        pytest.skip(figures["skipped"])
    assert figures["ok"], figures
