"""Sizes and durations on a command line, with their units."""

from typing import Final

import click

from umad.units import UnitError, parse_bytes, parse_duration


class _Size(click.ParamType[int]):
    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> int:
        """Bytes."""
        try:
            size = parse_bytes(str(value))
        except UnitError as error:
            self.fail(str(error), param, context)
        if size <= 0:
            self.fail("a size must be above zero", param, context)
        return size


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> float:
        """Seconds."""
        try:
            return value if isinstance(value, float) else parse_duration(str(value))
        except UnitError as error:
            self.fail(str(error), param, context)


SIZE: Final = _Size()
DURATION: Final = _Duration()
