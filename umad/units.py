"""Bytes and durations as people write them, and back again; text that is safe to show them.

Owns the one parser for sizes (configuration, command line, DRM fdinfo) and the one for
durations.  Rules: text carries its unit, a bare number is refused unless the caller names the
unit it means; IEC prefixes (KiB, MiB, ...) are powers of 1024, SI prefixes (kB, MB, ...) powers
of 1000; letter case is significant, so that "4gib" is an error and not a guess.
Stays out: anything that knows what the bytes are for.
"""

import math
import re
from fractions import Fraction
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_BYTE_UNITS: Final[dict[str, int]] = {
    "B": 1,
    **{
        prefix + suffix: 1000**power
        for power, prefix in enumerate("kMGT", start=1)
        for suffix in ("", "B")
    },
    **{
        prefix + "i" + suffix: 1024**power
        for power, prefix in enumerate("KMGT", start=1)
        for suffix in ("", "B")
    },
}
_DURATION_UNITS: Final[dict[str, Fraction]] = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
# ASCII digits only: \d would also take other scripts' digits.
_QUANTITY: Final = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,12})?)\s*([A-Za-z]*)\s*")


class UnitError(ValueError):
    """A size or duration that cannot be read; the message says what would be accepted.

    The writer of the text is at fault.  ``config`` turns it into a problem with a line,
    ``host`` into a broken reading.
    """


def parse_bytes(text: str, *, bare_unit: str | None = None) -> int:
    """Read a size such as ``40GiB`` or ``40GB`` into bytes.

    Args:
        text: digits, an optional fraction, and a unit: B, kB MB GB TB (or k M G T, powers of
            1000), KiB MiB GiB TiB (or Ki Mi Gi Ti, powers of 1024).
        bare_unit: the unit a number without one is in; None refuses such a number.

    Returns:
        Whole bytes, >= 0.

    Raises:
        UnitError: no number, no unit, an unknown unit, or a fraction of a byte.
    """
    number, unit = _split(text, "size", "40GiB")
    if not unit:
        if bare_unit is None:
            raise UnitError(f"{text!r} has no unit; write for example {text.strip()}GiB")
        unit = bare_unit
    factor = _BYTE_UNITS.get(unit)
    if factor is None:
        near = next((known for known in _BYTE_UNITS if known.lower() == unit.lower()), "GiB")
        raise UnitError(f"unknown unit {unit!r} in {text!r}; did you mean {near!r}?")
    value = number * factor
    if value.denominator != 1:
        raise UnitError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_duration(text: str) -> float:
    """Read a duration such as ``200ms`` or ``10min`` into seconds.

    Raises:
        UnitError: no number, no unit, or a unit other than us, ms, s, min, h, d.
    """
    number, unit = _split(text, "duration", "200ms")
    if not unit:
        raise UnitError(f"{text!r} has no unit; write for example {text.strip()}s")
    factor = _DURATION_UNITS.get(unit)
    if factor is None:
        known = ", ".join(_DURATION_UNITS)
        raise UnitError(f"unknown unit {unit!r} in {text!r}; use one of {known}")
    return float(number * factor)


def format_bytes(count: int) -> str:
    """Bytes for people: ``"512 B"``, ``"1.5 GiB"``; a leading minus for a negative count."""
    if abs(count) < KIB:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def format_excess(held: int, limit: int) -> str:
    """By how much, in brackets after a space: two rounded sizes may look alike; or nothing."""
    return f" ({format_bytes(held - limit)} too much)" if held > limit else ""


def format_duration(seconds: float) -> str:
    """Seconds for people: ``"85 us"``, ``"4.2 ms"``, ``"1.5 s"``, ``"12 min"``, ``"3.1 h"``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if abs(seconds) < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    if abs(seconds) < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def printable(text: str) -> str:
    """Without what speaks to a terminal: the names of programs, and of files, are anybody's."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _split(text: str, what: str, example: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UnitError(f"{text!r} is not a {what}; write it like {example!r}")
    return Fraction(match[1]), match[2]
