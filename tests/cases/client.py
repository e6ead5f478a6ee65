"""What the cases share: an embedded cache with its real tiers, and a client that stamps what it inserts and checks
every byte of what it reads.

P is 16 tokens, D, H and S are the device, host and NVMe tiers, as in the log of cases.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from hicache.errors import CorruptPage, TierUnavailable
from hicache.kernels.attend import PagedPart
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.compose import HiCache
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import BLOCK, PageShape
from hicache.tiers.nvme.io import FileIO

P: Final = 16
LAYERS, HEADS, DIM = 2, 2, 16
LAYOUT: Final = KVLayout.uniform(
    num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=KVDtype.FLOAT32, page_size=P
)
MODEL: Final = Namespace(model="a model", layout=LAYOUT)
SLOT_BYTES: Final = PageShape.of(LAYOUT).slot_bytes


class WrongBytes(AssertionError):
    """The failure that must never be."""


class _Abandoned(Exception):
    """Ends a step that was only begun to look at what is before it."""


def opened(directory: Path | None, *, device: int = 64, host: int = 64, nvme: int = 256, **options: Any) -> HiCache:
    """A cache with so many pages in each tier, out of which leaves what was used longest ago; without a directory there
    is no S."""
    if directory is not None:
        options |= {"nvme_dir": directory, "nvme_bytes": BLOCK + nvme * SLOT_BYTES}
    page_bytes = LAYOUT.page_bytes
    options = {"policy": "lru", **options}
    return HiCache.open(LAYOUT, device_bytes=device * page_bytes, host_bytes=host * page_bytes, **options)


@contextmanager
def seam(files: FileIO, **options: Any) -> Iterator[None]:
    """Within the block NVMe tiers open with these files, and with options that a cache does not give."""
    original: Callable[..., NvmeTier] = NvmeTier.open

    def with_files(directory: Path, **given: Any) -> NvmeTier:
        return original(directory, **{**given, **options, "files": files})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvmeTier, "open", with_files)
        yield


def sequence(letter: int, num_tokens: int) -> list[int]:
    """Tokens of one letter: two letters share none."""
    return [100_000 * (letter + 1) + place for place in range(num_tokens)]


def stamps(namespace: Namespace, tokens: Sequence[int]) -> torch.Tensor:
    """Keys and values that follow from the namespace and all tokens up to each one: float32
    `[num_tokens, num_layers, 2, num_heads, head_dim]`, of whole numbers, so that equal means equal in every byte."""
    state = hashlib.sha256(namespace.digest)
    rows = []
    for token in tokens:
        state.update(int(token).to_bytes(4, "little"))
        seed = np.frombuffer(state.digest()[:16], np.uint64)
        rows.append(np.random.Philox(key=seed).random_raw(LAYERS * 2 * HEADS * DIM) >> np.uint64(44))
    shape = len(rows), LAYERS, 2, HEADS, DIM
    return torch.from_numpy(np.array(rows, np.uint64).astype(np.float32).reshape(shape))


class Client:
    """Uses a cache as an engine would. One thread at a time."""

    def __init__(self, cache: HiCache, namespace: Namespace = MODEL) -> None:
        self.cache = cache
        self.namespace = namespace

    def insert(self, tokens: Sequence[int], *, timeout_s: float = 60.0) -> int:
        """Have everything of `tokens` cached; how many were found."""
        right = stamps(self.namespace, tokens)
        with self.cache.sequence(self.namespace, tokens, timeout_s=timeout_s) as running:
            found = running.num_cached
            while running.length < len(tokens):
                start = running.length
                new = tokens[start : start + 2 * P]
                with running.step(new, timeout_s=timeout_s) as step:
                    for layer in range(LAYERS):
                        keys, values = right[start : start + len(new), layer].unbind(1)
                        step.write(layer, keys.contiguous(), values.contiguous())
        return found

    def read(self, tokens: Sequence[int], *, timeout_s: float = 60.0) -> int:
        """Read everything that is offered of `tokens`; how many tokens that was. Raises `WrongBytes`.

        A page that turns out not to be readable ends the try, as it would end an engine's step; the next one finds it
        no longer.
        """
        for _ in range(len(tokens) // P + 1):
            try:
                return self._read(tokens, timeout_s)
            except CorruptPage:
                continue
        raise AssertionError("a page that cannot be read is offered again and again")

    def read_there(self, tokens: Sequence[int]) -> int:
        """`read`, and again while fewer come than are there, as of a disk that the machine has kept from answering for
        longer than a step waits. For disks that nothing befalls."""
        until = time.monotonic() + 60.0
        while (found := self.read(tokens)) < self.match(tokens) and time.monotonic() < until:
            pass
        return found

    def _read(self, tokens: Sequence[int], timeout_s: float) -> int:
        asked = [*tokens, 1]
        with self.cache.sequence(self.namespace, asked, timeout_s=timeout_s) as running:
            found = running.num_cached
            right = stamps(self.namespace, asked[:found])
            try:
                with running.step(asked[found : found + 1], timeout_s=timeout_s) as step:
                    for layer in range(LAYERS):
                        seen = [self._tokens_of(part) for part in step.parts(layer)]
                        context = torch.cat(seen) if seen else right[:0, layer]
                        if not torch.equal(context, right[:, layer]):
                            raise WrongBytes(f"layer {layer} of {asked[:3]}...")
                    raise _Abandoned
            except _Abandoned:
                return found

    @staticmethod
    def _tokens_of(part: PagedPart) -> torch.Tensor:
        """`[num_tokens, 2, num_heads, head_dim]`."""
        pages: torch.Tensor = part.pages[part.block_table.long()]
        return pages.transpose(1, 2).flatten(0, 1)[: part.num_tokens]

    def match(self, tokens: Sequence[int]) -> int:
        """Tokens of whole pages that are cached."""
        return self.cache.match(self.namespace, tokens).num_tokens

    def persist(self, tokens: Sequence[int]) -> int:
        """Have what is cached of `tokens` made durable; how many tokens are."""
        return self.cache.persist(self.namespace, tokens, timeout_s=60.0).num_tokens

    def persist_if_up(self, tokens: Sequence[int]) -> int:
        """As `persist`; 0 while the disk is down."""
        try:
            return self.persist(tokens)
        except TierUnavailable:
            return 0


def check_at_rest(cache: HiCache) -> None:
    """What holds at the end of every case: no lease, nothing under way, and every used page is one of the tree."""
    until = time.monotonic() + 10
    while (problem := _unrest(cache)) is not None:
        assert time.monotonic() < until, problem


def _unrest(cache: HiCache) -> str | None:
    snapshot = cache.snapshot()
    if snapshot["num_leases"]:
        return f"{snapshot['num_leases']} leases"
    for tier, figures in snapshot["tiers"].items():
        in_tree = sum(
            node["num_tokens"] // P for node in snapshot["nodes"] if node["residency"].get(tier) == "resident"
        )
        if in_tree != figures["used_pages"]:
            return f"{tier}: {figures['used_pages']} pages are used and {in_tree} are in the tree"
    return None


class SegmentFiles(FileIO):
    """Real files; a test may come before each write or read of pages, or take its place."""

    def __init__(self) -> None:
        self.before_write: Callable[[int], None] = lambda _number: None
        """Called with the number of the write, from 1, on the thread that makes it."""
        self.before_read: Callable[[int], None] = lambda _number: None
        self.num_writes = 0
        self.num_reads = 0
        self._lock = threading.Lock()

    def count_from_here(self) -> None:
        self.num_writes = self.num_reads = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._is_page(fd, offset):
            with self._lock:
                self.num_writes += 1
                number = self.num_writes
            self.before_write(number)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._is_page(fd, offset):
            with self._lock:
                self.num_reads += 1
                number = self.num_reads
            self.before_read(number)
        return super().preadv(fd, buffers, offset)

    @staticmethod
    def _is_page(fd: int, offset: int) -> bool:
        return offset >= BLOCK and os.readlink(f"/proc/self/fd/{fd}").endswith(".seg")
