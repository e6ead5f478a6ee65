"""`int8`: near-lossless, half the bytes of a 16-bit dtype. Opt-in, and part of the namespace (`Namespace.codec`).

Every element becomes an int8 times the scale of its group. Keys are grouped by channel, because some of their channels
are far larger than others at all tokens: one group is one element of one head over up to 64 tokens. Values, the keys of
pages with fewer than 16 tokens, and everything that is neither (latent, recurrent) are grouped by token: one group is
one head of one token.

    frame := (keys of a run of up to 64 tokens)*  rest      `rest`: what is grouped by token
    each  := u16[groups]:scales  i8[elements]               scales as bfloat16; elements in the layer's order

The length follows from the layout. With *m* the largest magnitude in an element's group, what comes back differs from
what was stored by at most `RELATIVE_ERROR[dtype] * m`, rounding to the dtype included (of float16, half its smallest
step, 2**-25, comes on top); a group with *m* below `FLUSHED_BELOW` comes back as zeros. A layer with a NaN, an infinity
or a magnitude above `LIMIT[dtype]` cannot be represented: `encode` says that it does not fit.
"""

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
FLUSHED_BELOW: Final = 2.0**-100
RELATIVE_ERROR: Final = {KVDtype.BFLOAT16: 1 / 127, KVDtype.FLOAT16: 1 / 224, KVDtype.FLOAT32: 1 / 252}
"""Half a step of 1/127 whose scale is rounded to 8 bits, and half a unit in the last place of the dtype."""
LIMIT: Final = {KVDtype.BFLOAT16: 2.0**127, KVDtype.FLOAT16: 64_000.0, KVDtype.FLOAT32: 2.0**127}
"""Above, a decoded element could overflow."""
_SCALED_LIMIT: Final = {dtype: np.float32(limit * 1.015) for dtype, limit in LIMIT.items()}
"""128 scales of what `encode` wrote are below; and so is the largest number of the dtype above."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a layer that is grouped in one way."""

    at: tuple[slice, ...]
    """Where in the layer's shape."""
    shape: tuple[int, ...]
    axis: int
    """The axis along which elements share a scale."""

    @property
    def scales_shape(self) -> tuple[int, ...]:
        return tuple(1 if axis == self.axis else length for axis, length in enumerate(self.shape))

    @property
    def num_scales(self) -> int:
        return int(np.prod(self.scales_shape))

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_scales + int(np.prod(self.shape))


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
            stop = start + 2 * block.num_scales
            part = elements[block.at]
            with np.errstate(invalid="ignore"):
                largest = np.abs(part).max(axis=block.axis, keepdims=True)
            # A NaN is the largest of whatever it is among, and compares as false.
            if not (largest <= LIMIT[form.dtype]).all():
                return None
            scales = _to_bfloat16(np.where(largest < FLUSHED_BELOW, np.float32(0), largest / np.float32(127)))
            into[start:stop] = scales.tobytes()
            steps = _from_bfloat16(scales)
            inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps > 0)
            start, stop = stop, stop + part.size
            whole = np.frombuffer(into[start:stop], np.int8).reshape(block.shape)
            # The scale may have been rounded down, but not so far that a quotient reaches 127.5.
            scaled = part * inverse
            np.rint(scaled, out=scaled)
            np.copyto(whole, scaled, casting="unsafe")
            start = stop
        return start

    def decode(self, layer: int, stored: memoryview, into: memoryview) -> bool:
        """See `Codec.decode`."""
        form = self._forms[layer]
        if len(stored) != self._layer_bytes[layer]:
            return False
        elements = np.empty(form.shape, np.float32)
        start = 0
        for block in self._blocks[layer]:
            stop = start + 2 * block.num_scales
            scales = _from_bfloat16(np.frombuffer(stored[start:stop], "<u2").reshape(block.scales_shape))
            # Neither negative nor NaN, nor so large that an element overflows.
            if not ((scales >= 0) & (scales <= _SCALED_LIMIT[form.dtype] / 128)).all():
                return False
            start, stop = stop, stop + elements[block.at].size
            np.multiply(np.frombuffer(stored[start:stop], np.int8).reshape(block.shape), scales,
                        out=elements[block.at], dtype=np.float32)  # fmt: skip
            start = stop
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
