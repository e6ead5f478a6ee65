"""Pages that are encoded on their way to NVMe: right, verified, restartable, and no more of them than fit."""

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import BadRequest, TierUnavailable
from hicache.layout import KVDtype
from hicache.namespace import Namespace
from hicache.tier import LayerRead, Outcome, PageIdentity, PageRead, PageWrite, Slots, Tier
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import Coding, PageShape
from hicache.tiers.nvme.header import PageHeader, decode_page_header, encode_page_header
from tests.stamps import identity_chain
from tests.tiers.contract import GUARD, TierContract, run
from tests.tiers.nvme import LANES, capacity_for, read_raw, shape_of, small_tier, write_raw
from tests.tiers.real_kv import real_layout, real_pages

LAYOUT = real_layout(16)
LOSSLESS = ("exponent-zstd", "lz4")
ALL = (*LOSSLESS, "int8")
NAMESPACE = Namespace(model="sha256:00", layout=LAYOUT, codec="int8")
PAGES = [page.reshape(-1).view(np.uint8).data.toreadonly() for page in real_pages(16)]
"""Four pages of real KV."""
NOISE = memoryview(np.random.default_rng(5).bytes(LAYOUT.page_bytes))


def identities(num_pages: int, namespace: Namespace = NAMESPACE) -> list[PageIdentity]:
    """Consecutive pages of one prompt in that namespace."""
    chain, prefix = [], namespace.digest
    for each in identity_chain(num_pages, page_size=16):
        chain.append(PageIdentity(namespace.digest, prefix, each.tokens))
        prefix = chain[-1].chain
    return chain


def open_tier(directory: Path, codec: str, *, num_pages: int = 8, **options: Any) -> NvmeTier:
    shape = PageShape.of(LAYOUT, codec=codec, codec_ratio=options.get("codec_ratio"))
    capacity_bytes, segment_bytes = capacity_for(shape, num_pages, slots_per_segment=min(num_pages, 4))
    tier = NvmeTier.open(
        directory, layout=LAYOUT, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, codec=codec,
        **{**LANES, **options},
    )  # fmt: skip
    tier.remember(NAMESPACE.digest, NAMESPACE.encode())
    return tier


@asynccontextmanager
async def encoding_tier(directory: Path, codec: str, **options: Any) -> AsyncIterator[NvmeTier]:
    tier = open_tier(directory / "store", codec, **options)
    try:
        yield tier
    finally:
        await tier.close()


async def write(
    tier: NvmeTier, slots: Slots, chain: Sequence[PageIdentity], pages: Sequence[memoryview]
) -> list[Outcome]:
    return await tier.write([
        PageWrite(int(slot), tier.generation(int(slot)), identity, page)
        for slot, identity, page in zip(slots, chain, pages, strict=True)
    ])


async def read(
    tier: NvmeTier, slots: Slots, chain: Sequence[PageIdentity]
) -> tuple[list[Outcome], list[bytes]]:
    buffers = [np.full(tier.page_bytes, GUARD, np.uint8) for _ in slots]
    outcomes = await tier.read([
        PageRead(int(slot), tier.generation(int(slot)), identity, buffer.data)
        for slot, identity, buffer in zip(slots, chain, buffers, strict=True)
    ])
    return outcomes, [buffer.tobytes() for buffer in buffers]


def read_layers(tier: NvmeTier, slot: int, identity: PageIdentity) -> tuple[list[Outcome], list[bytes]]:
    """Every layer of a page, each read alone."""
    buffers = [np.full(num_bytes, GUARD, np.uint8) for num_bytes in tier._shape.layer_bytes]
    ticket = tier.start_layer_reads([
        LayerRead(slot, tier.generation(slot), identity, layer, buffer.data) for layer, buffer in enumerate(buffers)
    ])
    return ticket.wait(60), [buffer.tobytes() for buffer in buffers]


