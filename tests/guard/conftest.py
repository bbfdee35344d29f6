"""The guard's library, built once."""

from pathlib import Path

import pytest

from tests.guard import guarded
from umad.guard import preload


@pytest.fixture(scope="session", autouse=True)
def library() -> Path:
    if guarded.CC is None:
        pytest.skip("there is no C compiler")
    return preload.build()
