"""Page headers and segment headers, as bytes. `tiers/FORMAT.md` is the description, with an example.

Integers are little-endian. Each header fills whole blocks of 4,096 bytes, and its last four bytes are the CRC32C of all
bytes before them, so that a flip anywhere in it is seen. Payloads have checksums of another kind, which of many small
layers that are not in a core's cache take half the time (`hicache.tiers.sums`).
"""

import struct
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from hicache.tier import PageIdentity
from hicache.tiers.codecs.registry import CODEC_IDS, NONE_ID
from hicache.tiers.nvme.geometry import (
    BLOCK,
    CRC_BYTES,
    PAGE_HEADER_FIXED_BYTES,
    SEGMENT_HEADER_BYTES,
    WORD_BYTES,
    PageShape,
)

FORMAT_VERSION: Final = 3
"""Counts changes of anything in `tiers/FORMAT.md`. A directory of an unknown version is refused and left as it is."""
FORGETFUL_VERSION: Final = 1
"""The version without a journal: it promised nothing after a restart, so its directories are taken over."""
PAGE_MAGIC: Final = b"HICPAGE\0"
SEGMENT_MAGIC: Final = b"HICSEGM\0"
DIGEST_BYTES: Final = 32
STORE_ID_BYTES: Final = 16

_PAGE: Final = struct.Struct("<8s4H16s2I4Q2I32s32s112s")
_SEGMENT: Final = struct.Struct("<8s4H16s2I2Q2I")
_CRC: Final = struct.Struct("<I")
_RESERVED: Final = bytes(112)
_GIL_KEPT_BELOW: Final = 128 << 10
"""Shorter checksums take some ten microseconds at most: getting the interpreter lock back costs more."""

assert _PAGE.size == PAGE_HEADER_FIXED_BYTES


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    """CRC32C of `data`, continued from the checksum of what comes before it. Releases the interpreter lock."""
    return crc32c(data, before, len(data) >= _GIL_KEPT_BELOW)


@dataclass(frozen=True, slots=True)
class PageHeader:
    """What stands before a page's bytes."""

    store: bytes
    """Random id of this life of the directory, 16 bytes: bytes that an earlier life left behind are recognised."""
    segment: int
    slot: int
    """Slot in the segment, from 0."""
    generation: int
    """Generation of the slot when the page was written."""
    identity: PageIdentity
    payload_bytes: int
    layer_sums: tuple[int, ...]
    """Checksum of each layer (`hicache.tiers.sums`), of the bytes as they are stored."""
    payload_sum: int
    """Checksum of the whole payload as it is stored."""
    sequence: int = 0
    """The last change of the store that was accepted before this page was written; its own record has a higher
    number."""

    codec: int = NONE_ID
    """Number of the codec of the payload."""
    layer_ends: tuple[int, ...] = ()
    """Where each layer ends in the payload; empty without a codec: as the layers of the page do."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payload as it is stored."""
        return self.layer_ends[-1] if self.layer_ends else self.payload_bytes


def encode_page_header(header: PageHeader, into: memoryview) -> None:
    """Write the header over `into`, whose length, whole blocks, is the header's."""
    num_tokens, num_layers = len(header.identity.tokens) // 4, len(header.layer_sums)
    _PAGE.pack_into(
        into, 0, PAGE_MAGIC, FORMAT_VERSION, len(into) // BLOCK, header.codec, 0,
        header.store, header.segment, header.slot, header.generation, header.sequence,
        header.payload_bytes, header.stored_bytes, num_tokens, num_layers,
        header.identity.namespace, header.identity.prefix, _RESERVED,
    )  # fmt: skip
    sums_at = _PAGE.size + 4 * num_tokens
    words = (*header.layer_sums, header.payload_sum, *header.layer_ends)
    rest_at, crc_at = sums_at + WORD_BYTES * len(words), len(into) - CRC_BYTES
    into[_PAGE.size : sums_at] = header.identity.tokens
    struct.pack_into(f"<{len(words)}I", into, sums_at, *words)
    into[rest_at:crc_at] = bytes(crc_at - rest_at)
    _CRC.pack_into(into, crc_at, checksum(into[:crc_at]))


def decode_page_header(block: memoryview) -> PageHeader | None:
    """The header in `block`, or None if these bytes are not a whole header of this version.

    None for a wrong checksum, magic, version, length or codec, and for counts that do not fit.
    """
    crc_at = len(block) - CRC_BYTES
    if _CRC.unpack_from(block, crc_at)[0] != checksum(block[:crc_at]):
        return None
    (
        magic, version, blocks, codec, part, store, segment, slot, generation, sequence, payload_bytes, stored_bytes,
        num_tokens, num_layers, namespace, prefix, reserved,
    ) = _PAGE.unpack_from(block)  # fmt: skip
    sums_at = _PAGE.size + 4 * num_tokens
    num_words = num_layers + 1 if codec == NONE_ID else 2 * num_layers + 1
    if (
        (magic, version, blocks * BLOCK) != (PAGE_MAGIC, FORMAT_VERSION, len(block))
        or (part, reserved) != (0, _RESERVED)
        or codec not in CODEC_IDS.values()
        or num_layers < 1
        or sums_at + WORD_BYTES * num_words > crc_at
    ):
        return None
    identity = PageIdentity(namespace, prefix, bytes(block[_PAGE.size : sums_at]))
    words = struct.unpack_from(f"<{num_words}I", block, sums_at)
    sums, payload_sum, ends = words[:num_layers], words[num_layers], words[num_layers + 1 :]
    header = PageHeader(
        store, segment, slot, generation, identity, payload_bytes, sums, payload_sum, sequence, codec, ends
    )
    return header if header.stored_bytes == stored_bytes else None


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First block of a segment file."""

    store: bytes
    """Random id of this life of the directory, 16 bytes."""
    segment: int
    """Number of the segment, as in its file name."""
    num_slots: int
    shape: PageShape
    """Its sizes are written down here; the table of its layers stands in the manifest."""


def encode_segment_header(header: SegmentHeader, into: memoryview) -> None:
    """Write the header over `into`, `SEGMENT_HEADER_BYTES` long."""
    shape, crc_at = header.shape, len(into) - CRC_BYTES
    into[_SEGMENT.size : crc_at] = bytes(crc_at - _SEGMENT.size)
    _SEGMENT.pack_into(
        into, 0, SEGMENT_MAGIC, FORMAT_VERSION, shape.header_bytes // BLOCK, 0, 0, header.store, header.segment,
        header.num_slots, shape.slot_bytes, shape.page_bytes, shape.page_size, shape.num_layers,
    )  # fmt: skip
    _CRC.pack_into(into, crc_at, checksum(into[:crc_at]))


def decode_segment_place(block: memoryview) -> tuple[bytes, int, int] | None:
    """Store id, number and slots that a segment header of this version names; None if it is none or damaged."""
    if segment_version(block) != FORMAT_VERSION:
        return None
    _, _, _, _, _, store, segment, num_slots, *_ = _SEGMENT.unpack_from(block)
    return store, segment, num_slots


def segment_version(block: memoryview) -> int | None:
    """Format version of a segment header, of any version; None if this is no segment header or a damaged one.

    Magic, version and the CRC at the end of the first block keep their places in all versions.
    """
    crc_at = SEGMENT_HEADER_BYTES - CRC_BYTES
    if len(block) < SEGMENT_HEADER_BYTES or bytes(block[:8]) != SEGMENT_MAGIC:
        return None
    if _CRC.unpack_from(block, crc_at)[0] != checksum(block[:crc_at]):
        return None
    version: int = struct.unpack_from("<H", block, 8)[0]
    return version
