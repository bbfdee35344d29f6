"""Lays recorded machines out as trees that a probe takes for a root folder."""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "machines"
NAMES = sorted(path.stem for path in _FOLDER.glob("*.json"))


def lay_out(name: str, root: Path) -> Path:
    """Write the files and links of a machine below ``root`` and return it."""
    record = _record(name)
    for place, text in record["files"].items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for place, target in record["links"].items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    return root


def expected(name: str) -> dict[str, Any]:
    """What a probe must find on that machine."""
    figures: dict[str, Any] = _record(name)["expected"]
    return figures


def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return record
