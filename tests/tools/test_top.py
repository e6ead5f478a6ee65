"""`hicache top` in a terminal: drawn, sorted, filtered, resized, quit, and left as it was found."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest

from hicache.service.client import Prompt
from hicache.service.server.walks import MAX_WALKS
from hicache.tools import owner, watching
from hicache.tools.cli import main
from hicache.tools.terminal import Style
from hicache.tools.top_view import MAX_FILTER, Choices, frame, sparkline
from hicache.tools.watching import Order, Watch
from tests.repository import ROOT
from tests.service.serving import WAIT_S
from tests.service.stored import NAMESPACE
from tests.tools.served import COLD, WARM, check_schema, known_server


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *arguments: str, columns: int = 130, rows: int = 45) -> None:
        self._controller, self._terminal = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self._terminal)
        """How the terminal was before."""
        # These would say another size than the terminal's.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hicache.tools", *arguments], cwd=ROOT,
            stdin=self._terminal, stdout=self._terminal, stderr=self._terminal,
            env={**inherited, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
        )  # fmt: skip
        self.shown = ""
        """All that it wrote since `press` or `resize`."""

    def resize(self, columns: int, rows: int) -> None:
        self.shown = ""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self._controller, keys.encode())

    def until(self, pattern: str) -> None:
        """Read until something was written since the last key."""
        deadline = monotonic() + WAIT_S
        while not re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown)):
            left = deadline - monotonic()
            assert left > 0, f"{pattern!r} is not in {self.shown[-3000:]!r}"
            if select.select([self._controller], [], [], left)[0]:
                self.shown += os.read(self._controller, 1 << 16).decode(errors="replace")

    def end(self) -> int:
        """Read what is left; the exit status."""
        while self.process.poll() is None:
            if select.select([self._controller], [], [], 0.05)[0]:
                self.shown += os.read(self._controller, 1 << 16).decode(errors="replace")
        while select.select([self._controller], [], [], 0)[0]:
            self.shown += os.read(self._controller, 1 << 16).decode(errors="replace")
        assert termios.tcgetattr(self._terminal) == self.modes
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._controller)
        os.close(self._terminal)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


def test_top_in_a_terminal(tmp_path: Path) -> None:
    with known_server(tmp_path) as (server, client), terminal("top", "--socket-dir", str(server.directory)) as top:
        top.until(r"prefixes by uses: 3 of 3")
        top.until(r"q quit")
        for expected in ("3 of 64 pages", "4 of 127 pages", "host → NVMe", "hit rate", "pages that left: host 4",
                         "engine\\x1b[31m", f"{NAMESPACE.digest.hex()[:8]}       0: 0 1 2 3 …"):  # fmt: skip
            assert expected in re.sub(r"\x1b\[[0-9;?]*m", "", top.shown), expected
        with client.acquire(Prompt(NAMESPACE, WARM)):
            top.press(" ")
            top.until("paused")
            top.press(" ")
            top.until(r"hit rate\s+100.0%")
            top.until(r"1 lease\b")
        top.until(r"0: 0 1 2 3 … +32 +8.00 KiB  host nvme +[0-9.]+ m?s +1 +")
        top.press("s")
        top.until("prefixes by last use: 3 of 3")
        top.press("ss")
        top.until("prefixes by leases: 3 of 3")
        top.press("s")
        top.until("prefixes by uses: 3 of 3")
        top.press("/900")
        top.until("filter: 900_")
        top.until("prefixes by uses, with '900': 1 of 3")
        top.press("\x7f\x7f\x7fñ中")
        top.until("filter: ñ中_")
        top.until("with 'ñ中': 0 of 3")
        top.press("\x7f\x7fnvme\r")
        top.until("with 'nvme': 2 of 3")
        top.press("\x1b")
        top.until("prefixes by uses: 3 of 3")
        top.resize(80, 20)
        top.until("q quit")
        lines = re.sub(r"\x1b\[[0-9;?]*m", "", top.shown[top.shown.rindex("\x1b[H") :]).split("\n")
        assert len(lines) == 20
        assert max(len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip("\r")) for line in lines) <= 80
        top.press("q")
        assert top.end() == 0
        assert "\x1b[?1049l" in top.shown  # the other screen is back
        assert "\x1b[?25h" in top.shown  # and so is the cursor


def test_a_server_that_ends_ends_it_with_one_line(tmp_path: Path) -> None:
    with known_server(tmp_path) as (server, client), terminal("top", "--socket-dir", str(server.directory)) as top:
        top.until("q quit")
        client.close()
        server.close()
        assert top.end() == 1
        last = top.shown[top.shown.rindex("\x1b[?1049l") :]
        assert "hicache top: " in last
        assert "Traceback" not in last


def test_the_json_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with known_server(tmp_path) as (server, _):
        assert main(["top", "--json", "--socket-dir", str(server.directory)]) == 0
        content = json.loads(capsys.readouterr().out)
        check_schema("top", content)
        assert sorted(prefix["num_tokens"] for prefix in content["prefixes"]) == [32, 32, 48]
        assert {prefix["uses"] for prefix in content["prefixes"]} == {0}
        assert content["hit_rate"] is None


def test_prefixes_are_those_that_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_PREFIXES", 2)
    with known_server(tmp_path) as (server, client), owner.reached(server.directory) as asked:
        for prompt in (COLD, COLD, WARM):
            with client.acquire(Prompt(NAMESPACE, prompt)):
                pass
        watch = Watch(asked, 0.0)
        assert (watch.num_matched, watch.is_whole) == (3, True)
        assert [(each.first_token, each.num_tokens, each.uses) for each in watch.prefixes] == [(0, 32, 3), (32, 32, 2)]
        watch.choose(Order.LATEST, "")
        assert {each.num_tokens for each in watch.prefixes} == {32, 48}
        assert [each.first_token for each in watch.prefixes] == [0, 32]
        watch.choose(Order.BYTES, "")
        assert watch.prefixes[0].num_tokens == 48
        with client.acquire(Prompt(NAMESPACE, COLD)):
            watch.choose(Order.LEASES, "")
            assert [(each.first_token, each.leases) for each in watch.prefixes] == [(32, 1), (0, 0)]
        for contains, matched in (
            ("900 901", 1), (NAMESPACE.digest.hex()[5:25].upper(), 3), ("nvme", 2), ("host nvme 32 33", 1),
            ("901 902 903 9", 0),
        ):  # fmt: skip
            watch.choose(Order.USES, contains)
            assert watch.num_matched == matched, contains


def test_what_a_server_has_forgotten_it_begins_anew(tmp_path: Path) -> None:
    with known_server(tmp_path) as (server, _), owner.reached(server.directory) as asked:
        watch = Watch(asked, 0.0)
        for _ in range(MAX_WALKS + 1):
            Watch(asked, 0.0)
        watch.look(1.0)
        assert watch.num_matched == 3


def test_what_the_index_dropped_is_told(tmp_path: Path) -> None:
    with known_server(tmp_path) as (server, _), owner.reached(server.directory) as asked:
        watch = Watch(asked, 0.0)
        told = "\n".join(frame(watch, Choices(), "server", Style(), 50))
        assert "(lost, as its memory was full)" not in told
        server.call(lambda inside: setattr(inside.cache.counters, "metadata_dropped_pages", 1234))
        watch.look(1.0)
        assert "index 1,234 (lost, as its memory was full)" in "\n".join(frame(watch, Choices(), "server", Style(), 50))
        assert watch.to_json(1)["metadata_dropped_pages"] == 1234


def test_without_a_terminal_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    complaint = "hicache top: standard input and output have to be a terminal; there is --json\n"
    assert capsys.readouterr().err == complaint


def test_sparklines_are_as_high_as_their_values() -> None:
    assert sparkline([0, 1, 2, 4], 6, Style()) == "  ▁▃▅█"
    assert sparkline([0.5], 2, Style(), most=1.0) == " ▅"
    assert sparkline([0, 0], 2, Style(unicode=False)) == "__"
    assert sparkline(range(100), 3, Style(unicode=False)) == "@@@"
    assert sparkline([], 2, Style()) == "  "


def test_keys() -> None:
    choices = Choices()
    assert choices.press("x")
    assert choices.press("/")
    assert choices.press("q")
    assert choices.press("\r")
    assert (choices.filter, choices.is_typing) == ("q", False)
    assert choices.press("\x1b")
    assert not choices.filter
    assert all(map(choices.press, "/" + 300 * "ñ" + "\r"))
    assert choices.filter == MAX_FILTER * "ñ"
    assert not choices.press("q")