def layers_of(page: bytes | memoryview) -> list[bytes]:
    step = LAYOUT.layer_bytes(0)
    return [bytes(page[start : start + step]) for start in range(0, len(page), step)]


class TestEncodedContract(TierContract):
    """All that a tier promises, with pages that no codec makes smaller."""

    @asynccontextmanager
    async def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AsyncIterator[NvmeTier]:
        plain = shape_of(page_bytes)
        runs = itertools.groupby(plain.layer_bytes)
        layers = " ".join(f"{len(list(run))}x1x1x1x{num_bytes}" for num_bytes, run in runs)
        coding = Coding.parse(f"lz4 int8 nhd {layers}", page_bytes + plain.num_layers)
        async with small_tier(PageShape(plain.layer_bytes, plain.page_size, coding), capacity_pages) as tier:
            yield tier

    def raw_page(self, tier: Tier, slot: int) -> bytes:
        """The stored layers without the byte in front of each."""
        assert isinstance(tier, NvmeTier)
        stored = read_raw(tier, slot, tier._shape.header_bytes, tier._shape.room_bytes)
        starts = [start + layer for layer, (start, _) in enumerate(tier._shape.layer_ranges)]
        return b"".join(
            stored[start + 1 : start + 1 + num_bytes] for start, num_bytes in zip(starts, tier._shape.layer_bytes)
        )


# ---- right, and more of it


@pytest.mark.parametrize("codec", ALL)
def test_real_pages_come_back_whole_and_layer_by_layer(codec: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, codec) as tier:
            slots, chain = tier.allocate(4), identities(4)
            assert await write(tier, slots, chain, PAGES) == [Outcome.OK] * 4
            outcomes, pages = await read(tier, slots, chain)
            assert outcomes == [Outcome.OK] * 4
            if codec in LOSSLESS:
                assert pages == [bytes(page) for page in PAGES]
            for slot, identity, page in zip(slots, chain, pages, strict=True):
                assert read_layers(tier, int(slot), identity) == ([Outcome.OK] * 6, layers_of(page))
            # One by one as well as in a run, and from a slot that a longer page had before.
            for slot, identity, page in zip(slots, chain, pages, strict=True):
                assert await read(tier, np.array([slot], np.int32), [identity]) == ([Outcome.OK], [page])

    run(main())


@pytest.mark.parametrize("codec", ALL)
def test_pages_survive_a_restart(codec: str, tmp_path: Path) -> None:
    chain = identities(4)

    async def first() -> list[bytes]:
        async with encoding_tier(tmp_path, codec) as tier:
            slots = tier.allocate(4)
            assert await write(tier, slots, chain, PAGES) == [Outcome.OK] * 4
            return (await read(tier, slots, chain))[1]

    async def second(pages: list[bytes]) -> None:
        async with encoding_tier(tmp_path, codec) as tier:
            (found,) = tier.recovered()
            assert (found.namespace, found.chain) == (NAMESPACE.encode(), chain[-1].chain)
            assert await read(tier, found.slots, chain) == ([Outcome.OK] * 4, pages)
            for slot, identity, page in zip(found.slots, chain, pages, strict=True):
                assert read_layers(tier, int(slot), identity) == ([Outcome.OK] * 6, layers_of(page))

    async def main() -> None:
        await second(await first())

    run(main())


def test_the_same_budget_holds_more_pages(tmp_path: Path) -> None:
    async def main() -> None:
        pages = {}
        for codec in ("none", *ALL):
            tier = NvmeTier.open(
                tmp_path / codec, layout=LAYOUT, capacity_bytes=4 << 20, segment_bytes=1 << 20, codec=codec
            )
            pages[codec] = tier.capacity_pages
            assert tier.total_bytes <= 4 << 20
            await tier.close()
        # Headers take a block, and slots whole blocks: of these small pages more than a codec's ratio says.
        assert pages["exponent-zstd"] >= 1.25 * pages["none"]
        assert pages["int8"] >= 1.55 * pages["none"]
        assert pages["lz4"] <= pages["none"]

    run(main())


