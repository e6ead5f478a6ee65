"""Attention of new tokens over a context whose pages are anywhere, part by part, merged exactly.

A context is a series of parts: pages in one memory each. `attend` goes over them once, in order, keeping the attention
state of what it has seen, and attends to the new tokens themselves last. On CUDA the kernels read device pages where
they are; on the CPU pages are gathered, a cache-sized piece at a time, and attended by torch.

Nothing is kept of a part when the next one is asked for, so a source may reuse one buffer for all of them. On CUDA that
holds in the order of the current stream: a source that refills a device buffer has to do so on that stream, or wait
for it.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from hicache.kernels import launch
from hicache.kernels.checks import (
    FLOAT_DTYPES,
    PageShape,
    check_group,
    check_page_ids,
    check_pages,
    check_query,
    check_tensor,
)
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from hicache.kernels.state import AttentionState

SCRATCH_BYTES: Final = 8 << 20
"""Keys and values that are gathered before they are attended to, at most: enough that merging costs little beside the
work of many queries."""
_SCRATCH_BYTES_FEW: Final = 2 << 20
"""The same for few queries, which are bound by memory: still in the cores' caches when attention reads them."""
_FOLD_TOKENS_MAX: Final = 64
"""Up to so many new tokens, the query heads of a group become rows of one head: fewer, larger products on the CPU.
Beyond, there are rows enough, and rearranging them costs more than it gains."""
_NARROW_BYTES: Final = 1 << 19
"""Half precision that is gathered before it is widened into those keys and values: what a core's own cache holds."""
_STATES_MAX: Final = 8
"""States that are collected on the GPU before they are merged."""


@dataclass(frozen=True)
class PagedPart:
    """Keys and values of consecutive tokens in whole or partly filled pages, somewhere in one memory."""

    pages: torch.Tensor
    """[num_slots, 2, page_size, kv_heads, head_dim], keys in plane 0 and values in plane 1, on any device; head_dim is
    contiguous, every other stride is free: one layer of a page-first arena is such a view."""
    block_table: torch.Tensor
    """int32 [n], slots of the part's pages in order; each within `pages`."""
    num_tokens: int
    """Tokens that the part has, 0 to `n * page_size`: pages are full but for the last; slots beyond are not read."""


class PartSource(Protocol):
    """Where the parts of a context come from: a running sequence, in `tiers/` and above."""

    def parts(self, layer: int) -> Iterator[PagedPart]:
        """The context's parts in one layer, in any order, each token once. Called from the thread that attends.

        A part is valid until the next one is asked for, or the iterator is closed; asking may wait for a transfer, but
        must not itself call `attend`, which is in the middle of using its thread's buffer.
        """
        ...


