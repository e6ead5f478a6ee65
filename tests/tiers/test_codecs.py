"""Codecs give back what was stored, within what they state; nothing that is stored can hurt a decoder."""

import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import BadRequest
from hicache.layout import AttentionKind, KVDtype, KVLayout, LayerGroup, PageOrder
from hicache.tiers.codecs.base import Codec, layers_of
from hicache.tiers.codecs.int8 import LIMIT, PER_DIFFERENCE, PER_MAGNITUDE, TINY, Int8
from hicache.tiers.codecs.registry import CODEC_IDS, NONE, make_codec, parse_codec
from tests.tiers.real_kv import real_layout, real_pages
from tests.tiers.test_nvme_format import example, undump

Bits = npt.NDArray[np.uint16]
LOSSLESS = ("exponent-zstd", "lz4")
ALL = (*LOSSLESS, "int8")
MIXED = (
    LayerGroup(AttentionKind.FULL, 2, 3, 8),
    LayerGroup(AttentionKind.SLIDING_WINDOW, 1, 1, 24, window=8),
    LayerGroup(AttentionKind.LATENT, 1, 1, 40),
    LayerGroup(AttentionKind.RECURRENT, 1, 2, 16),
)
"""One layer group of each kind, none of whose layers is a whole number of blocks."""
CONTENTS: dict[str, Callable[[int], npt.NDArray[np.uint16]]] = {
    "zeros": lambda count: np.zeros(count, np.uint16),
    "negative zeros": lambda count: np.full(count, 0x8000, np.uint16),
    "all equal": lambda count: np.full(count, 0x3F91, np.uint16),
    "all bits set": lambda count: np.full(count, 0xFFFF, np.uint16),
    "random bits": lambda count: np.random.default_rng(1).integers(0, 1 << 16, count, np.uint16),
    "denormals": lambda count: np.random.default_rng(2).integers(0, 4, count, np.uint16),
    "every value": lambda count: np.resize(np.arange(1 << 16, dtype=np.uint16), count),
    "infinities and quiet and signalling NaNs": lambda count: np.resize(
        np.array([0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0x3F80], np.uint16), count
    ),
}


def codec_of(name: str, layout: KVLayout) -> Codec:
    codec = make_codec(name, layout)
    assert codec is not None
    return codec


def encoded(codec: Codec, layer: int, data: npt.NDArray[Any]) -> bytes | None:
    raw = memoryview(data.tobytes())
    into = bytearray(2 * len(raw) + 64)
    ends = codec.encode(layer, raw, memoryview(into))
    if ends is None:
        return None
    (num_bytes,) = ends
    return bytes(into[:num_bytes])


def decoded(codec: Codec, layer: int, stored: bytes, num_bytes: int) -> bytes | None:
    guarded = bytearray(b"\xa5" * (num_bytes + 16))
    good = codec.decode(layer, (len(stored),), memoryview(stored), memoryview(guarded)[8:-8])
    assert guarded[:8] == guarded[-8:] == b"\xa5" * 8, "bytes beside the layer were written"
    return bytes(guarded[8:-8]) if good else None


def floats(bits: npt.NDArray[Any], dtype: KVDtype) -> npt.NDArray[np.float64]:
    """Elements of that dtype as numbers."""
    if dtype is KVDtype.BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float16 if dtype is KVDtype.FLOAT16 else np.float32).astype(np.float64)


# ---- lossless


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_codec_gives_every_bit_back(name: str, order: PageOrder, contents: str) -> None:
    for page_size in (1, 16, 100):
        layout = KVLayout(MIXED, KVDtype.BFLOAT16, page_size, order)
        codec = codec_of(name, layout)
        for layer, form in enumerate(layers_of(layout).forms):
            data = CONTENTS[contents](form.num_elements)
            stored = encoded(codec, layer, data)
            assert stored is not None
            assert len(stored) <= data.nbytes + 1
            assert decoded(codec, layer, stored, data.nbytes) == data.tobytes()