def test_a_page_of_its_own_writes_only_the_blocks_it_needs(tmp_path: Path) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, "exponent-zstd") as tier:
            slots, chain = tier.allocate(1), identities(1)
            slot, room = int(slots[0]), tier._shape.slot_bytes - 4096
            write_raw(tier, slot, 4096, b"\xa5" * room)
            assert await write(tier, slots, chain, [memoryview(bytes(LAYOUT.page_bytes))]) == [Outcome.OK]
            header = decode_page_header(memoryview(read_raw(tier, slot, 0, 4096)))
            assert header is not None
            assert header.stored_bytes < 4096
            stored = read_raw(tier, slot, 4096, room)
            assert stored[header.stored_bytes :] == bytes(4096 - header.stored_bytes) + b"\xa5" * (room - 4096)

    run(main())


# ---- what does not fit


@pytest.mark.parametrize("codec", ALL)
def test_a_page_that_does_not_fit_leaves_its_neighbours_alone(codec: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, codec, codec_ratio=None if codec == "int8" else 1.02) as tier:
            slots, chain = tier.allocate(4), identities(4)
            noise = NOISE if codec != "int8" else memoryview(b"\xff" * LAYOUT.page_bytes)
            pages = [PAGES[0], noise, PAGES[2], PAGES[3]]
            expected = [Outcome.OK, Outcome.ERROR, Outcome.OK, Outcome.OK]
            if codec == "lz4":
                pages = [memoryview(bytes(LAYOUT.page_bytes)) if page is not noise else noise for page in pages]
            assert await write(tier, slots, chain, pages) == expected
            assert tier.counters()["write.incompressible"] == 1
            assert tier.down is None
            outcomes, found = await read(tier, slots, chain)
            assert outcomes == [Outcome.OK, Outcome.NOT_FOUND, Outcome.OK, Outcome.OK]
            if codec in LOSSLESS:
                assert [found[at] for at in (0, 2, 3)] == [bytes(pages[at]) for at in (0, 2, 3)]
            # The slot is as good as any other.
            tier.free(slots[1:2])
            again = tier.allocate(1)
            assert await write(tier, again, [chain[1]], [pages[0]]) == [Outcome.OK]

    run(main())


def test_what_was_in_a_slot_is_not_served_after_a_page_that_did_not_fit(tmp_path: Path) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, "exponent-zstd") as tier:
            slots, chain = tier.allocate(1), identities(1)
            assert await write(tier, slots, chain, PAGES[:1]) == [Outcome.OK]
            assert await write(tier, slots, chain, [NOISE]) == [Outcome.ERROR]
            assert (await read(tier, slots, chain))[0] == [Outcome.NOT_FOUND]

    run(main())


# ---- damage


