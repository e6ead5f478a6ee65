"""One segment file: pages and layers in and out of its slots, verified. Every call blocks; lane threads make them.

Neighbouring slots are one contiguous range of the file, so a run of them is one system call over
[header, payload, header, payload, ...]. `payload` says how payloads lie in their slots. When a run fails, its pages are
tried one by one, so that a bad page leaves the others alone.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from hicache.tier import PageIdentity, PageSums
from hicache.tiers.nvme.findings import Finding
from hicache.tiers.nvme.geometry import BLOCK, SEGMENT_HEADER_BYTES, Geometry, round_up
from hicache.tiers.nvme.header import (
    PageHeader,
    SegmentHeader,
    decode_page_header,
    encode_page_header,
    encode_segment_header,
)
from hicache.tiers.nvme.health import Health, Kind
from hicache.tiers.nvme.io import FileIO, Scratch, read_fully, write_fully
from hicache.tiers.nvme.payload import StoredLayer, payloads_of
from hicache.tiers.sums import payload_checksum


@dataclass(frozen=True, slots=True)
class PagePut:
    """A page to write into slot `index` of the segment."""

    index: int
    generation: int
    identity: PageIdentity
    data: memoryview
    """`page_bytes`, flat."""
    sums: PageSums | None
    """Its checksums, where they are known."""
    sequence: int
    """The last change of the store that was accepted before."""


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a page that was to be written."""

    finding: Finding
    num_bytes: int = 0
    """Bytes that the device took: whole blocks of header and payload, as it is stored."""
    words: tuple[int, ...] = ()
    """What the index keeps of its layers, `PageShape.num_words`: the checksum of each as it is stored, that of all
    together and, where pages are encoded, where each ends."""


@dataclass(frozen=True, slots=True)
class PageGet:
    """A page to read from slot `index` of the segment."""

    index: int
    generation: int
    identity: PageIdentity
    payload_sum: int
    """Checksum of the page's stored bytes when it was written."""
    ends: Sequence[int]
    """Where its layers end in them; empty where pages lie as they are."""
    into: memoryview
    """`page_bytes`, flat, writable."""


@dataclass(frozen=True, slots=True)
class LayerGet:
    """A layer to read from slot `index` of the segment."""

    index: int
    layer: int
    stored: StoredLayer
    into: memoryview
    """The layer's bytes, flat, writable."""


