"""The identity record: every field counts, and no two different records encode alike."""

import dataclasses
import hashlib
import struct
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import BadRequest
from hicache.layout import MAX_LAYERS, AttentionKind, KVDtype, KVLayout, LayerGroup, PageOrder
from hicache.namespace import MAX_FIELD_BYTES, MAX_RECORD_BYTES, KeyEncoding, Namespace, PositionScheme

LAYOUT: Final = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KVDtype.BFLOAT16, page_size=16)
BASE: Final = Namespace(model="sha256:ab", layout=LAYOUT)
TEXT_FIELDS: Final = ("tenant", "model", "tokenizer", "adapter", "codec")

OTHER_LAYOUTS: Final[dict[str, list[KVLayout]]] = {
    "groups": [
        replace(LAYOUT, groups=(LayerGroup(AttentionKind.FULL, 31, 3, 64),)),
        replace(LAYOUT, groups=(LayerGroup(AttentionKind.FULL, 30, 4, 64),)),
        replace(LAYOUT, groups=(LayerGroup(AttentionKind.FULL, 30, 3, 128),)),
        replace(LAYOUT, groups=(LayerGroup(AttentionKind.LATENT, 30, 3, 64),)),
        replace(LAYOUT, groups=(LayerGroup(AttentionKind.SLIDING_WINDOW, 30, 3, 64, window=512),)),
        replace(LAYOUT, groups=(LayerGroup(AttentionKind.SLIDING_WINDOW, 30, 3, 64, window=513),)),
        # The same layers, cut into groups otherwise and in another order.
        replace(LAYOUT, groups=(LayerGroup(AttentionKind.FULL, 10, 3, 64), LayerGroup(AttentionKind.FULL, 20, 3, 64))),
        replace(LAYOUT, groups=(LayerGroup(AttentionKind.FULL, 20, 3, 64), LayerGroup(AttentionKind.FULL, 10, 3, 64))),
    ],
    "dtype": [replace(LAYOUT, dtype=dtype) for dtype in KVDtype if dtype is not LAYOUT.dtype],
    "page_size": [replace(LAYOUT, page_size=32)],
    "order": [replace(LAYOUT, order=PageOrder.HND)],
}
OTHER_POSITIONS: Final[dict[str, list[PositionScheme]]] = {
    "kind": [PositionScheme(kind="none")],
    "base": [PositionScheme(base=10_001.0), PositionScheme(base=10_000.000000000002)],
    "scaling": [PositionScheme(scaling="yarn:4")],
    "keys": [PositionScheme(keys=KeyEncoding.UNROTATED)],
}
OTHER_VALUES: Final[dict[str, list[Any]]] = {
    "model": ["sha256:ac", "sha256:a", "sha256:ab\0", "SHA256:ab"],
    "layout": [layout for layouts in OTHER_LAYOUTS.values() for layout in layouts],
    "tenant": ["x", "\0"],
    "tokenizer": ["x"],
    "adapter": ["x"],
    "adapter_generation": [1, 2**64 - 1],
    "positions": [scheme for schemes in OTHER_POSITIONS.values() for scheme in schemes],
    "num_ranks": [2],
    "pipeline_ranges": [((0, 30),), ((0, 15), (15, 30)), ((0, 30), (15, 30))],
    "codec": ["x"],
    "salt": [b"x", b"\0", b"\0\0"],
}
"""For every field, values other than that of `BASE`."""


@pytest.mark.parametrize(
    ("record", "others"), [(Namespace, OTHER_VALUES), (KVLayout, OTHER_LAYOUTS), (PositionScheme, OTHER_POSITIONS)]
)
def test_the_tables_cover_every_field(record: Any, others: dict[str, list[Any]]) -> None:
    assert set(others) == {field.name for field in dataclasses.fields(record)}
    assert all(others.values())


def test_each_field_alone_makes_another_identity() -> None:
    records = [BASE]
    records += [_changed(**{field: value}) for field, values in OTHER_VALUES.items() for value in values]
    assert len({record.digest for record in records}) == len(records)
    assert len({record.encode() for record in records}) == len(records)


def test_an_adapter_is_not_a_salt_nor_any_other_field_of_the_same_value() -> None:
    texts = [_changed(**{field: "X"}) for field in TEXT_FIELDS]
    records = [*texts, replace(BASE, salt=b"X"), replace(BASE, adapter="X", salt=b"X"), BASE]
    assert len({record.digest for record in records}) == len(records)


