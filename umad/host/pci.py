"""Graphics cards by their PCI address: cardN moves between boots, the address does not.

Stays out: what a card has and whose it is.
"""

import os
import re
from dataclasses import dataclass
from typing import Final

from umad.host.files import KernelFile, Unreadable, inside, read_file, read_text

_ADDRESS: Final = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{2}):([0-9a-f]{2}\.[0-7])")


def normal(text: str) -> str:
    """A PCI address as sysfs writes it ("0000:c5:00.0"), whatever the length of its domain.

    Raises:
        ValueError: no PCI address.
    """
    match = _ADDRESS.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text[:40]!r} is no PCI address")
    domain, bus, place = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{place}"


@dataclass(frozen=True, slots=True)
class Card:
    """A card: its PCI address, its folder in sysfs now, its maker and kind ("0x1002", "1002:1586").

    ``driver`` is the kernel's, "" where sysfs does not say.
    """

    pdev: str
    folder: str
    vendor: str
    pci_id: str
    driver: str


def cards(root: str) -> list[Card]:
    """The cards that the kernel shows now; one that cannot be read is left out."""
    drm = inside(root, "sys/class/drm")
    found: list[Card] = []
    for name in names(drm):
        if not re.fullmatch(r"card[0-9]+", name):
            continue
        folder = f"{drm}/{name}/device"
        try:
            vendor = read_text(f"{folder}/vendor")
            uevent = pairs(read_file(f"{folder}/uevent"), "=")
            pdev = normal(uevent.get("PCI_SLOT_NAME", ""))
        except (Unreadable, ValueError):
            continue
        found.append(Card(pdev, folder, vendor, uevent.get("PCI_ID", ""), uevent.get("DRIVER", "")))
    return found


class Place:
    """The folder of a card in sysfs, which may be another card's tomorrow.

    Args:
        pdev: the card.
        folder: where it was found.
        keep: see ``KernelFile``.
    """

    def __init__(self, pdev: str, folder: str, *, keep: bool) -> None:
        self._line = f"PCI_SLOT_NAME={pdev}\n".encode()
        self._uevent = KernelFile(f"{folder}/uevent", keep=keep)

    def still(self) -> bool:
        """Whether it is still there."""
        try:
            return self._line in self._uevent.read()
        except Unreadable:
            return False

    def close(self) -> None:
        """Give the descriptor back."""
        self._uevent.close()


def names(folder: str) -> list[str]:
    """What a folder holds; nothing where the subsystem is not there."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except OSError:
        return []


def pairs(data: bytes, separator: str) -> dict[str, str]:
    """The lines of a kernel file as key and value."""
    lines = data.decode("ascii", "replace").splitlines()
    return {
        key: value for key, found, value in (line.partition(separator) for line in lines) if found
    }
