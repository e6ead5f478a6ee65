"""`int8`: near-lossless, half the bytes of a 16-bit dtype. Opt-in, and part of the namespace (`Namespace.codec`).

Of every group the smallest and the largest element are kept as they are; each element is one of 255 equal steps
between them. Keys are grouped by channel, because some channels are far larger than others, or far from zero, at all
tokens: one group is one element of one head over up to 32 tokens. Values, the keys of pages with fewer than 16 tokens,
and everything that is neither (latent, recurrent) are grouped by token: one group is one head of one token. The ends
are exact because attention leans on outliers: a first token's keys, say, to which most queries attend.

    frame := (keys of a run of up to 32 tokens)*  rest          `rest`: what is grouped by token
    each  := smallest[groups]  largest[groups]  u8[elements]

Smallest and largest have the page's dtype, elements are in the layer's order; the length follows from the layout. With
*m* the largest magnitude in an element's group and *d* the difference between its largest and its smallest element,
what comes back differs from what was stored by at most `PER_DIFFERENCE * d + PER_MAGNITUDE[dtype] * m`, rounding to the
dtype included (of float16, half its smallest step, 2**-25, comes on top), or by `TINY` where that is more. A layer with
a NaN, an infinity or a magnitude above `LIMIT[dtype]` cannot be represented: `encode` says that it does not fit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest
from hicache.layout import KVDtype
from hicache.tiers.codecs.base import Ends, LayerForm, Layers, Run

CHANNEL_TOKENS_MAX: Final = 32
"""Tokens that share one step of a key channel."""
CHANNEL_TOKENS_MIN: Final = 16
"""Below, a step for each channel would cost more than it saves."""
TINY: Final = 2.0**-100
"""Groups whose elements differ by less come back as their smallest."""
STEPS: Final = np.float32(255)
PER_DIFFERENCE: Final = 1 / 509
"""Half a step."""
PER_MAGNITUDE: Final = {KVDtype.BFLOAT16: 1 / 255, KVDtype.FLOAT16: 1 / 2_040, KVDtype.FLOAT32: 1 / 2_000_000}
"""Half a unit in the last place of the dtype, and rounding on the way."""
LIMIT: Final = {KVDtype.BFLOAT16: 2.0**126, KVDtype.FLOAT16: 65_504.0, KVDtype.FLOAT32: 2.0**126}
"""Above, the difference of two elements could overflow."""

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_BITS: Final[dict[KVDtype, np.dtype[Any]]] = {
    KVDtype.BFLOAT16: np.dtype("<u2"), KVDtype.FLOAT16: np.dtype("<f2"), KVDtype.FLOAT32: np.dtype("<f4"),
}  # fmt: skip
"""How numpy holds the elements of a page; bfloat16 as its bits."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a layer that is grouped in one way."""

    at: tuple[slice, ...]
    """Where in `[layers, *form.shape]`."""
    shape: tuple[int, ...]
    axis: int
    """The axis along which the elements of a group lie."""
    itemsize: int
    """Bytes of the smallest or largest element of a group."""

    @property
    def groups_shape(self) -> tuple[int, ...]:
        return tuple(1 if axis == self.axis else length for axis, length in enumerate(self.shape))

    @property
    def num_groups(self) -> int:
        return math.prod(self.groups_shape)

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_groups * self.itemsize + math.prod(self.shape)