def test_a_scope_is_what_namespaces_share_that_differ_in_the_tenant_alone() -> None:
    base = _changed()
    assert base.scope == _changed(tenant="a").scope == _changed(tenant="b").scope
    assert base.scope == base.scope, "computed once"
    for field, others in OTHER_VALUES.items():
        for value in others:
            changed = _changed(**{field: value})
            assert (changed.scope == base.scope) == (field == "tenant"), field
    assert len({_changed(tenant=tenant).digest for tenant in ("", "a", "b")}) == 3


@pytest.mark.parametrize("separator", [":", "\0", "\n", "/", "|", ""])
def test_neighbouring_fields_cannot_trade_characters(separator: str) -> None:
    records = {
        replace(BASE, model=f"a{separator}b", tokenizer="c"),
        replace(BASE, model="a", tokenizer=f"b{separator}c"),
        replace(BASE, model=f"a{separator}b{separator}c", tokenizer=""),
        replace(BASE, model="a", tokenizer="b", adapter="c"),
    }
    assert len(records) == 4
    assert len({record.digest for record in records}) == 4


# Few values, so that many fields of two random records agree and separators land next to each other.
_texts = st.text(alphabet="a:\0", max_size=3)
_small = st.integers(1, 3)
_groups = st.one_of(
    st.builds(
        LayerGroup,
        st.sampled_from([AttentionKind.FULL, AttentionKind.LATENT, AttentionKind.RECURRENT]),
        _small,
        _small,
        _small,
    ),
    st.builds(LayerGroup, st.just(AttentionKind.SLIDING_WINDOW), _small, _small, _small, window=_small),
)
_layouts = st.builds(
    KVLayout,
    groups=st.lists(_groups, min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(KVDtype),
    page_size=_small,
    order=st.sampled_from(PageOrder),
)
_positions = st.builds(
    PositionScheme,
    kind=_texts,
    base=st.sampled_from([1.0, 1e4, 5e5]),
    scaling=_texts,
    keys=st.sampled_from(KeyEncoding),
)
_namespaces = st.builds(
    Namespace,
    model=_texts.filter(bool),
    layout=_layouts,
    tenant=_texts,
    tokenizer=_texts,
    adapter=_texts,
    adapter_generation=st.integers(0, 2),
    positions=_positions,
    num_ranks=_small,
    pipeline_ranges=st.lists(st.tuples(st.integers(0, 2), st.integers(3, 4)), max_size=2).map(tuple),
    codec=_texts,
    salt=_texts.map(str.encode),
)


@given(_namespaces)
def test_the_encoding_can_be_read_back(record: Namespace) -> None:
    # What can be read back without loss cannot encode two records alike.
    assert _decode(record.encode()) == record
    assert Namespace.decode(record.encode()) == record


def test_the_longest_record_can_be_read_back() -> None:
    long = "x" * MAX_FIELD_BYTES
    groups = tuple([LayerGroup(AttentionKind.SLIDING_WINDOW, 1, 1, 1, window=1)] * MAX_LAYERS)
    record = Namespace(
        model=long,
        layout=replace(LAYOUT, groups=groups),
        tenant=long,
        tokenizer=long,
        adapter=long,
        positions=PositionScheme(kind=long, scaling=long),
        pipeline_ranges=((0, MAX_LAYERS),) * MAX_LAYERS,
        codec=long,
        salt=long.encode(),
    )
    assert Namespace.decode(record.encode()) == record
    with pytest.raises(BadRequest, match=f"record: {MAX_RECORD_BYTES + 1} bytes"):
        Namespace.decode(bytes(MAX_RECORD_BYTES + 1))


@given(_namespaces, st.data())
def test_damaged_records_are_refused_or_are_other_records(record: Namespace, data: st.DataObject) -> None:
    encoded = record.encode()
    at = data.draw(st.integers(0, len(encoded)))
    replacement = data.draw(st.binary(max_size=6))
    damaged = encoded[:at] + replacement + encoded[at + data.draw(st.integers(0, 6)) :]
    try:
        decoded = Namespace.decode(damaged)
    except BadRequest:
        assert damaged != encoded
    else:
        assert decoded.encode() == damaged
        assert (decoded == record) == (damaged == encoded)


@pytest.mark.parametrize("record", [b"", b"\0" * 19, BASE.encode()[:-1], BASE.encode() + b"\0", BASE.encode()[:19]])
def test_what_is_no_record_is_refused_by_name(record: bytes) -> None:
    with pytest.raises(BadRequest, match=r"^record: "):
        Namespace.decode(record)


@given(_namespaces, _namespaces, st.data())
def test_records_encode_alike_exactly_when_equal(one: Namespace, other: Namespace, data: st.DataObject) -> None:
    assert (one == other) == (one.encode() == other.encode()) == (one.digest == other.digest)
    # A second record that differs from the first in few fields only, or in none.
    names = data.draw(st.sets(st.sampled_from([field.name for field in dataclasses.fields(Namespace)]), max_size=2))
    mixed = replace(one, **{name: getattr(other, name) for name in names})
    assert (one == mixed) == (one.encode() == mixed.encode()) == (one.digest == mixed.digest)


def test_the_encoding_is_pinned() -> None:
    # Written by hand from the grammar in the module's docstring: what is stored or sent elsewhere must stay readable.
    fields = [
        b"acme",
        b"sha256:ab",
        b"",
        b"lora-7",
        bytes([9, 0, 0, 0, 0, 0, 0, 0]),
        b"bfloat16",
        bytes([44, 0, 0, 0])  # one group of 44 bytes: two items with their lengths
        + bytes([4, 0, 0, 0]) + b"full"
        + bytes([32, 0, 0, 0]) + bytes([30, *[0] * 7, 3, *[0] * 7, 64, *[0] * 7, *[0] * 8]),
        b"nhd",
        bytes([16, 0, 0, 0, 0, 0, 0, 0]),
        bytes([1, 0, 0, 0, 0, 0, 0, 0]),
        bytes([16, 0, 0, 0]) + bytes([0, *[0] * 7, 30, *[0] * 7]),
        bytes([4, 0, 0, 0]) + b"rope"
        + bytes([8, 0, 0, 0]) + bytes.fromhex("000000000088c340")  # 10,000.0
        + bytes([0, 0, 0, 0])
        + bytes([7, 0, 0, 0]) + b"rotated",
        b"int8",
        b"\x00\xff",
    ]  # fmt: skip
    expected = b"hicache-namespace\x01\x00"
    for tag, value in enumerate(fields, start=1):
        expected += bytes([tag, len(value), 0, 0, 0]) + value
    record = replace(
        BASE,
        tenant="acme",
        adapter="lora-7",
        adapter_generation=9,
        pipeline_ranges=((0, 30),),
        codec="int8",
        salt=b"\x00\xff",
    )
    assert record.encode() == expected
    assert record.digest == hashlib.sha256(expected).digest()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("Namespace.model", {"model": ""}),
        ("Namespace.model", {"model": "x" * (MAX_FIELD_BYTES + 1)}),
        ("Namespace.tenant", {"tenant": "é" * (MAX_FIELD_BYTES // 2 + 1)}),
        ("Namespace.tenant", {"tenant": "\ud800"}),
        ("Namespace.tokenizer", {"tokenizer": "x" * (MAX_FIELD_BYTES + 1)}),
        ("Namespace.adapter", {"adapter": "x" * (MAX_FIELD_BYTES + 1)}),
        ("Namespace.codec", {"codec": "x" * (MAX_FIELD_BYTES + 1)}),
        ("Namespace.salt", {"salt": b"x" * (MAX_FIELD_BYTES + 1)}),
        ("Namespace.adapter_generation", {"adapter_generation": -1}),
        ("Namespace.adapter_generation", {"adapter_generation": 2**64}),
        ("Namespace.num_ranks", {"num_ranks": 0}),
        ("Namespace.num_ranks", {"num_ranks": 2**16 + 1}),
        ("Namespace.pipeline_ranges", {"pipeline_ranges": ((3, 3),)}),
        ("Namespace.pipeline_ranges", {"pipeline_ranges": ((-1, 3),)}),
        ("Namespace.pipeline_ranges", {"pipeline_ranges": ((0, MAX_LAYERS + 1),)}),
        ("Namespace.pipeline_ranges", {"pipeline_ranges": ((0, 1),) * (MAX_LAYERS + 1)}),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        _changed(**values)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("PositionScheme.kind", {"kind": "x" * (MAX_FIELD_BYTES + 1)}),
        ("PositionScheme.scaling", {"scaling": "x" * (MAX_FIELD_BYTES + 1)}),
        *[("PositionScheme.base", {"base": base}) for base in (0.0, -0.0, -1.0, float("inf"), float("nan"))],
    ],
)
def test_positions_out_of_bounds_are_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        PositionScheme(**values)
    assert caught.value.field == field


def test_bounds_themselves_are_allowed() -> None:
    widest = "x" * MAX_FIELD_BYTES
    record = _changed(
        **dict.fromkeys(TEXT_FIELDS, widest),
        salt=widest.encode(),
        adapter_generation=2**64 - 1,
        num_ranks=2**16,
        pipeline_ranges=((0, MAX_LAYERS),) * MAX_LAYERS,
        positions=PositionScheme(kind=widest, scaling=widest),
    )
    assert _decode(record.encode()) == record


def _changed(**values: Any) -> Namespace:
    """`BASE` with other values in some fields."""
    return replace(BASE, **values)


def _decode(data: bytes) -> Namespace:
    """The record that `data` encodes, read by the grammar alone."""
    magic, version = data[:17], struct.unpack_from("<H", data, 17)
    assert (magic, version) == (b"hicache-namespace", (1,))
    values, position = [], 19
    while position < len(data):
        tag, length = struct.unpack_from("<BI", data, position)
        values.append(data[position + 5 : position + 5 + length])
        position += 5 + length
        assert tag == len(values)
    assert position == len(data)
    tenant, model, tokenizer, adapter, generation, dtype, groups, order, page_size, *rest = values
    ranks, ranges, positions, codec, salt = rest
    kind, base, scaling, keys = _items(positions)
    return Namespace(
        model=model.decode(),
        layout=KVLayout(
            groups=tuple(_group(*_items(group)) for group in _items(groups)),
            dtype=KVDtype(dtype.decode()),
            page_size=_u64(page_size),
            order=PageOrder(order.decode()),
        ),
        tenant=tenant.decode(),
        tokenizer=tokenizer.decode(),
        adapter=adapter.decode(),
        adapter_generation=_u64(generation),
        positions=PositionScheme(
            kind.decode(), struct.unpack("<d", base)[0], scaling.decode(), KeyEncoding(keys.decode())
        ),
        num_ranks=_u64(ranks),
        pipeline_ranges=tuple((_u64(item[:8]), _u64(item[8:])) for item in _items(ranges)),
        codec=codec.decode(),
        salt=salt,
    )


def _group(kind: bytes, numbers: bytes) -> LayerGroup:
    num_layers, num_kv_heads, head_dim, window = struct.unpack("<4Q", numbers)
    return LayerGroup(AttentionKind(kind.decode()), num_layers, num_kv_heads, head_dim, window or None)


def _items(data: bytes) -> list[bytes]:
    items, position = [], 0
    while position < len(data):
        (length,) = struct.unpack_from("<I", data, position)
        items.append(data[position + 4 : position + 4 + length])
        position += 4 + length
    assert position == len(data)
    return items


def _u64(data: bytes) -> int:
    return int(struct.unpack("<Q", data)[0])


WRONG_TYPES: Final[dict[str, list[Any]]] = {
    "model": [None, b"m", 3],
    "layout": [None, "layout", (1,)],
    "tenant": [None, b"t"],
    "tokenizer": [None],
    "adapter": [0],
    "adapter_generation": [1.0, "1", None, True],
    "positions": [None, "rope"],
    "num_ranks": [1.0, 1.5, None, True],
    "pipeline_ranges": [None, [(0, 1)], ([0, 1],), ((0, 1, 2),), ((0.0, 1),), ((0,),), 3],
    "codec": [3],
    "salt": ["x", None, bytearray(b"x"), [1]],
}


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Namespace)])
def test_every_field_has_its_type(field: str) -> None:
    for value in WRONG_TYPES[field]:
        wrong: dict[str, Any] = {field: value}
        with pytest.raises(BadRequest) as caught:
            replace(BASE, **wrong)
        assert caught.value.field == f"Namespace.{field}"


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("KVLayout.groups", {"groups": list(LAYOUT.groups)}),
        ("KVLayout.dtype", {"dtype": "bfloat16"}),
        ("KVLayout.order", {"order": "nhd"}),
        ("LayerGroup.kind", {"groups": (LayerGroup("full", 1, 1, 8),)}),  # type: ignore[arg-type]  # on purpose
    ],
)
def test_a_layout_has_its_types_before_it_is_part_of_an_identity(field: str, layout: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        replace(BASE, layout=replace(LAYOUT, **layout))
    assert caught.value.field == field


def test_a_position_base_is_the_float_that_is_encoded() -> None:
    exact, near = PositionScheme(base=2.0**53), PositionScheme(base=2**53 + 1)
    assert exact == near
    assert replace(BASE, positions=exact).digest == replace(BASE, positions=near).digest
    assert type(near.base) is float
    for base in (10**400, None, "10000", True, 0, -1, float("nan"), float("inf")):
        wrong: Any = base
        with pytest.raises(BadRequest) as caught:
            PositionScheme(base=wrong)
        assert caught.value.field == "PositionScheme.base"
    for keys in ("rotated", None):
        with pytest.raises(BadRequest, match=r"PositionScheme\.keys"):
            PositionScheme(keys=keys)  # type: ignore[arg-type]  # on purpose


def test_records_are_bytes() -> None:
    for record in (None, "x", bytearray(BASE.encode())):
        with pytest.raises(BadRequest, match="record"):
            Namespace.decode(record)  # type: ignore[arg-type]  # on purpose
