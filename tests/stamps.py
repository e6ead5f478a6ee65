"""Stamped pages: every byte of a page follows from what the page is, so that any reader can verify any byte.

The code under test never imports this; a page whose bytes came from elsewhere, from another identity, part or position
cannot pass for the one asked.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache.tier import PageIdentity

_WORDS = 4
"""Philox gives four 64-bit words a step of its counter: 32 bytes, addressable by position."""


def stamp(identity: PageIdentity, num_bytes: int, *, part: int = 0, start: int = 0) -> npt.NDArray[np.uint8]:
    """Bytes `start .. start + num_bytes - 1` of `part` of the page `identity`: uint8 `[num_bytes]`, writable."""
    key = hashlib.blake2b(digest_size=16)
    for field in (identity.namespace, identity.prefix, identity.tokens, struct.pack("<I", part)):
        key.update(struct.pack("<Q", len(field)) + field)
    first, skip = divmod(start, 8 * _WORDS)
    generator = np.random.Philox(key=np.frombuffer(key.digest(), np.uint64), counter=first)
    words = generator.random_raw(-(-(skip + num_bytes) // 8) if num_bytes else 0)
    return words.astype("<u8").view(np.uint8)[skip : skip + num_bytes]


def identity_chain(num_pages: int, *, namespace: int = 0, page_size: int = 4, seed: int = 0) -> list[PageIdentity]:
    """Identities of `num_pages` consecutive pages of one sequence of random tokens, each chained to the one before."""
    digest = hashlib.sha256(b"namespace" + struct.pack("<Q", namespace)).digest()
    tokens = np.random.default_rng((seed, namespace)).integers(0, 50_000, (num_pages, page_size)).astype("<i4")
    chain: list[PageIdentity] = []
    prefix = digest
    for row in tokens:
        chain.append(PageIdentity(digest, prefix, row.tobytes()))
        prefix = chain[-1].chain
    return chain


def other_identities(identity: PageIdentity) -> Sequence[PageIdentity]:
    """Identities that differ from `identity` in one field each, by one bit."""

    def flipped(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    return (
        PageIdentity(flipped(identity.namespace), identity.prefix, identity.tokens),
        PageIdentity(identity.namespace, flipped(identity.prefix), identity.tokens),
        PageIdentity(identity.namespace, identity.prefix, flipped(identity.tokens)),
    )
