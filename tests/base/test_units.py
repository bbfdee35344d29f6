import pytest
from hypothesis import given
from hypothesis import strategies as st

from umad.units import (
    UnitError,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    printable,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("4G", 4 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("512 B", 512),
        (" 21504000 KiB ", 22020096000),
        ("0MiB", 0),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("4", "no unit"),
        ("4gib", "'GiB'"),
        ("4 gigs", "unknown unit"),
        ("-4GiB", "not a size"),
        ("1e3GiB", "not a size"),
        ("nan", "not a size"),
        ("", "not a size"),
        ("0.3 B", "whole number"),
        ("\u0664GiB", "not a size"),  # an Arabic-Indic four
    ],
)
def test_texts_that_are_no_size(text: str, hint: str) -> None:
    with pytest.raises(UnitError, match=hint):
        parse_bytes(text)


def test_fdinfo_counts_in_bytes_where_it_names_no_unit() -> None:
    assert parse_bytes("4096", bare_unit="B") == 4096
    assert parse_bytes("24 MiB", bare_unit="B") == 25165824


@given(st.integers(0, 2**60), st.sampled_from(["B", "KiB", "MiB", "GB", "T"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * parse_bytes(f"1{unit}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("5s", 5.0), ("10min", 600.0), ("1.5h", 5400.0), ("85us", 85e-6)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "5 m", "-1s", "s", "5secs"])
def test_texts_that_are_no_duration(text: str) -> None:
    with pytest.raises(UnitError):
        parse_duration(text)


def test_bytes_for_people() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(3 * 2**29) == "1.5 GiB"
    assert format_bytes(2**30 - 1) == "1.0 GiB"
    assert format_bytes(5 * 2**40) == "5.0 TiB"
    assert format_bytes(-(2**21)) == "-2.0 MiB"


def test_durations_for_people() -> None:
    shown = [format_duration(value) for value in (85e-6, 0.0042, 1.5, 720, 11160, float("inf"))]
    assert shown == ["85 us", "4.2 ms", "1.5 s", "12 min", "3.1 h", "inf"]


def test_what_speaks_to_a_terminal_is_not_shown() -> None:
    assert printable("Zürich 7 日本\u202e\x1b[2J\n\r\x9b\udcff") == "Zürich 7 日本??[2J????"
