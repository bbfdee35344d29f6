"""The only part of the client that knows torch, which is imported inside functions alone."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from umad.client.mapped import MappedFiles, Source

if TYPE_CHECKING:
    import torch

READERS: Final = min(4, os.cpu_count() or 1)  # one alone is slower than memory, and than a disk
PART_BYTES: Final = 32 << 20


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

    Raises:
        OSError: the file has become shorter, or cannot be read.
    """
    import torch

    copies: dict[tuple[object, ...], torch.Tensor] = {}
    reads: list[Future[None]] = []
    files = MappedFiles()
    pool = ThreadPoolExecutor(READERS)
    try:
        for tensor in _tensors(module):
            if tensor.device.type != "cpu" or not tensor.numel():
                continue
            address = tensor.data_ptr()
            if files.at(address) is None:
                continue
            key = (address, tensor.dtype, tensor.shape, tensor.stride())
            if key in copies:
                pass
            elif tensor.is_contiguous() and (source := files.source(address, tensor.nbytes)):
                copies[key] = torch.empty_like(tensor, requires_grad=False)
                for at, part in source.parts(PART_BYTES):
                    reads.append(pool.submit(_read, part, copies[key], at))
            else:
                copies[key] = tensor.detach().clone()
            tensor.data = copies[key]
        for one in reads:
            one.result()
    finally:  # revoked, or refused memory, in the middle: the rest would be read for nobody
        pool.shutdown(cancel_futures=True)
    return sum(copy.nbytes for copy in copies.values())


def _read(part: Source, to: "torch.Tensor", at: int) -> None:
    """Holds memory and file until it is done: who waits for it may be revoked at any moment."""
    part.read(to.data_ptr() + at)


def _tensors(module: "torch.nn.Module") -> Iterator["torch.Tensor"]:
    yield from module.parameters()
    yield from module.buffers()
