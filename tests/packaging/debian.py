"""What the packaging tests do and look at in a clean system that runs."""

import json
from typing import Any, Final

from tests.systemd.container import Container

APT: Final = "DEBIAN_FRONTEND=noninteractive apt-get -qq -y"
UNITS: Final = "umad.service umad.socket umad-compact.path umad-serve.service"


def show(debian: Container, unit: str, field: str) -> str:
    return debian.run(f"systemctl show --value -p {field} {unit}").stdout.strip()


def traces(debian: Container) -> str:
    """Every file and account that has umad in its name."""
    accounts = "(getent passwd; getent group) | grep umad || true"
    return debian.run(f"find / /run /tmp /dev/shm -xdev -name '*umad*'; {accounts}").stdout


def workers(debian: Container) -> list[tuple[Any, ...]]:
    state = json.loads(debian.run("umadctl status --json").stdout)
    return sorted((one["name"], one["pid"], one["state"]) for one in state["workers"])


def journal(debian: Container, search: str) -> str:
    """What ``journalctl`` shows for these arguments."""
    return debian.run(f"journalctl --sync; journalctl -o cat {search}").stdout