@pytest.mark.parametrize("codec", ALL)
def test_a_flipped_bit_spoils_its_layer_alone_and_the_page(codec: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(11)

    async def main() -> None:
        async with encoding_tier(tmp_path, codec) as tier:
            slots, chain = tier.allocate(4), identities(4)
            assert await write(tier, slots, chain, PAGES) == [Outcome.OK] * 4
            slot, identity = int(slots[1]), chain[1]
            ends = tier._index.layer_ends(slot)
            right = read_layers(tier, slot, identity)[1]
            for layer, (start, stop) in enumerate(itertools.pairwise((0, *ends))):
                for at in (start, stop - 1, *rng.integers(start, stop, 4)):
                    place = tier._shape.header_bytes + int(at)
                    before = read_raw(tier, slot, place, 1)
                    write_raw(tier, slot, place, bytes([before[0] ^ 1 << int(rng.integers(8))]))
                    outcomes, _ = await read(tier, slots, chain)
                    assert outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK]
                    outcomes, layers = read_layers(tier, slot, identity)
                    assert outcomes == [
                        Outcome.CORRUPT if each == layer else Outcome.OK for each in range(LAYOUT.num_layers)
                    ]
                    assert [layers[each] for each in range(6) if each != layer] == [
                        right[each] for each in range(6) if each != layer
                    ]
                    write_raw(tier, slot, place, before)
            assert (await read(tier, slots, chain))[0] == [Outcome.OK] * 4

    run(main())


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (lambda ends: (*ends[:2], ends[2] + 1, *ends[3:]), "other_payload"),
        (lambda ends: (ends[1], ends[0], *ends[2:]), "other_payload"),
        (lambda ends: (*ends[:-1], 1 << 31), "other_payload"),
        (lambda ends: (0,) * len(ends), "other_payload"),
    ],
)
def test_ends_that_a_journal_made_up_are_damage(words: Any, finding: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, "exponent-zstd") as tier:
            slots, chain = tier.allocate(4), identities(4)
            assert await write(tier, slots, chain, PAGES) == [Outcome.OK] * 4
            for slot in slots:
                tier._index._words[slot, 7:] = words(tier._index.layer_ends(int(slot)))
            assert (await read(tier, slots, chain))[0] == [Outcome.CORRUPT] * 4
            assert (await read(tier, slots[3:], chain[3:]))[0] == [Outcome.CORRUPT]
            assert tier.counters()[f"read.{finding}"] + tier.counters().get("read.short", 0) == 5
            for slot, identity in zip(slots, chain):
                outcomes, layers = read_layers(tier, int(slot), identity)
                assert Outcome.CORRUPT in outcomes
                right = layers_of(PAGES[int(slot)])
                assert all(
                    layers[at] == right[at] for at, outcome in enumerate(outcomes) if outcome is Outcome.OK
                )

    run(main())


def test_a_header_of_another_codec_is_damage(tmp_path: Path) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, "exponent-zstd") as tier:
            slots, chain = tier.allocate(1), identities(1)
            assert await write(tier, slots, chain, PAGES[:1]) == [Outcome.OK]
            block = memoryview(bytearray(read_raw(tier, int(slots[0]), 0, 4096)))
            header = decode_page_header(block)
            assert header is not None
            assert header.codec == 1
            encode_page_header(replace(header, codec=2), block)
            write_raw(tier, int(slots[0]), 0, bytes(block))
            assert (await read(tier, slots, chain))[0] == [Outcome.CORRUPT]
            assert tier.counters()["read.bad_header"] == 1

    run(main())


@given(st.data())
def test_headers_keep_the_ends_of_layers(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 400))
    word = st.integers(0, 2**32 - 1)
    sums = tuple(data.draw(st.lists(word, min_size=num_layers, max_size=num_layers)))
    ends = tuple(sorted(data.draw(st.lists(word, min_size=num_layers, max_size=num_layers))))
    identity = identities(1)[0]
    header = PageHeader(bytes(16), 1, 2, 3, identity, 1 << 20, sums, 5, 4, data.draw(st.sampled_from([1, 2, 3])), ends)
    block = memoryview(bytearray(4096))
    encode_page_header(header, block)
    assert decode_page_header(block) == header
    assert header.stored_bytes == ends[-1]
    block[12] = 4  # a codec that nobody knows
    assert decode_page_header(block) is None


# ---- lossy only for those who asked


def test_a_lossy_tier_takes_only_namespaces_that_name_its_codec(tmp_path: Path) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, "int8") as tier:
            slots = tier.allocate(3)
            exact = Namespace(model="sha256:00", layout=LAYOUT)
            unknown = Namespace(model="sha256:01", layout=LAYOUT, codec="int8")
            forged = Namespace(model="sha256:02", layout=LAYOUT)
            tier.remember(exact.digest, exact.encode())
            with pytest.raises(BadRequest, match="record"):
                tier.remember(forged.digest, unknown.encode())
            for namespace in (exact, unknown, forged):
                outcomes = await write(tier, slots, identities(3, namespace), PAGES[:3])
                assert outcomes == [Outcome.ERROR] * 3
            assert tier.counters()["write.lossy_refused"] == 9
            mixed = [identities(1, exact)[0], identities(1)[0], identities(1, unknown)[0]]
            outcomes = await write(tier, slots, mixed, PAGES[:3])
            assert outcomes == [Outcome.ERROR, Outcome.OK, Outcome.ERROR]
            assert (await read(tier, slots, mixed))[0] == [Outcome.NOT_FOUND, Outcome.OK, Outcome.NOT_FOUND]

    run(main())


