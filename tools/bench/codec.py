"""`hicache bench codec`: what codecs make of real KV, how much of it is lost, what it costs, and when it pays.

The KV is that of the demo's model over a document of the demo (`demo_kv`), cut into pages that are encoded as the NVMe
tier does it. Rows, for pages of 16 tokens and, with `_p64`, of 64:

- `lossless`: by how much `exponent-zstd` shrinks bfloat16 pages, beside zstd at level 1 over the same layers as they
  are. The bound is the entropy of the exponents of each channel, the other eight bits left as they are.
- `int8_error`: mean relative error of attention's output over keys and values that went through `int8` (float32 pages),
  beside those rounded to bfloat16; both against keys and values in float32, computed in float64.
  `int8_error_bfloat16` is what a user of bfloat16 pages gets: rounded to bfloat16, through `int8`, rounded again.
  `int8_shrinks` is by how much bfloat16 pages shrink.
- `encode_*`, `decode_*`: bytes of pages per second of one core, beside copying them. No code can be faster than the
  memory it reads and writes: the bound, from the same copy.
- `read_pays_below_*`, `write_pays_below_*`: the bandwidth of a device below which a page is sooner read (written) with
  the codec than without, by one thread; `read_page_*` is that page in microseconds on a device of 1 GB/s, beside the
  same without codec. Where other threads decode while some wait for the device, the codec pays up to as many times that
  bandwidth as there are cores to spare.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from hicache.layout import KVDtype, KVLayout
from hicache.tiers.codecs.base import Codec, Ends
from hicache.tiers.codecs.registry import make_codec
from hicache.tools.bench.results import Baseline, Note, Report, Row, alternated_us

if TYPE_CHECKING:
    from hicache.tools.bench.demo_kv import Recorded

NUM_TOKENS: Final = 2048
NUM_QUERIES: Final = 128
"""The last queries of the document, whose attention is compared."""
LOSSLESS_GOAL: Final = 1.45
INT8_GOAL: Final = 1.3
"""Times the error of bfloat16."""
DEVICE_GB_S: Final = 1.0
ROUNDS: Final = 5
MAX_TIMED_BYTES: Final = 16 << 20
"""Pages that one round encodes: more than a core's caches hold."""

Array = npt.NDArray[Any]
"""Bits of bfloat16 (uint16), or float32."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one size."""

    layout: KVLayout
    pages: Array
    """`[pages, layers, 2, page_size, kv_heads, head_dim]`, C order."""

    @property
    def suffix(self) -> str:
        return "" if self.layout.page_size == 16 else f"_p{self.layout.page_size}"


