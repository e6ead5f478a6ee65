"""Which page lies in which slot: in memory, from what this process wrote itself.

Flat arrays of fixed width, `8 + 64 + 4 * page_size + 4 * num_layers` bytes a slot (0.07 % of a page of 16 tokens and 30
layers), touched only where slots were used. Layer checksums are kept so that one layer can be read and verified without
its page's header; identities, so that this is true of whose layer it is, too.

The event loop alone changes it. Other threads may look slots up that a lease of their caller keeps from being freed.
"""

from dataclasses import dataclass

import numpy as np

from hicache.tier import PageIdentity, Slots
from hicache.tiers.nvme.geometry import PageShape

_NOTHING = -1


@dataclass(frozen=True, slots=True)
class LayerSums:
    """What one layer of a page must add up to."""

    before: int
    """Running CRC32C of the layers before it."""
    after: int
    """Running CRC32C with it."""


class Index:
    """See the module's docstring."""

    def __init__(self, shape: PageShape, num_slots: int) -> None:
        self._shape = shape
        self._generations = np.full(num_slots, _NOTHING, np.int64)
        """Generation whose page lies in the slot, written whole."""
        self._identities = np.zeros((num_slots, 64 + shape.token_bytes), np.uint8)
        self._sums = np.zeros((num_slots, shape.num_layers), np.uint32)

    def record(self, slot: int, generation: int, identity: PageIdentity, layer_sums: tuple[int, ...]) -> None:
        """The page was written whole."""
        self._identities[slot] = np.frombuffer(_packed(identity), np.uint8)
        self._sums[slot] = layer_sums
        self._generations[slot] = generation

    def forget(self, slots: Slots | int) -> None:
        """Whatever the slots held is no longer served."""
        self._generations[slots] = _NOTHING

    def holds(self, slot: int, generation: int) -> bool:
        """Whether a page of that generation lies in the slot, whole."""
        return int(self._generations[slot]) == generation

    def is_page(self, slot: int, identity: PageIdentity) -> bool:
        """Whether the page in the slot is that one, compared byte by byte."""
        stored: bytes = self._identities[slot].tobytes()
        return stored == _packed(identity)

    def payload_sum(self, slot: int) -> int:
        """CRC32C of the page in the slot."""
        return int(self._sums[slot, -1])

    def layer_sums(self, slot: int, layer: int) -> LayerSums:
        """Checksums around one layer of the page in the slot."""
        return LayerSums(int(self._sums[slot, layer - 1]) if layer else 0, int(self._sums[slot, layer]))


def _packed(identity: PageIdentity) -> bytes:
    return identity.namespace + identity.prefix + identity.tokens
