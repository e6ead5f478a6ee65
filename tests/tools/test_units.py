"""Sizes and times, as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.tools.units import MAX_BYTES, format_bytes, format_seconds, parse_bytes, plural


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("4096", 4096), ("12B", 12), ("64MiB", 64 << 20), ("64mib", 64 << 20), ("1.5GB", 1_500_000_000),
        ("2g", 2 << 30), ("2 GiB", 2 << 30), (" 3kb ", 3000), (".5k", 512), ("1.0001k", 1024), ("1T", 1 << 40),
        (str(MAX_BYTES), MAX_BYTES), (str(2**53 + 1), 2**53 + 1),
    ],
)  # fmt: skip
def test_sizes_in_every_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0.0001",
        "-1",
        "+5",
        "1e9",
        "1,5GB",
        "GB",
        "64Mi",
        "64 MB B",
        "1 2",
        "nan",
        "inf",
        "0x10",
        "5PB",
        "4194305T",
        "\uff11",
    ],
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_bytes(text)


@given(st.integers(1, MAX_BYTES))
def test_plain_numbers_are_themselves(size: int) -> None:
    assert parse_bytes(str(size)) == size


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_is_short_and_near(size: int) -> None:
    text = format_bytes(size)
    number, unit = text.split(" ")
    assert len(number) <= 4, text
    value = (
        float(number)
        * {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}[unit]
    )
    assert value == pytest.approx(size, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"), (1.5e-6, "1.50 µs"), (0.9994e-3, "999 µs"), (1e-3, "1.00 ms"), (0.9996, "1.00 s"),
        (3.7, "3.70 s"), (59.94, "59.9 s"),
        (59.96, "1 min 00 s"), (61, "1 min 01 s"), (3599.6, "1 h 00 min"), (7380, "2 h 03 min"),
    ],
)  # fmt: skip
def test_times(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_nouns_follow_their_number() -> None:
    assert [plural(n, "page") for n in (0, 1, 2000)] == ["0 pages", "1 page", "2,000 pages"]
