"""The contract of a codec, and what codecs must know of the layers of a page."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Protocol

from hicache.errors import BadRequest
from hicache.layout import AttentionKind, KVDtype, KVLayout, PageOrder


class Codec(Protocol):
    """Turns one layer of a page into fewer bytes and back. Made for the layers of one layout (`registry.make_codec`).

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

    def encode(self, layer: int, data: memoryview, into: memoryview) -> int | None:
        """Encode one layer.

        Args:
            layer: index from 0 over the whole page.
            data: the layer's bytes, flat, as many as the layout says.
            into: where the encoded bytes go, flat, writable, of any length.

        Returns how many bytes were written, or None if they do not fit into `into` or the codec cannot represent the
        data; what `into` then holds is undefined.
        """
        ...

    def decode(self, layer: int, stored: memoryview, into: memoryview) -> bool:
        """Decode one layer into `into`, flat, writable, exactly as long as the layer.

        `stored` is whatever the device gave back. False if `encode` cannot have written it; what `into` then holds is
        undefined. Never raises for what is in `stored`, and allocates no more than a few times the layer.
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


def layer_forms(layout: KVLayout) -> tuple[LayerForm, ...]:
    """The form of every layer of a page, part after part."""
    forms: list[LayerForm] = []
    for group in layout.groups:
        num_tokens = 1 if group.kind is AttentionKind.RECURRENT else layout.page_size
        form = LayerForm(
            group.num_planes, num_tokens, group.num_kv_heads, group.head_dim, layout.dtype, layout.order
        )
        forms += [form] * group.num_layers
    return tuple(forms)


def required(package: str, module: str, codec: str) -> ModuleType:
    """A module of a package that may be missing. Raises `BadRequest` naming it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise BadRequest("codec", f"{codec!r} needs the package {package}, which cannot be imported") from error