class SegmentFile:
    """An open segment. Slots are written and read by any number of threads; who may use which slot when is the
    caller's business."""

    def __init__(
        self,
        files: FileIO,
        fd: int,
        *,
        store: bytes,
        number: int,
        num_slots: int,
        geometry: Geometry,
        direct: bool,
        health: Health,
    ) -> None:
        self.fd = fd
        self.number = number
        self.num_slots = num_slots
        self._files = files
        self._store = store
        self._geometry = geometry
        self._shape = geometry.shape
        self._payloads = payloads_of(geometry.shape, direct=direct)
        self._health = health

    def write_header(self, scratch: memoryview) -> None:
        """Write the segment header, by way of `scratch`, one aligned block. Raises `OSError`."""
        header = SegmentHeader(self._store, self.number, self.num_slots, self._shape)
        encode_segment_header(header, scratch)
        write_fully(self._files, self.fd, [scratch], 0)

    def probe(self, scratch: Scratch) -> str | None:
        """Write the segment header again, sync, and read it back: None if the device does all that, else what is
        wrong.
        """
        block = scratch.tails[0]
        try:
            self.write_header(block)
            self._files.fsync(self.fd)
            written = bytes(block)
            block[:] = bytes(SEGMENT_HEADER_BYTES)
            if read_fully(self._files, self.fd, [block], 0) < SEGMENT_HEADER_BYTES or bytes(block) != written:
                return "what was written does not come back"
        except OSError as error:
            return _reason(error)
        return None

    # ---- pages

    def write_pages(self, puts: Sequence[PagePut], scratch: Scratch) -> list[Written]:
        """Write a run of neighbouring slots. For each page what became of it."""
        if len(puts) > 1 and not self._payloads.can_join([put.data for put in puts]):
            return self._one_by_one(puts, scratch)
        buffers, written = [], []
        for position, put in enumerate(puts):
            payload = self._payloads.outgoing(
                put.data, put.sums, position, scratch, is_last=position + 1 == len(puts)
            )
            if isinstance(payload, Finding):
                return self._one_by_one(puts, scratch) if len(puts) > 1 else [Written(payload)]
            header = PageHeader(
                self._store, self.number, put.index, put.generation, put.identity, self._shape.page_bytes,
                payload.sums, payload.sum, put.sequence, self._shape.codec_id, payload.ends,
            )  # fmt: skip
            encode_page_header(header, scratch.headers[position])
            buffers.append(scratch.headers[position])
            buffers += payload.buffers
            num_bytes = self._shape.header_bytes + sum(map(len, payload.buffers))
            words = (*payload.sums, payload.sum, *payload.ends)
            written.append(Written(Finding.OK, num_bytes, words))
        try:
            write_fully(self._files, self.fd, buffers, self._geometry.slot_offset(puts[0].index))
        except OSError as error:
            if len(puts) > 1:
                return self._one_by_one(puts, scratch)
            self._health.failed(Kind.WRITE, error)
            return [Written(Finding.DEVICE_ERROR)]
        self._health.succeeded(Kind.WRITE)
        return written

    def _one_by_one(self, puts: Sequence[PagePut], scratch: Scratch) -> list[Written]:
        return [written for put in puts for written in self.write_pages([put], scratch)]

    def read_pages(self, gets: Sequence[PageGet], scratch: Scratch) -> list[Finding]:
        """Read a run of neighbouring slots and verify each page. Only buffers of pages that are OK hold something."""
        return self.verify_pages(gets, self.fetch_pages(gets, scratch), scratch)

    def fetch_pages(self, gets: Sequence[PageGet], scratch: Scratch) -> list[Finding | None]:
        """The device's part of `read_pages`: for each page what is wrong with it, or None for one that came in whole
        and is to be verified, with the same scratch memory."""
        if len(gets) > 1 and not self._payloads.can_join([get.into for get in gets]):
            return [finding for get in gets for finding in self.read_pages([get], scratch)]
        buffers: list[memoryview] = []
        stops = []
        for position, get in enumerate(gets):
            blocks = self._payloads.incoming(
                get.into, get.ends, position, scratch, is_last=position + 1 == len(gets)
            )
            stops.append(position * self._shape.slot_bytes + self._shape.header_bytes + sum(map(len, blocks)))
            buffers.append(scratch.headers[position])
            buffers += blocks
        try:
            reached = read_fully(self._files, self.fd, buffers, self._geometry.slot_offset(gets[0].index))
        except OSError as error:
            if len(gets) > 1:
                return [finding for get in gets for finding in self.read_pages([get], scratch)]
            self._health.failed(Kind.READ, error)
            return [Finding.DEVICE_ERROR]
        self._health.succeeded(Kind.READ)
        return [None if reached >= stop else Finding.SHORT for stop in stops]

    def verify_pages(
        self, gets: Sequence[PageGet], fetched: Sequence[Finding | None], scratch: Scratch
    ) -> list[Finding]:
        """The rest of `read_pages`, after `fetch_pages`."""
        return [
            self._verify(get, position, scratch) if finding is None else finding
            for position, (get, finding) in enumerate(zip(gets, fetched, strict=True))
        ]

    def _verify(self, get: PageGet, position: int, scratch: Scratch) -> Finding:
        header = decode_page_header(scratch.headers[position])
        if (
            header is None
            or header.codec != self._shape.codec_id
            or header.payload_bytes != self._shape.page_bytes
            or len(header.layer_sums) != self._shape.num_layers
        ):
            return Finding.BAD_HEADER
        if (header.store, header.segment, header.slot) != (self._store, self.number, get.index):
            return Finding.MISPLACED
        if header.generation != get.generation:
            return Finding.OLDER_LIFE
        if header.identity != get.identity:
            return Finding.OTHER_PAGE
        if header.payload_sum != get.payload_sum or header.layer_ends != tuple(get.ends):
            return Finding.OTHER_PAYLOAD
        return self._payloads.complete(get.into, get.payload_sum, get.ends, position, scratch)

    # ---- layers

    def read_layer(self, get: LayerGet, scratch: Scratch) -> Finding:
        """Read one layer of a page and verify it by the checksums that the index keeps."""
        start, stop = get.stored.start, get.stored.stop
        if not 0 <= start <= stop <= self._shape.room_bytes:
            return Finding.BAD_PAYLOAD
        payload_at = self._geometry.slot_offset(get.index) + self._shape.header_bytes
        in_place = self._payloads.layer_in_place(get.stored, get.into)
        # Around an odd layer whole blocks are read: from the block in which it begins to that in which it ends.
        first = start if in_place else start // BLOCK * BLOCK
        buffer = get.into if in_place else scratch.page[: round_up(stop) - first]
        try:
            reached = read_fully(self._files, self.fd, [buffer], payload_at + first)
        except OSError as error:
            self._health.failed(Kind.READ, error)
            return Finding.DEVICE_ERROR
        self._health.succeeded(Kind.READ)
        if reached < stop - first:
            return Finding.SHORT
        stored = buffer[start - first : stop - first]
        if payload_checksum(stored) != get.stored.sum:
            return Finding.BAD_PAYLOAD
        if not in_place and not self._payloads.complete_layer(get.layer, stored, get.into):
            return Finding.BAD_PAYLOAD
        return Finding.OK


def _reason(error: OSError) -> str:
    return error.strerror or errno.errorcode.get(error.errno or 0, str(error))
