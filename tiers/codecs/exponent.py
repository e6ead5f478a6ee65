"""`exponent-zstd`: lossless for 16-bit floats. Exponents are entropy-coded, signs and mantissas kept as they are.

The mantissas of KV are noise, but within one channel (one element of one head, over the tokens of a page) exponents lie
close below their largest. Each element is therefore turned by one bit, so that its upper byte holds the exponent (of
float16: the exponent and three mantissa bits) and its lower byte the rest with the sign. Upper bytes are replaced by
their distance to the channel's largest, and these largest by their distance to the layer's; zstd sees distances only:

    frame := u8:0  layer                                               as it is
           | u8:1  u8:largest  u32:length  distances[length]  rest     one byte an element
           | u8:2  u8:largest  u32:length  distances[length]  rest     as a zstd frame, where that pays

`distances` is a zstd frame of one byte an element, in the layer's order, and then one a channel. zstd frames name their
content's size. zstd runs at level 1 with a minimal table for repetitions: there are none to be found in exponents, and
looking for them costs two thirds of the time and, where some are found by chance, a few per cent of the ratio.
"""

import math
import struct
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest
from hicache.layout import KVDtype
from hicache.tiers.codecs.base import Ends, Layers, required

_RAW: Final = 0
_SPLIT: Final = 1
_BOTH: Final = 2
_HEAD: Final = struct.Struct("<BBI")
_PAYS_BELOW: Final = 1 / 8
"""The rest is tried, too, where distances shrink to less than this: pages of zeros, padding, repeated values."""

Bytes = npt.NDArray[np.uint8]


