"""Linear layers on a CPU whose kernels are oneDNN's, of few sizes, made while the model is loaded.

oneDNN has a kernel for each number of rows, which takes 0.5 ms to make and up to 0.75 MiB for good:
a model that is asked for texts of all lengths would grow by a hundred MiB, past its quota.  So rows
are done in pieces of few sizes, the last one padded, and all of these kernels are made at the load.

bfloat16: where torch takes oneDNN by itself.  float32: torch multiplies with MKL, which on x86
processors of other makers than its own takes a slow path; oneDNN, which torch brings along, does
not.  The weights stay as they are: no copy of them is made, and none is kept.  Sums are added in
another order, so results differ by what the type rounds.  Source: our measurement, AMD EPYC, one
thread, time of oneDNN over that of MKL: 16 rows of 384 by 1536 0.60, 64 rows 0.48, 320 rows 0.46;
128 rows of 4096 by 11008 0.47; a single row 1.3, four rows 0.8; a tiny layer gains nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import torch
from torch.nn.functional import linear, pad

from umad.units import MIB

LEAST: Final = {torch.float32: 16, torch.bfloat16: 4}
"""Rows of the smallest piece; in float32 fewer go MKL's way, and a single one goes as it is."""
ROWS_MAX: Final = 128
WEIGHTS_MIN: Final = 1 << 17  # of a layer in float32
PIECE_BYTES: Final = 2 * MIB  # of what goes into a piece, and of what comes out of it
PIECES: Final = 3  # in which what is left over is done; the last is padded


_home: Callable[[], AbstractContextManager[object]] = nullcontext


def keep_kernels_in(home: Callable[[], AbstractContextManager[object]]) -> None:
    """Make kernels inside this context: oneDNN keeps them for the whole process, whoever asked."""
    global _home
    _home = home


class Linear(torch.nn.Linear):
    """One that does its rows in pieces; see above."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """As torch's own; shapes: (..., in_features) to (..., out_features)."""
        rows = input.numel() // self.in_features
        dtype = self.weight.dtype
        alone = rows < (LEAST[dtype] if dtype is torch.float32 else 2)
        if alone or input.dtype is not dtype or torch.is_grad_enabled():
            return linear(input, self.weight, self.bias)
        flat = input.reshape(rows, self.in_features)
        found = flat.new_empty((rows, self.out_features))
        at = 0
        for size in pieces(rows, self.rows_max, LEAST[dtype]):
            piece = flat[at : at + size]
            if missing := size - len(piece):
                piece = pad(piece, (0, 0, 0, missing))
            found[at : at + size] = self._piece(piece)[: rows - at]
            at += size
        return found.view(*input.shape[:-1], self.out_features)

    @property
    def rows_max(self) -> int:
        """Of a piece."""
        return rows_max(max(self.in_features, self.out_features))

    def _piece(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype is not torch.float32:
            return linear(rows, self.weight, self.bias)
        op = torch.ops.mkldnn._linear_pointwise
        return op(rows, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


@cache
def rows_max(features: int) -> int:
    """Of a piece that has so many features: a power of 2."""
    fitting = PIECE_BYTES // (4 * features)
    return min(ROWS_MAX, max(max(LEAST.values()), 1 << fitting.bit_length() >> 1))


@lru_cache(maxsize=1024)
def pieces(rows: int, most: int, least: int) -> list[int]:
    """Sizes in which so many rows are done, the last one padded: powers of 2 between the two."""
    whole, left = divmod(rows, most)
    sizes = []
    for _ in range(PIECES - 1):
        size = 1 << left.bit_length() >> 1  # the largest that it fills
        if size < least:
            break
        sizes.append(size)
        left -= size
    if left:
        sizes.append(max(least, 1 << (left - 1).bit_length()))
    # As many rows as one kernel does are done by one.
    if len(sizes) > 1 and sum(sizes) >= (one := 2 * sizes[0]):
        sizes = [one]
    return [most] * whole + sizes


def quicken(module: torch.nn.Module) -> None:
    """Have the linear layers of a model that oneDNN does, or does faster, go in pieces.

    In the thread that will use them: torch keeps oneDNN's kernels for each by itself.
    """
    made = set()
    for layer in module.modules():
        # A subclass, or one whose weights are not yet there, does something of its own.
        if type(layer) is not torch.nn.Linear or not _suits(layer.weight):
            continue
        layer.__class__ = Linear
        shape = (layer.in_features, layer.out_features, layer.bias is None, layer.weight.dtype)
        if shape not in made:
            made.add(shape)
            with _home():
                _make_kernels(layer)


def _make_kernels(layer: torch.nn.Linear) -> None:
    dtype = layer.weight.dtype
    rows = rows_max(max(layer.in_features, layer.out_features))
    sizes = [rows >> by for by in range(rows.bit_length()) if rows >> by >= LEAST[dtype]]
    if dtype is not torch.float32:
        sizes.append(1)
    with torch.inference_mode():
        for size in sizes:
            layer(torch.zeros(size, layer.in_features, dtype=dtype))


def _suits(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    if weight.dtype is torch.float32:
        return weight.numel() >= WEIGHTS_MIN and _pays()
    return weight.dtype is torch.bfloat16 and _is_onednns()


@cache
def _is_onednns() -> bool:
    """Whether torch has oneDNN multiply bfloat16 here."""
    onednn = torch.backends.mkldnn
    return bool(
        onednn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@cache
def _pays() -> bool:
    mkl, onednn = torch.backends.mkl, torch.backends.mkldnn
    if not (
        mkl.is_available()  # type: ignore[no-untyped-call]
        and onednn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    return vendor(Path("/proc/cpuinfo").read_text()) not in ("", "GenuineIntel")


def vendor(cpuinfo: str) -> str:
    """Who made an x86 processor; empty where it does not say, as others do not."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    return ""
