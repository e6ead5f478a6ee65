"""Byte counts of a page, against shapes counted out by hand, and the bounds of a layout."""

import math
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import BadRequest
from hicache.layout import (
    MAX_DIMENSION,
    MAX_LAYERS,
    MAX_PAGE_SIZE,
    AttentionKind,
    KVDtype,
    KVLayout,
    LayerGroup,
    PageOrder,
)

ITEMSIZE: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
FULL: Final = LayerGroup(AttentionKind.FULL, num_layers=2, num_kv_heads=3, head_dim=64)


def _layer_shape(group: LayerGroup, page_size: int) -> tuple[int, ...]:
    """One layer of one page, axis by axis, as the docstrings of the kinds describe it."""
    match group.kind:
        case AttentionKind.FULL | AttentionKind.SLIDING_WINDOW:
            return (2, page_size, group.num_kv_heads, group.head_dim)
        case AttentionKind.LATENT:
            return (page_size, group.num_kv_heads, group.head_dim)
        case AttentionKind.RECURRENT:
            return (group.num_kv_heads, group.head_dim)


_small = st.integers(1, 5)
_groups = st.builds(
    lambda kind, layers, heads, dim, window: LayerGroup(
        kind, layers, heads, dim, window if kind is AttentionKind.SLIDING_WINDOW else None
    ),
    st.sampled_from(AttentionKind),
    _small,
    _small,
    _small,
    _small,
)


@given(
    st.lists(_groups, min_size=1, max_size=4).map(tuple),
    st.sampled_from(KVDtype),
    st.integers(1, MAX_PAGE_SIZE),
    st.sampled_from(PageOrder),
)
def test_bytes_follow_from_shapes(
    groups: tuple[LayerGroup, ...], dtype: KVDtype, page_size: int, order: PageOrder
) -> None:
    layout = KVLayout(groups, dtype, page_size, order)
    layer_bytes = [math.prod(_layer_shape(group, page_size)) * ITEMSIZE[dtype.value] for group in groups]
    assert [layout.layer_bytes(part) for part in range(layout.num_parts)] == layer_bytes
    part_bytes = [group.num_layers * size for group, size in zip(groups, layer_bytes, strict=True)]
    assert [layout.part_bytes(part) for part in range(layout.num_parts)] == part_bytes
    assert layout.page_bytes == sum(part_bytes)
    assert layout.num_layers == sum(group.num_layers for group in groups)
    # A tier of n pages of tokens has room for what n pages of tokens cost, and no byte a page less is charged.
    assert 0 <= layout.token_bytes * page_size - layout.page_bytes < page_size


@given(st.integers(0, 10_000), st.integers(1, MAX_PAGE_SIZE))
def test_pages_are_counted_up(num_tokens: int, page_size: int) -> None:
    pages = KVLayout((FULL,), KVDtype.FLOAT16, page_size).pages_for(num_tokens)
    assert pages * page_size >= num_tokens > (pages - 1) * page_size


def test_every_dtype_has_a_size() -> None:
    assert {dtype.value: dtype.itemsize for dtype in KVDtype} == ITEMSIZE


def test_uniform_is_one_group_of_full_attention() -> None:
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=3, head_dim=64, dtype=KVDtype.FLOAT16, page_size=16)
    assert layout == KVLayout((FULL,), KVDtype.FLOAT16, 16, PageOrder.NHD)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *[
            (f"LayerGroup.{name}", {name: value})
            for name in ("num_layers", "num_kv_heads", "head_dim")
            for value in (0, -1, MAX_DIMENSION + 1, 2.0, "2", None)
        ],
        ("LayerGroup.window", {"window": 8}),
        ("LayerGroup.window", {"kind": AttentionKind.SLIDING_WINDOW}),
        *[
            ("LayerGroup.window", {"kind": AttentionKind.SLIDING_WINDOW, "window": window})
            for window in (0, -1, 1.5, MAX_DIMENSION + 1)
        ],
    ],
)
def test_a_group_out_of_bounds_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        replace(FULL, **values)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("KVLayout.groups", {"groups": ()}),
        ("KVLayout.groups", {"groups": (replace(FULL, num_layers=MAX_LAYERS), FULL)}),
        *[("KVLayout.page_size", {"page_size": size}) for size in (0, -16, MAX_PAGE_SIZE + 1, 16.0, "16")],
    ],
)
def test_a_layout_out_of_bounds_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        replace(KVLayout((FULL,), KVDtype.FLOAT16, 16), **values)
    assert caught.value.field == field


def test_bounds_themselves_are_allowed() -> None:
    group = LayerGroup(AttentionKind.SLIDING_WINDOW, MAX_LAYERS, MAX_DIMENSION, MAX_DIMENSION, MAX_DIMENSION)
    assert KVLayout((group,), KVDtype.INT8, MAX_PAGE_SIZE).page_bytes == 1024 * 2 * 256 * 2**20 * 2**20
