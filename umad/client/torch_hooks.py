"""The only part of the client that knows torch, which is imported inside functions alone."""

import ctypes
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_MAPS: Final = Path("/proc/self/maps")
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ ([0-9]+)")
_POPULATE_READ: Final = 22  # madvise(2), Linux 5.14; Python has no name for it yet
_madvise: Final = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def measure(module: "torch.nn.Module") -> int:
    """Bytes of a module's parameters and buffers, each storage once, on any device."""
    sizes = {
        (tensor.device, storage.data_ptr()): storage.nbytes()
        for tensor in _tensors(module)
        if (storage := tensor.untyped_storage()).data_ptr()
    }
    return sum(sizes.values())


def privatise(module: "torch.nn.Module") -> int:
    """Copy every weight that lies in a mapped file into memory of this process.

    Some loaders leave weights as a mapping of the checkpoint file: the kernel counts such pages
    as cache, drops them under pressure and reads them again in the middle of a forward.  A copy
    is counted, and stays.  Weights that are tied to each other stay tied.

    Returns:
        Bytes copied.
    """
    import torch

    starts, ends = _file_mappings()
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    with torch.no_grad():
        for tensor in _tensors(module):
            if tensor.device.type != "cpu" or not tensor.numel():
                continue
            address = tensor.data_ptr()
            index = bisect_right(starts, address) - 1
            if index < 0 or address >= ends[index]:
                continue
            key = (address, tensor.dtype, tensor.shape, tensor.stride())
            if key not in copies:
                _read_in(address, min(address + tensor.nbytes, ends[index]))
                copies[key] = tensor.detach().clone()
            tensor.data = copies[key]
    return sum(copy.nbytes for copy in copies.values())


def _read_in(start: int, end: int) -> None:
    """Map the pages of a file in one call: a third of what a copy costs are faults on its source.

    Only faster: an older kernel, or a file that has become shorter, leaves it to the copy.
    """
    page = start & -mmap.PAGESIZE
    _madvise(page, end - page, _POPULATE_READ)


def _tensors(module: "torch.nn.Module") -> Iterator["torch.Tensor"]:
    yield from module.parameters()
    yield from module.buffers()


def _file_mappings() -> tuple[list[int], list[int]]:
    """Where mapped files begin and end, in ascending order."""
    starts: list[int] = []
    ends: list[int] = []
    for line in _MAPS.read_text().splitlines():
        found = _MAPPING.match(line)
        if found is not None and found[3] != "0":  # anonymous memory has no inode
            starts.append(int(found[1], 16))
            ends.append(int(found[2], 16))
    return starts, ends
