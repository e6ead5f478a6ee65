"""`exponent-zstd`: lossless for 16-bit floats. Exponents are entropy-coded, signs and mantissas kept as they are.

The mantissas of KV are noise, but within one channel (one element of one head, over the tokens of a page) exponents lie
close below their largest. Each element is therefore turned by one bit, so that its upper byte holds the exponent (of
float16: the exponent and three mantissa bits) and its lower byte the rest with the sign; upper bytes are replaced by
their distance to the channel's largest, and only these distances and the largest are given to zstd:

    frame := u8:0  layer                                                    as it is
           | u8:1  u32:a  u32:b  distances[a]  largest[b]  rest             `rest` one byte an element
           | u8:2  u32:a  u32:b  distances[a]  largest[b]  rest (zstd)      where that pays

`distances`, `largest` and a compressed `rest` are zstd frames that name their content's size. zstd runs at level 1 with
a minimal table for repetitions: there are none to be found in exponents, and looking for them costs two thirds of the
time and, where it finds some by chance, a few per cent of the ratio.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest
from hicache.layout import KVDtype
from hicache.tiers.codecs.base import LayerForm, required

_RAW: Final = 0
_SPLIT: Final = 1
_BOTH: Final = 2
_HEAD: Final = struct.Struct("<BII")
_PAYS_BELOW: Final = 1 / 8
"""The rest is tried, too, where distances shrink to less than this: pages of zeros, padding, repeated values."""


class ExponentZstd:
    """See the module's docstring. Raises `BadRequest` when the dtype has not 16 bits or `zstandard` is missing."""

    name: Final = "exponent-zstd"
    codec_id: Final = 1
    lossless: Final = True
    exact_bytes: Final = None

    def __init__(self, forms: Sequence[LayerForm], text: str) -> None:
        for form in forms:
            if form.dtype not in (KVDtype.BFLOAT16, KVDtype.FLOAT16):
                raise BadRequest("codec", f"{self.name!r} is for bfloat16 and float16, not {form.dtype.value}")
        self._zstd = required("zstandard", "zstandard", self.name)
        self._forms = tuple(forms)
        self._text = text
        self._local = threading.local()
        """zstd's contexts: one call at a time each."""

    @property
    def text(self) -> str:
        return self._text

    def encode(self, layer: int, data: memoryview, into: memoryview) -> int | None:
        """See `Codec.encode`."""
        form = self._forms[layer]
        compress = self._contexts()[0].compress
        elements = np.frombuffer(data, "<u2").reshape(form.shape)
        upper = np.right_shift(elements, 7).astype(np.uint8)
        largest = upper.max(axis=form.token_axis, keepdims=True)
        distances: bytes = compress(np.subtract(largest, upper))
        tops: bytes = compress(largest)
        rest_at, num_rest = _HEAD.size + len(distances) + len(tops), form.num_elements
        lower = (np.left_shift(elements, 1) | np.right_shift(elements, 15)).astype(np.uint8)
        mode = _SPLIT
        rest = memoryview(lower).cast("B")
        if len(distances) < num_rest * _PAYS_BELOW and len(packed := compress(lower)) < num_rest:
            mode, rest = _BOTH, memoryview(packed)
        num_bytes = rest_at + len(rest)
        if num_bytes > len(data):
            num_bytes = 1 + len(data)
            if num_bytes > len(into):
                return None
            into[0] = _RAW
            into[1:num_bytes] = data
            return num_bytes
        if num_bytes > len(into):
            return None
        _HEAD.pack_into(into, 0, mode, len(distances), len(tops))
        into[_HEAD.size : _HEAD.size + len(distances)] = distances
        into[_HEAD.size + len(distances) : rest_at] = tops
        into[rest_at:num_bytes] = rest
        return num_bytes

    def decode(self, layer: int, stored: memoryview, into: memoryview) -> bool:
        """See `Codec.decode`."""
        form = self._forms[layer]
        if len(stored) == 1 + len(into) and stored[0] == _RAW:
            into[:] = stored[1:]
            return True
        if len(stored) < _HEAD.size:
            return False
        mode, num_distances, num_tops = _HEAD.unpack_from(stored)
        tops_at = _HEAD.size + num_distances
        rest_at = tops_at + num_tops
        if mode not in (_SPLIT, _BOTH) or rest_at > len(stored):
            return False
        tops_shape = list(form.shape)
        tops_shape[form.token_axis] = 1
        distances = self._unpacked(stored[_HEAD.size : tops_at], form.shape)
        largest = self._unpacked(stored[tops_at:rest_at], tops_shape)
        rest: npt.NDArray[np.uint8] | None
        if mode == _BOTH:
            rest = self._unpacked(stored[rest_at:], form.shape)
        else:
            whole = len(stored) - rest_at == form.num_elements
            rest = np.frombuffer(stored[rest_at:], np.uint8).reshape(form.shape) if whole else None
        if distances is None or largest is None or rest is None:
            return False
        elements = np.frombuffer(into, "<u2").reshape(form.shape)
        upper = np.subtract(largest, distances)
        np.left_shift(upper, 7, out=elements, dtype=np.uint16)
        wide = rest.astype(np.uint16)
        elements |= np.right_shift(wide, 1)
        elements |= np.left_shift(wide, 15)
        return True

    def _unpacked(self, frame: memoryview, shape: Sequence[int]) -> npt.NDArray[np.uint8] | None:
        """The contents of a zstd frame, None if they are not exactly so many bytes. The size that a frame names is
        compared before memory is taken for it."""
        num_bytes = int(np.prod(shape))
        try:
            if self._zstd.get_frame_parameters(frame).content_size != num_bytes:
                return None
            data = self._contexts()[1].decompress(frame, allow_extra_data=False)
        except self._zstd.ZstdError:
            return None
        return np.frombuffer(data, np.uint8).reshape(shape) if len(data) == num_bytes else None

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
