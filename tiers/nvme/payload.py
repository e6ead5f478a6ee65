"""A page's payload between the caller's buffer and the device: as it is, or encoded layer by layer.

Both kinds say where the blocks of a page go out from and come in to, and what is wrong with what came in. Lane threads
call; a page's `position` is its place in the run, and with it the part of the lane's scratch memory that it has.

Of an encoded page the *ends* of its layers are kept, too: layer *i* takes the stored bytes from end *i - 1* (0 for the
first) to end *i*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import numpy as np

from hicache.tier import PageSums
from hicache.tiers.codecs.base import Codec
from hicache.tiers.nvme.findings import Finding
from hicache.tiers.nvme.geometry import BLOCK, PageShape, round_up
from hicache.tiers.nvme.io import Scratch, is_aligned
from hicache.tiers.sums import page_sums, payload_checksum, payload_checksums, unpacked, whole_sum


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """Where one layer of a page lies in the page's payload, and its checksum (`hicache.tiers.sums`)."""

    start: int
    stop: int
    sum: int
    """Checksum of these bytes."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A payload that is to be written."""

    sums: tuple[int, ...]
    """Checksum of each layer, of the bytes as they are stored."""
    sum: int
    """Checksum of all of them together."""
    ends: tuple[int, ...]
    """Where each layer ends in the payload; empty where pages lie as they are."""
    buffers: list[memoryview]
    """Whole blocks."""


class Payloads(Protocol):
    """How a store's pages lie in their slots."""

    def can_join(self, buffers: Sequence[memoryview]) -> bool:
        """Whether several pages with these buffers can share an I/O."""
        ...

    def outgoing(
        self, data: memoryview, sums: PageSums | None, position: int, scratch: Scratch, *, is_last: bool
    ) -> Outgoing | Finding:
        """What to write for a page, `is_last` in its I/O; or why it cannot be written. `sums` are the checksums that
        the page came with."""
        ...

    def incoming(
        self, into: memoryview, ends: Sequence[int], position: int, scratch: Scratch, *, is_last: bool
    ) -> list[memoryview]:
        """Where the blocks of a page go that is read into `into`. `ends` are its layers', as the index keeps them."""
        ...

    def complete(
        self, into: memoryview, sum_: int, ends: Sequence[int], position: int, scratch: Scratch
    ) -> Finding:
        """Bring a page whose blocks came in into the caller's buffer, verified: its stored bytes have that checksum."""
        ...

    def layer_in_place(self, layer: StoredLayer, into: memoryview) -> bool:
        """Whether that layer can be read straight into the caller's buffer."""
        ...

    def complete_layer(self, index: int, stored: memoryview, into: memoryview) -> bool:
        """Bring the verified bytes of layer `index` into the caller's buffer. False if they cannot be decoded."""
        ...


class PlainPayloads:
    """Pages lie as they are: straight from and into buffers that begin at a multiple of `BLOCK`."""

    def __init__(self, shape: PageShape, *, direct: bool) -> None:
        self._shape: Final = shape
        self._direct: Final = direct

    def can_join(self, buffers: Sequence[memoryview]) -> bool:
        """There is scratch memory for one page that the device cannot be pointed at."""
        return all(map(self._reaches, buffers))

    def outgoing(
        self, data: memoryview, sums: PageSums | None, position: int, scratch: Scratch, *, is_last: bool
    ) -> Outgoing:
        """The caller's own bytes, and a copy of the last, incomplete block with zeros. A page that came with its
        checksums is not looked at: whether it still is what they were taken of shows when it is read back."""
        if sums is None:
            sums = page_sums(data, self._shape.layer_ranges)
        *layer_sums, sum_ = unpacked(sums)
        return Outgoing(tuple(layer_sums), sum_, (), self._blocks(data, position, scratch))

    def _blocks(self, data: memoryview, position: int, scratch: Scratch) -> list[memoryview]:
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

    def incoming(
        self, into: memoryview, ends: Sequence[int], position: int, scratch: Scratch, *, is_last: bool
    ) -> list[memoryview]:
        """The caller's buffer, and scratch memory for what does not fill a block."""
        if not self._reaches(into):
            return [scratch.page[: round_up(len(into))]]
        whole = len(into) // BLOCK * BLOCK
        if whole == len(into):
            return [into]
        return [into[:whole], scratch.tails[position]] if whole else [scratch.tails[position]]

    def complete(
        self, into: memoryview, sum_: int, ends: Sequence[int], position: int, scratch: Scratch
    ) -> Finding:
        """Fetch what was read elsewhere, then check it where the caller has it."""
        if not self._reaches(into):
            _copy(scratch.page[: len(into)], into)
        elif rest := len(into) % BLOCK:
            into[len(into) - rest :] = scratch.tails[position][:rest]
        return Finding.OK if payload_checksum(into) == sum_ else Finding.BAD_PAYLOAD

    def layer_in_place(self, layer: StoredLayer, into: memoryview) -> bool:
        """Where direct I/O can begin, end and put it."""
        return not self._direct or (layer.start % BLOCK == layer.stop % BLOCK == 0 and is_aligned(into))

    def complete_layer(self, index: int, stored: memoryview, into: memoryview) -> bool:
        """Copies what was not read in place."""
        into[:] = stored
        return True

    def _reaches(self, buffer: memoryview) -> bool:
        """Whether the device can be pointed at this buffer."""
        return not self._direct or is_aligned(buffer)


