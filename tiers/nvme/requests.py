"""What callers ask of a store, checked before anything is touched."""

from collections.abc import Sequence

from hicache.errors import BadRequest
from hicache.tier import SUM_BYTES, LayerRead, PageIdentity, PageRead, PageWrite
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.header import DIGEST_BYTES
from hicache.tiers.nvme.io import flat
from hicache.tiers.slots import SlotPool


class Requests:
    """Checks slots, buffers and identities against the store's pages. Any thread may call."""

    def __init__(self, shape: PageShape, pool: SlotPool) -> None:
        self._shape = shape
        self._pool = pool

    def check_write(self, pages: Sequence[PageWrite]) -> list[memoryview]:
        """The pages' buffers as flat views. Raises `BadRequest` for what no device could make right."""
        if len({page.slot for page in pages}) < len(pages):
            raise BadRequest("pages", "one slot is named twice")
        num_sums = self._shape.num_layers + 1
        for page in pages:
            if page.sums is not None and len(page.sums) != SUM_BYTES * num_sums:
                raise BadRequest("sums", f"{len(page.sums)} bytes are not {num_sums} checksums")
        return [self._checked(page.slot, page.identity, page.data, self._shape.page_bytes) for page in pages]

    def check_read(self, pages: Sequence[PageRead]) -> list[memoryview]:
        """The pages' buffers as flat views. Raises `BadRequest` as `check_write` does."""
        num_bytes = self._shape.page_bytes
        return [self._checked(page.slot, page.identity, page.into, num_bytes, writable=True) for page in pages]

    def check_layer_reads(self, reads: Sequence[LayerRead]) -> list[memoryview]:
        """The layers' buffers as flat views. Raises `BadRequest` as `check_write` does."""
        buffers = []
        for read in reads:
            if not 0 <= read.layer < self._shape.num_layers:
                raise BadRequest("layer", f"{read.layer} is not within 0 to {self._shape.num_layers - 1}")
            num_bytes = self._shape.layer_bytes[read.layer]
            buffers.append(self._checked(read.slot, read.identity, read.into, num_bytes, writable=True))
        return buffers

    def _checked(
        self, slot: int, identity: PageIdentity, buffer: memoryview, num_bytes: int, *, writable: bool = False
    ) -> memoryview:
        self._pool.generation(slot)
        if buffer.nbytes != num_bytes:
            raise BadRequest("buffer", f"{buffer.nbytes} bytes are not the {num_bytes} that are needed")
        if not buffer.c_contiguous:
            raise BadRequest("buffer", "is not contiguous")
        if writable and buffer.readonly:
            raise BadRequest("buffer", "cannot be written to")
        lengths = len(identity.namespace), len(identity.prefix), len(identity.tokens)
        if lengths != (DIGEST_BYTES, DIGEST_BYTES, self._shape.token_bytes):
            raise BadRequest("identity", f"lengths {lengths} are not (32, 32, {self._shape.token_bytes}) bytes")
        return flat(buffer)
