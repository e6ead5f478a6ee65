"""The files of this repository, for tests that look at all of them."""

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PARTS: Final = ("hicache", "tiers", "kernels", "service", "tools")
"""The folders that are installed, all as parts of the one package `hicache`."""
LINKED: Final = PARTS[1:]
"""Those that hicache/ shows by a link."""


def repository_files() -> list[PurePosixPath]:
    """Files that belong to the repository: all that .gitignore does not name. Links are listed, not followed. Sorted.

    Read from the disk, so that it works on an archive without git too.
    """
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()] + [".git"]
    found = []
    for folder, subfolders, files in os.walk(ROOT):
        inside = PurePosixPath(Path(folder).relative_to(ROOT).as_posix())
        subfolders[:] = [name for name in subfolders if not any(fnmatch(name, pattern) for pattern in ignored)]
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        found += [inside / name for name in (*files, *links) if not any(fnmatch(name, pattern) for pattern in ignored)]
    return sorted(found)


def copy_of_repository(target: Path) -> Path:
    """Copy the repository's files into `target`, links as links; returns `target`."""
    for path in repository_files():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target / path, follow_symlinks=False)
    return target
