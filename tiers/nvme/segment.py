"""One segment file: pages and layers in and out of its slots, verified. Every call blocks; lane threads make them.

Neighbouring slots are one contiguous range of the file, so a run of them is one system call over
[header, payload, header, payload, ...], with payloads straight from and into the callers' buffers where those begin at
a multiple of 4,096. When a run fails, its pages are tried one by one, so that a bad page leaves the others alone.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache.tier import PageIdentity
from hicache.tiers.nvme.findings import Finding
from hicache.tiers.nvme.geometry import BLOCK, SEGMENT_HEADER_BYTES, Geometry, round_up
from hicache.tiers.nvme.header import (
    PageHeader,
    SegmentHeader,
    checksum,
    decode_page_header,
    encode_page_header,
    encode_segment_header,
    layer_checksums,
)
from hicache.tiers.nvme.health import Health, Kind
from hicache.tiers.nvme.index import LayerSums
from hicache.tiers.nvme.io import FileIO, Scratch, is_aligned, read_fully, write_fully


@dataclass(frozen=True, slots=True)
class PagePut:
    """A page to write into slot `index` of the segment."""

    index: int
    generation: int
    identity: PageIdentity
    data: memoryview
    """`page_bytes`, flat."""
    sequence: int
    """The last change of the store that was accepted before."""


@dataclass(frozen=True, slots=True)
class PageGet:
    """A page to read from slot `index` of the segment."""

    index: int
    generation: int
    identity: PageIdentity
    payload_sum: int
    """CRC32C of the page when it was written."""
    into: memoryview
    """`page_bytes`, flat, writable."""


@dataclass(frozen=True, slots=True)
class LayerGet:
    """A layer to read from slot `index` of the segment."""

    index: int
    layer: int
    sums: LayerSums
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
        self._direct = direct
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

    def write_pages(self, puts: Sequence[PagePut], scratch: Scratch) -> list[tuple[Finding, tuple[int, ...]]]:
        """Write a run of neighbouring slots. For each page what became of it, and its layer checksums."""
        if len(puts) > 1 and not all(self._reaches(put.data) for put in puts):
            return self._one_by_one(puts, scratch)
        buffers, sums = [], []
        for position, put in enumerate(puts):
            sums.append(layer_checksums(put.data, self._shape))
            header = PageHeader(
                self._store, self.number, put.index, put.generation, put.identity, self._shape.page_bytes, sums[-1],
                put.sequence,
            )  # fmt: skip
            encode_page_header(header, scratch.headers[position])
            buffers.append(scratch.headers[position])
            buffers += self._payload_out(put.data, position, scratch)
        try:
            write_fully(self._files, self.fd, buffers, self._geometry.slot_offset(puts[0].index))
        except OSError as error:
            if len(puts) > 1:
                return self._one_by_one(puts, scratch)
            self._health.failed(Kind.WRITE, error)
            return [(Finding.DEVICE_ERROR, ())]
        self._health.succeeded(Kind.WRITE)
        return [(Finding.OK, each) for each in sums]

    def _one_by_one(self, puts: Sequence[PagePut], scratch: Scratch) -> list[tuple[Finding, tuple[int, ...]]]:
        return [written for put in puts for written in self.write_pages([put], scratch)]

    def read_pages(self, gets: Sequence[PageGet], scratch: Scratch) -> list[Finding]:
        """Read a run of neighbouring slots and verify each page. Only buffers of pages that are OK hold something."""
        if len(gets) > 1 and not all(self._reaches(get.into) for get in gets):
            return [finding for get in gets for finding in self.read_pages([get], scratch)]
        buffers = []
        for position, get in enumerate(gets):
            buffers.append(scratch.headers[position])
            buffers += self._payload_in(get.into, position, scratch)
        try:
            reached = read_fully(self._files, self.fd, buffers, self._geometry.slot_offset(gets[0].index))
        except OSError as error:
            if len(gets) > 1:
                return [finding for get in gets for finding in self.read_pages([get], scratch)]
            self._health.failed(Kind.READ, error)
            return [Finding.DEVICE_ERROR]
        self._health.succeeded(Kind.READ)
        findings = []
        for position, get in enumerate(gets):
            if reached < (position + 1) * self._shape.slot_bytes:
                findings.append(Finding.SHORT)
            else:
                self._complete(get.into, position, scratch)
                findings.append(self._verify(get, scratch.headers[position]))
        return findings

    def _verify(self, get: PageGet, block: memoryview) -> Finding:
        header = decode_page_header(block)
        if (
            header is None
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
        if header.payload_sum != get.payload_sum:
            return Finding.OTHER_PAYLOAD
        if checksum(get.into) != header.payload_sum:
            return Finding.BAD_PAYLOAD
        return Finding.OK

    # ---- layers

    def read_layer(self, get: LayerGet, scratch: Scratch) -> Finding:
        """Read one layer of a page and verify it by the checksums that the index keeps."""
        start, stop = self._shape.layer_ranges[get.layer]
        payload_at = self._geometry.slot_offset(get.index) + self._shape.header_bytes
        in_place = not self._direct or (start % BLOCK == stop % BLOCK == 0 and is_aligned(get.into))
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
        layer = buffer[start - first : stop - first]
        if checksum(layer, get.sums.before) != get.sums.after:
            return Finding.BAD_PAYLOAD
        if not in_place:
            get.into[:] = layer
        return Finding.OK

    # ---- payload buffers

    def _reaches(self, buffer: memoryview) -> bool:
        """Whether the device can be pointed at this buffer."""
        return not self._direct or is_aligned(buffer)

    def _payload_out(self, data: memoryview, position: int, scratch: Scratch) -> list[memoryview]:
        """The payload in whole blocks: the caller's own bytes, and a copy of the last, incomplete block with zeros."""
        if not self._reaches(data):
            bounce = scratch.page[: round_up(len(data))]
            _copy(data, bounce[: len(data)])
            bounce[len(data) :] = bytes(len(bounce) - len(data))
            return [bounce]
        whole = len(data) // BLOCK * BLOCK
        if whole == len(data):
            return [data]
        tail = scratch.tails[position]
        rest = len(data) - whole
        tail[:rest] = data[whole:]
        tail[rest:] = bytes(BLOCK - rest)
        return [data[:whole], tail] if whole else [tail]

    def _payload_in(self, into: memoryview, position: int, scratch: Scratch) -> list[memoryview]:
        """Where the payload's whole blocks go."""
        if not self._reaches(into):
            return [scratch.page[: round_up(len(into))]]
        whole = len(into) // BLOCK * BLOCK
        if whole == len(into):
            return [into]
        return [into[:whole], scratch.tails[position]] if whole else [scratch.tails[position]]

    def _complete(self, into: memoryview, position: int, scratch: Scratch) -> None:
        """Bring what was read elsewhere into the caller's buffer."""
        if not self._reaches(into):
            _copy(scratch.page[: len(into)], into)
        elif rest := len(into) % BLOCK:
            into[len(into) - rest :] = scratch.tails[position][:rest]


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes without holding the interpreter lock, which a slice assignment would."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _reason(error: OSError) -> str:
    return error.strerror or errno.errorcode.get(error.errno or 0, str(error))
