"""The Debian package, built once for all tests that install it."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.needs import PROJECT, need
from umad import __version__

NEWER: Final = f"{__version__}+next"


@pytest.fixture(scope="session")
def deb() -> Path:
    """The package, built from the sources as they are."""
    need("dh", "debhelper")
    done = subprocess.run(
        [PROJECT / "packaging/build-deb"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = PROJECT.glob(f"dist/umad_{__version__}_*.deb")
    return built


@pytest.fixture(scope="session")
def packages(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with umad.deb and newer.deb, the same with a higher version."""
    folder = tmp_path_factory.mktemp("packages")
    shutil.copy(deb, folder / "umad.deb")
    tree = folder / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", deb, tree], check=True)
    for file in ("DEBIAN/control", "usr/lib/umad/umad/__init__.py"):
        text = (tree / file).read_text()
        assert __version__ in text
        (tree / file).write_text(text.replace(__version__, NEWER, 1))
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", "-Znone", tree, folder / "newer.deb"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    shutil.rmtree(tree)
    folder.chmod(0o755)
    return folder
