"""KV events in the form that vLLM publishes, so that routers which know that form know where our pages are.

A message has three frames: the topic, which is empty, the sequence as 8 bytes (big-endian, from 0, without gaps), and a
msgpack array

    [time (seconds since 1970), [event, ...], rank (0)]

in which each event is a map:

    {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": hash or nil, "token_ids": [...],
     "block_size": tokens of a block, "lora_id": nil, "medium": "CPU" or "DISK", "lora_name": nil, "extra_keys": nil}
    {"type": "BlockRemoved", "block_hashes": [...], "medium": "CPU" or "DISK"}
    {"type": "AllBlocksCleared"}

A block is a page. Its hash is an unsigned integer of 64 bits, as vLLM's are: the first 8 bytes, big-endian, of the
SHA-256 that names the page's content together with all before it and its namespace (`hicache.tier.chain_digest`). Who
receives it need not be able to compute it: `token_ids` and `parent_block_hash` say what it stands for. A page that is
in two tiers is told of for each, and removed from each.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack

from hicache.tier import HOST, NVME, PageIdentity, TierId

MEDIUMS: Final[Mapping[TierId, str]] = {HOST: "CPU", NVME: "DISK"}
"""What vLLM calls the tiers."""
END: Final = (-1).to_bytes(8, "big", signed=True)
"""In place of a sequence, after the last message of a replay."""

Event = dict[str, Any]


def stored(pages: Sequence[PageIdentity], tier: TierId, page_size: int) -> Event:
    """Consecutive pages can be served from a tier."""
    parent = pages[0].prefix
    return {
        "type": "BlockStored",
        "block_hashes": hashes(pages),
        "parent_block_hash": None if parent == pages[0].namespace else _short(parent),
        "token_ids": list(memoryview(b"".join([page.tokens for page in pages])).cast("i")),
        "block_size": page_size,
        "lora_id": None,
        "medium": MEDIUMS[tier],
        "lora_name": None,
        "extra_keys": None,
    }


def removed(pages: Sequence[PageIdentity], tier: TierId) -> Event:
    """Pages cannot be served from a tier any longer."""
    return {"type": "BlockRemoved", "block_hashes": hashes(pages), "medium": MEDIUMS[tier]}


def cleared() -> Event:
    """Nothing that was told before holds."""
    return {"type": "AllBlocksCleared"}


def hashes(pages: Sequence[PageIdentity]) -> list[int]:
    """The hash of each of consecutive pages."""
    return [*[_short(page.prefix) for page in pages[1:]], _short(pages[-1].chain)]


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def batch(wall: float, events: Sequence[Event]) -> bytes:
    """The last frame of a message."""
    return bytes(msgpack.packb([wall, list(events), 0]))


def sequence_bytes(sequence: int) -> bytes:
    """A sequence as it travels."""
    return sequence.to_bytes(8, "big")