class ExponentZstd:
    """See the module's docstring. Raises `BadRequest` when the dtype has not 16 bits or `zstandard` is missing."""

    name: Final = "exponent-zstd"
    codec_id: Final = 1
    lossless: Final = True
    exact_bytes: Final = None

    def __init__(self, layers: Layers) -> None:
        for form in layers.forms:
            if form.dtype not in (KVDtype.BFLOAT16, KVDtype.FLOAT16):
                raise BadRequest("codec", f"{self.name!r} is for bfloat16 and float16, not {form.dtype.value}")
        self._layers = layers
        self._zstd = required("zstandard", "zstandard", self.name)
        self._local = threading.local()
        """zstd's contexts: one call at a time each."""

    @property
    def text(self) -> str:
        return self._layers.text(self.name)

    def encode(self, first: int, data: memoryview, into: memoryview) -> Ends | None:
        """See `Codec.encode`."""
        ends: list[int] = []
        end = start = 0
        for run in self._layers.runs(first, len(data)):
            form, stop = run.form, start + run.num_layers * run.form.num_bytes
            elements = np.frombuffer(data[start:stop], "<u2").reshape(run.num_layers, *form.shape)
            num_elements = form.num_elements
            upper = np.right_shift(elements, 7).astype(np.uint8)
            largest = upper.max(axis=1 + form.token_axis, keepdims=True)
            tops = largest.reshape(run.num_layers, -1).max(axis=1, keepdims=True)
            distances = np.empty((run.num_layers, num_elements + largest.size // run.num_layers), np.uint8)
            np.subtract(largest, upper, out=distances[:, :num_elements].reshape(elements.shape))
            np.subtract(tops, largest.reshape(run.num_layers, -1), out=distances[:, num_elements:])
            rest = (np.left_shift(elements, 1) | np.right_shift(elements, 15)).astype(np.uint8)
            rest = rest.reshape(run.num_layers, -1)
            for layer in range(run.num_layers):
                raw = data[start + layer * form.num_bytes : start + (layer + 1) * form.num_bytes]
                taken = self._pack(raw, int(tops[layer, 0]), distances[layer], rest[layer], into[end:])
                if taken is None:
                    return None
                end += taken
                ends.append(end)
            start = stop
        return tuple(ends)

    def _pack(self, raw: memoryview, top: int, distances: Bytes, rest: Bytes, into: memoryview) -> int | None:
        """One layer's frame; how many bytes it has, None if it does not fit."""
        compress = self._contexts()[0].compress
        packed: bytes = compress(distances)
        mode, tail = _SPLIT, rest.data
        if len(packed) < len(rest) * _PAYS_BELOW and len(shorter := compress(rest)) < len(rest):
            mode, tail = _BOTH, memoryview(shorter)
        rest_at = _HEAD.size + len(packed)
        num_bytes = rest_at + len(tail)
        if num_bytes > len(raw):
            if 1 + len(raw) > len(into):
                return None
            into[0] = _RAW
            into[1 : 1 + len(raw)] = raw
            return 1 + len(raw)
        if num_bytes > len(into):
            return None
        _HEAD.pack_into(into, 0, mode, top, len(packed))
        into[_HEAD.size : rest_at] = packed
        into[rest_at:num_bytes] = tail
        return num_bytes

    def decode(self, first: int, ends: Ends, stored: memoryview, into: memoryview) -> bool:
        """See `Codec.decode`."""
        begin = start = at = 0
        for run in self._layers.runs(first, len(into)):
            form, stop = run.form, start + run.num_layers * run.form.num_bytes
            channels = list(form.shape)
            channels[form.token_axis] = 1
            num_elements = form.num_elements
            distances = np.zeros((run.num_layers, num_elements + math.prod(channels)), np.uint8)
            rest = np.zeros((run.num_layers, num_elements), np.uint8)
            tops = np.zeros((run.num_layers, 1), np.uint8)
            raw: list[tuple[int, memoryview]] = []
            for layer in range(run.num_layers):
                frame, begin, at = stored[begin : ends[at]], ends[at], at + 1
                if len(frame) == 1 + form.num_bytes and frame[0] == _RAW:
                    raw.append((start + layer * form.num_bytes, frame[1:]))
                elif (top := self._unpack(frame, distances[layer], rest[layer])) is not None:
                    tops[layer] = top
                else:
                    return False
            largest = np.subtract(tops, distances[:, num_elements:]).reshape(run.num_layers, *channels)
            upper = np.subtract(largest, distances[:, :num_elements].reshape(run.num_layers, *form.shape))
            elements = np.frombuffer(into[start:stop], "<u2").reshape(upper.shape)
            np.left_shift(upper, 7, out=elements, dtype=np.uint16)
            lower = rest.reshape(upper.shape).astype(np.uint16)
            elements |= np.right_shift(lower, 1)
            elements |= np.left_shift(lower, 15)
            for place, layer_bytes in raw:
                into[place : place + form.num_bytes] = layer_bytes
            start = stop
        return True

    def _unpack(self, frame: memoryview, distances: Bytes, rest: Bytes) -> int | None:
        """Fill in what one layer's frame holds; the layer's largest upper byte, None for a bad frame."""
        if len(frame) < _HEAD.size:
            return None
        mode, top, num_packed = _HEAD.unpack_from(frame)
        rest_at = _HEAD.size + num_packed
        if rest_at > len(frame) or not self._inflate(frame[_HEAD.size : rest_at], distances):
            return None
        if mode == _BOTH:
            return top if self._inflate(frame[rest_at:], rest) else None
        if mode != _SPLIT or len(frame) - rest_at != len(rest):
            return None
        rest[:] = np.frombuffer(frame[rest_at:], np.uint8)
        return int(top)

    def _inflate(self, frame: memoryview, into: Bytes) -> bool:
        """Whether the zstd frame held exactly as many bytes. The size that it names is compared before memory is taken
        for it."""
        try:
            if self._zstd.get_frame_parameters(frame).content_size != len(into):
                return False
            data: bytes = self._contexts()[1].decompress(frame, allow_extra_data=False)
        except self._zstd.ZstdError:
            return False
        if len(data) != len(into):
            return False
        into[:] = np.frombuffer(data, np.uint8)
        return True

    def _contexts(self) -> tuple[Any, Any]:
        """This thread's compressor and decompressor."""
        try:
            contexts: tuple[Any, Any] = self._local.contexts
        except AttributeError:
            zstd = self._zstd
            parameters = zstd.ZstdCompressionParameters.from_level(
                1, strategy=zstd.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17,
                write_content_size=True, write_checksum=False, write_dict_id=False,
            )  # fmt: skip
            contexts = self._local.contexts = (
                zstd.ZstdCompressor(compression_params=parameters), zstd.ZstdDecompressor(),
            )  # fmt: skip
        return contexts
