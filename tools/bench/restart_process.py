"""What `hicache bench restart` runs in processes of their own, so that they can be killed: filling a store, and opening
one.

    python -m hicache.tools.bench.restart_process fill|open|close PROMPTS NUM_PAGES DIRECTORY

Each prints lines of JSON. `fill` says how many pages are written, `{"durable": true}` once all of them are, and then
waits to be killed. `open` prints an `Opened` and kills itself, so that the store is left as it was found. `close` opens
it, writes a page, and closes it.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.cache import Cache
from hicache.clock import SystemClock
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.tier import HOST, NVME, Outcome, PageIdentity, PageRead, PageWrite, chain_digest
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.store import RESERVE_SHARE
from hicache.tree import HiRadixTree

PAGE_SIZE: Final = 16
LAYOUT: Final = KVLayout.uniform(
    num_layers=1, num_kv_heads=1, head_dim=32, dtype=KVDtype.BFLOAT16, page_size=PAGE_SIZE
)
"""Small pages, of 2,048 bytes: what counts is how many there are."""
NAMESPACE: Final = Namespace(model="bench", layout=LAYOUT)
LONG_PAGES: Final = 64
GROUP_PAGES: Final = 100
WRITE_PAGES: Final = 1024
"""Pages handed to the tier at once."""
DEADLINE_S: Final = 60.0

Tokens = npt.NDArray[np.int32]


def prompts(kind: str, num_pages: int) -> Iterator[Tokens]:
    """Prompts of as many pages in all, rounded down to whole groups.

    `pages`: prompts of 64 pages that share nothing, each one node of the tree. `single`: prompts of two pages, of which
    99 share each first one, so that every page is a node of its own.
    """
    if kind == "pages":
        for number in range(num_pages // LONG_PAGES):
            yield np.arange(LONG_PAGES * PAGE_SIZE, dtype=np.int32) + np.int32(number * LONG_PAGES * PAGE_SIZE)
        return
    for group in range(num_pages // GROUP_PAGES):
        first = np.arange(PAGE_SIZE, dtype=np.int32) + np.int32(group * GROUP_PAGES * PAGE_SIZE)
        for number in range(1, GROUP_PAGES):
            yield np.concatenate([first, first + np.int32(number * PAGE_SIZE)])


def identities(tokens: Tokens) -> list[PageIdentity]:
    """The pages of a prompt."""
    packed, found, prefix = tokens.tobytes(), [], NAMESPACE.digest
    for start in range(0, len(packed), 4 * PAGE_SIZE):
        own = packed[start : start + 4 * PAGE_SIZE]
        found.append(PageIdentity(NAMESPACE.digest, prefix, own))
        prefix = chain_digest(prefix, own)
    return found


def content(identity: PageIdentity) -> bytes:
    """The bytes of a page: its identity, over and over."""
    own = identity.prefix + identity.tokens
    return (own * (LAYOUT.page_bytes // len(own) + 1))[: LAYOUT.page_bytes]


def capacity_bytes(num_pages: int) -> int:
    """Bytes of a store with room for so many pages and some more, and the reserve that a store keeps."""
    return int((num_pages + WRITE_PAGES) * PageShape.of(LAYOUT).slot_bytes / (1 - RESERVE_SHARE)) + (1 << 20)


@dataclass(frozen=True, slots=True)
class Opened:
    """How long it took until the first lookup was right, and what was there. Times in seconds."""

    tier_s: float
    """The tier: the log is read and checked."""
    tree_s: float
    """The tree is put together."""
    lookup_s: float
    """A prompt is found, and one of its pages read and compared."""
    insert_s: float
    """For comparison: all prompts inserted into a tree, without any store."""
    num_pages: int
    num_nodes: int
    clean_stop: bool


def say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


async def fill(kind: str, num_pages: int, directory: Path) -> None:
    """Write a store until all of it is durable, then wait for the end."""
    tier = NvmeTier.open(directory, layout=LAYOUT, capacity_bytes=capacity_bytes(num_pages))
    tier.remember(NAMESPACE.digest, NAMESPACE.encode())
    known: set[bytes] = set()
    waiting: list[PageIdentity] = []
    num_written = 0
    for tokens in prompts(kind, num_pages):
        for identity in identities(tokens):
            if identity.chain not in known:
                known.add(identity.chain)
                waiting.append(identity)
        if len(waiting) >= WRITE_PAGES:
            await write(tier, waiting)
            num_written += len(waiting)
            waiting.clear()
            say({"written": num_written})
    if waiting:
        await write(tier, waiting)
    await tier.sync(tier.accepted, deadline=monotonic() + DEADLINE_S)
    say({"durable": True})
    sys.stdin.read()


async def write(tier: NvmeTier, pages: Sequence[PageIdentity]) -> None:
    """Write pages into slots of their own."""
    slots = tier.allocate(len(pages)).tolist()
    writes = [
        PageWrite(slot, tier.generation(slot), identity, memoryview(content(identity)))
        for slot, identity in zip(slots, pages, strict=True)
    ]
    assert set(await tier.write(writes)) == {Outcome.OK}, "a page could not be written"


async def open_store(kind: str, num_pages: int, directory: Path, *, close: bool) -> None:
    """Open a store, look something up, and say how long that took."""
    from hicache.tiers.host import HostTier  # brings torch, which filling does without

    asked = random.Random(num_pages).choice(list(prompts(kind, num_pages)))
    page = identities(asked)[-1]
    into = bytearray(LAYOUT.page_bytes)
    host = HostTier(page_bytes=LAYOUT.page_bytes, capacity_pages=1, huge_pages=False)
    began = perf_counter()
    tier = NvmeTier.open(directory, layout=LAYOUT, capacity_bytes=capacity_bytes(num_pages))
    tier_s = perf_counter() - began
    async with Cache(LAYOUT, {HOST: host, NVME: tier}, clock=SystemClock()) as cache:
        tree_s = perf_counter() - began - tier_s
        match = cache.tree.match(NAMESPACE, asked)
        assert match.num_tokens == asked.size, f"{match.num_tokens} of {asked.size} tokens were found"
        slot = int(match.nodes[-1].slots(NVME)[match.pages_in_last - 1])
        (outcome,) = await tier.read([PageRead(slot, tier.generation(slot), page, memoryview(into))])
        assert outcome is Outcome.OK, outcome
        assert into == content(page), "the page holds something else"
        lookup_s = perf_counter() - began - tier_s - tree_s
        if close:
            await write(tier, identities(np.full(PAGE_SIZE, num_pages * PAGE_SIZE, np.int32)))
            return
        opened = Opened(
            tier_s=tier_s, tree_s=tree_s, lookup_s=lookup_s, insert_s=insert_all(kind, num_pages),
            num_pages=cache.recovered.pages, num_nodes=cache.recovered.nodes, clean_stop=tier.recovery.clean_stop,
        )  # fmt: skip
        say(asdict(opened))
        os.kill(os.getpid(), signal.SIGKILL)


def insert_all(kind: str, num_pages: int) -> float:
    """Seconds to insert the prompts into a tree."""
    tree = HiRadixTree(page_size=PAGE_SIZE, tiers=(NVME,))
    asked, known = list(prompts(kind, num_pages)), set[int]()
    began, next_slot = perf_counter(), 0
    for tokens in asked:
        first = int(tokens[0])
        first_page = 1 if first in known else 0
        known.add(first)
        count = tokens.size // PAGE_SIZE - first_page
        slots = np.arange(next_slot, next_slot + count, dtype=np.int32)
        tree.insert(NAMESPACE, tokens, tier=NVME, slots=slots, first_page=first_page, now=began)
        next_slot += count
    return perf_counter() - began


def main() -> None:
    action, kind, num_pages, directory = sys.argv[1:]
    if action == "fill":
        asyncio.run(fill(kind, int(num_pages), Path(directory)))
    else:
        asyncio.run(open_store(kind, int(num_pages), Path(directory), close=action == "close"))


if __name__ == "__main__":
    main()
