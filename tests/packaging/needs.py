"""What the packaging tests need of this machine: programs, and clean Debian systems.

Nothing is in those but what Debian itself installs.  They are made once, by mmdebstrap, and kept in
``.work``; a container writes into an overlay, never into them.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

PROJECT: Final = Path(__file__).resolve().parents[2]
# Of the package's dependencies only what every such system has; no network is needed later.
INCLUDE: Final = "systemd,systemd-sysv,dbus,python3,passwd"


def give_up(reason: str) -> None:
    """A skip on a developer's machine, a failure where all must run."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def need(program: str, package: str) -> None:
    """A program and the Debian package that brings it."""
    if shutil.which(program) is None:
        give_up(f"{program} is missing: apt-get install {package}")


def clean_root(suite: str) -> Path:
    """The folder of a system of this suite, like "bookworm"; about a minute the first time.

    Without network, or with another reason why it cannot be made, the test gives up.
    """
    root = PROJECT / f".work/roots/{suite}"
    if not root.exists():
        need("mmdebstrap", "mmdebstrap")
        new = root.with_name(f"{suite}.{os.getpid()}")
        new.parent.mkdir(parents=True, exist_ok=True)
        command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={INCLUDE}", suite, new]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
            new.rename(root)
        except subprocess.CalledProcessError as error:
            give_up(f"no clean Debian {suite}: {error.stderr}")
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return root
