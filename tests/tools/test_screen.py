"""Lines and the bar below them, on a terminal and off it."""

import io

import pytest

from hicache.tools.demo.screen import Screen
from hicache.tools.terminal import Colour, Style


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_off_a_terminal_there_are_lines_and_nothing_else() -> None:
    stream = io.StringIO()
    screen = Screen(stream, Style.of(stream))
    with screen.stage("loading"):
        pass
    with screen.bar(2) as bar:
        bar.describe("first")
        screen.print(["one", "two"])
        bar.advance()
    screen.print([])
    assert stream.getvalue() == "loading\none\ntwo\n"


def test_on_a_terminal_the_bar_stands_below_the_lines_and_goes_at_the_end(terminal: Terminal) -> None:
    style = Style.of(terminal)
    screen = Screen(terminal, style)
    with screen.stage("loading"):
        pass
    long = "x" * 150
    with screen.bar(2) as bar:
        bar.describe("request 1")
        screen.print([style.paint("one", Colour.GOOD) + " 123 [red]", long])
        bar.advance()
        bar.describe("[bold] is no markup")
        bar.advance()
    screen.print(["after"])
    shown = terminal.getvalue()
    assert "\x1b[1;32mone\x1b[0m 123 [red]" in shown  # as painted: no highlighting, no markup of rich's
    assert "[bold] is no markup" in shown
    assert long in shown  # not cut, not wrapped by us
    assert "2/2" in shown
    assert shown.endswith("after\n")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0  # the cursor is back


def test_the_cursor_comes_back_when_the_work_fails(terminal: Terminal) -> None:
    screen = Screen(terminal, Style.of(terminal))
    with pytest.raises(KeyboardInterrupt), screen.bar(3):
        raise KeyboardInterrupt
    screen.print(["after"])
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
    assert terminal.getvalue().endswith("after\n")
