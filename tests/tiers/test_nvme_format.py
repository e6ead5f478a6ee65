"""What is written down in `tiers/FORMAT.md` is what the code writes; and headers are read by these rules alone."""

import hashlib
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from hicache.errors import BadRequest
from hicache.layout import AttentionKind, KVDtype, KVLayout, LayerGroup
from hicache.tier import PageIdentity
from hicache.tiers.nvme.geometry import MAX_SEGMENTS, Geometry, PageShape
from hicache.tiers.nvme.header import (
    PageHeader,
    SegmentHeader,
    checksum,
    decode_page_header,
    decode_segment_place,
    encode_page_header,
    encode_segment_header,
    segment_version,
)
from hicache.tiers.nvme.index import Index
from hicache.tiers.nvme.manifest import Manifest, decode_manifest, encode_manifest, manifest_version
from hicache.tiers.nvme.records import (
    LogHeader,
    Record,
    RecordType,
    budget_record,
    decode_frame,
    decode_log_header,
    encode_frames,
    encode_log_header,
    freed_records,
    namespace_record,
    pages_records,
)
from hicache.tiers.sums import payload_checksum, payload_checksums

FORMAT = Path(__file__).parents[2] / "tiers" / "FORMAT.md"
STORE = bytes(range(16))
SHAPE = PageShape((8, 4), 4)
DIGEST = hashlib.sha256(b"example").digest()
IDENTITY = PageIdentity(DIGEST, DIGEST, struct.pack("<4i", 101, 102, 103, 104))
PAYLOAD = bytes(range(12))
CHECKSUMS = (0x85AF88F8, 0xDB34C0D4, 0x1C10894B)
"""Of the payload's two layers and of all of it."""


def example_header() -> PageHeader:
    """The page of the worked example, from the sentences around it."""
    return PageHeader(STORE, 0, 1, 2, IDENTITY, 12, *payload_checksums(memoryview(PAYLOAD), SHAPE.layer_ranges), 6)


EPOCH = bytes(range(16, 32))
MANIFEST = Manifest(STORE, Geometry(SHAPE, slots_per_segment=3, num_slots=3), (0,))


def example_log() -> bytes:
    """The log of the worked example: an empty checkpoint and one round."""
    index = Index(SHAPE, 3)
    index.record(1, 2, 0, IDENTITY, (*example_header().layer_sums, example_header().payload_sum))
    first = encode_frames([Record(RecordType.END, b"")], EPOCH, first=0, sequence=6)
    records = [
        namespace_record(0, DIGEST, b"example"),
        *freed_records(np.array([0]), np.array([1])),
        budget_record(1 << 30),
        *pages_records(index.rows(np.array([1]))),
    ]
    later = encode_frames(records, EPOCH, first=1, sequence=8)
    last = encode_frames([Record(RecordType.CLEAN, b"")], EPOCH, first=5, sequence=8)
    return encode_log_header(LogHeader(STORE, EPOCH, 1)) + first + later + last


def encoded(header: PageHeader, num_bytes: int = 4096) -> memoryview:
    block = memoryview(bytearray(b"\xff" * num_bytes))
    encode_page_header(header, block)
    return block


