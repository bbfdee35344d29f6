import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch

from tests.demo.fixtures import FOLDERS, checkpoints
from umad.serve import dtypes
from umad.serve.dtypes import own_default_dtype
from umad.serve.kinds.base import Runner
from umad.serve.loader import load

pytestmark = pytest.mark.models
HALF = torch.bfloat16


def elsewhere() -> torch.dtype:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: torch.ones(1).dtype).result()


def test_it_is_this_threads_alone_and_ends_with_the_block() -> None:
    with own_default_dtype():
        torch.set_default_dtype(HALF)
        assert torch.get_default_dtype() == torch.ones(1).dtype == HALF
        assert elsewhere() == torch.float32
        with own_default_dtype():
            assert torch.ones(1).dtype == HALF
            torch.set_default_dtype(torch.float16)
            assert torch.ones(1).dtype == torch.float16
        assert torch.ones(1).dtype == HALF
    assert torch.get_default_dtype() == torch.ones(1).dtype == torch.float32
    torch.set_default_dtype(torch.float64)  # outside it is the process's, as ever
    try:
        assert elsewhere() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


CALLS = {
    "empty": lambda: torch.empty(2, device="meta"),
    "full": lambda: torch.full((2,), 0.5),
    "a number": lambda: torch.tensor(0.5),
    "a list": lambda: torch.tensor([1.0, 2.0]),
    "whole numbers": lambda: torch.tensor([1, 2]),
    "arange of floats": lambda: torch.arange(0, 1, 0.25),
    "arange": lambda: torch.arange(4),
    "a division": lambda: torch.arange(4) / 2,
    "a power": lambda: 10000.0 ** torch.arange(4),
    "an array": lambda: torch.tensor(numpy.ones(2, numpy.float32)),
    "an array, shared": lambda: torch.from_numpy(numpy.ones(2, numpy.float32)),
    "asked for": lambda: torch.ones(2, dtype=torch.float32),
    "converted": lambda: torch.arange(4).float(),
    "converted by name": lambda: torch.arange(4).to(torch.float32),
    "from a float": lambda: torch.ones(2, dtype=torch.float32) * 2.0,
    "stacked": lambda: torch.stack([torch.ones(2, dtype=torch.float32)] * 2),
    "a layer": lambda: torch.nn.Linear(2, 2).weight,
    "a mask": lambda: torch.ones(2) > 0,
}


@pytest.mark.parametrize("call", CALLS)
def test_results_are_of_the_dtype_that_torch_gives_them(call: str) -> None:
    torch.set_default_dtype(HALF)
    try:
        expected = CALLS[call]()
    finally:
        torch.set_default_dtype(torch.float32)
    with own_default_dtype():
        torch.set_default_dtype(HALF)
        got = CALLS[call]()
    assert got.dtype == expected.dtype
    assert got.device == expected.device
    if got.device.type == "cpu" and call != "a layer":
        # What torch computes in the default dtype is computed in float32 here, and rounded then.
        torch.testing.assert_close(got, expected, rtol=0.01, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_load_never_changes_the_dtype_of_another_thread(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at from another thread at every layer that is built."""
    path = str(checkpoints() / FOLDERS[kind])
    build = torch.nn.Linear.__init__
    seen: set[torch.dtype] = set()
    here = threading.get_ident()

    def look(layer: torch.nn.Linear, *args: Any, **values: Any) -> None:
        assert threading.get_ident() == here
        seen.add(elsewhere())
        build(layer, *args, **values)

    monkeypatch.setattr(torch.nn.Linear, "__init__", look)
    ours = load(kind, path, dtype="bfloat16", progress=lambda _stage, _ratio: None)
    assert seen == {torch.float32}
    assert torch.get_default_dtype() == torch.float32
    # Else it is the model that the libraries make by themselves.
    monkeypatch.setattr(dtypes, "own_default_dtype", nullcontext)
    theirs = load(kind, path, dtype="bfloat16", progress=lambda _stage, _ratio: None)
    assert HALF in seen
    tensors = zip(tensors_of(ours), tensors_of(theirs), strict=True)
    assert all(our.dtype == their.dtype and torch.equal(our, their) for our, their in tensors)


def tensors_of(runner: Runner) -> Iterator[torch.Tensor]:
    for part in vars(runner).values():
        for module in getattr(part, "components", {"": part}).values():
            if isinstance(module, torch.nn.Module):
                yield from (*module.parameters(), *module.buffers())
