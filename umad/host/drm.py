"""DRM clients: which process holds how much of a GPU's memory, from fdinfo.

Rules: a client, that is a device and a client id, is billed once, however many descriptors and
processes show it, and to a registered process.  Only amdgpu's figures are read at every look:
reading xe's wakes the GPU and walks all its buffers.
Stays out: what the GPU has left (``gpu``), and makers that do not speak fdinfo.

Source: Documentation/gpu/drm-usage-stats.rst.
"""

import errno
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from umad.host.files import LARGEST, KernelFile, Unreadable, inside, parsed, read_file
from umad.units import GIB, KIB, MIB, parse_bytes
from umad.values import Identity

_SCAN_S: Final = 1.0
"""How old the list of a process's DRM descriptors may be; amdgpu's figures are always new."""
SLOW_S: Final = 1.5
"""The same where another driver is among them, and how old that driver's figures may be."""

_FAST_DRIVER: Final = "amdgpu"
# One pass over the text: this is done for every client at every look.  amdgpu's "cpu" region is
# left out: buffers that were moved out and may be in swap.
_LINE: Final = re.compile(
    r"^(?:drm-(driver|pdev|client-id)|(?:drm-(resident|memory|total|shared)|amd-(evicted))-"
    r"((?:gtt|vram|system|local|stolen|memory)[^:\n]*)):[ \t]*(.*?)[ \t]*$",
    re.MULTILINE,
)
_DRAM: Final = ("gtt", "system", "memory")
_SCALES: Final = {"": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_KEPT_MAX: Final = 16
"""Descriptors kept open per process; one with more clients costs two calls more for each."""


@dataclass(frozen=True, slots=True)
class DrmClient:
    """One fdinfo: a client of a device and its resident bytes; ``client`` None when unnamed.

    ``dram`` are pages of system memory, ``own`` is memory of the device's own (or stolen from
    the system by its firmware), ``shared`` the part of both that other clients may show too,
    ``evicted`` what amdgpu moved out of the device's memory.
    """

    pdev: str
    client: str | None
    dram: int
    own: int = 0
    shared: int = 0
    slow: bool = False
    evicted: int = 0

    @property
    def bytes(self) -> int:
        """All that it holds."""
        return self.dram + self.own


def parse_fdinfo(data: bytes) -> DrmClient | None:
    """Read one /proc/PID/fdinfo/N; None for a descriptor that is no DRM client.

    Of each region the resident figure is taken where the driver has it, else the older
    drm-memory, else the total: one of them, never a sum.  A number without a unit is in bytes.

    Raises:
        ValueError: a DRM client whose figures cannot be read.
    """
    fields: dict[str, str] = {}
    regions: dict[str, dict[str, str]] = {}
    evicted = 0
    for key, figure, moved, region, value in _LINE.findall(data.decode("ascii", "replace")):
        if key:
            fields[key] = value
        elif moved:
            evicted += _size(value) if region == "vram" else 0
        else:
            regions.setdefault(region, {})[figure] = value
    driver = fields.get("driver")
    if not data.endswith(b"\n"):
        raise ValueError("the last line is cut short")
    if driver is None:
        return None
    dram = own = shared = 0
    known = False
    for region, figures in regions.items():
        text = next((figures[k] for k in ("resident", "memory", "total") if k in figures), None)
        if text is None:
            continue
        if region.startswith(_DRAM):
            dram += _size(text)
        else:
            own += _size(text)
        shared += _size(figures.get("shared", "0"))
        known = True
    if not known and driver in (_FAST_DRIVER, "xe", "i915"):
        raise ValueError("a DRM client without memory figures")
    pdev, client = fields.get("pdev", ""), fields.get("client-id")
    return DrmClient(pdev, client, dram, own, shared, driver != _FAST_DRIVER, evicted)


def _size(text: str) -> int:
    number, _, unit = text.partition(" ")
    if unit in _SCALES and number.isascii() and number.isdigit() and len(number) <= 20:
        size = int(number) * _SCALES[unit]
    else:
        size = parse_bytes(text, bare_unit="B")
    if size >= LARGEST:
        raise ValueError(f"size {text!r}")
    return size


@dataclass(slots=True)
class Bill:
    """What one process pays for on one device, in bytes; see ``DrmClient``."""

    dram: int = 0
    own: int = 0
    shared: int = 0
    evicted: int = 0

    def add(self, client: DrmClient) -> None:
        """Pay for a client, too."""
        self.dram += client.dram
        self.own += client.own
        self.shared += client.shared
        self.evicted += client.evicted


ClientKey = tuple[str, str]
"""A client by device and client id."""


class Billing(NamedTuple):
    """Who pays for what: by process and device, with what was odd about it, one text each.

    ``payers`` is for the next billing; ``unknown`` are processes that hold a client of which
    another may be the payer, with the reason.
    """

    bills: dict[Identity, dict[str, Bill]]
    odd: list[str]
    payers: dict[ClientKey, Identity]
    unknown: dict[Identity, str]


def bill(
    held: Mapping[Identity, Iterable[DrmClient]],
    hidden: Collection[Identity] = (),
    former: Mapping[ClientKey, Identity] = MappingProxyType({}),
    kin: Mapping[Identity, Identity] = MappingProxyType({}),
) -> Billing:
    """Share out DRM clients among the registered processes that hold them.

    1. A client (device and client id together) counts once.  Where two processes hold it, the
       older one pays: a descriptor is inherited, so the younger is the fork.
    2. A payer whose descriptors cannot be read at the moment remains the payer: a fork is not
       billed for the trouble of its parent.
    3. A client that was never billed, while an older process cannot be read, may be that one's.
    4. Files without a client id count once per process and device.

    Args:
        held: the clients of each process, by process.
        hidden: processes whose clients cannot be read now.
        former: who paid the last time.
        kin: who answers for whom: that such two share a client is nothing odd.
    """
    billing = Billing({}, [], {key: who for key, who in former.items() if who in hidden}, {})
    for identity in sorted(held, key=_age):
        own: dict[tuple[str, str | None], DrmClient] = {}  # each client of this process once
        for client in held[identity]:
            place = (client.pdev, client.client)
            if place not in own or client.bytes > own[place].bytes:
                own[place] = client
        bills = billing.bills[identity] = {}
        for (pdev, name), client in own.items():
            if name is None:  # 4
                billing.odd.append(
                    f"process {identity.pid}: DRM file of {pdev or '?'} without a client id"
                )
            elif (payer := billing.payers.setdefault((pdev, name), identity)) != identity:  # 1, 2
                if kin.get(payer, payer) != kin.get(identity, identity):
                    billing.odd.append(
                        f"DRM client {name} of {pdev} is held by processes {payer.pid} and "
                        f"{identity.pid}; billed to {payer.pid}"
                    )
                continue
            elif (pdev, name) not in former:
                older = [who for who in hidden if _age(who) < _age(identity)]
                if older:  # 3
                    billing.unknown[identity] = (
                        f"DRM client {name} of {pdev} may be that of process {older[0].pid}, "
                        "which cannot be read"
                    )
            bills.setdefault(pdev, Bill()).add(client)
    return billing


def _age(identity: Identity) -> tuple[int, int]:
    return identity.start_ticks, identity.pid


@dataclass(slots=True)
class _Shown:
    """One client, the file that shows it, and the text it was read from."""

    file: KernelFile
    text: bytes
    client: DrmClient


@dataclass(slots=True)
class _Found:
    """The DRM clients of a process as one scan found them."""

    scanned_s: float
    until_s: float
    shown: list[_Shown]

    def close(self) -> None:
        """Give the kept descriptors back."""
        for each in self.shown:
            each.file.close()


class DrmScanner:
    """Finds and reads the DRM clients of registered processes.

    The list of a process's descriptors is made anew every second at most; of amdgpu, one file
    per client is read at every look: freed bytes must be seen at once, a new client may take a
    second.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._found: dict[Identity, _Found] = {}

    def clients(self, identity: Identity, now_s: float, *, fresh: bool = False) -> list[DrmClient]:
        """The DRM clients of a process, each once; ``fresh`` reads slow ones now, too.

        Raises:
            Unreadable: its descriptors may not be listed, or a file makes no sense.
        """
        found = self._found.get(identity)
        if fresh or found is None or not found.scanned_s <= now_s < found.until_s:
            return self._scan(identity, now_s)
        for shown in found.shown:
            if shown.client.slow:
                continue
            try:
                text = shown.file.read()
            except Unreadable as error:
                if not (error.absent or error.gone):
                    raise
                return self._scan(identity, now_s)  # closed
            if text != shown.text:
                now = parsed(shown.file.path, text, parse_fdinfo)
                if now is None:  # closed; its number is another file's by now
                    return self._scan(identity, now_s)
                shown.text, shown.client = text, now
        return [shown.client for shown in found.shown]

    def old(self, identity: Identity, now_s: float) -> bool:
        """Whether a figure of this process is older than this look."""
        found = self._found.get(identity)
        return (
            found is not None
            and found.scanned_s != now_s
            and any(shown.client.slow for shown in found.shown)
        )

    def age_ms(self, now_s: float) -> int | None:
        """The age of the oldest figure; None when all are as old as this look."""
        old = [found.scanned_s for who, found in self._found.items() if self.old(who, now_s)]
        return round((now_s - min(old)) * 1000) if old else None

    def keep_only(self, identities: frozenset[Identity]) -> None:
        """Forget processes that nobody asks for any more."""
        for identity in self._found.keys() - identities:
            self._found.pop(identity).close()

    def close(self) -> None:
        """Give every kept descriptor back."""
        self.keep_only(frozenset())

    def _scan(self, identity: Identity, now_s: float) -> list[DrmClient]:
        if (old := self._found.pop(identity, None)) is not None:
            old.close()
        folder = inside(self._root, f"proc/{identity.pid}")
        kept: dict[tuple[str, str | None], _Shown] = {}
        try:
            with os.scandir(f"{folder}/fd") as entries:
                names = [entry.name for entry in entries]
        except OSError as error:
            problem = Unreadable.from_os(f"{folder}/fd", error)
            if problem.absent or problem.gone:
                return []
            raise problem from error
        for name in names:
            if not links_to(f"{folder}/fd/{name}", ("/dev/dri/",)):
                continue
            path = f"{folder}/fdinfo/{name}"
            try:
                text = read_file(path)
            except Unreadable as error:
                if error.absent or error.gone:  # closed while we looked
                    continue
                raise
            client = parsed(path, text, parse_fdinfo)
            if client is not None:
                key = (client.pdev, client.client)
                if key not in kept or client.bytes > kept[key].client.bytes:
                    keep = self._root == "/" and len(kept) < _KEPT_MAX
                    kept[key] = _Shown(KernelFile(path, keep=keep), text, client)
        shown = list(kept.values())
        period_s = SLOW_S if any(each.client.slow for each in shown) else _SCAN_S
        # A process with very many descriptors is looked through less often.
        until_s = now_s + max(period_s, len(names) / 1000)
        self._found[identity] = _Found(now_s, until_s, shown)
        return [each.client for each in shown]


def links_to(link: str, places: tuple[str, ...]) -> bool:
    """Whether a descriptor in /proc/PID/fd belongs to a device below one of these places."""
    try:
        return os.readlink(link).startswith(places)  # noqa: PTH115 - hot: no Path each
    except OSError as error:
        # No link at all happens in a copied tree only; there fdinfo decides.
        return error.errno == errno.EINVAL
