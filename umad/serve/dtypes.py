"""torch's default dtype, changed for one thread alone.

transformers and diffusers set it while they build a model, and it is one for the whole process: a
float tensor that another model's thread makes meanwhile would be a bfloat16, and its answer
another one.  Owns ``own_default_dtype``: inside it, ``torch.set_default_dtype`` is this thread's.
Limit: the old constructor ``torch.Tensor(...)`` and its kin do not see it.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

# Results have the default dtype whatever the arguments: asked for in it, no copy is made.
_FACTORIES = frozenset(
    {
        *(torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye),
        *(torch.empty_strided, torch.linspace, torch.logspace),
    }
)
# Results are float32 because the call says so.
_BY_NAME = frozenset({"float", "from_numpy", "type", "as_subclass", "load"})
_on_top: Any = _get_current_function_mode  # torch gives it no types
_here = threading.local()  # .mode: this thread's, inside own_default_dtype


@contextmanager
def own_default_dtype() -> Iterator[None]:
    """Inside, this thread's changes of torch's default dtype hold for it alone, and end with it.

    A library that fails before it has set the old one again does no harm either.
    """
    _patch()
    before = getattr(_here, "mode", None)
    mode = _here.mode = _OwnDefault()
    try:
        yield
    finally:
        mode.set(mode.process)
        _here.mode = before


@cache
def _patch() -> None:
    """Once and for all: whoever is not inside has what torch does."""
    set_for_all, get_of_all = torch.set_default_dtype, torch.get_default_dtype

    def set_default_dtype(d: torch.dtype, /) -> None:
        mode = getattr(_here, "mode", None)
        if mode is None:
            set_for_all(d)
        else:
            mode.set(d)

    def get_default_dtype() -> torch.dtype:
        mode = getattr(_here, "mode", None)
        return get_of_all() if mode is None else mode.dtype

    torch.set_default_dtype = set_default_dtype
    torch.get_default_dtype = get_default_dtype


class _OwnDefault(TorchFunctionMode):
    """Gives what has the process's default dtype this thread's.

    On torch's stack only while the two differ, since all calls pass through it there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.process = self.dtype = torch.get_default_dtype()
        self._stacked = False

    def set(self, dtype: torch.dtype) -> None:
        """Use it from now on."""
        self.dtype = dtype
        if dtype != self.process and not self._stacked:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._stacked = True
        elif dtype == self.process and _on_top() is self:
            self.__exit__(None, None, None)
            self._stacked = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if self.dtype == self.process or _says_dtype(func, args, given):
            return func(*args, **given)
        if func in _FACTORIES:
            return func(*args, **given | {"dtype": self.dtype})
        result = func(*args, **given)
        if isinstance(result, torch.Tensor) and result.dtype == self.process:
            return result.to(self.dtype)
        return result


def _says_dtype(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """Whether the dtype of the result follows from the call, and not from the default."""
    if getattr(func, "__name__", "") in _BY_NAME:
        return True
    values = [*args, *given.values()]
    values += [one for value in values if isinstance(value, list | tuple) for one in value]
    return any(
        isinstance(value, torch.dtype) or "float" in str(getattr(value, "dtype", ""))
        for value in values
    )
