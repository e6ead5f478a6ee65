"""`lz4`: every layer as one LZ4 block, or as it is where that is no shorter.

Gains nothing on KV as models make it (its mantissas are noise to a code that looks for repetitions); for data that
repeats, and for devices that are barely slower than memory.

    frame := u8:0  layer            as it is
           | u8:1  LZ4 block
"""

from typing import Final

import numpy as np

from hicache.tiers.codecs.base import Ends, Layers, required

_RAW: Final = 0
_BLOCK: Final = 1


class Lz4:
    """See the module's docstring. Raises `BadRequest` when the package `lz4` is missing."""

    name: Final = "lz4"
    codec_id: Final = 2
    lossless: Final = True
    exact_bytes: Final = None

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._lz4 = required("lz4", "lz4.block", self.name)

    @property
    def text(self) -> str:
        return self._layers.text(self.name)

    def encode(self, first: int, data: memoryview, into: memoryview) -> Ends | None:
        """See `Codec.encode`."""
        ends, end = [], 0
        for start, stop in self._layers.ranges(first, len(data)):
            layer = data[start:stop]
            encoded: bytes = self._lz4.compress(layer, store_size=False)
            mode, body = (_BLOCK, memoryview(encoded)) if len(encoded) < len(layer) else (_RAW, layer)
            begin, end = end, end + 1 + len(body)
            if end > len(into):
                return None
            into[begin] = mode
            into[begin + 1 : end] = body
            ends.append(end)
        return tuple(ends)

    def decode(self, first: int, ends: Ends, stored: memoryview, into: memoryview) -> bool:
        """See `Codec.decode`."""
        begin = 0
        for (start, stop), end in zip(self._layers.ranges(first, len(into)), ends, strict=True):
            if not self._decode(stored[begin:end], into[start:stop]):
                return False
            begin = end
        return True

    def _decode(self, frame: memoryview, into: memoryview) -> bool:
        if len(frame) < 2:
            return False
        body: bytes | memoryview = frame[1:]
        if frame[0] == _BLOCK:
            try:
                body = self._lz4.decompress(body, uncompressed_size=len(into))
            except self._lz4.LZ4BlockError:
                return False
        elif frame[0] != _RAW:
            return False
        if len(body) != len(into):
            return False
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(body, np.uint8))
        return True
