"""Ways to damage a directory between two runs of the NVMe tier, drawn from a seed."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

FOREIGN: Final = {
    "notes.txt": b"not the store's",
    "hicache-999999.bak": b"\0" * 5000,
    "lost+found/old.seg": b"somebody put this here",
}
"""Files that are not the store's: they stay as they are, whatever else happens."""


def add_foreign(directory: Path) -> None:
    for name, data in FOREIGN.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def foreign_is_untouched(directory: Path) -> bool:
    return all((directory / name).read_bytes() == data for name, data in FOREIGN.items())


def damage(directory: Path, rng: random.Random) -> str:
    """Damage one or two files of the store; in words, what was done."""
    done = [_one(directory, rng) for _ in range(rng.choice((1, 1, 2)))]
    return "; ".join(done)


def _one(directory: Path, rng: random.Random) -> str:
    files = sorted(path for path in directory.iterdir() if path.name not in FOREIGN and path.is_file())
    # Every kind of file as often as another, however many of it there are.
    kinds = sorted({path.suffix for path in files})
    kind = rng.choice(kinds)
    path = rng.choice([path for path in files if path.suffix == kind])
    way = rng.choice(WAYS)
    return f"{way.__name__.strip('_')} {path.name}: {way(path, rng)}"


def _flip(path: Path, rng: random.Random) -> str:
    """One to eight bits, often in the first blocks, where something is."""
    data = bytearray(path.read_bytes())
    places = [rng.randrange(8 * _where(len(data), rng)) for _ in range(rng.randint(1, 8))] if data else []
    for place in places:
        data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    return f"bits {places}"


def _where(num_bytes: int, rng: random.Random) -> int:
    """Bytes from the beginning among which a place is drawn."""
    return min(num_bytes, rng.choice((512, 8192, 65_536, num_bytes)))


def _truncate(path: Path, rng: random.Random) -> str:
    size = path.stat().st_size
    cut = rng.choice((0, 1, rng.randrange(_where(size, rng) + 1) if size else 0))
    os.truncate(path, cut)
    return f"at {cut}"


def _zero(path: Path, rng: random.Random) -> str:
    return _overwrite(path, rng, bytes)


def _randomise(path: Path, rng: random.Random) -> str:
    return _overwrite(path, rng, rng.randbytes)


def _overwrite(path: Path, rng: random.Random, what: Callable[[int], bytes]) -> str:
    """A range of the file, or all of it."""
    size = path.stat().st_size
    start = rng.choice((0, rng.randrange(_where(size, rng))) if size else (0,))
    length = min(size - start, rng.choice((16, 512, 4096, 100_000, size)))
    with path.open("r+b") as file:
        file.seek(start)
        file.write(what(length))
    return f"{length} bytes from {start}"


def _duplicate(path: Path, rng: random.Random) -> str:
    """A range of the file is also in another place of it, as a misdirected write leaves it."""
    data = path.read_bytes()
    if len(data) < 8192:
        return _flip(path, rng)
    length = rng.choice((512, 4096, 8192))
    source, target = (rng.randrange((len(data) - length) // 512 + 1) * 512 for _ in range(2))
    with path.open("r+b") as file:
        file.seek(target)
        file.write(data[source : source + length])
    return f"{length} bytes from {source} to {target}"


def _append(path: Path, rng: random.Random) -> str:
    data = rng.choice((bytes, rng.randbytes))(rng.choice((100, 4096)))
    with path.open("ab") as file:
        file.write(data)
    return f"{len(data)} bytes"


def _delete(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "gone"


def _swap(path: Path, rng: random.Random) -> str:
    """Two files of the directory take each other's names."""
    other = rng.choice(sorted(each for each in path.parent.iterdir() if each.is_file() and each.name not in FOREIGN))
    aside = path.with_suffix(".aside")
    path.rename(aside)
    if other != path:
        other.rename(path)
    aside.rename(other if other != path else path)
    return f"with {other.name}"


def _replace_by_garbage(path: Path, rng: random.Random) -> str:
    size = rng.choice((0, 1, 100, path.stat().st_size))
    path.write_bytes(rng.randbytes(size))
    return f"{size} bytes"


def _replace_by_older(path: Path, rng: random.Random) -> str:
    """The file as it was at an earlier time, where a copy lies beside the directory."""
    older = path.parent.with_suffix(".older") / path.name
    if not older.exists():
        return _flip(path, rng)
    shutil.copyfile(older, path)
    return "as it was before"


def _replace_by_link(path: Path, rng: random.Random) -> str:
    """A symbolic link to a file outside, of which nothing may be read or written."""
    outside = path.parent.with_suffix(".outside")
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    return "a symbolic link"


def _replace_by_directory(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a directory"


def _replace_by_hard_link(path: Path, rng: random.Random) -> str:
    outside = path.parent.with_suffix(".outside")
    outside.unlink(missing_ok=True)
    os.link(path, outside)
    return "another name outside"


WAYS: Final[tuple[Callable[[Path, random.Random], str], ...]] = (
    _flip, _flip, _flip, _truncate, _truncate, _zero, _randomise, _duplicate, _append, _delete, _swap,
    _replace_by_garbage, _replace_by_older, _replace_by_link, _replace_by_directory, _replace_by_hard_link,
)  # fmt: skip
