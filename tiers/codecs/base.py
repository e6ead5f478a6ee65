"""The contract of a codec, and what codecs must know of the layers of a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from types import ModuleType
from typing import Final, Protocol

from hicache.errors import BadRequest
from hicache.layout import AttentionKind, KVDtype, KVLayout, PageOrder

MAX_RUN_ELEMENTS: Final = 48 << 10
"""Elements that are worked on at once. Small layers share the cost of calls (a quarter faster than one by one), and
what is computed on the way fits a core's cache and is not asked of the system anew each time (twice as fast as pages of
megabytes at once)."""

Ends = Sequence[int]
"""Where encoded layers end, one after the other."""


class Codec(Protocol):
    """Turns the layers of a page into fewer bytes and back, each by itself. Made for the layers of one layout
    (`registry.make_codec`).

    Pure: the same bytes in give the same bytes out. Any number of threads may call at once; what takes long releases
    the interpreter lock.
    """

    @property
    def name(self) -> str:
        """As users choose it."""
        ...

    @property
    def codec_id(self) -> int:
        """As page headers name it, 1 to 65,535; never given to another codec."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back exactly what was encoded."""
        ...

    @property
    def text(self) -> str:
        """Name and layers: all that a decoder needs beside the stored bytes. `registry.parse_codec` reads it."""
        ...

    @property
    def exact_bytes(self) -> int | None:
        """Bytes of every encoded page; None where that depends on its contents."""
        ...

    def encode(self, first: int, data: memoryview, into: memoryview) -> Ends | None:
        """Encode consecutive layers, one behind the other. A whole page at once is sooner done than its layers.

        Args:
            first: index of the first layer, from 0 over the whole page.
            data: the bytes of whole layers, flat, as many as there are to encode.
            into: where the encoded bytes go, flat, writable, of any length.

        Returns where each layer ends in `into`, or None if they do not fit there or the codec cannot represent the
        data; what `into` then holds is undefined.
        """
        ...

    def decode(self, first: int, ends: Ends, stored: memoryview, into: memoryview) -> bool:
        """Decode consecutive layers, from layer `first` on, into `into`, flat, writable, exactly as long as they.

        `stored` is whatever the device gave back, flat, and `ends` says where each layer ends in it: rising, from 0 on,
        to its length at most. False if `encode` cannot have written it; what `into` then holds is undefined. Never
        raises for what is in `stored`, and allocates no more than a few times the layers.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerForm:
    """How the elements of one layer of a page lie."""

    num_planes: int
    """2 for keys and values, 1 where there is one entry only."""
    num_tokens: int
    num_heads: int
    head_dim: int
    dtype: KVDtype
    order: PageOrder

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`[planes, tokens, heads, head_dim]`, or `[planes, heads, tokens, head_dim]` where the order is HND."""
        if self.order is PageOrder.HND:
            return self.num_planes, self.num_heads, self.num_tokens, self.head_dim
        return self.num_planes, self.num_tokens, self.num_heads, self.head_dim

    @property
    def token_axis(self) -> int:
        """Axis of `shape` along which tokens lie."""
        return 2 if self.order is PageOrder.HND else 1

    @property
    def num_elements(self) -> int:
        return self.num_planes * self.num_tokens * self.num_heads * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of the layer; the same as `KVLayout.layer_bytes`."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring layers of one form, together no larger than `MAX_RUN_ELEMENTS` if there are several."""

    num_layers: int
    form: LayerForm


class Layers:
    """The layers of a page."""

    def __init__(self, forms: Sequence[LayerForm]) -> None:
        self.forms: Final = tuple(forms)
        self._num_bytes: Final = sum(form.num_bytes for form in forms)
        self._runs: Final = _runs(self.forms)

    def text(self, name: str) -> str:
        """The text of the codec of that name (`registry`)."""
        words = [name, self.forms[0].dtype.value, self.forms[0].order.value]
        words += [
            f"{len(list(run))}x{form.num_planes}x{form.num_tokens}x{form.num_heads}x{form.head_dim}"
            for form, run in groupby(self.forms)
        ]
        return " ".join(words)

    def runs(self, first: int, num_bytes: int) -> Sequence[Run]:
        """The layers from `first` on that have so many bytes together."""
        if num_bytes == self._num_bytes:
            return self._runs
        return _runs(self.forms[first : first + len(self.ranges(first, num_bytes))])

    def ranges(self, first: int, num_bytes: int) -> list[tuple[int, int]]:
        """Half-open range of each of the layers from `first` on that have so many bytes together."""
        ranges: list[tuple[int, int]] = []
        start = 0
        while start < num_bytes:
            stop = start + self.forms[first + len(ranges)].num_bytes
            ranges.append((start, stop))
            start = stop
        assert start == num_bytes, "these are no whole layers"
        return ranges


def _runs(forms: Sequence[LayerForm]) -> Sequence[Run]:
    runs: list[Run] = []
    for form, group in groupby(forms):
        num_layers, most = len(list(group)), max(1, MAX_RUN_ELEMENTS // form.num_elements)
        runs += [Run(min(most, num_layers - start), form) for start in range(0, num_layers, most)]
    return runs


def layers_of(layout: KVLayout) -> Layers:
    """The layers of a page, part after part."""
    forms: list[LayerForm] = []
    for group in layout.groups:
        num_tokens = 1 if group.kind is AttentionKind.RECURRENT else layout.page_size
        form = LayerForm(
            group.num_planes, num_tokens, group.num_kv_heads, group.head_dim, layout.dtype, layout.order
        )
        forms += [form] * group.num_layers
    return Layers(forms)


def required(package: str, module: str, codec: str) -> ModuleType:
    """A module of a package that may be missing. Raises `BadRequest` naming it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise BadRequest("codec", f"{codec!r} needs the package {package}, which cannot be imported") from error
