"""Sizes and places: what one page takes on disk, and how a byte budget is cut into segments and slots.

    segment := segment header (4,096 bytes)  slot*
    slot    := page header (`header_bytes`)  payload (`room_bytes`, rounded up to the next 4,096)

Everything begins and ends at multiples of `BLOCK`, as direct I/O demands. `tiers/FORMAT.md` describes the contents.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, Self

from hicache.errors import BadRequest
from hicache.layout import MAX_LAYERS, MAX_PAGE_SIZE, KVDtype, KVLayout
from hicache.tiers.codecs.base import Codec
from hicache.tiers.codecs.registry import NONE, NONE_ID, make_codec, parse_codec

BLOCK: Final = 4096
"""Unit of offsets, lengths and addresses of direct I/O."""
SEGMENT_HEADER_BYTES: Final = BLOCK
"""First block of every segment file."""
PAGE_HEADER_FIXED_BYTES: Final = 256
"""The part of a page header before the token ids."""
CRC_BYTES: Final = 4
"""A CRC32C."""
WORD_BYTES: Final = 4
"""One of the numbers that are kept of a layer."""
MIN_SEGMENT_BYTES: Final = 256 << 20
"""Default segment size of small stores."""
AIMED_SEGMENTS: Final = 64
"""Segments that a large store is cut into by default."""
MAX_SEGMENTS: Final = 512
"""Each segment is an open file."""
MAX_PAGE_BYTES: Final = 1 << 30
"""Largest page: one I/O must hold it."""


PLANNED_RATIO: Final = {
    ("exponent-zstd", KVDtype.BFLOAT16): 1.3,
    ("exponent-zstd", KVDtype.FLOAT16): 1.1,
}
"""What a codec is trusted to do without being told: a tenth less than it does to real KV (1.49 and 1.17), so that
hardly a page is left out. Others (lz4) keep room for the whole page and save only its transfer."""
MAX_RATIO: Final = 16.0


def round_up(num_bytes: int) -> int:
    """The next multiple of `BLOCK`."""
    return -(-num_bytes // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Coding:
    """How a store's pages are encoded. Two are equal if each could read what the other wrote."""

    text: str
    """Name and layers of the codec (`Codec.text`)."""
    stored_bytes: int
    """Room for an encoded page in a slot; a page that takes more is not stored."""
    codec: Codec = field(compare=False, repr=False)

    @classmethod
    def plan(cls, name: str, layout: KVLayout, ratio: float | None = None) -> Self | None:
        """The coding of a layout's pages by the codec of that name; None for `none`.

        `ratio` is by how much pages are expected to shrink, 1 to 16; it decides how many slots a budget has. Raises
        `BadRequest` naming `codec` or `codec_ratio`.
        """
        codec = make_codec(name, layout)
        if ratio is not None and not (1 <= ratio <= MAX_RATIO and math.isfinite(ratio)):
            raise BadRequest("codec_ratio", f"{ratio} is not within 1 to {MAX_RATIO:g}")
        if codec is None:
            if ratio is not None:
                raise BadRequest("codec_ratio", "needs a codec")
            return None
        if codec.exact_bytes is not None:
            if ratio is not None:
                raise BadRequest("codec_ratio", f"is not needed: {name!r} gives every page the same length")
            return cls(codec.text, codec.exact_bytes, codec)
        if ratio is None:
            ratio = PLANNED_RATIO.get((name, layout.dtype), 1.0)
        # A layer that does not shrink is stored with a byte in front.
        return cls(codec.text, math.ceil((layout.page_bytes + layout.num_layers) / ratio), codec)

    @classmethod
    def parse(cls, text: str, stored_bytes: int) -> Self:
        """The coding with that text. Raises `BadRequest` for a text that no codec has."""
        return cls(text, stored_bytes, parse_codec(text))


@dataclass(frozen=True)
class PageShape:
    """What the store must know of a page: its layers, in the order in which they lie, and how many tokens it has.

    Raises `BadRequest` naming the field for no layer, too many, an empty one, or a page size out of bounds.
    """

    layer_bytes: tuple[int, ...]
    """Bytes of each layer of one page, 1 to 1,024 layers."""
    page_size: int
    """Tokens in a page, 1 to 256."""
    coding: Coding | None = None
    """How pages are encoded; None where they lie as they are."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.layer_bytes) <= MAX_LAYERS:
            raise BadRequest("layer_bytes", f"{len(self.layer_bytes)} layers are not within 1 to {MAX_LAYERS}")
        for index, num_bytes in enumerate(self.layer_bytes):
            if num_bytes < 1:
                raise BadRequest("layer_bytes", f"layer {index} has {num_bytes} bytes; at least 1 is needed")
        if self.page_bytes > MAX_PAGE_BYTES:
            raise BadRequest("layer_bytes", f"a page of {self.page_bytes} bytes is above {MAX_PAGE_BYTES}")
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise BadRequest("page_size", f"{self.page_size} is not within 1 to {MAX_PAGE_SIZE} tokens")
        if self.coding is not None and not 1 <= self.coding.stored_bytes <= self.page_bytes + self.num_layers:
            raise BadRequest("stored_bytes", f"{self.coding.stored_bytes} are no room for pages of {self.page_bytes}")

    @classmethod
    def of(cls, layout: KVLayout, *, codec: str = NONE, codec_ratio: float | None = None) -> "PageShape":
        """The layers of all parts of a layout's page, part after part, encoded as `Coding.plan` says."""
        return cls(
            tuple(
                layout.layer_bytes(part)
                for part, group in enumerate(layout.groups)
                for _ in range(group.num_layers)
            ),
            layout.page_size,
            Coding.plan(codec, layout, codec_ratio),
        )

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(self.layer_bytes)

    @cached_property
    def layer_ranges(self) -> tuple[tuple[int, int], ...]:
        """Half-open byte range of each layer in a page."""
        return tuple(pairwise(accumulate(self.layer_bytes, initial=0)))

    @property
    def token_bytes(self) -> int:
        """Bytes of a page's own token ids."""
        return 4 * self.page_size

    @property
    def codec_id(self) -> int:
        """Number of the codec, 0 for none."""
        return NONE_ID if self.coding is None else self.coding.codec.codec_id

    @property
    def codec_text(self) -> str:
        """What the codec is, for people and the manifest."""
        return NONE if self.coding is None else self.coding.text

    @cached_property
    def room_bytes(self) -> int:
        """Bytes that a slot has for a page's payload, before they are rounded up to blocks."""
        return self.page_bytes if self.coding is None else self.coding.stored_bytes

    @cached_property
    def num_words(self) -> int:
        """Numbers (u32) that are kept of a page's layers: a checksum each, one of all together and, where pages are
        encoded, how far each reaches in the payload."""
        return self.num_layers + 1 if self.coding is None else 2 * self.num_layers + 1

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of a page header: fixed part, token ids, `num_words` numbers, its own CRC, in whole blocks."""
        return round_up(PAGE_HEADER_FIXED_BYTES + self.token_bytes + WORD_BYTES * self.num_words + CRC_BYTES)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot: header and payload, each in whole blocks."""
        return self.header_bytes + round_up(self.room_bytes)


