"""The digest of a model's files: a name says nothing, and the same name has carried other weights.

Reading a large model takes a while, so digests are kept beside what the file system says of each file, in a small file
of this user's own. A file that was changed has another time of change (`st_ctime_ns`), which programs cannot set.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from hicache.errors import BadRequest

WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
"""Files that are taken for weights."""
FROM_FILES: Final = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "sharded_state",
    "presharded", "runai_streamer", "runai_streamer_sharded", "gguf", "bitsandbytes", "layered",
})  # fmt: skip
"""What engines call ways of loading that read the weights from the model's own directory."""
_FORMAT: Final = b"hicache-weights\x01"
_log = logging.getLogger(__name__)


def check_load_format(config: Any) -> None:
    """Refuse weights that are not those of the model's files, by an engine's `load_format`. Raises `BadRequest`."""
    name = str(getattr(config, "load_format", "auto"))
    if name not in FROM_FILES:
        what = "are made up" if name == "dummy" else "are not those of the model's files"
        raise BadRequest("weights", f"{what} (load_format={name}); name them with the setting `weights`")


def files_digest(path: str | Path, *, remembered: Path | None = None) -> str:
    """`"sha256:"` and the digest over names and contents of the weight files at `path`, a directory or one file.

    `remembered`: where digests are kept, by default in this user's cache directory. Raises `BadRequest` where there
    are no weights or they cannot be read.
    """
    root = Path(path)
    try:
        files = [root] if root.is_file() else sorted(each for each in root.iterdir() if each.suffix in WEIGHT_SUFFIXES)
    except OSError as error:
        raise BadRequest("weights", f"{root}: {error.strerror}") from error
    if not files:
        raise BadRequest("weights", f"{root} has no weight files ({', '.join(WEIGHT_SUFFIXES)})")
    memory = _Remembered(remembered or default_memory())
    try:
        with ThreadPoolExecutor(min(4, len(files))) as threads:
            digests = list(threads.map(memory.digest, files))
    except OSError as error:
        raise BadRequest("weights", f"{error.filename}: {error.strerror}") from error
    memory.keep()
    whole = hashlib.sha256(_FORMAT)
    for each, digest in zip(files, digests, strict=True):
        name = each.name.encode()
        whole.update(len(name).to_bytes(4, "little") + name + digest)
    return f"sha256:{whole.hexdigest()}"


def model_directory(name: str, revision: str | None, cache_dir: str | None) -> str:
    """Where the files of a model are that its engine has loaded already: a path, or the name of a repository, which is
    looked for in the Hugging Face cache. Asks nobody. Raises `BadRequest`."""
    if os.path.exists(name):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise BadRequest("weights", f"the files of {name} were not found; name them with `weights`") from error


def default_memory() -> Path | None:
    """Where digests are kept: `$XDG_CACHE_HOME/hicache/digests.json`; None for a user without a home, as containers may
    have."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "hicache" / "digests.json"


class _Remembered:
    """Digests of files, by what the file system says of them."""

    def __init__(self, path: Path | None) -> None:
        self._path: Final = path
        self._known: Final = dict(_read(path) if path is not None else ())
        self._new: Final[dict[str, str]] = {}

    def digest(self, file: Path) -> bytes:
        """SHA-256 of a file's contents."""
        with file.open("rb") as opened:
            before = os.fstat(opened.fileno())
            key = f"{before.st_dev}:{before.st_ino}:{before.st_size}:{before.st_mtime_ns}:{before.st_ctime_ns}"
            known = self._known.get(key)
            if known is not None:
                return bytes.fromhex(known)
            digest = hashlib.file_digest(opened, "sha256").digest()
            if os.fstat(opened.fileno()).st_ctime_ns == before.st_ctime_ns:
                self._new[key] = digest.hex()
            return digest

    def keep(self) -> None:
        """Write down what is new. A directory that cannot be written costs the next start the time again."""
        if not self._new or self._path is None:
            return
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_text(json.dumps(dict([*_read(self._path), *self._new.items()])))
            new.replace(self._path)
        except OSError as error:
            _log.info("hicache: %s: %s", self._path, error.strerror)


def _read(path: Path) -> Iterable[tuple[str, str]]:
    """What is written there, as far as it is what we write."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict):
        return []
    return [(key, value) for key, value in found.items() if isinstance(value, str) and _is_digest(value)]


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(each in "0123456789abcdef" for each in text)