class EncodedPayloads:
    """Pages are encoded into scratch memory, and decoded from it."""

    def __init__(self, shape: PageShape, codec: Codec) -> None:
        self._shape: Final = shape
        self._codec: Final = codec

    def can_join(self, buffers: Sequence[memoryview]) -> bool:
        """There is scratch memory for every page of a run."""
        return True

    def outgoing(
        self, data: memoryview, sums: PageSums | None, position: int, scratch: Scratch, *, is_last: bool
    ) -> Outgoing | Finding:
        """Layers one behind the other, zeros to the end of the block. Pages before the last go out with their whole
        slot, whose rest nobody looks at: that is cheaper than an I/O of its own. What is stored has checksums of its
        own, so those that the page came with are compared here, for the last time."""
        if sums is not None and payload_checksum(data) != whole_sum(sums):
            return Finding.SPOILT
        room = scratch.encoded[position]
        ends = self._codec.encode(0, data, room[: self._shape.room_bytes])
        if ends is None:
            return Finding.INCOMPRESSIBLE
        layer_sums, sum_ = payload_checksums(room, pairwise((0, *ends)))
        blocks = round_up(ends[-1])
        room[ends[-1] : blocks] = bytes(blocks - ends[-1])
        return Outgoing(layer_sums, sum_, tuple(ends), [room[:blocks] if is_last else room])

    def incoming(
        self, into: memoryview, ends: Sequence[int], position: int, scratch: Scratch, *, is_last: bool
    ) -> list[memoryview]:
        """As many blocks as were written; the whole slot of a page that another follows."""
        room = scratch.encoded[position]
        return [room[: round_up(min(ends[-1], self._shape.room_bytes))] if is_last else room]

    def complete(
        self, into: memoryview, sum_: int, ends: Sequence[int], position: int, scratch: Scratch
    ) -> Finding:
        """Check the bytes that were stored, then decode them."""
        stored = scratch.encoded[position]
        if not self._is_sound(ends) or payload_checksum(stored[: ends[-1]]) != sum_:
            return Finding.BAD_PAYLOAD
        return Finding.OK if self._codec.decode(0, ends, stored[: ends[-1]], into) else Finding.BAD_PAYLOAD

    def layer_in_place(self, layer: StoredLayer, into: memoryview) -> bool:
        """It has to be decoded."""
        return False

    def complete_layer(self, index: int, stored: memoryview, into: memoryview) -> bool:
        """Decode it."""
        return self._codec.decode(index, (len(stored),), stored, into)

    def _is_sound(self, ends: Sequence[int]) -> bool:
        """Whether layers can end so: a journal may say anything."""
        bounds = (0, *ends, self._shape.room_bytes)
        return len(ends) == self._shape.num_layers and all(a <= b for a, b in pairwise(bounds))


def payloads_of(shape: PageShape, *, direct: bool) -> Payloads:
    """How pages of that shape lie in their slots; `direct` where the file is open for direct I/O."""
    if shape.coding is None:
        return PlainPayloads(shape, direct=direct)
    return EncodedPayloads(shape, shape.coding.codec)


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes without holding the interpreter lock, which a slice assignment would."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