@given(st.data())
def test_any_layer_comes_back_bit_for_bit(data: st.DataObject) -> None:
    group = LayerGroup(AttentionKind.FULL, 1, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)))
    dtype = data.draw(st.sampled_from([KVDtype.BFLOAT16, KVDtype.FLOAT16]))
    layout = KVLayout((group,), dtype, data.draw(st.integers(1, 20)), data.draw(st.sampled_from(PageOrder)))
    codec = codec_of(data.draw(st.sampled_from(LOSSLESS)), layout)
    count = layers_of(layout).forms[0].num_elements
    bits = np.array(data.draw(st.lists(st.integers(0, 65535), min_size=count, max_size=count)), np.uint16)
    stored = encoded(codec, 0, bits)
    assert stored is not None
    assert decoded(codec, 0, stored, bits.nbytes) == bits.tobytes()


def ratio_of(codec: Codec, pages: list[npt.NDArray[np.uint16]]) -> float:
    raw = stored = 0
    for page in pages:
        for layer in range(len(page)):
            one = encoded(codec, layer, page[layer])
            assert one is not None
            assert decoded(codec, layer, one, page[layer].nbytes) == page[layer].tobytes()
            raw, stored = raw + page[layer].nbytes, stored + len(one)
    return raw / stored


def test_real_kv_takes_two_thirds() -> None:
    """The goal is 1.45; published tries of the same idea give 1.43 to 1.45 for these page sizes."""
    assert ratio_of(codec_of("exponent-zstd", real_layout(16)), real_pages(16)) >= 1.47
    assert ratio_of(codec_of("exponent-zstd", real_layout(64)), real_pages(64)) >= 1.49
    assert ratio_of(codec_of("lz4", real_layout(16)), real_pages(16)) < 1.05


def test_padding_and_repetition_nearly_vanish() -> None:
    codec = codec_of("exponent-zstd", real_layout(64))
    page = np.zeros((2, 64, 3, 64), np.uint16)
    stored = encoded(codec, 0, page)
    assert stored is not None
    assert len(stored) < page.nbytes / 100


# ---- int8


@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.FLOAT16, KVDtype.FLOAT32])
@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("page_size", [8, 16, 64, 100])
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 15), spread=st.integers(0, 12))
def test_int8_is_within_the_error_that_it_states(
    dtype: KVDtype, order: PageOrder, page_size: int, seed: int, exponent: int, spread: int
) -> None:
    layout = KVLayout((LayerGroup(AttentionKind.FULL, 1, 2, 32),), dtype, page_size, order)
    (form,), codec = layers_of(layout).forms, codec_of("int8", layout)
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal(form.shape) * np.exp2(rng.integers(-spread, 1, form.shape) + float(exponent))
    wide += rng.choice([0.0, 1.0, -30.0]) * 2.0**exponent
    data = as_dtype(np.clip(wide, -LIMIT[dtype], LIMIT[dtype]), dtype)
    stored = encoded(codec, 0, data)
    assert stored is not None
    assert len(stored) == codec.exact_bytes
    back = decoded(codec, 0, stored, data.nbytes)
    assert back is not None
    right, got = floats(data, dtype), floats(np.frombuffer(back, data.dtype).reshape(form.shape), dtype)
    above, below = group_maxima(right, form.token_axis), -group_maxima(-right, form.token_axis)
    bound = PER_DIFFERENCE * (above - below) + PER_MAGNITUDE[dtype] * np.maximum(above, -below)
    bound += 2.0**-25 if dtype is KVDtype.FLOAT16 else TINY
    assert (np.abs(right - got) <= bound).all()


def as_dtype(values: npt.NDArray[np.float64], dtype: KVDtype) -> npt.NDArray[Any]:
    if dtype is not KVDtype.BFLOAT16:
        return values.astype(np.float16 if dtype is KVDtype.FLOAT16 else np.float32)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def group_maxima(values: npt.NDArray[np.float64], token_axis: int) -> npt.NDArray[np.float64]:
    """The largest element in each element's group, by the words of the codec's description."""
    maxima = np.empty_like(values)
    tokens = values.shape[token_axis]
    maxima[1] = values[1].max(axis=2, keepdims=True)
    if tokens < 16:
        maxima[0] = values[0].max(axis=2, keepdims=True)
        return maxima
    keys = np.moveaxis(values[0], token_axis - 1, 0)
    for start in range(0, tokens, 32):
        largest = keys[start : start + 32].max(axis=0, keepdims=True)
        np.moveaxis(maxima[0], token_axis - 1, 0)[start : start + 32] = largest
    return maxima


