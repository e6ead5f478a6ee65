"""What is drawn: escaped, of the promised width, and without colours where there is no terminal."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.tools.terminal import MIN_WIDTH, PLAIN_WIDTH, STAND_INS, Colour, Style, pad, printable, visible_length

COLOUR = Style(colour=True)
ASCII = Style(unicode=False)


@given(st.text())
def test_escaped_text_is_one_harmless_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain Ünïcode 漢", "plain Ünïcode 漢"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("right\u202eleft", "right\\u202eleft"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        (b"bad\xff.txt".decode("utf-8", "surrogateescape"), "bad\\udcff.txt"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_what_could_act_on_a_terminal_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_an_encoding_lacks_has_a_stand_in_or_is_escaped() -> None:
    for encoding, shown in (
        ("ascii", "cut~ host > NVMe 3 us \\xfc\\u6f22~ \\udcff"),
        ("latin-1", "cut~ host > NVMe 3 µs ü\\u6f22~ \\udcff"),
    ):
        written = "cut… host → NVMe 3 µs ü漢… \udcff".encode(encoding, STAND_INS)
        assert written.decode(encoding) == shown


@given(st.text(), st.integers(1, 20))
def test_cut_text_fits_and_says_that_it_was_cut(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert visible_length(shown) <= limit
    assert shown == printable(text) or shown.endswith("…")


@given(st.floats(-1, 2), st.integers(1, 60), st.sampled_from([Style(), COLOUR, ASCII]))
def test_a_bar_has_exactly_its_columns(share: float, cells: int, style: Style) -> None:
    bar = style.bar(share, cells, Colour.HOST)
    assert visible_length(bar) == cells
    if share <= 0:
        assert visible_length(bar.replace("·", "").replace(".", "")) == 0


def test_the_least_amount_shows() -> None:
    assert Style().bar(1e-9, 4) == "▏···"
    assert ASCII.bar(1e-9, 4) == "#..."
    assert Style().bar(1, 4) == "████"


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.integers(1, 40), st.booleans())
def test_a_stacked_bar_has_exactly_its_columns(amounts: list[float], cells: int, unicode: bool) -> None:
    parts = [(amount, colour) for amount, colour in zip(amounts, Colour, strict=False)]
    assert visible_length(Style(colour=True, unicode=unicode).stack(parts, cells)) == cells


def test_a_stacked_bar_shares_its_cells_out() -> None:
    parts = [(3.0, Colour.DEVICE), (1.0, Colour.HOST), (0.0, Colour.NVME)]
    assert COLOUR.stack(parts, 8) == "\x1b[32m██████\x1b[0m\x1b[36m██\x1b[0m"
    assert COLOUR.stack([(0.0, Colour.HOST)], 8) == " " * 8


def test_padding_counts_columns_and_not_colour_codes() -> None:
    painted = COLOUR.paint("ab", Colour.GOOD)
    assert pad(painted, 4) == painted + "  "
    assert pad(painted, 4, right=True) == "  " + painted
    assert pad("abcdef", 4) == "abcdef"


def test_wide_characters_take_two_columns_and_combining_ones_none() -> None:
    assert visible_length("漢字e\u0301") == 5
    assert printable("漢字漢字", 5) == "漢字…"
    assert printable("漢字漢字", 8) == "漢字漢字"
    assert printable("e\u0301" * 6, 6) == "e\u0301" * 6


class FakeTerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Latin1Terminal(FakeTerminal):
    encoding = "iso-8859-1"


def test_a_pipe_gets_no_colours_and_a_fixed_width() -> None:
    assert Style.of(io.StringIO()) == Style(colour=False, unicode=False, width=PLAIN_WIDTH, live=False)


def test_a_terminal_gets_colours_at_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "97")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Style.of(FakeTerminal()) == Style(colour=True, unicode=True, width=97, live=True)
    assert not Style.of(Latin1Terminal()).unicode
    monkeypatch.setenv("COLUMNS", "20")
    assert Style.of(FakeTerminal()).width == MIN_WIDTH
    monkeypatch.setenv("NO_COLOR", "1")
    assert Style.of(FakeTerminal()) == Style(colour=False, unicode=True, width=MIN_WIDTH, live=True)
    monkeypatch.setenv("TERM", "dumb")
    assert not Style.of(FakeTerminal()).live
