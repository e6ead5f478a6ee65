"""Directories in which a benchmark makes its files, and removes them again."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache.tools.exits import UsageProblem
from hicache.tools.terminal import printable
from hicache.tools.units import format_bytes


def check_directory(directory: Path, needed_bytes: int) -> None:
    """Raises `UsageProblem` for a directory in which no such files can be made. Creates nothing."""
    name = printable(os.fspath(directory))
    if not directory.is_dir():
        raise UsageProblem(f"--dir: there is no directory {name}")
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as problem:
        reason = "takes no direct I/O (O_DIRECT)" if problem.errno == errno.EINVAL else problem.strerror
        raise UsageProblem(f"--dir: {name}: {reason}") from problem
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise UsageProblem(f"--dir: {name} has {format_bytes(free)} free, the run takes {format_bytes(needed_bytes)}")


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A fresh directory in `parent`, removed with all that is in it when the block ends."""
    directory = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
