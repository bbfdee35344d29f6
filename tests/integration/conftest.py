import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since the path of a Unix socket is at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="umad-") as made:
        yield Path(made)
