"""Sizes and places: what one page takes on disk, and how a byte budget is cut into segments and slots.

    segment := segment header (4,096 bytes)  slot*
    slot    := page header (`header_bytes`)  payload (`page_bytes`)  zeros up to the next 4,096

Everything begins and ends at multiples of `BLOCK`, as direct I/O demands. `tiers/FORMAT.md` describes the contents.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hicache.errors import BadRequest
from hicache.layout import MAX_LAYERS, MAX_PAGE_SIZE, KVLayout

BLOCK: Final = 4096
"""Unit of offsets, lengths and addresses of direct I/O."""
SEGMENT_HEADER_BYTES: Final = BLOCK
"""First block of every segment file."""
PAGE_HEADER_FIXED_BYTES: Final = 256
"""The part of a page header before the token ids."""
CRC_BYTES: Final = 4
"""A CRC32C."""
MIN_SEGMENT_BYTES: Final = 256 << 20
"""Default segment size of small stores."""
AIMED_SEGMENTS: Final = 64
"""Segments that a large store is cut into by default."""
MAX_SEGMENTS: Final = 512
"""Each segment is an open file."""
MAX_PAGE_BYTES: Final = 1 << 30
"""Largest page: one I/O must hold it."""


def round_up(num_bytes: int) -> int:
    """The next multiple of `BLOCK`."""
    return -(-num_bytes // BLOCK) * BLOCK


@dataclass(frozen=True)
class PageShape:
    """What the store must know of a page: its layers, in the order in which they lie, and how many tokens it has.

    Raises `BadRequest` naming the field for no layer, too many, an empty one, or a page size out of bounds.
    """

    layer_bytes: tuple[int, ...]
    """Bytes of each layer of one page, 1 to 1,024 layers."""
    page_size: int
    """Tokens in a page, 1 to 256."""

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

    @classmethod
    def of(cls, layout: KVLayout) -> "PageShape":
        """The layers of all parts of a layout's page, part after part."""
        return cls(
            tuple(
                layout.layer_bytes(part)
                for part, group in enumerate(layout.groups)
                for _ in range(group.num_layers)
            ),
            layout.page_size,
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
        ranges, start = [], 0
        for num_bytes in self.layer_bytes:
            ranges.append((start, start + num_bytes))
            start += num_bytes
        return tuple(ranges)

    @property
    def token_bytes(self) -> int:
        """Bytes of a page's own token ids."""
        return 4 * self.page_size

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of a page header: fixed part, token ids, one CRC a layer, its own CRC, in whole blocks."""
        return round_up(PAGE_HEADER_FIXED_BYTES + self.token_bytes + CRC_BYTES * self.num_layers + CRC_BYTES)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot: header and payload, each in whole blocks."""
        return self.header_bytes + round_up(self.page_bytes)


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
        full_bytes = SEGMENT_HEADER_BYTES + slots_per_segment * shape.slot_bytes
        num_full, rest = divmod(capacity_bytes, full_bytes)
        rest_slots = max(0, rest - SEGMENT_HEADER_BYTES) // shape.slot_bytes
        geometry = cls(shape, slots_per_segment, num_full * slots_per_segment + rest_slots)
        if geometry.num_segments > MAX_SEGMENTS:
            raise BadRequest(
                "segment_bytes", f"{segment_bytes} cuts {capacity_bytes} bytes into more than {MAX_SEGMENTS} segments"
            )
        return geometry

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
