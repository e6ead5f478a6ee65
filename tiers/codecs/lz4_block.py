"""`lz4`: every layer as one LZ4 block, or as it is where that is no shorter.

Gains nothing on KV as models make it (its mantissas are noise to a code that looks for repetitions); for data that
repeats, and for devices that are barely slower than memory.

    frame := u8:0  layer            as it is
           | u8:1  LZ4 block
"""

from typing import Final

import numpy as np

from hicache.tiers.codecs.base import required

_RAW: Final = 0
_BLOCK: Final = 1


class Lz4:
    """See the module's docstring. Raises `BadRequest` when the package `lz4` is missing."""

    name: Final = "lz4"
    codec_id: Final = 2
    lossless: Final = True
    text: Final = name
    exact_bytes: Final = None

    def __init__(self) -> None:
        self._lz4 = required("lz4", "lz4.block", self.name)

    def encode(self, layer: int, data: memoryview, into: memoryview) -> int | None:
        """See `Codec.encode`."""
        encoded: bytes = self._lz4.compress(data, store_size=False)
        mode, body = (_BLOCK, memoryview(encoded)) if len(encoded) < len(data) else (_RAW, data)
        num_bytes = 1 + len(body)
        if num_bytes > len(into):
            return None
        into[0] = mode
        into[1:num_bytes] = body
        return num_bytes

    def decode(self, layer: int, stored: memoryview, into: memoryview) -> bool:
        """See `Codec.decode`."""
        if len(stored) < 2:
            return False
        body: bytes | memoryview = stored[1:]
        if stored[0] == _BLOCK:
            try:
                body = self._lz4.decompress(body, uncompressed_size=len(into))
            except self._lz4.LZ4BlockError:
                return False
        elif stored[0] != _RAW:
            return False
        if len(body) != len(into):
            return False
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(body, np.uint8))
        return True
