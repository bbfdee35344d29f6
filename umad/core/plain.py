"""Values as plain data (what JSON holds) and back again, by their types.

``typed`` believes nothing: what it is given may have been written by anybody, so every value is
held against the type it must have.

Maps with text as keys become objects, other maps lists of pairs; sets are sorted.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from umad.errors import UmadError

_INT_MAX: Final = 2**64
_SCALARS: Final = frozenset({NoneType, bool, int, float, str})
_SEQUENCES: Final = {list: list, tuple: tuple, deque: deque, set: set, frozenset: frozenset}


def plain(value: Any) -> Any:
    """A value of umad as plain data."""
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: plain(one) for key, one in value.items()}
        return [[plain(key), plain(one)] for key, one in value.items()]
    if isinstance(value, AbstractSet):
        return sorted((plain(one) for one in value), key=repr)
    if isinstance(value, list | tuple | deque):
        return [plain(one) for one in value]
    if isinstance(value, UmadError):
        return plain(value.to_wire())
    return {name: plain(getattr(value, name)) for name in _hints(kind)}


def typed(hint: Any, data: Any) -> Any:
    """The value of a type that plain data stands for.

    Args:
        hint: the type, as an annotation has it.
        data: from JSON.

    Raises:
        ValueError: it is no such value; the message says where.
    """
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return _either(get_args(hint), data)
    if origin in (dict, Mapping, Counter):
        return _mapping(hint, origin, data)
    if origin in _SEQUENCES:
        return _sequence(hint, origin, data)
    if is_dataclass(hint):
        return _instance(hint, data)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(data)
    if hint is Any or (hint is NoneType and data is None):
        return data
    right = type(data) in (int, float) if hint is float else type(data) is hint
    if not right:
        raise ValueError(f"{_shown(data)} is no {getattr(hint, '__name__', hint)}")
    if hint is int and not -_INT_MAX < data < _INT_MAX:
        raise ValueError("a number beyond all bounds")
    if hint is float and not math.isfinite(data):
        raise ValueError(f"{data} is no finite number")
    return data


def _either(hints: tuple[Any, ...], data: Any) -> Any:
    problem = ValueError("no type fits")
    for hint in hints:
        try:
            return typed(hint, data)
        except ValueError as error:
            problem = error
    raise problem


def _mapping(hint: Any, origin: Any, data: Any) -> Any:
    key_hint, value_hint = (*get_args(hint), int)[:2]  # a Counter names its keys alone
    if isinstance(data, dict):
        pairs: list[Any] = list(data.items())
    elif isinstance(data, list) and all(isinstance(one, list) and len(one) == 2 for one in data):
        pairs = data
    else:
        raise ValueError(f"{_shown(data)} is no map")
    made = {typed(key_hint, key): _at(str(key)[:40], value_hint, one) for key, one in pairs}
    return Counter(made) if origin is Counter else made


def _sequence(hint: Any, origin: Any, data: Any) -> Any:
    if not isinstance(data, list):
        raise ValueError(f"{_shown(data)} is no list")
    hints = get_args(hint)
    if origin is tuple and hints[-1] is not Ellipsis:
        if len(data) != len(hints):
            raise ValueError(f"{len(data)} values, not {len(hints)}")
        return tuple(typed(each, one) for each, one in zip(hints, data, strict=True))
    return _SEQUENCES[origin](typed(hints[0], one) for one in data)


def _instance(kind: Any, data: Any) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{_shown(data)} is no {kind.__name__}")
    hints = _hints(kind)
    if unknown := data.keys() - hints.keys():
        raise ValueError(f"{kind.__name__} has no {min(unknown)[:40]!r}")
    given = {name: _at(name, hints[name], one) for name, one in data.items()}
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _at(name: str, hint: Any, data: Any) -> Any:
    try:
        return typed(hint, data)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def _shown(data: Any) -> str:
    return repr(data)[:40] if isinstance(data, str | int | float) else type(data).__name__