def example(name: str) -> str:
    """The text of the fenced block of that name in FORMAT.md."""
    found = re.search(rf"^```{name}\n(.*?)^```", FORMAT.read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"FORMAT.md has no example {name!r}"
    return found[1]


def undump(text: str) -> bytes:
    """The bytes of a hex dump with `*` for lines of zeros."""
    data = bytearray()
    for line in text.splitlines():
        if line == "*":
            continue
        address, _, rest = line.partition("  ")
        data += bytes(int(address, 16) - len(data))
        if rest:
            chars = rest[rest.index("|") + 1 : -1]
            row = bytes.fromhex(rest[: rest.index("|")])
            assert chars == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
            data += row
    return bytes(data)


# ---- the written format


def test_the_example_page_header_is_what_the_code_writes() -> None:
    dumped = undump(example("hexdump page header"))
    assert dumped == bytes(encoded(example_header()))
    assert decode_page_header(memoryview(dumped)) == example_header()


def test_the_example_can_be_read_with_nothing_but_the_table() -> None:
    """A second reader, from the table of FORMAT.md and not from the code."""
    dumped = undump(example("hexdump page header"))
    assert dumped[:8] == b"HICPAGE\0"
    assert struct.unpack_from("<HHHH", dumped, 8) == (3, 1, 0, 0)
    assert dumped[16:32] == STORE
    assert struct.unpack_from("<II", dumped, 32) == (0, 1)
    assert struct.unpack_from("<QQQQ", dumped, 40) == (2, 6, 12, 12)
    assert struct.unpack_from("<II", dumped, 72) == (4, 2)
    assert dumped[80:112] == dumped[112:144] == hashlib.sha256(b"example").digest()
    assert dumped[144:256] == bytes(112)
    assert struct.unpack_from("<4i", dumped, 256) == (101, 102, 103, 104)
    parts = PAYLOAD[:8], PAYLOAD[8:], PAYLOAD
    assert struct.unpack_from("<III", dumped, 272) == CHECKSUMS
    assert tuple(xxh3_64_intdigest(part) % 2**32 for part in parts) == CHECKSUMS
    assert dumped[284:4092] == bytes(4092 - 284)
    assert struct.unpack_from("<I", dumped, 4092) == (crc32c(dumped[:4092]),)
    assert crc32c(b"123456789") == 0xE3069283
    assert xxh3_64_intdigest(b"123456789") == 0x72DCB18B67A17DFF
    assert xxh3_64_intdigest(b"") == 0x2D06800538D394C2, "as the authors of XXH3 publish it"


def test_the_example_segment_header_is_what_the_code_writes() -> None:
    block = memoryview(bytearray(b"\xff" * 4096))
    encode_segment_header(SegmentHeader(STORE, 0, 3, SHAPE), block)
    assert undump(example("hexdump segment header")) == bytes(block)
    assert segment_version(block) == 3
    assert decode_segment_place(block) == (STORE, 0, 3)


def test_the_example_manifest_is_what_the_code_writes() -> None:
    text = example("manifest").encode()
    assert text == encode_manifest(MANIFEST)
    assert manifest_version(text) == 3
    assert decode_manifest(text) == MANIFEST
    body = json.loads(text.splitlines()[1])
    assert body["layer_bytes"] == [8, 4]
    table = FORMAT.read_text().partition("Version 3 has these fields, in this order")[2].partition("\n\nOpened")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", "".join(rows)) == list(body)


def test_the_example_log_is_what_the_code_writes() -> None:
    assert undump(example("hexdump log")) == example_log()


def test_the_example_log_can_be_read_with_nothing_but_the_table() -> None:
    """A second reader, from the tables of FORMAT.md and not from the code."""
    dumped = undump(example("hexdump log"))
    assert dumped[:16] == b"HICJRNL\0" + struct.pack("<4H", 3, 0, 0, 0)
    assert dumped[16:48] == STORE + EPOCH
    assert struct.unpack_from("<Q", dumped, 48) == (1,)
    assert struct.unpack_from("<I", dumped, 4092) == (crc32c(dumped[:4092]),)
    at = 4096
    found: list[tuple[int, int, bytes]] = []
    while at < len(dumped):
        crc, length, kind, zero, ordinal, sequence = struct.unpack_from("<IIHHIQ", dumped, at)
        assert dumped[at + 24 : at + 40] == EPOCH
        end = at + 40 + length + -length % 8
        assert crc == crc32c(dumped[at + 4 : end])
        assert (zero, ordinal) == (0, len(found))
        found.append((kind, sequence, dumped[at + 40 : at + 40 + length]))
        at = end
    assert [(kind, sequence) for kind, sequence, _ in found] == [(5, 6), (1, 8), (3, 8), (4, 8), (2, 8), (6, 8)]
    assert found[0][2] == found[5][2] == b""
    assert found[1][2] == struct.pack("<II", 0, 7) + DIGEST + b"example"
    assert found[2][2] == struct.pack("<IIQ", 0, 0, 1)
    assert found[3][2] == struct.pack("<q", 1 << 30)
    page = found[4][2]
    assert struct.unpack_from("<IIQHHI", page) == (1, 0, 2, 0, 0, 12)
    assert page[24:56] == DIGEST
    assert struct.unpack_from("<4i", page, 56) == (101, 102, 103, 104)
    assert struct.unpack_from("<3I", page, 72) == CHECKSUMS
    assert len(page) == 84


def test_a_log_header_or_frame_with_any_single_bit_flipped_is_none() -> None:
    log = bytearray(example_log())
    for bit in range(8 * 4096):
        log[bit // 8] ^= 1 << bit % 8
        assert decode_log_header(memoryview(log)) is None, f"bit {bit}"
        log[bit // 8] ^= 1 << bit % 8
    at, ordinal = 4096, 0
    while at < len(log):
        frame = decode_frame(memoryview(log), at, EPOCH, ordinal)
        assert frame is not None
        for bit in range(8 * at, 8 * frame.end):
            log[bit // 8] ^= 1 << bit % 8
            assert decode_frame(memoryview(log), at, EPOCH, ordinal) is None, f"bit {bit}"
            log[bit // 8] ^= 1 << bit % 8
        assert decode_frame(memoryview(log), at, EPOCH, ordinal + 1) is None
        assert decode_frame(memoryview(log), at, STORE, ordinal) is None
        assert decode_frame(memoryview(log)[: frame.end - 1], at, EPOCH, ordinal) is None
        at, ordinal = frame.end, ordinal + 1
    assert ordinal == 6


# ---- headers

bytes_of = st.integers(0, 2**32 - 1)


@st.composite
def headers(draw: st.DrawFn) -> tuple[PageHeader, int]:
    page_size, num_layers = draw(st.integers(1, 256)), draw(st.integers(1, 1024))
    shape = PageShape((1,) * num_layers, page_size)
    digest = st.binary(min_size=32, max_size=32)
    tokens = draw(st.binary(min_size=4 * page_size, max_size=4 * page_size))
    sums = tuple(draw(st.lists(bytes_of, min_size=num_layers, max_size=num_layers)))
    identity = PageIdentity(draw(digest), draw(digest), tokens)
    store = draw(st.binary(min_size=16, max_size=16))
    generation = draw(st.integers(0, 2**63 - 1))
    sequence = draw(st.integers(0, 2**64 - 1))
    header = PageHeader(
        store, draw(bytes_of), draw(bytes_of), generation, identity, draw(bytes_of), sums, draw(bytes_of), sequence
    )
    return header, shape.header_bytes


@given(headers())
@settings(max_examples=60, deadline=None)
def test_headers_come_back_as_they_were_written(case: tuple[PageHeader, int]) -> None:
    header, num_bytes = case
    assert decode_page_header(encoded(header, num_bytes)) == header


def test_a_header_with_any_single_bit_flipped_is_no_header() -> None:
    block = encoded(example_header())
    for bit in range(8 * len(block)):
        block[bit // 8] ^= 1 << bit % 8
        assert decode_page_header(block) is None, f"bit {bit}"
        block[bit // 8] ^= 1 << bit % 8
    assert decode_page_header(block) == example_header()


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        pytest.param(0, b"h", id="magic"),
        pytest.param(8, b"\x04", id="version above"),
        pytest.param(8, b"\x02", id="version below"),
        pytest.param(10, b"\x02", id="length in blocks"),
        pytest.param(12, b"\x01", id="codec"),
        pytest.param(14, b"\x01", id="part"),
        pytest.param(56, b"\x0b", id="payload bytes alone"),
        pytest.param(64, b"\x0b", id="stored bytes alone"),
        pytest.param(76, b"\x00", id="no layer"),
        pytest.param(72, b"\xff\xff\xff\xff", id="tokens beyond the block"),
        pytest.param(76, b"\xff\xff\xff\xff", id="layers beyond the block"),
        pytest.param(76, struct.pack("<I", (4092 - 272) // 4 + 1), id="one layer more than there is room for"),
        pytest.param(144, b"\x01", id="first reserved byte"),
        pytest.param(255, b"\x01", id="last reserved byte"),
    ],
)
def test_a_header_of_another_kind_is_no_header_though_its_checksum_is_right(offset: int, data: bytes) -> None:
    block = encoded(example_header())
    block[offset : offset + len(data)] = data
    struct.pack_into("<I", block, 4092, checksum(block[:4092]))
    assert decode_page_header(block) is None


def test_a_page_of_zeros_is_no_header() -> None:
    assert decode_page_header(memoryview(bytearray(4096))) is None
    assert segment_version(memoryview(bytearray(4096))) is None


def test_checksums_cover_each_layer_and_the_whole() -> None:
    page = memoryview(bytes(range(256)) * 5)
    shape = PageShape((1, 255, 700, 324), 4)
    sums, whole = payload_checksums(page, shape.layer_ranges)
    assert sums == tuple(xxh3_64_intdigest(page[start:stop]) % 2**32 for start, stop in shape.layer_ranges)
    assert whole == xxh3_64_intdigest(page) % 2**32 == payload_checksum(page)


@pytest.mark.parametrize("offset", [*range(16), 32, 40, 64, 4091, 4092, 4095])
def test_a_damaged_segment_header_has_no_version(offset: int) -> None:
    block = memoryview(bytearray(4096))
    encode_segment_header(SegmentHeader(STORE, 7, 3, SHAPE), block)
    block[offset] ^= 4
    assert segment_version(block) is None
    assert segment_version(block[:4095]) is None


def test_a_manifest_is_whole_or_damaged_and_tells_any_version() -> None:
    manifest = encode_manifest(MANIFEST)
    for bit in range(8 * len(manifest)):
        flipped = bytearray(manifest)
        flipped[bit // 8] ^= 1 << bit % 8
        # The last newline is the one byte that says nothing.
        if bit // 8 < len(manifest) - 1:
            assert manifest_version(bytes(flipped)) is None, f"bit {bit}"
        assert decode_manifest(bytes(flipped)) is None
    for length in range(len(manifest) - 1):
        assert manifest_version(manifest[:length]) is None
    text = b"hicache-nvme 31\nsomething that is not JSON\nand more\n"
    assert manifest_version(text + b"crc32c %08x\n" % crc32c(text)) == 31
    for first in (b"hicache-nvme\n", b"hicache-nvme x\n", b"hicache-nvme 1 2\n", b"other 1\n", b"hicache-nvme -1\n"):
        assert manifest_version(first + b"crc32c %08x\n" % crc32c(first)) is None


# ---- sizes


def test_header_and_slot_sizes() -> None:
    assert PageShape((12_288,) * 30, 16).header_bytes == 4096
    assert PageShape((12_288,) * 30, 16).slot_bytes == 4096 + 368_640
    assert PageShape((1,) * 702, 256).header_bytes == 4096
    assert PageShape((1,) * 703, 256).header_bytes == 8192
    assert PageShape((1,) * 1024, 256).header_bytes == 8192
    assert PageShape((4096, 1), 1).slot_bytes == 3 * 4096


def test_the_shape_of_a_layout_is_its_layers_part_after_part() -> None:
    groups = (LayerGroup(AttentionKind.FULL, 2, 1, 8), LayerGroup(AttentionKind.LATENT, 3, 1, 16))
    layout = KVLayout(groups, KVDtype.FLOAT16, 4)
    shape = PageShape.of(layout)
    assert shape == PageShape((128, 128, 128, 128, 128), 4)
    assert shape.page_bytes == layout.page_bytes
    assert shape.layer_ranges[1] == (128, 256)


@given(page_bytes=st.integers(1, 50_000), spare=st.integers(0, 400_000), more=st.integers(0, 5_000_000))
@settings(max_examples=300, deadline=None)
def test_a_budget_is_kept_and_used(page_bytes: int, spare: int, more: int) -> None:
    shape = PageShape((page_bytes,), 16)
    smallest = 4096 + shape.slot_bytes
    segment = smallest + spare
    capacity = segment + more
    geometry = Geometry.plan(shape, capacity_bytes=capacity, segment_bytes=segment)
    assert geometry.num_slots >= 1
    assert geometry.total_bytes == sum(geometry.bytes_of(i) for i in range(geometry.num_segments)) <= capacity
    assert capacity - geometry.total_bytes < smallest
    assert sum(geometry.slots_of(i) for i in range(geometry.num_segments)) == geometry.num_slots
    assert all(geometry.bytes_of(i) <= segment for i in range(geometry.num_segments))
    assert geometry.locate(geometry.num_slots - 1)[0] == geometry.num_segments - 1


@pytest.mark.parametrize(
    ("capacity", "segment", "field"),
    [
        (20_479, None, "capacity_bytes"),
        (0, None, "capacity_bytes"),
        (-1, None, "capacity_bytes"),
        (1 << 20, 20_479, "segment_bytes"),
        (1 << 20, (1 << 20) + 1, "capacity_bytes"),
        ((MAX_SEGMENTS + 1) * 20_480, 20_480, "segment_bytes"),
    ],
)
def test_budgets_out_of_bounds_are_refused(capacity: int, segment: int | None, field: str) -> None:
    shape = PageShape((12_288,), 16)
    assert Geometry.plan(shape, capacity_bytes=20_480).num_slots == 1
    assert Geometry.plan(shape, capacity_bytes=MAX_SEGMENTS * 20_480, segment_bytes=20_480).num_slots == MAX_SEGMENTS
    with pytest.raises(BadRequest) as caught:
        Geometry.plan(shape, capacity_bytes=capacity, segment_bytes=segment)
    assert caught.value.field == field


def test_segments_are_large_by_default_and_few() -> None:
    shape = PageShape((12_288,) * 30, 16)
    assert Geometry.plan(shape, capacity_bytes=100 << 20).num_segments == 1
    assert Geometry.plan(shape, capacity_bytes=1 << 30).num_segments in (4, 5)
    terabytes = Geometry.plan(shape, capacity_bytes=4 << 40)
    assert terabytes.num_segments in (64, 65)
    assert terabytes.bytes_of(0) > 60 << 30


@pytest.mark.parametrize(
    ("layer_bytes", "page_size", "field"),
    [
        ((), 16, "layer_bytes"),
        ((0,), 16, "layer_bytes"),
        ((8, -1), 16, "layer_bytes"),
        ((1,) * 1025, 16, "layer_bytes"),
        ((1 << 30, 1), 16, "layer_bytes"),
        ((8,), 0, "page_size"),
        ((8,), 257, "page_size"),
    ],
)
def test_shapes_out_of_bounds_are_refused(layer_bytes: tuple[int, ...], page_size: int, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        PageShape(layer_bytes, page_size)
    assert caught.value.field == field


# ---- manifests that no program writes


@pytest.mark.parametrize(
    "change",
    [
        {"store": "00"},
        {"store": 7},
        {"page_size": 0},
        {"page_size": 4.0},
        {"page_size": True},
        {"layer_bytes": []},
        {"layer_bytes": [8, 0]},
        {"layer_bytes": [8, 5]},
        {"layer_bytes": "84"},
        {"num_slots": 0},
        {"num_slots": 1 << 31},
        {"num_slots": 4},
        {"slots_per_segment": 0},
        {"segments": []},
        {"segments": [0, 1]},
        {"segments": [-1]},
        {"segments": [1_000_000]},
        {"segments": [None]},
        {"slots_per_segment": 1, "segments": [0, 0, 1]},
        {"page_bytes": 13},
        {"header_bytes": 8192},
        {"slot_bytes": 4096},
        {"more": 1},
        {"segments": None},
    ],
)
def test_a_manifest_that_no_program_writes_is_damaged_though_its_checksum_is_right(change: dict[str, object]) -> None:
    body = json.loads(encode_manifest(MANIFEST).splitlines()[1]) | change
    text = f"hicache-nvme 3\n{json.dumps(body, separators=(',', ':'))}\n".encode()
    assert decode_manifest(text + b"crc32c %08x\n" % crc32c(text)) is None
    del body[next(iter(change))]
    text = f"hicache-nvme 3\n{json.dumps(body, separators=(',', ':'))}\n".encode()
    assert decode_manifest(text + b"crc32c %08x\n" % crc32c(text)) is None or change == {"more": 1}
    for line in (b"[]", b"1", b"{", b"[" * 10_000, b"\xff"):
        text = b"hicache-nvme 3\n" + line + b"\n"
        assert decode_manifest(text + b"crc32c %08x\n" % crc32c(text)) is None
