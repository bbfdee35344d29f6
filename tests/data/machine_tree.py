"""Lays recorded machines out as trees that a probe takes for a root folder."""

import json
from pathlib import Path
from typing import Any

from tests.data import fake_nvml

_FOLDER = Path(__file__).parent / "machines"
NAMES = sorted(path.stem for path in _FOLDER.glob("*.json"))


def lay_out(name: str, root: Path) -> Path:
    """Write the files and links of a machine below ``root`` and return it.

    NVML then speaks of this machine, from its file ``nvml.txt``; without one there is no driver.
    """
    record = _record(name)
    for place, text in record["files"].items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for place, target in record["links"].items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    answer_nvml(root)
    return root


def answer_nvml(root: Path) -> None:
    """Let NVML speak of this machine, laid out before, from now on."""
    nvml = root / "nvml.txt"
    fake_nvml.use(nvml if nvml.exists() else None)


def expected(name: str) -> dict[str, Any]:
    """What a probe must find on that machine."""
    figures: dict[str, Any] = _record(name)["expected"]
    return figures


def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return record
