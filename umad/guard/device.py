"""A worker's memory on a GPU, charged to its account: one torch memory pool over our allocator.

Owns the binding to ``device/*.c``: building and loading it, ``DeviceQuota``, and what a
device must be set to before its first use.  Works with CUDA and ROCm (torch calls both "cuda"),
and needs no preloaded guard.  torch is imported inside functions only.

What it cannot do; none of it has been run on a GPU yet (``tests/gpu``):

- Quotas bind on *segments*: torch asks for 2 MiB, 20 MiB or more at a time and keeps what is
  freed.  Cached segments of a pool are not given back under pressure (pytorch #159674), so a
  fragmented pool is refused although it holds free blocks; ``release`` gives them back.
- ``expandable_segments`` maps memory past a pluggable allocator, or is ignored for it, depending
  on the version (pytorch #147851); it is refused here.
- ``torch.cuda.memory_stats`` and its kin do not follow a pluggable allocator everywhere (pytorch
  #133281); the figures of the account count.
- Only the thread that is inside ``use`` is served, on this quota's device (pytorch #153356).
  Threads that it starts, autograd's among them, allocate from torch's common pool, uncharged; so
  do libraries that call the driver themselves, CUDA contexts (hundreds of MiB) and pinned memory.
- While any pool is in use torch defers blocks that other streams still use (pytorch #175015).
- transformers reads weights in threads of its own, unless HF_DEACTIVATE_ASYNC_LOAD is set.
- A running kernel cannot be stopped from a thread, and device pages cannot be taken away under it.
  Forced return on a device is: refuse, and fence the worker; or ``isolation = "process"``.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

from umad.errors import ConfigError, PreflightError, QuotaExceeded
from umad.guard import account, page, preload
from umad.units import format_bytes

_HERE: Final = Path(__file__).parent
FOLDER: Final = _HERE / "device"
LIBRARY: Final = FOLDER / "libumaddevice.so"
# XNACK turns page migration on; SDMA picks the copy engines.  HSA reads both once, maybe before
# torch is asked anything, so they are the launcher's to set.
HIP_ENVIRONMENT: Final = {"HSA_XNACK": "0", "HSA_ENABLE_SDMA": "0"}
OFF: Final = "device quotas: off, "
"""How a ``ConfigError`` begins that says why there are none; the reason follows."""
_ALLOC_CONF: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def build(cc: str | None = None) -> Path:
    """Compile the library into its place; nothing is done when it is newer than its sources.

    Args:
        cc: the C compiler; ``$CC`` or ``cc`` when None.

    Raises:
        ConfigError: there is no compiler, or it failed; its words are in the message.
    """
    sources = sorted(FOLDER.glob("*.c"))
    headers = [*FOLDER.glob("*.h"), _HERE / "page.h"]
    inputs = (*sources, *headers, Path(preload.__file__), Path(__file__))
    newest = max(path.stat().st_mtime_ns for path in inputs)
    if LIBRARY.is_file() and LIBRARY.stat().st_mtime_ns > newest:
        return LIBRARY
    compiler = cc or os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise ConfigError(f"the device allocator cannot be built: no C compiler {compiler!r}")
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent, prefix=".build-") as folder:
        fresh = Path(folder) / LIBRARY.name
        command = [compiler, *preload.FLAGS, f"-I{_HERE}", "-o", str(fresh)]
        command += [*map(str, sources), *preload.LINK]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"the device allocator cannot be built: {done.stderr[-2000:]}")
        fresh.replace(LIBRARY)  # a process that has the old one mapped keeps it
    return LIBRARY


class Library:
    """The exported functions of one loaded ``libumaddevice.so``.

    PyDLL where a call ends at once, so that giving up the interpreter's lock is not worth it.
    """

    def __init__(self, path: Path) -> None:
        quick, slow = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self.enter = quick.umad_device_enter
        self.enter.argtypes, self.enter.restype = [ctypes.c_int], ctypes.c_uint64
        self.leave = quick.umad_device_leave
        self.leave.argtypes, self.leave.restype = [ctypes.c_uint64], None
        self.held = quick.umad_device_held
        self.held.argtypes, self.held.restype = [ctypes.c_int], ctypes.c_uint64
        self.failures = quick.umad_device_failures
        self.failures.restype = ctypes.c_uint64
        self.runtime = slow.umad_device_runtime
        self.runtime.restype = ctypes.c_char_p
        self.attach = slow.umad_device_attach
        self.spin = slow.umad_device_spin
        self.peer = slow.umad_device_peer
        self._account = quick.umad_device_account
        self._account.argtypes = [ctypes.c_int, ctypes.c_char_p]

    def reading(self, slot: int) -> page.AccountReading | None:
        """An account's line; None before ``attach``."""
        line = ctypes.create_string_buffer(page.LINE_BYTES)
        if self._account(slot, line) != 0:
            return None
        return page.AccountReading._make(page.ACCOUNT.unpack_from(line))


