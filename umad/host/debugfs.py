"""The files of debugfs that umad opens, and no others.

Some files there act when they are read (they evict buffers, shrink pools, run tests on the GPU),
so a path is taken from this list and never from a directory or a pattern.
Stays out: what the files say.
"""

from enum import StrEnum
from typing import Final

from umad.host.files import inside
from umad.host.pci import normal

_DEBUGFS: Final = "sys/kernel/debug"


class DebugFile(StrEnum):
    """Every file of debugfs that is ever opened, below its root."""

    KFD_LIMITS = "kfd/mem_limit"
    TTM_PAGE_POOL = "ttm/page_pool"
    NVMAP_CLIENTS = "nvmap/iovmm/clients"
    # In no mainline kernel; some vendor trees and many articles have it.
    HSA_PAGES = "hsa/agents/{pdev}/pages_used"
    HSA_MEMORY = "hsa/agents/{pdev}/mem_info"


def debug_path(root: str, file: DebugFile, pdev: str = "0000:00:00.0") -> str:
    """Where a file is; ``pdev`` names the GPU where the path has one.

    Raises:
        ValueError: ``pdev`` is no PCI address.
    """
    return inside(root, f"{_DEBUGFS}/{file.value.format(pdev=normal(pdev))}")