def test_int8_nearly_halves_real_kv_and_hardly_changes_it() -> None:
    for page_size, ratio in ((16, 1.72), (64, 1.82)):
        layout, codec = real_layout(page_size), codec_of("int8", real_layout(page_size))
        assert codec.exact_bytes is not None
        assert layout.page_bytes / codec.exact_bytes >= ratio
        for page in real_pages(page_size):
            for layer in range(len(page)):
                stored = encoded(codec, layer, page[layer])
                assert stored is not None
                back = decoded(codec, layer, stored, page[layer].nbytes)
                assert back is not None
                right = floats(page[layer], KVDtype.BFLOAT16)
                got = floats(np.frombuffer(back, np.uint16).reshape(right.shape), KVDtype.BFLOAT16)
                assert np.sqrt(((right - got) ** 2).mean() / (right**2).mean()) < 0.005


@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.FLOAT16, KVDtype.FLOAT32])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, "beyond"])
@pytest.mark.parametrize("plane", [0, 1])
def test_int8_refuses_what_it_cannot_represent(dtype: KVDtype, bad: float | str, plane: int) -> None:
    codec = codec_of("int8", real_layout(16, dtype))
    values = np.ones((2, 16, 3, 64))
    data = as_dtype(values, dtype)
    assert encoded(codec, 0, data) is not None
    values[plane, 5, 1, 7] = np.float64(LIMIT[dtype]) * 1.02 if bad == "beyond" else float(bad)
    with np.errstate(over="ignore"):  # beyond the largest float16 is infinity
        data = as_dtype(values, dtype)
    assert encoded(codec, 0, data) is None


def test_int8_survives_the_smallest_and_the_largest() -> None:
    codec = codec_of("int8", real_layout(16))
    for bits in (0x0001, 0x8001, 0x007F, 0x0080, 0x7E80, 0xFE80):
        data = np.full((2, 16, 3, 64), bits, np.uint16)
        stored = encoded(codec, 0, data)
        assert stored is not None
        back = decoded(codec, 0, stored, data.nbytes)
        assert back is not None
        right, got = floats(data, KVDtype.BFLOAT16), floats(np.frombuffer(back, np.uint16), KVDtype.BFLOAT16)
        assert np.isfinite(got).all()
        assert np.abs(right.ravel() - got).max() <= max(TINY, abs(right.flat[0]) / 250)


def test_a_signalling_nan_is_refused_quietly() -> None:
    data = np.full((2, 16, 3, 64), 0x7F81, np.uint16)
    assert encoded(codec_of("int8", real_layout(16)), 0, data) is None


# ---- room and bad frames


