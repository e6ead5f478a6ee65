"""Codecs by name, and by the text that a manifest keeps.

    text   := "lz4" | ("exponent-zstd" | "int8") " " dtype " " order (" " layers)*
    layers := count "x" planes "x" tokens "x" heads "x" head_dim
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from hicache.errors import BadRequest
from hicache.layout import MAX_LAYERS, KVDtype, KVLayout, PageOrder
from hicache.tiers.codecs.base import Codec, LayerForm, layer_forms
from hicache.tiers.codecs.exponent import ExponentZstd
from hicache.tiers.codecs.int8 import Int8
from hicache.tiers.codecs.lz4_block import Lz4

NONE: Final = "none"
NONE_ID: Final = 0
CODEC_IDS: Final = {
    NONE: NONE_ID,
    ExponentZstd.name: ExponentZstd.codec_id,
    Lz4.name: Lz4.codec_id,
    Int8.name: Int8.codec_id,
}
"""Names and the numbers that page headers hold. A number is never used again for anything else."""
LOSSY: Final = frozenset({Int8.name})
"""Codecs that a namespace must name before its pages may pass through them."""
MAX_TEXT_BYTES: Final = 32 << 10
"""Longest text of a codec."""

_LAYERS: Final = re.compile(r"(\d{1,4})x([12])x(\d{1,3})x(\d{1,7})x(\d{1,7})", re.ASCII)


def make_codec(name: str, layout: KVLayout) -> Codec | None:
    """The codec of that name for a layout's pages; None for `none`.

    Raises `BadRequest` naming `codec` for a name that is not known, a dtype or layout that the codec is not for, and a
    package that is missing.
    """
    check_name(name)
    return None if name == NONE else _make(name, layer_forms(layout))


def check_name(name: str) -> None:
    """Raise `BadRequest` naming `codec` for a name that is not known."""
    if name not in CODEC_IDS:
        raise BadRequest("codec", f"{name!r} is none of {', '.join(CODEC_IDS)}")


def parse_codec(text: str) -> Codec:
    """The codec with that text. Raises `BadRequest` naming `codec` for a text that no codec has."""
    name, *words = text.split(" ") if len(text) <= MAX_TEXT_BYTES else [""]
    unknown = BadRequest("codec", f"{text[:80]!r} is not the text of a codec")
    forms: list[LayerForm] = []
    if name not in CODEC_IDS or name == NONE:
        raise unknown
    if name != Lz4.name:
        try:
            forms = _forms_of(words)
        except ValueError:
            raise unknown from None
    codec = _make(name, forms)
    if codec.text != text:
        raise unknown
    return codec


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


def _make(name: str, forms: Sequence[LayerForm]) -> Codec:
    if name == Lz4.name:
        return Lz4()
    text = _text_of(name, forms)
    return ExponentZstd(forms, text) if name == ExponentZstd.name else Int8(forms, text)


def _text_of(name: str, forms: Sequence[LayerForm]) -> str:
    words = [name, forms[0].dtype.value, forms[0].order.value]
    for form, run in groupby(forms):
        words.append(
            f"{len(list(run))}x{form.num_planes}x{form.num_tokens}x{form.num_heads}x{form.head_dim}"
        )
    return " ".join(words)
