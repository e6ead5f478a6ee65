"""The demo's options, checked as far as that needs no model: nothing is created and nothing heavy is imported here."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.tools.exits import UsageProblem
from hicache.tools.terminal import printable

DTYPES: Final = ("float32", "bfloat16", "float16")
DEFAULT_REQUESTS: Final = 40
QUICK_REQUESTS: Final = 14
DEFAULT_DOCUMENTS: Final = 12
"""Documents of the demo's own corpus."""
MAX_REQUESTS: Final = 10_000
MAX_NEW_TOKENS: Final = 1_024


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user asked for. `None` leaves a choice to the demo."""

    docs: Path | None = None
    questions: Path | None = None
    model: Path | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    nvme_dir: Path | None = None
    requests: int = DEFAULT_REQUESTS
    seed: int = 0
    max_new_tokens: int = 12
    dtype: str = "float32"
    device: str = "cpu"
    json: Path | None = None
    snapshot: Path | None = None
    compare: int = 8
    """Requests to compare with plain generation, at least."""
    compare_each: int = 2
    """Of these, how many of each way of being served."""

    @property
    def max_documents(self) -> int:
        """Documents that so few requests can ask about more than once."""
        return max(self.requests * 2 // 5, 1)

    def check(self) -> None:
        """Raise `UsageProblem` for the first thing that is wrong with the files and directories named."""
        for option, output in (("--json", self.json), ("--snapshot", self.snapshot)):
            if output is not None:
                _check_output(option, output)
        if self.json is not None and self.snapshot is not None and _same(self.json, self.snapshot):
            raise UsageProblem("--json and --snapshot name the same file")
        if self.nvme_dir is not None:
            _check_nvme_dir(self.nvme_dir)


def _check_output(option: str, path: Path) -> None:
    shown = printable(os.fspath(path))
    if path.is_dir():
        raise UsageProblem(f"{option}: {shown} is a directory")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise UsageProblem(f"{option}: {shown} cannot be written")
    elif not path.parent.is_dir():
        raise UsageProblem(f"{option}: {shown} is in a directory that does not exist")
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageProblem(f"{option}: {shown} is in a directory that cannot be written")


def _check_nvme_dir(path: Path) -> None:
    shown = printable(os.fspath(path))
    if path.exists():
        if not path.is_dir():
            raise UsageProblem(f"--nvme-dir: {shown} is not a directory")
        if not os.access(path, os.W_OK | os.X_OK):
            raise UsageProblem(f"--nvme-dir: {shown} cannot be written")
    elif not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageProblem(f"--nvme-dir: {shown} does not exist and cannot be made")


def _same(first: Path, second: Path) -> bool:
    return os.path.abspath(first) == os.path.abspath(second)
