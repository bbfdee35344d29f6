"""Intel GPUs: the pool of an integrated one; its processes are found in DRM's fdinfo (``drm``).

Stays out: how much memory a card of its own has: no file of a mainline kernel says it without
waking the card, so such a card has no pool here and its clients' bytes only.
"""

import os
from typing import Final

from umad.host.files import KernelFile, Unreadable, inside, parse_line, parsed
from umad.host.look import UNIFIED_POOL, Gpu, Look, left, unified_pool
from umad.host.pci import Card, Place
from umad.values import PoolReading, Reading

VENDOR: Final = "0x8086"
_PAGES_LIMIT: Final = "sys/module/ttm/parameters/pages_limit"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class IntelGpu(Gpu):
    """One Intel GPU; integrated ones sit on bus 0 of their domain."""

    def __init__(self, root: str, card: Card) -> None:
        self._integrated = card.pdev.split(":")[1] == "00"
        kind = "intel-igpu" if self._integrated else "intel-dgpu"
        super().__init__(card.pdev, kind, 0, drm=True)
        self.card = card
        self._keep = root == "/"
        self._place = Place(card.pdev, card.folder, keep=self._keep)
        path = inside(root, _PAGES_LIMIT)
        self._pages_limit = KernelFile(path, keep=self._keep)
        self._limited = False  # the limit was there once: missing later is broken
        self._lost = False

    @property
    def dram_pool(self) -> str:
        """See ``Gpu``."""
        return self.name(UNIFIED_POOL) if self._integrated else super().dram_pool

    @property
    def moved(self) -> bool:
        """Its folder in sysfs is another card's by now, or gone."""
        return self._lost or not self._place.still()

    def adopt(self, found: Card | None) -> None:
        """Take over what a new search found of this card; None when it found nothing."""
        self._lost = found is None
        self.card = found or self.card
        self._place.close()
        self._place = Place(self.pdev, self.card.folder, keep=self._keep)

    def pools(self, look: Look) -> list[PoolReading]:
        """See ``Gpu``: system memory, less what TTM allows where the driver (xe) uses it."""
        if self._lost:
            look.anomalies.append(f"GPU {self.pdev} is gone from sysfs")
        if not self._integrated:
            return []
        active = look.meminfo.get("GPUActive")
        used = Reading.absent("GPUActive") if active is None else Reading.of(active, "GPUActive")
        limit = left(self._ttm(), used, f"{self.pdev}: ttm", look.anomalies)
        if limit.value is not None:
            look.info[self.name("limit_ttm")] = limit.value
        return [unified_pool(self, look, used, {"ttm": limit})]

    def close(self) -> None:
        """Give every kept descriptor back."""
        self._place.close()
        self._pages_limit.close()

    def _ttm(self) -> Reading:
        """TTM's limit; it binds xe alone, i915's buffers are shared memory of the kernel's."""
        if self.card.driver != "xe":
            return Reading.absent(_PAGES_LIMIT)
        file = self._pages_limit
        try:
            pages = parsed(file.path, file.read(), parse_line)
        except Unreadable as error:
            if error.absent and self._limited:
                return Reading.broken(_PAGES_LIMIT, f"{error}; it was there before")
            return error.reading(_PAGES_LIMIT)
        self._limited = True
        return Reading.of(pages * _PAGE_BYTES, _PAGES_LIMIT)
