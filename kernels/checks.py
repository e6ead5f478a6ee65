"""Checks that several wrappers share. Each raises `BadArgument` and touches nothing."""

from itertools import pairwise
from typing import NamedTuple

import torch

from hicache.kernels import launch
from hicache.kernels.errors import BadArgument

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Element types that the kernels take."""
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Element types that stored keys and values may have beside that of the query."""
HEAD_DIM_MAX = 256
"""Greatest head of keys and values of their own, for which the shared memory of a GPU has room."""


class PageShape(NamedTuple):
    """What the shape of a pages tensor says."""

    num_slots: int
    page_size: int
    num_kv_heads: int
    head_dim: int


def check_tensor(
    argument: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    contiguous: bool = True,
) -> None:
    """Refuse a tensor of another shape (None: any size), dtype or device, or whose last dimension is not contiguous,
    unless that does not matter."""
    if not _fits(tensor.shape, shape):
        expected = ", ".join("*" if want is None else str(want) for want in shape)
        raise BadArgument(argument, f"has shape {list(tensor.shape)}, expected [{expected}]")
    if dtype is not None and tensor.dtype not in (dtypes := dtype if isinstance(dtype, tuple) else (dtype,)):
        raise BadArgument(argument, f"is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if device is not None and tensor.device != device:
        raise BadArgument(argument, f"is on {tensor.device}, expected {device}")
    if contiguous and shape and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise BadArgument(argument, f"has stride {tensor.stride(-1)} in its last dimension, expected 1")


def _fits(shape: torch.Size, expected: tuple[int | None, ...]) -> bool:
    """Whether each size is as expected, None being any: a plain loop, as every layer of a step asks several times."""
    if len(shape) != len(expected):
        return False
    for have, want in zip(shape, expected, strict=True):  # noqa: SIM110
        if want is not None and have != want:
            return False
    return True


def check_query(
    query: torch.Tensor, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES, head_dim_max: int | None = None
) -> None:
    """Refuse a query that is not [T, HQ, D] with at least one head of at least one element, and at most
    `head_dim_max`."""
    check_tensor("query", query, (None, None, None), dtype=dtypes)
    if query.shape[1] < 1 or query.shape[2] < 1:
        raise BadArgument("query", f"has shape {list(query.shape)}, expected at least one head and one element")
    if head_dim_max is not None and query.shape[2] > head_dim_max:
        raise BadArgument("query", f"has heads of {query.shape[2]} elements, expected at most {head_dim_max}")


def stored_dtypes(query: torch.Tensor) -> tuple[torch.dtype, ...]:
    """Types that keys and values may be stored in for `query`: its own, and float8 if it is of half precision."""
    return (query.dtype,) if query.dtype == torch.float32 else (query.dtype, *FLOAT8_DTYPES)


def check_pages(
    argument: str, pages: torch.Tensor, query: torch.Tensor, dtypes: tuple[torch.dtype, ...] | None = None
) -> PageShape:
    """Refuse pages that are not [num_slots, 2, page_size, kv_heads, head_dim] fitting `query` [T, HQ, D], of one of
    `dtypes`, that of the query if None; the device is not compared. Slots, planes, tokens and heads may have any
    stride."""
    check_tensor(argument, pages, (None, 2, None, None, query.shape[2]), dtype=dtypes or query.dtype)
    shape = PageShape(pages.shape[0], pages.shape[2], pages.shape[3], pages.shape[4])
    if shape.page_size < 1:
        raise BadArgument(argument, "has pages of 0 tokens, expected at least 1")
    check_group(argument, shape.num_kv_heads, query)
    return shape


def check_launchable_query(query: torch.Tensor, head_dim_max: int | None = None) -> None:
    """Refuse what `check_query` refuses, and a query where no kernel can be launched."""
    check_query(query, head_dim_max=head_dim_max)
    launch.require_launchable("query", query.device)


def check_pages_beside(query: torch.Tensor, pages: torch.Tensor, page_scales: torch.Tensor | None) -> PageShape:
    """Refuse what `check_pages` refuses of pages in the query's dtype or float8, pages that are not on its device, and
    scales that do not fit them."""
    shape = check_pages("pages", pages, query, stored_dtypes(query))
    if pages.device != query.device:
        raise BadArgument("pages", f"is on {pages.device}, expected {query.device}")
    check_page_scales("page_scales", page_scales, pages)
    return shape


def check_page_scales(argument: str, scales: torch.Tensor | None, pages: torch.Tensor) -> None:
    """Refuse scales that are not float32, [num_slots, 2, kv_heads] of `pages` and beside them; slots and planes may
    have any stride, 0 included."""
    if scales is not None:
        shape = (pages.shape[0], 2, pages.shape[3])
        check_tensor(argument, scales, shape, dtype=torch.float32, device=pages.device, contiguous=False)


def check_group(argument: str, num_kv_heads: int, query: torch.Tensor) -> None:
    """Refuse key/value heads that do not divide the query's heads."""
    if num_kv_heads < 1 or query.shape[1] % num_kv_heads:
        raise BadArgument(argument, f"has {num_kv_heads} key/value heads, expected a divisor of {query.shape[1]}")


def check_page_ids(argument: str, ids: torch.Tensor, num_slots: int, *, negative: bool) -> None:
    """Refuse page ids outside `num_slots`, and below 0 unless `negative`. Only where it is cheap: on the CPU. On a GPU
    it would make the host wait for the device."""
    if ids.device.type != "cpu" or not ids.numel():
        return
    least, most = (int(bound) for bound in torch.aminmax(ids))
    if most >= num_slots or (least < 0 and not negative):
        wrong = most if most >= num_slots else least
        raise BadArgument(argument, f"names page {wrong}, expected 0 to {num_slots - 1}")


def check_lengths(argument: str, lengths: torch.Tensor, most: int) -> None:
    """Refuse token counts outside 0 to `most`; on the CPU only, as `check_page_ids`."""
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    least, greatest = (int(bound) for bound in torch.aminmax(lengths))
    if least < 0 or greatest > most:
        wrong = least if least < 0 else greatest
        raise BadArgument(argument, f"holds {wrong} tokens, expected 0 to {most}, what the block table has room for")


def check_tables(
    names: tuple[str, str],
    tables: torch.Tensor,
    lengths: torch.Tensor,
    num_seqs: int,
    *,
    num_slots: int,
    page_size: int,
    device: torch.device,
) -> int:
    """Refuse block tables that are not int32 [num_seqs, max_pages], or lengths that are not int32 [num_seqs], on
    `device`, and what `check_page_ids` and `check_lengths` refuse. `names`: of the two. Returns the most tokens that a
    sequence may have."""
    check_tensor(names[0], tables, (num_seqs, None), dtype=torch.int32, device=device)
    check_tensor(names[1], lengths, (num_seqs,), dtype=torch.int32, device=device)
    check_page_ids(names[0], tables, num_slots, negative=True)
    max_tokens = tables.shape[1] * page_size
    check_lengths(names[1], lengths, max_tokens)
    return max_tokens


def check_positions(
    argument: str,
    positions: torch.Tensor | None,
    shape: tuple[int],
    device: torch.device,
    *,
    least: torch.Tensor | None,
    offset: int,
) -> None:
    """Refuse positions that are not int32, of `shape`, on `device`, and, looked at on the CPU only, at least
    `least + offset` (0 if None)."""
    if positions is None:
        return
    check_tensor(argument, positions, shape, dtype=torch.int32, device=device)
    if device.type == "cpu" and bool((positions < (0 if least is None else least + offset)).any()):
        raise BadArgument(argument, f"is {positions.tolist()[:8]}..., expected positions behind the table's tokens")


def check_indptr(argument: str, indptr: torch.Tensor, num_tokens: int) -> None:
    """Refuse offsets that do not rise from 0 to `num_tokens`; on the CPU only, as `check_page_ids`."""
    if indptr.device.type != "cpu":
        return
    offsets = indptr.tolist()
    if offsets[0] != 0 or offsets[-1] != num_tokens or any(b < a for a, b in pairwise(offsets)):
        raise BadArgument(argument, f"is {offsets[:8]}..., expected offsets that rise from 0 to {num_tokens}")


def check_most(argument: str, most: int | None, indptr: torch.Tensor, num_tokens: int) -> int:
    """The most of `num_tokens` tokens that one of the sequences in `indptr` has: what the caller says, or all if None.

    Refuses what is not 1 to `num_tokens` (0 if that is 0), and, on the CPU only, less than a sequence has: what lies
    beyond would not be written.
    """
    if most is None:
        return num_tokens
    least = min(1, num_tokens)
    if indptr.device.type == "cpu" and indptr.shape[0] > 1:
        least = int(indptr.diff().max())
    if not least <= most <= num_tokens:
        raise BadArgument(argument, f"is {most}, expected {least} to {num_tokens}")
    return most