def attend(
    query: torch.Tensor,
    parts: Iterable[PagedPart],
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    path: Path | None = None,
) -> AttentionState:
    """Attend `T` new tokens of one sequence to everything in `parts`, and to the new tokens up to themselves.

    query [T, HQ, D], on the device that does the work; key, value [T, H, D], those of the new tokens, there too, or
    [0, H, D] if the queries are to see the parts only; HQ a multiple of H, D contiguous. float16, bfloat16 or float32
    (on the torch path float64 too), the same in all parts. `scale` multiplies the scores. Parts may be empty and on any
    device: those elsewhere than the query are gathered into a buffer beside it first, at most `SCRATCH_BYTES` at a
    time. They are asked for one by one, and not at all with T = 0.

    Returns output [T, HQ, D] in the query's dtype and natural-log LSE [T, HQ], float32 (float64 for float64), new
    tensors that alias nothing and carry no gradient; 0 and -inf where there was no key at all. Partial results are kept
    and merged in float32. On CUDA the work is queued on the current stream. `path` is chosen by the query's device if
    None. Callable from several threads. Raises `BadArgument`, in the middle of the parts if one of them does not fit.
    """
    path = launch.choose_path("query", query.device, path)
    check_query(query, FLOAT_DTYPES if path is Path.TRITON else (*FLOAT_DTYPES, torch.float64))
    num_tokens, _, head_dim = query.shape
    num_new = 0 if key.shape[:1] == (0,) else num_tokens
    check_tensor("key", key, (num_new, None, head_dim), dtype=query.dtype, device=query.device)
    check_group("key", key.shape[1], query)
    check_tensor("value", value, tuple(key.shape), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return _no_keys(query, query.dtype)
    fitting = _checked(parts, query, key.shape[1])
    work = _attend_triton if path is Path.TRITON else _attend_torch
    # A recorded graph would keep every buffer that is meant to be used again.
    with torch.no_grad():
        return work(query, fitting, key, value, scale)


def _checked(
    parts: Iterable[PagedPart], query: torch.Tensor, num_kv_heads: int
) -> Iterator[tuple[PagedPart, PageShape]]:
    """The parts that have tokens, each checked when it comes."""
    for part in parts:
        shape = check_pages("part.pages", part.pages, query)
        if shape.num_kv_heads != num_kv_heads:
            raise BadArgument("part.pages", f"has {shape.num_kv_heads} key/value heads, the new tokens {num_kv_heads}")
        check_tensor("part.block_table", part.block_table, (None,), dtype=torch.int32)
        most = part.block_table.shape[0] * shape.page_size
        if not 0 <= part.num_tokens <= most:
            raise BadArgument("part.num_tokens", f"is {part.num_tokens}, expected 0 to {most}, the tokens of its pages")
        if part.num_tokens:
            table = part.block_table[: -(-part.num_tokens // shape.page_size)]
            check_page_ids("part.block_table", table, shape.num_slots, negative=False)
            yield PagedPart(part.pages, table, part.num_tokens), shape


def _state_dtype(query: torch.Tensor) -> torch.dtype:
    """Type in which states are kept and LSE is returned."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _no_keys(query: torch.Tensor, dtype: torch.dtype) -> AttentionState:
    """The state over no keys, its output in `dtype`."""
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=_state_dtype(query))
    return AttentionState(query.new_zeros(query.shape, dtype=dtype), lse)


# The torch path.


class _Scratch(threading.local):
    """Buffers of one thread; kept, because a step of a model attends in every layer and new memory is slow to touch."""

    def __init__(self) -> None:
        self._buffer = _new_buffer(0)
        self._narrow = _new_buffer(0)

    def take(self, num_bytes: int, like: torch.Tensor, page_size: int) -> torch.Tensor:
        """[2, capacity, H, D] of undefined content, with H, D and dtype of `like` [*, H, D]: keys in plane 0, values
        in plane 1; capacity in tokens, at least one page, otherwise as many as `num_bytes` hold. Overwritten by the
        next call of this thread."""
        _, num_kv_heads, head_dim = like.shape
        dtype = like.dtype
        token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        capacity = max(page_size, num_bytes // token_bytes)
        if self._buffer.numel() < capacity * token_bytes:
            self._buffer = _new_buffer(capacity * token_bytes)
        flat = self._buffer[: capacity * token_bytes].view(dtype)
        return flat.view(2, capacity, num_kv_heads, head_dim)

    def take_narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, ...] of undefined content, of the dtype and row shape of `rows` [*, ...]: what is gathered before it is
        widened. n is at least 1, otherwise as many rows as `_NARROW_BYTES` hold."""
        row_shape = rows.shape[1:]
        row_bytes = row_shape.numel() * rows.element_size()
        count = max(1, _NARROW_BYTES // row_bytes)
        if self._narrow.numel() < count * row_bytes:
            self._narrow = _new_buffer(count * row_bytes)
        return self._narrow[: count * row_bytes].view(rows.dtype).view(count, *row_shape)


def _new_buffer(num_bytes: int) -> torch.Tensor:
    # Made in inference mode, it could not be written to outside of it.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8)


_scratch = _Scratch()


class _Running:
    """The attention state over the keys seen so far: output [H, G, T, D] and LSE [H, G, T], of any stride."""

    def __init__(self) -> None:
        self.state: AttentionState | None = None
        """Output and LSE so far; None as long as there was no key."""

    def add(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge in the state over further keys, at least one for every query. Takes the tensors over."""
        if self.state is None:
            self.state = AttentionState(output, lse)
            return
        # exp(s2 - log(exp(s1) + exp(s2))) is a sigmoid, and the two weights add up to one.
        weight = torch.sigmoid(lse - self.state.lse)
        self.state.output.lerp_(output, weight.unsqueeze(-1))
        torch.logaddexp(self.state.lse, lse, out=self.state.lse)


def _attend_torch(
    query: torch.Tensor,
    parts: Iterable[tuple[PagedPart, PageShape]],
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> AttentionState:
    # Half precision is widened first: states would otherwise be rounded once a part, and torch's fused attention is no
    # faster with bfloat16 than with float32, and slower with float16.
    dtype = query.dtype
    query, key, value = (tensor.to(_state_dtype(query)) for tensor in (query, key, value))
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    few = num_tokens <= _FOLD_TOKENS_MAX
    num_bytes = min(SCRATCH_BYTES, _SCRATCH_BYTES_FEW) if few else SCRATCH_BYTES
    by_head = query.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    rows = by_head.reshape(num_kv_heads, -1, head_dim) if few else query.transpose(0, 1)
    running = _Running()
    buffer = torch.empty(0)
    filled = 0

    def attend_to(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False) -> None:
        output, lse = _flash(rows, key, value, scale, is_causal=is_causal)
        running.add(output.view(*by_head.shape), lse.view(*by_head.shape[:3]))

    def flush() -> None:
        """Attend to the tokens in the buffer, all of which every query sees."""
        nonlocal filled
        if filled:
            attend_to(rows, buffer[0, :filled], buffer[1, :filled])
        filled = 0

    for part, shape in parts:
        if buffer.dim() == 1 or buffer.shape[1] < shape.page_size:
            flush()
            buffer = _scratch.take(num_bytes, key, shape.page_size)
        table, left = part.block_table, part.num_tokens
        while left:
            # Whole pages are gathered; behind the tokens of a last one lies its unused rest, which what follows
            # overwrites.
            room = (buffer.shape[1] - filled) // shape.page_size
            if not room:
                flush()
                continue
            ids, table = table[:room], table[room:]
            count = min(left, ids.shape[0] * shape.page_size)
            for plane in (0, 1):
                target = buffer[plane, filled : filled + ids.shape[0] * shape.page_size]
                _gather(part.pages[:, plane], ids, target.view(ids.shape[0], *shape[1:]))
            filled += count
            left -= count
    if num_tokens == len(key) == 1:
        # A single new token is one more key that every query sees: cheaper than a state of its own.
        if buffer.dim() == 1:
            buffer = _scratch.take(num_bytes, key, 1)
        elif filled == buffer.shape[1]:
            flush()
        buffer[0, filled], buffer[1, filled] = key[0], value[0]
        filled += 1
        flush()
    else:
        flush()
        if len(key):
            attend_to(query.transpose(0, 1), key, value, is_causal=True)
    if running.state is None:
        return _no_keys(query, dtype)
    output = running.state.output.to(dtype).permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
    return AttentionState(output, running.state.lse.permute(2, 0, 1).reshape(num_tokens, num_heads))


def _gather(pages: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> None:
    """`target[i] = pages[ids[i]]`; pages [num_slots, ...], ids on any device, target contiguous on the CPU, of the same
    dtype or a wider one."""
    ids = ids.to(pages.device)
    if pages.device != target.device:
        target.copy_(pages.index_select(0, ids))
    elif pages.dtype == target.dtype:
        torch.index_select(pages, 0, ids, out=target)
    else:
        narrow = _scratch.take_narrow(pages)
        for start in range(0, ids.shape[0], narrow.shape[0]):
            piece = ids[start : start + narrow.shape[0]]
            into = target[start : start + narrow.shape[0]]
            into.copy_(torch.index_select(pages, 0, piece, out=narrow[: piece.shape[0]]))


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's fused attention: query [HQ, T, D], key, value [L, H, D], L at least 1; output [HQ, T, D], LSE [HQ, T].

    The operator dies of an empty key, hence the bound. It takes a head shared by several query heads as it is, and rows
    and heads of any stride. Its causal mask is aligned to the first key, right where queries and keys are the same
    tokens.
    """
    assert key.shape[0] >= 1
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0.0, is_causal, scale=scale
    )
    return output[0], lse[0]


# The Triton path. What it needs is imported when it is first taken: the torch path works without Triton.


class _Stack:
    """States over disjoint keys of the same queries, merged whenever there are `_STATES_MAX` of them."""

    def __init__(self, query: torch.Tensor) -> None:
        self._outputs = query.new_empty((_STATES_MAX, *query.shape), dtype=torch.float32)
        self._lses = query.new_empty((_STATES_MAX, *query.shape[:2]), dtype=torch.float32)
        self._used = 0
        self._query = query

    def push(self) -> AttentionState:
        """Room for one more state, to be filled before the next call."""
        from hicache.kernels.merge import merge_states

        if self._used == _STATES_MAX:
            merged = merge_states(self._outputs, self._lses)
            self._outputs[0], self._lses[0] = merged.output, merged.lse
            self._used = 1
        self._used += 1
        return AttentionState(self._outputs[self._used - 1], self._lses[self._used - 1])

    def result(self, dtype: torch.dtype) -> AttentionState:
        """The state over all keys, its output in `dtype`."""
        from hicache.kernels.merge import merge_states

        if not self._used:
            return _no_keys(self._query, dtype)
        return merge_states(self._outputs[: self._used], self._lses[: self._used], dtype=dtype)


def _attend_triton(
    query: torch.Tensor,
    parts: Iterable[tuple[PagedPart, PageShape]],
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> AttentionState:
    from hicache.kernels.decode import paged_decode
    from hicache.kernels.extend import paged_extend

    num_tokens = query.shape[0]
    indptr = torch.arange(2, dtype=torch.int32, device=query.device) * num_tokens
    stack = _Stack(query)
    for part, shape in parts:
        for local in _local_pieces(part, shape, query.device):
            tables = local.block_table[None]
            lengths = torch.full((1,), local.num_tokens, dtype=torch.int32, device=query.device)
            output, lse = stack.push()
            if num_tokens == 1:
                paged_decode(query, local.pages, tables, lengths, scale=scale, output=output, lse=lse)
            else:
                paged_extend(
                    query, indptr, scale=scale, pages=local.pages, block_tables=tables, prefix_lens=lengths,
                    output=output, lse=lse,
                )
    if len(key):
        output, lse = stack.push()
        paged_extend(query, indptr, scale=scale, key=key, value=value, output=output, lse=lse)
    return stack.result(query.dtype)


def _local_pieces(part: PagedPart, shape: PageShape, device: torch.device) -> Iterator[PagedPart]:
    """The part as it is if it is on `device`, otherwise copied there a piece at a time."""
    if part.pages.device == device:
        yield PagedPart(part.pages, part.block_table.to(device), part.num_tokens)
        return
    page_bytes = part.pages.element_size() * part.pages[:1].numel()
    step = max(1, SCRATCH_BYTES // page_bytes)
    for begin in range(0, part.block_table.shape[0], step):
        ids = part.block_table[begin : begin + step].to(part.pages.device)
        # Not `non_blocking`: when the next part is asked for, the copy has to be over.
        pages = part.pages.index_select(0, ids).to(device)
        table = torch.arange(ids.shape[0], dtype=torch.int32, device=device)
        yield PagedPart(pages, table, min(part.num_tokens - begin * shape.page_size, ids.shape[0] * shape.page_size))
