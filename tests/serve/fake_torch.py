"""A stand-in for what umad uses of ``torch.cuda``, over the real device allocator.

It has no tensors, only bytes: ``Tensor(size)`` is a piece of memory on the device.  As torch does,
a pool takes whole segments, keeps those that are freed, and lets go of them at ``empty_cache``
once nobody holds the pool any more.  Unlike torch, it insists: outside of a pool there is none.
"""

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

SEGMENT_BYTES = 2 << 20


class OutOfMemoryError(RuntimeError):
    """Told by its name, as torch's."""


class Allocator:
    """``torch.cuda.memory.CUDAPluggableAllocator``."""

    def __init__(self, path: str, allocate: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self.allocate, self.free = library[allocate], library[free]
        self.allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.allocate.restype = ctypes.c_void_p
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.free.restype = None

    def allocator(self) -> "Allocator":
        return self


class _Segments:
    """What outlives its MemPool for as long as tensors are in it."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.cached: list[tuple[int, int]] = []

    def take(self, size: int) -> tuple[int, int]:
        whole = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
        fits = [one for one in self.cached if one[1] == whole]
        if fits:
            self.cached.remove(fits[0])
            return fits[0]
        block = self.allocator.allocate(whole, 0, None)
        if not block:
            raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {whole} bytes.")
        return block, whole


_orphans: list[_Segments] = []


class MemPool:
    """``torch.cuda.MemPool``."""

    initialized = False

    def __init__(self, allocator: Allocator) -> None:
        MemPool.initialized = True
        self.segments = _Segments(allocator)

    def __del__(self) -> None:
        _orphans.append(self.segments)


class _Current(threading.local):
    pool: MemPool | None = None


_current = _Current()


class Tensor:
    """Bytes on the device, for as long as it lives."""

    def __init__(self, size: int) -> None:
        assert _current.pool is not None, "this thread is outside of every quota"
        self._segments = _current.pool.segments
        self._block = self._segments.take(size)

    def __del__(self) -> None:
        if hasattr(self, "_block"):
            self._segments.cached.append(self._block)


@contextmanager
def use_mem_pool(pool: MemPool, _device: int) -> Iterator[None]:
    assert _current.pool is None
    _current.pool = pool
    try:
        yield
    finally:
        _current.pool = None


def empty_cache() -> None:
    for segments in _orphans:
        while segments.cached:
            block, size = segments.cached.pop()
            segments.allocator.free(block, size, 0, None)


def module(*, version: str = "2.13.0", hip: str | None = None, available: bool = True) -> Any:
    """A module to stand at ``sys.modules["torch"]``."""
    torch: Any = ModuleType("torch")
    torch.__version__ = version
    torch.version = SimpleNamespace(hip=hip)
    torch.get_num_threads, torch.set_num_threads = lambda: 1, lambda _: None
    torch._C = SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: None)
    torch.cuda = SimpleNamespace(
        is_available=lambda: available,
        is_initialized=lambda: MemPool.initialized,
        get_allocator_backend=lambda: "native",
        memory=SimpleNamespace(CUDAPluggableAllocator=Allocator),
        device=lambda _: nullcontext(),
        MemPool=MemPool,
        use_mem_pool=use_mem_pool,
        empty_cache=empty_cache,
        memory_snapshot=list,
    )
    return torch


def install() -> None:
    """Be torch in this process, which has nothing that stands on the real one."""
    sys.modules["torch"] = module()
    sys.modules["transformers"] = None  # type: ignore[assignment]  # an import of it fails
