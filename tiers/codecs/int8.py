"""`int8`: near-lossless, half the bytes of a 16-bit dtype. Opt-in, and part of the namespace (`Namespace.codec`).

Every element becomes its group's centre plus an int8 times the group's step. Keys are grouped by channel, because some
channels are far larger than others, or far from zero, at all tokens: one group is one element of one head over up to 64
tokens. Values, the keys of pages with fewer than 16 tokens, and everything that is neither (latent, recurrent) are
grouped by token: one group is one head of one token.

    frame := (keys of a run of up to 64 tokens)*  rest          `rest`: what is grouped by token
    each  := u16[groups]:centres  u16[groups]:steps  i8[elements]

Centres and steps are bfloat16, elements in the layer's order; the length follows from the layout. With *m* the largest
magnitude in an element's group and *d* the difference between the group's largest and smallest element, what comes back
differs from what was stored by at most `PER_DIFFERENCE * d + PER_MAGNITUDE[dtype] * m`, rounding to the dtype included
(of float16, half its smallest step, 2**-25, comes on top), or by `TINY` where that is more. A layer with a NaN, an
infinity or a magnitude above `LIMIT[dtype]` cannot be represented: `encode` says that it does not fit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest
from hicache.layout import KVDtype
from hicache.tiers.codecs.base import Ends, LayerForm, Layers, Run

CHANNEL_TOKENS_MAX: Final = 64
"""Tokens that share one scale of a key channel."""
CHANNEL_TOKENS_MIN: Final = 16
"""Below, a scale for each channel would cost more than it saves."""
TINY: Final = 2.0**-100
"""Groups whose elements differ from their centre by less come back as that centre."""
PER_DIFFERENCE: Final = 1 / 500
"""Half a step of 1/254 of the difference, a step being rounded to 8 bits."""
PER_MAGNITUDE: Final = {KVDtype.BFLOAT16: 1 / 250, KVDtype.FLOAT16: 1 / 1_900, KVDtype.FLOAT32: 1 / 60_000}
"""Half a unit in the last place of the dtype, and what a rounded centre adds to a step."""
LIMIT: Final = {KVDtype.BFLOAT16: 2.0**126, KVDtype.FLOAT16: 64_000.0, KVDtype.FLOAT32: 2.0**126}
"""Above, a decoded element could overflow."""
_DECODED_LIMIT: Final = {dtype: np.float32(limit * 1.02) for dtype, limit in LIMIT.items()}
"""No centre with 128 steps that `encode` writes is beyond, and every dtype reaches further."""

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a layer that is grouped in one way."""

    at: tuple[slice, ...]
    """Where in `[layers, *form.shape]`."""
    shape: tuple[int, ...]
    axis: int
    """The axis along which elements share a centre and a step."""

    @property
    def groups_shape(self) -> tuple[int, ...]:
        return tuple(1 if axis == self.axis else length for axis, length in enumerate(self.shape))

    @property
    def num_groups(self) -> int:
        return math.prod(self.groups_shape)

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_groups + math.prod(self.shape)


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
        elements = _load(data, run)
        start = 0
        for block in self._blocks[run.form]:
            part, axis = elements[block.at], 1 + block.axis
            with np.errstate(invalid="ignore"):
                largest, smallest = part.max(axis=axis, keepdims=True), part.min(axis=axis, keepdims=True)
            # A NaN is the largest and the smallest of whatever it is among, and compares as false.
            if not (largest.max() <= LIMIT[dtype] and smallest.min() >= -LIMIT[dtype]):
                return False
            centres = _to_bfloat16((largest + smallest) * np.float32(0.5))
            middle = _from_bfloat16(centres)
            reach = np.maximum(largest - middle, middle - smallest)
            steps = _to_bfloat16(reach * (reach >= TINY) * np.float32(1 / 127))
            size = _from_bfloat16(steps)
            inverse = np.divide(np.float32(1), size, out=np.zeros_like(size), where=size > 0)
            # A step may have been rounded down, but not so far that a quotient reaches 127.5.
            scaled = part - middle
            scaled *= inverse
            np.rint(scaled, out=scaled)
            for numbers in (centres.astype("<u2", copy=False), steps.astype("<u2", copy=False), scaled.astype(np.int8)):
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
        elements = np.empty((run.num_layers, *run.form.shape), np.float32)
        start = 0
        for block in self._blocks[run.form]:
            elements_at = start + 4 * block.num_groups
            groups = np.ascontiguousarray(frames[:, start:elements_at]).view("<u2")
            middle, size = _from_bfloat16(groups.reshape(run.num_layers, 2, *block.groups_shape).swapaxes(0, 1))
            # Neither NaN nor so large that an element overflows.
            with np.errstate(invalid="ignore", over="ignore"):
                good = (size >= 0) & (np.abs(middle) + size * np.float32(128) <= _DECODED_LIMIT[run.form.dtype])
            if not good.all():
                return False
            part = elements[block.at]
            start = elements_at + math.prod(block.shape)
            steps = frames[:, elements_at:start].view(np.int8).reshape(part.shape)
            np.multiply(steps, size, out=part, dtype=np.float32)
            part += middle
        _store(elements, into, run)
        return True

    def _frame_bytes(self, form: LayerForm) -> int:
        return sum(block.num_bytes for block in self._blocks[form])


def _blocks(form: LayerForm) -> Iterator[_Block]:
    shape, axis = form.shape, form.token_axis
    first_by_token = 0
    if form.num_planes == 2 and form.num_tokens >= CHANNEL_TOKENS_MIN:
        first_by_token = 1
        for start in range(0, form.num_tokens, CHANNEL_TOKENS_MAX):
            stop = min(start + CHANNEL_TOKENS_MAX, form.num_tokens)
            tokens = (slice(start, stop) if each == axis else slice(None) for each in (1, 2, 3))
            at = (slice(None), slice(0, 1), *tokens)
            yield _Block(at, (1, *(stop - start if each == axis else shape[each] for each in (1, 2, 3))), axis)
    yield _Block((slice(None), slice(first_by_token, None)), (form.num_planes - first_by_token, *shape[1:]), 3)


def _load(data: memoryview, run: Run) -> Floats:
    """The elements of layers, `[layers, *form.shape]`."""
    shape = run.num_layers, *run.form.shape
    if run.form.dtype is KVDtype.BFLOAT16:
        return _from_bfloat16(np.frombuffer(data, "<u2").reshape(shape))
    raw = np.frombuffer(data, "<f2" if run.form.dtype is KVDtype.FLOAT16 else "<f4")
    return raw.reshape(shape).astype(np.float32, copy=False)


def _store(elements: Floats, into: memoryview, run: Run) -> None:
    if run.form.dtype is KVDtype.BFLOAT16:
        np.copyto(np.frombuffer(into, "<u2").reshape(elements.shape), _to_bfloat16(elements))
    else:
        target = np.frombuffer(into, "<f2" if run.form.dtype is KVDtype.FLOAT16 else "<f4")
        np.copyto(target.reshape(elements.shape), elements, casting="same_kind")


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
