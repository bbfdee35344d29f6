"""Linear layers of float32 on processors that torch's first choice is not made for.

torch multiplies matrices of float32 with MKL, which on x86 processors of other makers than its own
takes a slow path; oneDNN, which torch brings along, does not.  The weights stay as they are: no
copy of them is made, and none is kept.  Sums are added in another order, so results differ by what
float32 rounds.  Source: our measurement, AMD EPYC, one thread, time of oneDNN over that of MKL:
16 rows of 384 by 1536 0.60, 64 rows 0.48, 320 rows 0.46; 128 rows of 4096 by 11008 0.47; a single
row 1.3, four rows 0.8; a tiny layer gains nothing.

Each number of rows is a kernel of its own, made in 0.2 to 0.6 ms and kept in 0.5 MiB, of which the
model's quota must hold: rows are rounded up so that there are few, and the engine's environment
bounds how many are kept.
"""

from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch.nn.functional import linear, pad

ROWS_MIN: Final = 16
WEIGHTS_MIN: Final = 1 << 17


class Linear(torch.nn.Linear):
    """One that takes the faster way where there is one; see above."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """As torch's own; shapes: (..., in_features) to (..., out_features)."""
        rows = input.numel() // self.in_features
        if rows < ROWS_MIN or input.dtype is not torch.float32 or torch.is_grad_enabled():
            return linear(input, self.weight, self.bias)
        flat = input.reshape(rows, self.in_features)
        missing = -rows % step(rows)
        if missing:
            flat = pad(flat, (0, 0, 0, missing))
        found = torch.ops.mkldnn._linear_pointwise(flat, self.weight, self.bias, "none", [], "")
        return found[:rows].view(*input.shape[:-1], self.out_features)  # type: ignore[no-any-return]


def step(rows: int) -> int:
    """So many rows are rounded up to a multiple of this: four sizes from one power of 2 on."""
    return max(ROWS_MIN, 1 << (rows - 1).bit_length() >> 3)


def quicken(module: torch.nn.Module) -> None:
    """Have a model's large linear layers take the faster way, where this processor has one."""
    if not _pays():
        return
    for layer in module.modules():
        # A subclass, or one whose weights are not yet there, does something of its own.
        if type(layer) is torch.nn.Linear and _suits(layer.weight):
            layer.__class__ = Linear


def _suits(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and weight.numel() >= WEIGHTS_MIN
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
