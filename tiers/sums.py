"""Checksums of a page's bytes, which travel with it (`PageSums`).

They are taken once, where a page enters host memory: from there on a byte that changes is found when the page is read
back from a disk, wherever it changed. Each is the lower 32 bits of XXH3-64 without a seed. Packed little-endian uint32:
one for each layer, in order, then one for all bytes together. Every function here may be called from any thread.
"""

import struct
from collections.abc import Iterable
from functools import cache
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from hicache.tier import SUM_BYTES, PageSums

_LOW_32: Final = 0xFFFFFFFF


def payload_checksum(data: bytes | memoryview) -> int:
    """Checksum of bytes of a page. Of more than 100 KiB without the interpreter lock."""
    return xxh3_64_intdigest(data) & _LOW_32


def pieces_checksum(pieces: Iterable[memoryview]) -> int:
    """`payload_checksum` of all pieces one behind the other, each taken when it comes."""
    whole = xxh3_64()
    for piece in pieces:
        whole.update(piece)
    return whole.intdigest() & _LOW_32


def payload_checksums(payload: memoryview, ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], int]:
    """The checksums of layers, which lie at these half-open ranges one behind the other, and that of all together."""
    whole, sums = xxh3_64(), []
    for start, stop in ranges:
        layer = payload[start:stop]
        sums.append(xxh3_64_intdigest(layer) & _LOW_32)
        whole.update(layer)  # it is in the cache now: a small part of the time
    return tuple(sums), whole.intdigest() & _LOW_32


def page_sums(page: memoryview, layer_ranges: Iterable[tuple[int, int]]) -> PageSums:
    """The checksums of a page, flat, whose layers lie at these half-open ranges one behind the other."""
    sums, whole = payload_checksums(page, layer_ranges)
    return _words(len(sums) + 1).pack(*sums, whole)


def unpacked(sums: PageSums) -> tuple[int, ...]:
    """The checksums as numbers: each layer's, then the whole page's."""
    return _words(len(sums) // SUM_BYTES).unpack(sums)


def whole_sum(sums: PageSums) -> int:
    """That of all bytes together: what `payload_checksum` gives of the page."""
    return int.from_bytes(sums[-SUM_BYTES:], "little")


@cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")