class Int8:
    """See the module's docstring. Raises `BadRequest` for a dtype that is not bfloat16, float16 or float32, and for
    layers that it would not make smaller."""

    name: Final = "int8"
    codec_id: Final = 3
    lossless: Final = False

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._blocks: dict[LayerForm, tuple[_Block, ...]] = {}
        for form in layers.forms:
            if form.dtype not in LIMIT:
                raise BadRequest(
                    "codec", f"{self.name!r} is for bfloat16, float16 and float32, not {form.dtype.value}"
                )
            self._blocks[form] = tuple(_blocks(form))
            if self._frame_bytes(form) >= form.num_bytes:
                raise BadRequest("codec", f"{self.name!r} saves nothing with heads of {form.head_dim} elements")

    @property
    def text(self) -> str:
        return self._layers.text(self.name)

    @property
    def exact_bytes(self) -> int:
        return sum(map(self._frame_bytes, self._layers.forms))

    def encode(self, first: int, data: memoryview, into: memoryview) -> Ends | None:
        """See `Codec.encode`."""
        ends: list[int] = []
        start = end = 0
        for run in self._layers.runs(first, len(data)):
            frame_bytes = self._frame_bytes(run.form)
            begin, end = end, end + run.num_layers * frame_bytes
            stop = start + run.num_layers * run.form.num_bytes
            if end > len(into):
                return None
            frames = np.frombuffer(into[begin:end], np.uint8).reshape(run.num_layers, frame_bytes)
            if not self._encode(data[start:stop], run, frames):
                return None
            ends += range(begin + frame_bytes, end + 1, frame_bytes)
            start = stop
        return tuple(ends)

    def _encode(self, data: memoryview, run: Run, frames: Bytes) -> bool:
        """Layers of one form into their frames, `[layers, frame_bytes]`."""
        dtype = run.form.dtype
        elements = _from_bits(np.frombuffer(data, _BITS[dtype]), dtype).reshape(run.num_layers, *run.form.shape)
        start = 0
        for block in self._blocks[run.form]:
            part, axis = elements[block.at], 1 + block.axis
            with np.errstate(invalid="ignore"):
                largest, smallest = part.max(axis=axis, keepdims=True), part.min(axis=axis, keepdims=True)
            # A NaN is the largest and the smallest of whatever it is among, and compares as false.
            if not (largest.max() <= LIMIT[dtype] and smallest.min() >= -LIMIT[dtype]):
                return False
            difference = largest - smallest
            inverse = np.divide(STEPS, difference, out=np.zeros_like(difference), where=difference >= TINY)
            scaled = part - smallest
            scaled *= inverse
            np.rint(scaled, out=scaled)
            # Above the last step by rounding alone.
            np.minimum(scaled, STEPS, out=scaled)
            for numbers in (_to_bits(smallest, dtype), _to_bits(largest, dtype), scaled.astype(np.uint8)):
                rows = numbers.reshape(run.num_layers, -1).view(np.uint8)
                frames[:, start : start + rows.shape[1]] = rows
                start += rows.shape[1]
        return True

    def decode(self, first: int, ends: Ends, stored: memoryview, into: memoryview) -> bool:
        """See `Codec.decode`."""
        start = end = at = 0
        for run in self._layers.runs(first, len(into)):
            frame_bytes = self._frame_bytes(run.form)
            begin, end = end, end + run.num_layers * frame_bytes
            expected = range(begin + frame_bytes, end + 1, frame_bytes)
            if end > len(stored) or list(ends[at : at + run.num_layers]) != list(expected):
                return False
            at += run.num_layers
            stop = start + run.num_layers * run.form.num_bytes
            frames = np.frombuffer(stored[begin:end], np.uint8).reshape(run.num_layers, frame_bytes)
            if not self._decode(frames, run, into[start:stop]):
                return False
            start = stop
        return True

    def _decode(self, frames: Bytes, run: Run, into: memoryview) -> bool:
        dtype = run.form.dtype
        elements = np.empty((run.num_layers, *run.form.shape), np.float32)
        start = 0
        for block in self._blocks[run.form]:
            elements_at = start + 2 * block.num_groups * dtype.itemsize
            groups = np.ascontiguousarray(frames[:, start:elements_at]).view(_BITS[dtype])
            groups = groups.reshape(run.num_layers, 2, *block.groups_shape)
            smallest, largest = _from_bits(groups[:, 0], dtype), _from_bits(groups[:, 1], dtype)
            # A NaN compares as false.
            with np.errstate(invalid="ignore"):
                good = (smallest >= -LIMIT[dtype]) & (smallest <= largest) & (largest <= LIMIT[dtype])
            if not good.all():
                return False
            part = elements[block.at]
            start = elements_at + math.prod(block.shape)
            steps = frames[:, elements_at:start].reshape(part.shape)
            np.multiply(steps, (largest - smallest) / STEPS, out=part, dtype=np.float32)
            part += smallest
        np.copyto(np.frombuffer(into, _BITS[dtype]).reshape(elements.shape), _to_bits(elements, dtype))
        return True

    def _frame_bytes(self, form: LayerForm) -> int:
        return sum(block.num_bytes for block in self._blocks[form])


def _blocks(form: LayerForm) -> Iterator[_Block]:
    shape, axis, item = form.shape, form.token_axis, form.dtype.itemsize
    first_by_token = 0
    if form.num_planes == 2 and form.num_tokens >= CHANNEL_TOKENS_MIN:
        first_by_token = 1
        for start in range(0, form.num_tokens, CHANNEL_TOKENS_MAX):
            stop = min(start + CHANNEL_TOKENS_MAX, form.num_tokens)
            tokens = (slice(start, stop) if each == axis else slice(None) for each in (1, 2, 3))
            at = (slice(None), slice(0, 1), *tokens)
            yield _Block(at, (1, *(stop - start if each == axis else shape[each] for each in (1, 2, 3))), axis, item)
    yield _Block((slice(None), slice(first_by_token, None)), (form.num_planes - first_by_token, *shape[1:]), 3, item)


def _from_bits(elements: npt.NDArray[Any], dtype: KVDtype) -> Floats:
    """Elements as numbers; float32 is not copied."""
    return _from_bfloat16(elements) if dtype is KVDtype.BFLOAT16 else elements.astype(np.float32, copy=False)


def _to_bits(numbers: Floats, dtype: KVDtype) -> npt.NDArray[Any]:
    """Numbers rounded to elements."""
    return _to_bfloat16(numbers) if dtype is KVDtype.BFLOAT16 else numbers.astype(_BITS[dtype], copy=False)


def _from_bfloat16(halves: npt.NDArray[np.uint16]) -> Floats:
    wide = halves.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _to_bfloat16(elements: Floats) -> npt.NDArray[np.uint16]:
    """Finite floats rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(elements).view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += bits
    odd += 0x7FFF
    odd >>= 16
    return cast(npt.NDArray[np.uint16], odd.astype(np.uint16))
