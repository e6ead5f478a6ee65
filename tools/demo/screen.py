"""Where the demo's lines go: a terminal with a moving bar below them, or a file or pipe with plain lines."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO

from hicache.tools.terminal import Style

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """A progress bar over a known number of steps; outside a terminal it shows nothing, the lines tell."""

    def __init__(self, progress: "Progress | None" = None, task: "TaskID | None" = None) -> None:
        self._progress: Final = progress
        self._task: Final = task

    def describe(self, text: str) -> None:
        """Say what is under way."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=text)

    def advance(self) -> None:
        """One more step is done."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)


class Screen:
    """Prints lines in order; on a terminal, above a bar while there is one."""

    def __init__(self, stream: TextIO, style: Style) -> None:
        self.style: Final = style
        self._stream: Final = stream
        self._progress: Progress | None = None

    def print(self, lines: Iterable[str]) -> None:
        """Write whole lines, at once."""
        if self._progress is None:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
            return
        from rich.text import Text

        for line in lines:
            self._progress.console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Something without steps that takes a while: a spinner on a terminal, a line elsewhere."""
        if not self.style.live:
            self.print([text])
            yield
            return
        from rich.console import Console

        with Console(file=self._stream).status(text):
            yield

    @contextmanager
    def bar(self, total: int) -> Iterator[Bar]:
        """A bar over `total` steps, below the lines, gone when the block ends."""
        if not self.style.live:
            yield Bar()
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("  {task.description:<36}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left", style="dim"),
            TimeRemainingColumn(),
        )
        # Standard output and error are left alone: nothing else writes to them meanwhile.
        console = Console(file=self._stream, no_color=not self.style.colour)
        with Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as progress:
            self._progress = progress
            try:
                yield Bar(progress, progress.add_task("", total=total))
            finally:
                self._progress = None
