"""Digests of LoRA adapters, from their files, which a thread reads: the scheduler waits for no disk."""

import hashlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache.errors import BadRequest
from hicache.service.engines.weights import WEIGHT_SUFFIXES, files_digest

CONFIG: Final = "adapter_config.json"
"""It scales the weights."""
LOOK_S: Final = 1.0
"""How long it is good for that an adapter's files have not changed."""
PATIENCE_S: Final = 5.0
"""How long requests wait for an adapter's digest. Those that come later, while it is still read, are not cached."""
MAX_KNOWN: Final = 4096
"""Adapters that are remembered: one more, and the one that came first is read again when it is asked for."""

_Mark = tuple[tuple[str | int, ...], ...]
"""What the file system says of an adapter's files."""


@dataclass(slots=True)
class _Adapter:
    """One of them."""

    path: str
    """Where its files are."""
    look: "Future[tuple[_Mark, str]] | None" = None
    """Under way, or not heard yet."""
    looked_at: float = float("-inf")
    """When the last look that was heard began, or the one under way, where there is one."""
    mark: _Mark = ()
    digest: str = ""
    """Empty where it cannot be told."""
    is_known: bool = False
    """Whether a look was heard."""


class Adapters:
    """The adapters of one engine. Belongs to its scheduling thread."""

    def __init__(self, *, look_s: float = LOOK_S, patience_s: float = PATIENCE_S) -> None:
        self._look_s: Final = look_s
        self._patience_s: Final = patience_s
        self._known: Final[dict[int, _Adapter]] = {}
        self._thread: Final = ThreadPoolExecutor(1, "hicache-adapter")

    def is_settled(self, lora: Any) -> bool:
        """Whether `digest` has its last word on an adapter, vLLM's `LoRARequest`. Otherwise ask again later: it is
        being read, for which requests wait `PATIENCE_S` at most."""
        adapter = self._of(lora)
        now = time.monotonic()
        if adapter.look is None:
            if now - adapter.looked_at < self._look_s or (adapter.is_known and not adapter.digest):
                return True
            adapter.looked_at = now
            adapter.look = self._thread.submit(_look, str(lora.lora_path), adapter.mark, adapter.digest)
        if adapter.look.done():
            self._hear(adapter, *adapter.look.result())
            return True
        return now - adapter.looked_at >= self._patience_s

    def digest(self, lora: Any) -> str:
        """`"sha256:"` and the digest of an adapter's weights and configuration. Empty where it cannot be told: its
        files cannot be read, or not in time, or they have changed since the engine first asked, or its number was
        another's. vLLM may have those of before, or have read them again, and does not say which."""
        adapter = self._of(lora)
        return "" if adapter.look is not None else adapter.digest

    def close(self) -> None:
        """Read nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _of(self, lora: Any) -> _Adapter:
        number, path = int(lora.lora_int_id), str(lora.lora_path)
        adapter = self._known.get(number)
        if adapter is None:
            if len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            adapter = self._known[number] = _Adapter(path)
        elif adapter.path != path:
            # vLLM goes by the number alone.
            adapter.look, adapter.digest, adapter.is_known = None, "", True
        return adapter

    @staticmethod
    def _hear(adapter: _Adapter, mark: _Mark, digest: str) -> None:
        adapter.look = None
        if not adapter.is_known:
            adapter.mark, adapter.digest, adapter.is_known = mark, digest, True
        elif digest == adapter.digest:
            adapter.mark = mark
        else:
            adapter.digest = ""


def _look(path: str, mark: _Mark, digest: str) -> tuple[_Mark, str]:
    """What an adapter's files are now: how the file system calls them, and their digest, which is `digest` where that
    is `mark`. Called by the thread."""
    try:
        now = _mark_of(path)
        if now != mark:
            whole = hashlib.sha256(files_digest(path).encode() + (Path(path) / CONFIG).read_bytes())
            digest = f"sha256:{whole.hexdigest()}"
    except (BadRequest, OSError, ValueError):  # the last for names that are no text
        return (), ""
    return now, digest


def _mark_of(path: str) -> _Mark:
    with os.scandir(path) as entries:
        files = [each for each in entries if each.name == CONFIG or Path(each.name).suffix in WEIGHT_SUFFIXES]
    found = sorted((each.name, each.stat()) for each in files)
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