@cache
def library() -> Library:
    """The library of this process.

    Raises:
        ConfigError: it was not built, or this system's loader cannot use it.
    """
    if not LIBRARY.is_file():
        raise ConfigError(f"{OFF}the device allocator was not built (no C compiler?)")
    try:
        return Library(LIBRARY)
    except OSError as error:
        raise ConfigError(f"{OFF}{error}") from error


def attach(fd: int) -> None:
    """Bind this process to its account page: the preloaded guard and the device allocator.

    To be called instead of ``account.attach`` where device quotas are used, so that no charge is
    lost when a new daemon's page takes the place of the old one.  ``fd`` stays the caller's.

    Raises:
        ConfigError: the allocator is off, or the page or the machine are not fit for it.
    """
    result = library().attach(fd)
    if result != 0:
        raise ConfigError(f"{OFF}{page.describe(result)}")


def unsettled(environment: Mapping[str, str]) -> str:
    """What has to be set, beyond ``environment``, for pages to stay where they were put (ROCm).

    Returns:
        ``NAME=value`` for each, with blanks between; empty when all is well.
    """
    wrong = {k: v for k, v in HIP_ENVIRONMENT.items() if environment.get(k) != v}
    return " ".join(f"{name}={value}" for name, value in wrong.items())


def prepare_device(device: int, peers: Iterable[int] = ()) -> None:
    """Set a device to what umad needs; call it under the init mutex, before the device's first use.

    Checks that pages stay where they were put (ROCm), and has threads that wait for the device
    spin: the answer is there sooner, and each of them keeps a core busy meanwhile.  The driver
    enables access between devices while all of them stand still, so that is done here too.

    Args:
        device: index, as in ``cuda:0``.
        peers: indices of devices that were prepared before; it and they may read each other.

    Raises:
        ConfigError: torch has no GPU here, the library is missing, or the driver refused.
        PreflightError: on ROCm, the environment is not ``HIP_ENVIRONMENT``.
    """
    torch = _import_torch()
    if torch.version.hip and (wanted := unsettled(os.environ)):
        raise PreflightError(
            f"set this in the environment of umad-serve before it starts: {wanted}"
        )
    _require_device(torch)
    failed = library().spin(device)
    if failed != 0:
        raise ConfigError(f"device {device} does not take spin scheduling: driver error {failed}")
    for peer in peers:
        for one, other in ((device, peer), (peer, device)):
            failed = library().peer(one, other)
            if failed != 0:
                raise ConfigError(
                    f"device {one} is refused access to device {other}: driver error {failed}"
                )


def prepare_pools() -> None:
    """Make the allocator that torch's pools will call, so that ``use`` finds nothing to refuse.

    Raises:
        ConfigError: torch has no GPU here, is too old or set to what excludes pools.
    """
    _allocator(_import_torch())


