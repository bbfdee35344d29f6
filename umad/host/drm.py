"""DRM clients: which process holds how much of a GPU's memory, from fdinfo.

Rules: a client, that is a device and a client id, is billed once, however many descriptors and
processes show it, and to a registered process.
Stays out: what the GPU has left (``gpu``), and makers that do not speak fdinfo.

Source: Documentation/gpu/drm-usage-stats.rst.
"""

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from umad.host.files import Unreadable, inside, read_as
from umad.units import parse_bytes
from umad.values import Identity

_SCAN_S: Final = 1.0
"""How old the list of a process's DRM descriptors may be; its figures are read every time."""


@dataclass(frozen=True, slots=True)
class DrmClient:
    """One fdinfo: a client of a device and its resident bytes; ``client`` None when unnamed."""

    pdev: str
    client: str | None
    bytes: int


def parse_fdinfo(data: bytes) -> DrmClient | None:
    """Read one /proc/PID/fdinfo/N; None for a descriptor that is no DRM client.

    Resident figures are taken where the driver has them, else the older drm-memory ones, never
    both.  A number without a unit is in bytes.

    Raises:
        ValueError: a DRM client whose figures cannot be read.
    """
    fields: dict[str, str] = {}
    for line in data.decode("ascii", "replace").splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.strip()
    if "drm-driver" not in fields:
        return None
    size = 0
    known = False
    for region in ("gtt", "vram"):
        text = fields.get(f"drm-resident-{region}", fields.get(f"drm-memory-{region}"))
        if text is not None:
            size += parse_bytes(text, bare_unit="B")
            known = True
    if not known and fields["drm-driver"] == "amdgpu":
        raise ValueError("a DRM client without memory figures")
    return DrmClient(fields.get("drm-pdev", ""), fields.get("drm-client-id"), size)


def bill(held: Mapping[Identity, Iterable[DrmClient]]) -> tuple[dict[Identity, int], list[str]]:
    """Share out DRM clients among the registered processes that hold them.

    A client (device and client id together) counts once.  Where two processes hold it, the older
    one pays: a descriptor is inherited, so the younger is the fork.  Files without a client id
    count once per process and device.

    Returns:
        Bytes by process, and what was odd about it, one text each.
    """
    billed: dict[Identity, int] = {}
    payer: dict[tuple[str, str], Identity] = {}
    odd: list[str] = []
    for identity in sorted(held, key=lambda who: (who.start_ticks, who.pid)):
        own: dict[tuple[str, str | None], int] = {}  # each client of this process once
        for client in held[identity]:
            key = (client.pdev, client.client)
            own[key] = max(client.bytes, own.get(key, 0))
        billed[identity] = 0
        for (pdev, name), size in own.items():
            if name is None:
                odd.append(f"process {identity.pid}: DRM file of {pdev or '?'} without a client id")
                billed[identity] += size
                continue
            first = payer.setdefault((pdev, name), identity)
            if first == identity:
                billed[identity] += size
            else:
                odd.append(
                    f"DRM client {name} of {pdev} is held by processes {first.pid} and "
                    f"{identity.pid}; billed to {first.pid}"
                )
    return billed, odd


class DrmScanner:
    """Finds and reads the DRM clients of registered processes.

    The list of a process's descriptors is made anew every second at most, one file per client is
    read at every look: freed bytes must be seen at once, a new client may take a second.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._files: dict[Identity, tuple[float, list[str]]] = {}

    def clients(self, identity: Identity, now_s: float) -> list[DrmClient]:
        """The DRM clients of a process, each once.

        Raises:
            Unreadable: its descriptors may not be listed, or a file makes no sense.
        """
        until_s, paths = self._files.get(identity, (now_s, []))
        if now_s < until_s:
            try:
                found = [read_as(path, parse_fdinfo) for path in paths]
            except Unreadable as error:
                if not (error.absent or error.gone):
                    raise
                found = [None]
            if None not in found:
                return [client for client in found if client is not None]
        return self._scan(identity, now_s)

    def keep_only(self, identities: frozenset[Identity]) -> None:
        """Forget processes that nobody asks for any more."""
        for identity in self._files.keys() - identities:
            del self._files[identity]

    def _scan(self, identity: Identity, now_s: float) -> list[DrmClient]:
        self._files.pop(identity, None)
        folder = inside(self._root, f"proc/{identity.pid}")
        kept: dict[tuple[str, str | None], tuple[str, DrmClient]] = {}
        try:
            with os.scandir(f"{folder}/fd") as entries:
                names = [entry.name for entry in entries]
        except OSError as error:
            problem = Unreadable.from_os(f"{folder}/fd", error)
            if problem.absent or problem.gone:
                return []
            raise problem from error
        for name in names:
            if not _is_drm(f"{folder}/fd/{name}"):
                continue
            path = f"{folder}/fdinfo/{name}"
            try:
                client = read_as(path, parse_fdinfo)
            except Unreadable as error:
                if error.absent or error.gone:  # closed while we looked
                    continue
                raise
            if client is not None:
                key = (client.pdev, client.client)
                if key not in kept or client.bytes > kept[key][1].bytes:
                    kept[key] = path, client
        # A process with very many descriptors is looked through less often.
        until_s = now_s + max(_SCAN_S, len(names) / 1000)
        self._files[identity] = until_s, [path for path, _ in kept.values()]
        return [client for _, client in kept.values()]


def _is_drm(link: str) -> bool:
    try:
        return os.readlink(link).startswith("/dev/dri/")  # noqa: PTH115 - hot: no Path each
    except OSError as error:
        # No link at all happens in a copied tree only; there fdinfo decides.
        return error.errno == errno.EINVAL
