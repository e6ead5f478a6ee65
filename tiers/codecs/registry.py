"""Codecs by name, and by the text that a manifest keeps.

    text   := name " " dtype " " order (" " layers)*
    layers := count "x" planes "x" tokens "x" heads "x" head_dim
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from hicache.errors import BadRequest
from hicache.layout import MAX_LAYERS, KVDtype, KVLayout, PageOrder
from hicache.tiers.codecs.base import Codec, LayerForm, Layers, layers_of
from hicache.tiers.codecs.exponent import ExponentZstd
from hicache.tiers.codecs.int8 import Int8
from hicache.tiers.codecs.lz4_block import Lz4

NONE: Final = "none"
NONE_ID: Final = 0
_CODECS: Final[Mapping[str, type[ExponentZstd | Lz4 | Int8]]] = {
    ExponentZstd.name: ExponentZstd, Lz4.name: Lz4, Int8.name: Int8,
}  # fmt: skip
CODEC_IDS: Final = {NONE: NONE_ID, **{name: codec.codec_id for name, codec in _CODECS.items()}}
"""Names and the numbers that page headers hold. A number is never used again for anything else."""
MAX_TEXT_BYTES: Final = 32 << 10
"""Longest text of a codec."""

_LAYERS: Final = re.compile(r"(\d{1,4})x([12])x(\d{1,3})x(\d{1,7})x(\d{1,7})", re.ASCII)


def make_codec(name: str, layout: KVLayout) -> Codec | None:
    """The codec of that name for a layout's pages; None for `none`.

    Raises `BadRequest` naming `codec` for a name that is not known, a dtype or layout that the codec is not for, and a
    package that is missing.
    """
    check_name(name)
    return None if name == NONE else _CODECS[name](layers_of(layout))


def check_name(name: str) -> None:
    """Raise `BadRequest` naming `codec` for a name that is not known."""
    if name not in CODEC_IDS:
        raise BadRequest("codec", f"{name!r} is none of {', '.join(CODEC_IDS)}")


def parse_codec(text: str) -> Codec:
    """The codec with that text. Raises `BadRequest` naming `codec` for a text that no codec has."""
    name, *words = text.split(" ") if len(text) <= MAX_TEXT_BYTES else [""]
    unknown = BadRequest("codec", f"{text[:80]!r} is not the text of a codec")
    if name not in _CODECS:
        raise unknown
    try:
        layers = Layers(_forms_of(words))
    except ValueError:
        raise unknown from None
    if layers.text(name) != text:
        raise unknown
    return _CODECS[name](layers)


def _forms_of(words: Sequence[str]) -> list[LayerForm]:
    """The layers that the words of a text describe. Raises `ValueError`."""
    if len(words) < 3:
        raise ValueError("no layers")
    dtype, order = KVDtype(words[0]), PageOrder(words[1])
    forms: list[LayerForm] = []
    for word in words[2:]:
        if (found := _LAYERS.fullmatch(word)) is None:
            raise ValueError(word)
        num_layers, num_planes, num_tokens, num_heads, head_dim = map(int, found.groups())
        if min(num_layers, num_tokens, num_heads, head_dim) < 1 or len(forms) + num_layers > MAX_LAYERS:
            raise ValueError(word)
        forms += [LayerForm(num_planes, num_tokens, num_heads, head_dim, dtype, order)] * num_layers
    return forms
