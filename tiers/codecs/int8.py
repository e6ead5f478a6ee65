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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest
from hicache.layout import KVDtype
from hicache.tiers.codecs.base import LayerForm

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


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a layer that is grouped in one way."""

    at: tuple[slice, ...]
    """Where in the layer's shape."""
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

    def __init__(self, forms: Sequence[LayerForm], text: str) -> None:
        for form in forms:
            if form.dtype not in LIMIT:
                raise BadRequest(
                    "codec", f"{self.name!r} is for bfloat16, float16 and float32, not {form.dtype.value}"
                )
        self._forms = tuple(forms)
        self._text = text
        blocks = {form: tuple(_blocks(form)) for form in set(forms)}
        self._blocks = [blocks[form] for form in forms]
        self._layer_bytes = [sum(block.num_bytes for block in each) for each in self._blocks]
        for form, num_bytes in zip(forms, self._layer_bytes):
            if num_bytes >= form.num_bytes:
                raise BadRequest("codec", f"{self.name!r} saves nothing with heads of {form.head_dim} elements")

    @property
    def text(self) -> str:
        return self._text

    @property
    def exact_bytes(self) -> int:
        return sum(self._layer_bytes)

    def encode(self, layer: int, data: memoryview, into: memoryview) -> int | None:
        """See `Codec.encode`."""
        form = self._forms[layer]
        if self._layer_bytes[layer] > len(into):
            return None
        elements = _load(data, form)
        start = 0
        for block in self._blocks[layer]:
            part = elements[block.at]
            with np.errstate(invalid="ignore"):
                largest = part.max(axis=block.axis, keepdims=True)
                smallest = part.min(axis=block.axis, keepdims=True)
            # A NaN is the largest and the smallest of whatever it is among, and compares as false.
            if not (largest.max() <= LIMIT[form.dtype] and smallest.min() >= -LIMIT[form.dtype]):
                return None
            centres = _to_bfloat16((largest + smallest) * np.float32(0.5))
            middle = _from_bfloat16(centres)
            reach = np.maximum(largest - middle, middle - smallest)
            steps = _to_bfloat16(reach * (reach >= TINY) * np.float32(1 / 127))
            size = _from_bfloat16(steps)
            inverse = np.divide(np.float32(1), size, out=np.zeros_like(size), where=size > 0)
            elements_at = start + 4 * block.num_groups
            into[start : start + 2 * block.num_groups] = centres.tobytes()
            into[start + 2 * block.num_groups : elements_at] = steps.tobytes()
            start = elements_at + part.size
            # A step may have been rounded down, but not so far that a quotient reaches 127.5.
            scaled = part - middle
            scaled *= inverse
            np.rint(scaled, out=scaled)
            np.copyto(np.frombuffer(into[elements_at:start], np.int8).reshape(block.shape), scaled, casting="unsafe")
        return start

    def decode(self, layer: int, stored: memoryview, into: memoryview) -> bool:
        """See `Codec.decode`."""
        form = self._forms[layer]
        if len(stored) != self._layer_bytes[layer]:
            return False
        elements = np.empty(form.shape, np.float32)
        start = 0
        for block in self._blocks[layer]:
            elements_at = start + 4 * block.num_groups
            groups = np.frombuffer(stored[start:elements_at], "<u2").reshape(2, *block.groups_shape)
            middle, size = _from_bfloat16(groups)
            # Neither NaN nor so large that an element overflows.
            with np.errstate(invalid="ignore", over="ignore"):
                good = (size >= 0) & (np.abs(middle) + size * np.float32(128) <= _DECODED_LIMIT[form.dtype])
            if not good.all():
                return False
            part = elements[block.at]
            start = elements_at + part.size
            steps = np.frombuffer(stored[elements_at:start], np.int8).reshape(block.shape)
            np.multiply(steps, size, out=part, dtype=np.float32)
            part += middle
        _store(elements, into, form)
        return True


def _blocks(form: LayerForm) -> Iterator[_Block]:
    shape, axis = form.shape, form.token_axis
    first_by_token = 0
    if form.num_planes == 2 and form.num_tokens >= CHANNEL_TOKENS_MIN:
        first_by_token = 1
        for start in range(0, form.num_tokens, CHANNEL_TOKENS_MAX):
            stop = min(start + CHANNEL_TOKENS_MAX, form.num_tokens)
            at = (slice(0, 1), *(slice(start, stop) if each == axis else slice(None) for each in (1, 2, 3)))
            yield _Block(at, (1, *(stop - start if each == axis else shape[each] for each in (1, 2, 3))), axis)
    yield _Block((slice(first_by_token, None),), (form.num_planes - first_by_token, *shape[1:]), 3)


def _load(data: memoryview, form: LayerForm) -> Floats:
    if form.dtype is KVDtype.BFLOAT16:
        return _from_bfloat16(np.frombuffer(data, "<u2").reshape(form.shape))
    raw = np.frombuffer(data, "<f2" if form.dtype is KVDtype.FLOAT16 else "<f4").reshape(form.shape)
    return raw.astype(np.float32, copy=False)


def _store(elements: Floats, into: memoryview, form: LayerForm) -> None:
    if form.dtype is KVDtype.BFLOAT16:
        np.copyto(np.frombuffer(into, "<u2").reshape(form.shape), _to_bfloat16(elements))
    else:
        target = np.frombuffer(into, "<f2" if form.dtype is KVDtype.FLOAT16 else "<f4")
        np.copyto(target.reshape(form.shape), elements, casting="same_kind")


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
