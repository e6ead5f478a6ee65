"""How far something is, on standard error."""

import sys


class Progress:
    """One line that moves on a terminal, a line a tenth elsewhere."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._last = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        step = (what, 10 * done // max(total, 1))
        if step == self._last or (not self._is_live and not 0 < step[1] < 10):
            return
        self._last = step
        text = f"{what}: {done:,} of {total:,}"
        if self._is_live:
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """How it stands with what has no known end; said on a terminal alone."""
        if self._is_live and (text, 0) != self._last:
            self._last = (text, 0)
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Nothing more is to come."""
        if self._is_live and self._last[1] >= 0:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._last = ("", -1)