@pytest.mark.parametrize("name", ALL)
def test_too_little_room_is_said_and_nothing_is_written_beyond_it(name: str) -> None:
    codec, layer = codec_of(name, real_layout(16)), real_pages(16)[0][2]
    stored = encoded(codec, 2, layer)
    assert stored is not None
    for room in (0, 1, 8, 12, len(stored) // 2, len(stored) - 1):
        guarded = bytearray(b"\xa5" * (room + 64))
        assert codec.encode(2, memoryview(layer.tobytes()), memoryview(guarded)[:room]) is None
        assert guarded[room:] == b"\xa5" * 64
    exact = bytearray(len(stored))
    assert codec.encode(2, memoryview(layer.tobytes()), memoryview(exact)) == (len(stored),)
    assert exact == stored


@pytest.mark.parametrize("name", ALL)
def test_no_bytes_hurt_a_decoder(name: str) -> None:
    """Cut, extended, flipped and random frames are refused or decode to something; nothing else happens."""
    rng = np.random.default_rng(7)
    codec, layer = codec_of(name, real_layout(16)), real_pages(16)[1][3]
    stored = encoded(codec, 3, layer)
    assert stored is not None
    for cut in (0, 1, 2, 5, 9, 20, len(stored) - 1):
        assert decoded(codec, 3, stored[:cut], layer.nbytes) is None
    assert decoded(codec, 3, stored + b"\0", layer.nbytes) is None
    for _ in range(3000):
        damaged = bytearray(stored)
        for at in rng.integers(0, min(len(stored), int(rng.choice([16, 64, len(stored)]))), rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        decoded(codec, 3, bytes(damaged), layer.nbytes)
    for _ in range(300):
        decoded(codec, 3, rng.bytes(int(rng.integers(0, 200))), layer.nbytes)


def test_a_frame_that_claims_a_gigabyte_gets_none() -> None:
    import zstandard

    codec, layer = codec_of("exponent-zstd", real_layout(16)), real_pages(16)[0][0]
    compress = zstandard.ZstdCompressor().compress
    for num_bytes in (0, layer.size + 383, layer.size + 385, 1 << 24):
        packed = compress(bytes(num_bytes))
        head = b"\x01\x80" + len(packed).to_bytes(4, "little")
        assert decoded(codec, 0, head + packed + bytes(layer.size), layer.nbytes) is None
    packed = compress(bytes(layer.size + 384))
    head = b"\x01\x80" + len(packed).to_bytes(4, "little")
    assert decoded(codec, 0, head + packed + bytes(layer.size), layer.nbytes) is not None
    assert decoded(codec, 0, b"\x01\x80" + b"\xff" * 4 + bytes(layer.size), layer.nbytes) is None


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("name", ALL)
def test_a_page_is_encoded_as_its_layers_are(name: str, order: PageOrder) -> None:
    """Whole pages are encoded at once, and single layers read back, also where layers differ."""
    layout = KVLayout(MIXED, KVDtype.BFLOAT16, 20, order)
    codec, forms = codec_of(name, layout), layers_of(layout).forms
    rng = np.random.default_rng(1)
    layers = [rng.integers(0, 0x4000, form.num_elements, np.uint16) for form in forms]
    layers[1][:] = 0
    frames = [encoded(codec, at, layer) for at, layer in enumerate(layers)]
    page = b"".join(layer.tobytes() for layer in layers)
    into, back = memoryview(bytearray(2 * len(page))), memoryview(bytearray(len(page)))
    ends = codec.encode(0, memoryview(page), into)
    assert ends is not None
    assert [bytes(into[start:end]) for start, end in itertools.pairwise((0, *ends))] == frames
    assert codec.decode(0, ends, into[: ends[-1]], back)
    singly = [decoded(codec, at, frame or b"", layer.nbytes) for at, (frame, layer) in enumerate(zip(frames, layers))]
    assert singly == [bytes(back[start:stop]) for start, stop in layers_of(layout).ranges(0, len(page))]
    # A few layers in the middle.
    some = memoryview(b"".join(layer.tobytes() for layer in layers[1:4]))
    between = codec.encode(1, some, into)
    assert between is not None
    assert bytes(into[: between[-1]]) == b"".join(frame or b"" for frame in frames[1:4])
    assert codec.decode(1, between, into[: between[-1]], back[: len(some)])
    assert bytes(back[: len(some)]) == b"".join(layer or b"" for layer in singly[1:4])
    if codec.lossless:
        assert b"".join(layer or b"" for layer in singly) == page


@pytest.mark.parametrize("name", ALL)
def test_threads_share_a_codec(name: str) -> None:
    codec = codec_of(name, real_layout(16))
    layers = [(index, page[index]) for page in real_pages(16) for index in range(len(page))]
    alone = [encoded(codec, index, layer) for index, layer in layers]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            assert list(pool.map(lambda each: encoded(codec, *each), layers)) == alone
            backs = pool.map(lambda each: decoded(codec, each[0][0], each[1] or b"", each[0][1].nbytes),
                             zip(layers, alone))  # fmt: skip
            assert None not in list(backs)


# ---- the written format


@pytest.mark.parametrize("name", ["exponent-zstd", "int8"])
def test_the_examples_are_what_the_codecs_read_and_write(name: str) -> None:
    layer = np.arange(0x3F80, 0x3FC0, dtype=np.uint16)
    layer[::8] |= 0x8000
    codec, stored = parse_codec(f"{name} bfloat16 nhd 1x2x4x1x8"), undump(example(f"hexdump {name}"))
    back = decoded(codec, 0, stored, layer.nbytes)
    assert back is not None
    if name == "exponent-zstd":
        # Another version of zstd may find other bytes for the same; what it reads stays.
        assert back == layer.tobytes()
    else:
        assert stored == encoded(codec, 0, layer)
        right, got = floats(layer, KVDtype.BFLOAT16), floats(np.frombuffer(back, np.uint16), KVDtype.BFLOAT16)
        assert np.abs(right - got).max() <= (1.5 + 1.0) / 509 + 1.5 / 255


# ---- names


def test_names_and_numbers_are_those_on_disk() -> None:
    assert CODEC_IDS == {"none": 0, "exponent-zstd": 1, "lz4": 2, "int8": 3}
    assert make_codec(NONE, real_layout(16)) is None
    for name in ALL:
        codec = codec_of(name, real_layout(16))
        assert (codec.name, codec.codec_id, codec.lossless) == (name, CODEC_IDS[name], name != "int8")


@pytest.mark.parametrize("name", ALL)
def test_a_codec_comes_back_from_its_text(name: str) -> None:
    for layout in (real_layout(16), KVLayout(MIXED, KVDtype.FLOAT16, 20, PageOrder.HND)):
        codec = codec_of(name, layout)
        again = parse_codec(codec.text)
        assert (again.text, again.exact_bytes) == (codec.text, codec.exact_bytes)
        data = np.random.default_rng(3).integers(0, 0x3000, layout.layer_bytes(0) // 2, np.uint16)
        stored = encoded(codec, 0, data)
        assert stored is not None
        assert stored == encoded(again, 0, data)


def test_the_text_says_what_the_layers_are() -> None:
    assert codec_of("exponent-zstd", real_layout(16)).text == "exponent-zstd bfloat16 nhd 6x2x16x3x64"
    assert codec_of("int8", KVLayout(MIXED, KVDtype.FLOAT16, 20, PageOrder.HND)).text == (
        "int8 float16 hnd 2x2x20x3x8 1x2x20x1x24 1x1x20x1x40 1x1x1x2x16"
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "none", "lz5", "lz4", "lz4 ", "lz4 bfloat16", "int8", "int8 bfloat16 nhd", "int8 bfloat16 nhd 0x2x16x3x64",
        "int8 bfloat16 nhd 1x3x16x3x64", "int8 bfloat16 nhd 1x2x16x3x64 ", "int8 bfloat17 nhd 1x2x16x3x64",
        "int8 bfloat16 ndh 1x2x16x3x64", "int8 bfloat16 nhd 01x2x16x3x64", "int8 bfloat16 nhd 1025x2x16x3x64",
        "int8 bfloat16 nhd 1x2x16x3x64 1x2x16x3x64", "exponent-zstd float32 nhd 1x2x16x3x64",
        "int8 bfloat16 nhd" + " 1x2x16x3x64" * 9000, "int8 bfloat16 nhd \u0661x2x16x3x64",
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match=r"^codec: "):
        parse_codec(text)


def test_what_a_codec_is_not_for_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="'gzip' is none of none, exponent-zstd, lz4, int8"):
        make_codec("gzip", real_layout(16))
    with pytest.raises(BadRequest, match="bfloat16 and float16, not float32"):
        make_codec("exponent-zstd", real_layout(16, KVDtype.FLOAT32))
    with pytest.raises(BadRequest, match="not float8_e4m3fn"):
        make_codec("int8", real_layout(16, KVDtype.FLOAT8_E4M3))
    with pytest.raises(BadRequest, match="saves nothing with heads of 1 elements"):
        make_codec("int8", KVLayout.uniform(
            num_layers=1, num_kv_heads=4, head_dim=1, dtype=KVDtype.FLOAT16, page_size=8
        ))  # fmt: skip


@pytest.mark.parametrize(("name", "package", "module"), [
    ("exponent-zstd", "zstandard", "zstandard"), ("lz4", "lz4", "lz4.block"),
])  # fmt: skip
def test_a_missing_package_is_named(
    name: str, package: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadRequest, match=f"codec: '{name}' needs the package {package}"):
        make_codec(name, real_layout(16))
    assert isinstance(make_codec("int8", real_layout(16)), Int8)
