"""Which page lies in which slot: in memory, from what this process wrote itself and what recovery found.

Flat arrays of fixed width, `12 + 64 + 4 * page_size + 4 * num_words` bytes a slot (0.07 % of a page of 16 tokens and
30 layers), touched only where slots were used. Layer checksums are kept so that one layer can be read and verified
without its page's header; identities, so that this is true of whose layer it is, too.

The event loop alone changes it. Other threads may look slots up that a lease of their caller keeps from being freed.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.tier import PageIdentity, PageSums, Slots
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.header import DIGEST_BYTES
from hicache.tiers.nvme.payload import StoredLayer
from hicache.tiers.nvme.records import Rows, row_dtype

NOTHING: Final = -1
"""Generation of a slot that holds no page."""


class Index:
    """See the module's docstring."""

    def __init__(self, shape: PageShape, num_slots: int) -> None:
        self.shape = shape
        self._generations = np.full(num_slots, NOTHING, np.int64)
        """Generation whose page lies in the slot, written whole."""
        self._namespaces = np.zeros(num_slots, np.uint32)
        """Number of the page's namespace (`Namespaces`)."""
        self._identities = np.zeros((num_slots, 64 + shape.token_bytes), np.uint8)
        self._words = np.zeros((num_slots, shape.num_words), "<u4")
        """Checksums of the page's layers, of all together and, where pages are encoded, where each layer ends."""

    def record(
        self, slot: int, generation: int, namespace: int, identity: PageIdentity, words: tuple[int, ...]
    ) -> None:
        """The page was written whole. `namespace` is the number of its namespace."""
        self._namespaces[slot] = namespace
        self._identities[slot] = np.frombuffer(_packed(identity), np.uint8)
        self._words[slot] = words
        self._generations[slot] = generation

    def forget(self, slots: Slots | int) -> None:
        """Whatever the slots held is no longer served."""
        self._generations[slots] = NOTHING

    def forget_all(self, slots: Sequence[int]) -> None:
        """`forget` for a list."""
        if slots:
            self._generations[np.array(slots, np.int64)] = NOTHING

    def holds(self, slot: int, generation: int) -> bool:
        """Whether a page of that generation lies in the slot, whole."""
        return int(self._generations[slot]) == generation

    def generations(self, slots: Slots | npt.NDArray[np.int64] | slice) -> npt.NDArray[np.int64]:
        """Generations of the pages in the slots, `NOTHING` where there is none; copied."""
        return np.array(self._generations[slots])

    def holds_any(self, slot: int) -> bool:
        """Whether a page lies in the slot, whole."""
        return int(self._generations[slot]) != NOTHING

    def namespace_numbers(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Numbers of the namespaces of the pages that lie in the slots, each once."""
        return np.unique(self._namespaces[slots][self._generations[slots] != NOTHING])

    def namespaces_in_use(self) -> list[int]:
        """Numbers of the namespaces that pages have. Walks all slots."""
        return [int(number) for number in np.unique(self._namespaces[self._generations != NOTHING])]

    def rows(self, slots: npt.NDArray[np.int64]) -> Rows:
        """The pages in the slots, as records hold them. Every slot holds one."""
        rows = np.zeros(slots.size, row_dtype(self.shape))
        rows["slot"] = slots
        rows["namespace"] = self._namespaces[slots]
        rows["generation"] = self._generations[slots]
        rows["codec"] = self.shape.codec_id
        rows["stored_bytes"] = self._words[slots, -1] if self.shape.coding is not None else self.shape.page_bytes
        rows["prefix"] = self._identities[slots, DIGEST_BYTES : 2 * DIGEST_BYTES]
        rows["tokens"] = np.ascontiguousarray(self._identities[slots, 2 * DIGEST_BYTES :]).view("<i4")
        rows["words"] = self._words[slots]
        return rows

    def restore(self, rows: Rows, digests: npt.NDArray[np.uint8]) -> None:
        """Pages that an earlier life recorded; `digests` are their namespaces', `[num_pages, 32]`."""
        slots = rows["slot"]
        self._namespaces[slots] = rows["namespace"]
        self._identities[slots, :DIGEST_BYTES] = digests
        self._identities[slots, DIGEST_BYTES : 2 * DIGEST_BYTES] = rows["prefix"]
        tokens = np.ascontiguousarray(rows["tokens"]).view(np.uint8)
        self._identities[slots, 2 * DIGEST_BYTES :] = tokens.reshape(slots.size, self.shape.token_bytes)
        self._words[slots] = rows["words"]
        self._generations[slots] = rows["generation"]

    def is_page(self, slot: int, identity: PageIdentity) -> bool:
        """Whether the page in the slot is that one, compared byte by byte."""
        stored: bytes = self._identities[slot].tobytes()
        return stored == _packed(identity)

    def sums(self, slot: int) -> PageSums:
        """Checksums of the page in the slot, which lies as it is."""
        assert self.shape.coding is None, "of an encoded page they are not those of its bytes"
        sums: bytes = self._words[slot].tobytes()
        return sums

    def payload_sum(self, slot: int) -> int:
        """Checksum of the page in the slot, as it is stored."""
        return int(self._words[slot, self.shape.num_layers])

    def layer_ends(self, slot: int) -> tuple[int, ...]:
        """Where the layers of the page in the slot end in its payload; empty where pages lie as they are."""
        return tuple(self._words[slot, self.shape.num_layers + 1 :].tolist())

    def stored_layer(self, slot: int, layer: int) -> StoredLayer:
        """Where one layer of the page in the slot lies in its payload, and its checksum."""
        words, num_layers = self._words[slot], self.shape.num_layers
        if self.shape.coding is None:
            start, stop = self.shape.layer_ranges[layer]
        else:
            start, stop = int(words[num_layers + layer]) if layer else 0, int(words[num_layers + 1 + layer])
        return StoredLayer(start, stop, int(words[layer]))


def _packed(identity: PageIdentity) -> bytes:
    return identity.namespace + identity.prefix + identity.tokens