@dataclass(frozen=True)
class Geometry:
    """A byte budget cut into segments. All segments have `slots_per_segment` slots, the last one perhaps fewer."""

    shape: PageShape
    slots_per_segment: int
    num_slots: int

    @classmethod
    def plan(cls, shape: PageShape, *, capacity_bytes: int, segment_bytes: int | None = None) -> "Geometry":
        """Cut `capacity_bytes` into as many slots as fit, segment headers included.

        `segment_bytes` is the most that one file may have; by default a sixty-fourth of the capacity, at least 256 MiB,
        at most the capacity. Raises `BadRequest` when the capacity is below one page or one segment.
        """
        smallest = SEGMENT_HEADER_BYTES + shape.slot_bytes
        if capacity_bytes < smallest:
            raise BadRequest("capacity_bytes", f"{capacity_bytes} is below one page, which takes {smallest} bytes")
        if segment_bytes is None:
            aimed = max(MIN_SEGMENT_BYTES, -(-capacity_bytes // AIMED_SEGMENTS), smallest)
            segment_bytes = min(aimed, capacity_bytes)
        if segment_bytes < smallest:
            raise BadRequest("segment_bytes", f"{segment_bytes} is below one page, which takes {smallest} bytes")
        if capacity_bytes < segment_bytes:
            raise BadRequest("capacity_bytes", f"{capacity_bytes} is below one segment of {segment_bytes} bytes")
        slots_per_segment = (segment_bytes - SEGMENT_HEADER_BYTES) // shape.slot_bytes
        geometry = cls._cut(shape, slots_per_segment, capacity_bytes)
        if geometry.num_segments > MAX_SEGMENTS:
            raise BadRequest(
                "segment_bytes", f"{segment_bytes} cuts {capacity_bytes} bytes into more than {MAX_SEGMENTS} segments"
            )
        return geometry

    def resized(self, capacity_bytes: int) -> "Geometry":
        """The same segments, as many as fit into another capacity of at least one page.

        Raises `BadRequest` when that would take too many of them.
        """
        geometry = self._cut(self.shape, self.slots_per_segment, capacity_bytes)
        if geometry.num_segments > MAX_SEGMENTS:
            raise BadRequest(
                "capacity_bytes",
                f"{capacity_bytes} bytes are more than {MAX_SEGMENTS} segments of {self.bytes_of(0)} bytes, the size "
                "that the store was made with; empty the directory to begin anew",
            )
        return geometry

    @classmethod
    def _cut(cls, shape: PageShape, slots_per_segment: int, capacity_bytes: int) -> "Geometry":
        full_bytes = SEGMENT_HEADER_BYTES + slots_per_segment * shape.slot_bytes
        num_full, rest = divmod(capacity_bytes, full_bytes)
        rest_slots = max(0, rest - SEGMENT_HEADER_BYTES) // shape.slot_bytes
        return cls(shape, slots_per_segment, num_full * slots_per_segment + rest_slots)

    @property
    def num_segments(self) -> int:
        return -(-self.num_slots // self.slots_per_segment)

    def slots_of(self, ordinal: int) -> int:
        """Slots of the segment at that place, from 0."""
        return min(self.slots_per_segment, self.num_slots - ordinal * self.slots_per_segment)

    def bytes_of(self, ordinal: int) -> int:
        """File size of the segment at that place."""
        return SEGMENT_HEADER_BYTES + self.slots_of(ordinal) * self.shape.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all segment files; at most the capacity that was planned for."""
        return sum(self.bytes_of(ordinal) for ordinal in range(self.num_segments))

    def locate(self, slot: int) -> tuple[int, int]:
        """Which segment (its place, from 0) and which slot in it."""
        return divmod(slot, self.slots_per_segment)

    def slot_offset(self, index: int) -> int:
        """Where slot `index` of a segment begins in its file."""
        return SEGMENT_HEADER_BYTES + index * self.shape.slot_bytes