@pytest.mark.parametrize("codec", ["none", *LOSSLESS])
def test_a_lossless_tier_takes_any_namespace(codec: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, codec) as tier:
            slots, chain = tier.allocate(1), identities(1, Namespace(model="sha256:00", layout=LAYOUT))
            assert await write(tier, slots, chain, PAGES[:1]) == [Outcome.OK]
            assert await read(tier, slots, chain) == ([Outcome.OK], [bytes(PAGES[0])])

    run(main())


# ---- opening


def names_and_contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize(("there", "asked", "problem"), [
    ("none", {"codec": "exponent-zstd"}, "holds pages with codec 'none' in 73728 bytes, not with 'exponent-zstd"),
    ("exponent-zstd", {"codec": "none"}, "holds pages with codec 'exponent-zstd bfloat16 nhd 6x2x16x3x64' in 56719"),
    ("exponent-zstd", {"codec": "exponent-zstd", "codec_ratio": 1.4}, "in 56719 bytes, not with .* in 52668 bytes"),
    ("exponent-zstd", {"codec": "int8"}, "not with 'int8 bfloat16 nhd 6x2x16x3x64'"),
])  # fmt: skip
def test_another_codec_is_refused_and_nothing_altered(
    there: str, asked: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with encoding_tier(tmp_path, there, num_pages=2) as tier:
            slots, chain = tier.allocate(1), identities(1)
            assert await write(tier, slots, chain, PAGES[:1]) == [Outcome.OK]
        before = names_and_contents(tmp_path / "store")
        with pytest.raises(TierUnavailable, match=problem):
            open_tier(tmp_path / "store", num_pages=2, **asked)
        assert names_and_contents(tmp_path / "store") == before
        async with encoding_tier(tmp_path, there, num_pages=2) as tier:
            (found,) = tier.recovered()
            assert await read(tier, found.slots, chain) == ([Outcome.OK], [bytes(PAGES[0])])

    run(main())


@pytest.mark.parametrize(("options", "problem"), [
    ({"codec": "gzip"}, "codec: 'gzip' is none of"),
    ({"codec": "exponent-zstd", "codec_ratio": 0.9}, "codec_ratio: 0.9 is not within 1 to 16"),
    ({"codec": "exponent-zstd", "codec_ratio": 17.0}, "codec_ratio: 17.0 is not within 1 to 16"),
    ({"codec": "exponent-zstd", "codec_ratio": float("nan")}, "codec_ratio: nan is not within 1 to 16"),
    ({"codec_ratio": 1.3}, "codec_ratio: needs a codec"),
    ({"codec": "int8", "codec_ratio": 2.0}, "codec_ratio: is not needed: 'int8' gives every page the same length"),
    ({"codec": "exponent-zstd", "layout": real_layout(16, KVDtype.FLOAT32)}, "codec: 'exponent-zstd' is for bfloat16"),
    ({"codec": "lz4", "layout": shape_of(8192)}, "layout: a codec needs a KVLayout"),
    ({"codec": "gzip", "layout": shape_of(8192)}, "codec: 'gzip' is none of"),
])  # fmt: skip
def test_a_wrong_codec_is_refused_before_anything_is_made(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"layout": LAYOUT, "capacity_bytes": 1 << 20, **options}
    with pytest.raises(BadRequest, match=problem):
        NvmeTier.open(tmp_path / "store", **arguments)
    assert not (tmp_path / "store").exists()