def run(report: Report, note: Note, *, divisor: int = 1) -> None:
    """Measure every row over `NUM_TOKENS / divisor` tokens, but at least 128."""
    from hicache.tools.bench.demo_kv import demo_kv

    num_tokens = max(128, NUM_TOKENS // divisor // 64 * 64)
    note(f"running {num_tokens} tokens through the demo's model")
    measure(report, note, demo_kv(num_tokens))


def measure(report: Report, note: Note, recorded: "Recorded") -> None:
    """Measure every row on what attention saw."""
    note("comparing attention over encoded pages")
    exact = _attention(recorded, recorded.kv)
    rounded = _error(exact, _attention(recorded, _from_bfloat16(_to_bfloat16(recorded.kv))))
    for page_size in (16, 64):
        _lossless(report, _pages(_to_bfloat16(recorded.kv), page_size))
        _int8(report, recorded, page_size, exact, rounded)
    note("timing")
    for page_size in (16, 64):
        pages = _pages(_to_bfloat16(recorded.kv), page_size)
        for name in ("exponent-zstd", "lz4", "int8"):
            _timed(report, pages, name)


# ---- how much smaller, how much worse


def _lossless(report: Report, pages: Pages) -> None:
    encoded = sum(len(stored) for _, stored in _encoded(_codec("exponent-zstd", pages.layout), pages))
    plain = zstandard.ZstdCompressor(level=1)
    whole = sum(len(plain.compress(layer)) for page in pages.pages for layer in page)
    num_bytes = pages.pages.nbytes
    report(Row(
        f"lossless{pages.suffix}", num_bytes / encoded, "x", Baseline("zstd-1", num_bytes / whole),
        bound=_entropy_bound(pages), goal=LOSSLESS_GOAL, higher_is_better=True,
    ))  # fmt: skip


def _entropy_bound(pages: Pages) -> float:
    """By how much the pages shrink if each channel's exponents took their entropy, and signs and mantissas 8 bits.

    Channels of few tokens flatter the bound: as many bits are added as estimates of entropy are known to lack (the
    number of values seen less one, over twice the tokens, in nats)."""
    exponents = (pages.pages >> 7).astype(np.uint8)
    channels = np.moveaxis(exponents, (0, 3), (0, 1)).reshape(exponents.shape[0] * exponents.shape[3], -1).T
    bits = 0.0
    for channel in channels:
        counts = np.bincount(channel)
        shares = counts[counts > 0] / channel.size
        bits -= float((shares * np.log2(shares)).sum())
        bits += (shares.size - 1) / (2 * channel.size * np.log(2))
    return float(16 / (8 + bits / len(channels)))


def _int8(report: Report, recorded: "Recorded", page_size: int, exact: Array, rounded: float) -> None:
    baseline = Baseline("bfloat16", rounded)
    for suffix, kv, goal in (("", recorded.kv, INT8_GOAL), ("_bfloat16", _to_bfloat16(recorded.kv), None)):
        pages = _pages(kv, page_size)
        codec, back = _codec("int8", pages.layout), np.empty_like(pages.pages)
        for page, (ends, stored) in zip(back, _encoded(codec, pages)):
            assert codec.decode(0, ends, memoryview(stored), _flat(page))
        again = back if back.dtype == np.float32 else _from_bfloat16(back)
        output = _attention(recorded, np.moveaxis(again, 0, 2).reshape(kv.shape))
        report(Row(
            f"int8_error{suffix}{pages.suffix}", _error(exact, output), "", baseline, goal=goal, goal_is_ratio=True
        ))  # fmt: skip
    assert codec.exact_bytes is not None
    report(Row(f"int8_shrinks{pages.suffix}", pages.layout.page_bytes / codec.exact_bytes, "x", bound=2.0))


def _attention(recorded: "Recorded", kv: Array) -> Array:
    """Causal attention of the last queries over keys and values, in float64: `[layers, queries, heads, head_dim]`."""
    num_tokens = kv.shape[2]
    num_queries = min(NUM_QUERIES, num_tokens)
    group = recorded.queries.shape[2] // kv.shape[3]
    hidden = np.triu(np.full((num_queries, num_tokens), -np.inf), num_tokens - num_queries + 1)
    outputs = np.empty((len(kv), num_queries, *recorded.queries.shape[2:]), np.float64)
    for layer, (key, value) in enumerate(kv.astype(np.float64)):
        queries = recorded.queries[layer, -num_queries:].astype(np.float64)
        for head in range(queries.shape[1]):
            scores = queries[:, head] @ key[:, head // group].T / np.sqrt(key.shape[-1]) + hidden
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            outputs[layer, :, head] = weights @ value[:, head // group] / weights.sum(axis=1, keepdims=True)
    return outputs


def _error(exact: Array, output: Array) -> float:
    """Mean over queries and heads of the length of the difference over the length of the output."""
    return float((np.linalg.norm(output - exact, axis=-1) / np.linalg.norm(exact, axis=-1)).mean())


# ---- how fast


def _timed(report: Report, pages: Pages, name: str) -> None:
    codec, layout = _codec(name, pages.layout), pages.layout
    some = Pages(layout, pages.pages[: max(1, MAX_TIMED_BYTES // layout.page_bytes)])
    frames = [(ends, memoryview(stored)) for ends, stored in _encoded(codec, some)]
    room, back = memoryview(bytearray(2 * layout.page_bytes)), np.empty_like(some.pages)
    num_bytes = some.pages.nbytes

    def encode() -> None:
        for page in some.pages:
            codec.encode(0, _flat(page), room)

    def decode() -> None:
        for page, (ends, stored) in zip(back, frames):
            codec.decode(0, ends, stored, _flat(page))

    def copy() -> None:
        np.copyto(back, some.pages)

    copy()
    encoding, decoding, copying = alternated_us([encode] * ROUNDS, [decode] * ROUNDS, [copy] * ROUNDS)
    ratio = num_bytes / sum(len(stored) for _, stored in frames)
    label = name.replace("-", "_")
    memory = Baseline("memcpy", num_bytes / copying / 1e3)
    bound = memory.value * 2 / (1 + 1 / ratio)
    for direction, time_us in (("encode", encoding), ("decode", decoding)):
        report(Row(
            f"{direction}_{label}{pages.suffix}", num_bytes / time_us / 1e3, "GB/s", memory, bound=bound,
            higher_is_better=True,
        ))  # fmt: skip
    for direction, time_us in (("read", decoding), ("write", encoding)):
        saved = num_bytes - num_bytes / ratio
        report(Row(f"{direction}_pays_below_{label}{pages.suffix}", saved / time_us / 1e3, "GB/s"))
    page_us = layout.page_bytes / DEVICE_GB_S / 1e3
    report(Row(
        f"read_page_{label}{pages.suffix}", page_us / ratio + decoding * layout.page_bytes / num_bytes, "µs",
        Baseline(f"without, at {DEVICE_GB_S:g} GB/s", page_us), bound=page_us / ratio,
    ))  # fmt: skip


# ---- parts of the above


def _pages(kv: Array, page_size: int) -> Pages:
    layers, _, num_tokens, num_heads, head_dim = kv.shape
    dtype = KVDtype.FLOAT32 if kv.dtype == np.float32 else KVDtype.BFLOAT16
    layout = KVLayout.uniform(
        num_layers=layers, num_kv_heads=num_heads, head_dim=head_dim, dtype=dtype, page_size=page_size
    )
    pages = kv.reshape(layers, 2, num_tokens // page_size, page_size, num_heads, head_dim)
    return Pages(layout, np.ascontiguousarray(np.moveaxis(pages, 2, 0)))


def _codec(name: str, layout: KVLayout) -> Codec:
    codec = make_codec(name, layout)
    assert codec is not None
    return codec


def _encoded(codec: Codec, pages: Pages) -> Iterator[tuple[Ends, bytes]]:
    """Every page encoded: where its layers end, and the bytes."""
    room = memoryview(bytearray(2 * pages.layout.page_bytes))
    for page in pages.pages:
        ends = codec.encode(0, _flat(page), room)
        assert ends is not None, f"{codec.name} does not fit into twice a page"
        yield ends, bytes(room[: ends[-1]])


def _flat(page: Array) -> memoryview:
    return page.reshape(-1).view(np.uint8).data


def _to_bfloat16(values: Array) -> Array:
    """Finite values rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)