class DeviceQuota:
    """One worker's memory on one device; thread-safe, nothing is loaded before ``use``.

    Args:
        slot: the account, 0 .. 62.  Where CPU and GPU share one DRAM it is the worker's only
            account and host and device bytes share its limit; for memory of a device's own it is
            a second account of the worker, with the limit of that pool.
        device: index, as in ``cuda:0``.
        shared_dram: whether it is the first case; then ``use`` enters the account in the guard,
            too.
    """

    def __init__(self, slot: int, device: int = 0, *, shared_dram: bool = True) -> None:
        if not 0 <= slot < page.SLOTS:
            raise ValueError(f"there is no account {slot}")
        self.slot = slot
        self.device = device
        self._shared_dram = shared_dram
        self._lock = threading.Lock()
        # A pool serves one thread at a time (torch: "already recording to mempool_id"), so a
        # second thread of the worker gets a second one; all charge the same account.
        self._idle: list[Any] = []
        self._releases = 0

    @property
    def held(self) -> int:
        """Bytes of this account in device segments now, those torch keeps cached included."""
        return int(library().held(self.slot))

    @contextmanager
    def use(self) -> Iterator[None]:
        """What this thread allocates on the device meanwhile is charged to the account.

        Never left open across an ``await`` or a ``yield``.  May be nested in itself, not in
        another quota's: torch would go on serving from the outer one's pool.

        Raises:
            QuotaExceeded: torch got no memory; ``details`` has the numbers.
            ConfigError: torch has no GPU here, is too old or set to what excludes pools, or no
                account page is attached.
        """
        outer = _inside.quota
        if outer is self:
            yield
            return
        if outer is not None:
            raise RuntimeError(f"account {outer.slot}'s device quota is in use by this thread")
        torch = _import_torch()
        before = self._reading()
        pool, releases = self._take_pool(torch)
        host: AbstractContextManager[None] = (
            account.account(self.slot) if self._shared_dram else nullcontext()
        )
        token = library().enter(self.slot)
        _inside.quota = self
        try:
            with host, torch.cuda.use_mem_pool(pool, self.device):
                yield
        except RuntimeError as error:
            denied = self.denied(error, before)
            if denied is None:
                raise
            try:
                raise denied from error
            finally:
                del denied  # else this frame and its error would keep each other, and the tensors
        finally:
            _inside.quota = None
            library().leave(token)
            with self._lock:
                if releases == self._releases:
                    self._idle.append(pool)
            del pool  # after a release in between this ends it

    def denied(self, error: RuntimeError, before: page.AccountReading) -> QuotaExceeded | None:
        """What an error of torch means when an allocation failed; None for any other error.

        Args:
            error: as torch raised it.
            before: the account before the code that raised it.
        """
        now = self._reading()
        refused = now.refused > before.refused
        # Where there is no NVML (Jetson) torch fails while it words its own error: pytorch #185240.
        unworded = refused and "NVML_SUCCESS" in str(error)
        if type(error).__name__ != "OutOfMemoryError" and not unworded:
            return None
        why = (
            f"asked for {format_bytes(now.requested)} more, with {format_bytes(now.used)} of its "
            f"{format_bytes(now.limit)} in use"
            if refused
            else "got no memory from the driver, though its quota allows it"
        )
        return QuotaExceeded(
            f"account {self.slot} on device {self.device} {why}",
            details={
                "account": self.slot,
                "device": self.device,
                "by_quota": refused,
                "closed": now.state != page.AccountState.OPEN,
                "asked_bytes": now.requested if refused else None,
                "used_bytes": now.used,
                "device_bytes": self.held,
                "quota_bytes": now.limit,
            },
        )

    def release(self) -> int:
        """Drop the pools: segments without a live tensor go back to the driver.

        The worker's tensors should be gone; segments of those that live on go back at a release
        after them.  A pool that a thread is inside of goes when the thread leaves it.  Also drops
        torch's common cache and, from torch 2.10 on (before, doing so is a race), the cuBLAS
        workspaces of all threads, which are made anew at their next use.

        Returns:
            Bytes by which ``held`` has fallen.
        """
        with self._lock:
            pools, self._idle = self._idle, []
            self._releases += 1
        if not _allocators:
            return 0
        before = self.held
        torch = _import_torch()
        if _version(torch) >= (2, 10):
            torch._C._cuda_clearCublasWorkspaces()
        pools.clear()
        torch.cuda.empty_cache()
        return max(0, before - self.held)

    def _reading(self) -> page.AccountReading:
        reading = library().reading(self.slot)
        if reading is None:
            raise ConfigError(f"{OFF}no account page is attached")
        return reading

    def _take_pool(self, torch: Any) -> tuple[Any, int]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), self._releases
            releases = self._releases
        allocator = _allocator(torch).allocator()
        with torch.cuda.device(self.device):  # a pool belongs to the device that is current
            return torch.cuda.MemPool(allocator), releases


class _Inside(threading.local):
    """The quota that a thread is inside of."""

    quota: DeviceQuota | None = None


_inside: Final = _Inside()
_allocators: Final[list[Any]] = []  # the one allocator; torch's pools keep a bare pointer to it
_allocators_lock: Final = threading.Lock()


def _allocator(torch: Any) -> Any:
    with _allocators_lock:
        if not _allocators:
            _require_device(torch)
            _require_pools(torch)
            _allocators.append(
                torch.cuda.memory.CUDAPluggableAllocator(
                    str(LIBRARY), "umad_device_alloc", "umad_device_free"
                )
            )
        return _allocators[0]


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"{OFF}torch cannot be imported: {error}") from error
    return torch


def _version(torch: Any) -> tuple[int, int]:
    major, minor, *_ = str(torch.__version__).split(".")
    return int(major), int(minor)


def _require_device(torch: Any) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(f"{OFF}torch {torch.__version__} sees no CUDA or ROCm GPU")
    wanted, found = b"hip" if torch.version.hip else b"cuda", library().runtime()
    if found != wanted:  # one that torch does not use would hand out another driver's addresses
        raise ConfigError(
            f"{OFF}torch wants {wanted.decode()}, and the library that was found "
            f"is {found.decode() if found else 'none'} (libcudart.so.12, libamdhip64.so.6, ...)"
        )


def _require_pools(torch: Any) -> None:
    if _version(torch) < (2, 8):  # the first with pools of a thread's own (pytorch #153356)
        raise ConfigError(f"{OFF}they need torch 2.8, this is {torch.__version__}")
    if torch.cuda.get_allocator_backend() != "native":
        raise ConfigError(f"{OFF}torch's allocator backend must be 'native'")
    for name in _ALLOC_CONF:
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise ConfigError(f"{OFF}{name} sets expandable_segments")
