"""Attention over parts on the CPU, by torch: pages are gathered, a cache-sized piece at a time, and attended to.

What torch's fused operator wants is known in one place, `_flash`: it dies of an empty key, reports LSE 0 for a row that
sees nothing, and aligns its causal mask to the first key; it is never given an empty key or a mask.
"""

import threading
from collections.abc import Iterable
from typing import Final

import torch

from hicache.kernels.checks import PageShape
from hicache.kernels.parts import PagedPart, no_keys, state_dtype
from hicache.kernels.state import AttentionState

SCRATCH_BYTES: Final = 8 << 20
"""Keys and values that are gathered before they are attended to, at most: enough that merging and the calls of torch
cost little, and still in the cores' shared cache when attention reads them."""
_FOLD_TOKENS_MAX: Final = 64
"""Up to so many new tokens, the query heads of a group become rows of one head: fewer, larger products on the CPU.
Beyond, there are rows enough, and rearranging them costs more than it gains."""
_NARROW_BYTES: Final = 1 << 19
"""Half precision that is gathered before it is widened into those keys and values: what a core's own cache holds."""

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


def attend_torch(
    query: torch.Tensor,
    parts: Iterable[tuple[PagedPart, PageShape]],
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> AttentionState:
    """See `hicache.kernels.attend.attend`, whose checks have been made; the query, `key` and `value` are on the CPU."""
    # Half precision is widened first: states would otherwise be rounded once a part, and torch's fused attention is no
    # faster with bfloat16 than with float32, and slower with float16.
    dtype = query.dtype
    query, key, value = (tensor.to(state_dtype(query)) for tensor in (query, key, value))
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    few = num_tokens <= _FOLD_TOKENS_MAX
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
            buffer = _scratch.take(SCRATCH_BYTES, key, shape.page_size)
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
            buffer = _scratch.take(SCRATCH_BYTES, key, 1)
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
        return no_keys(query, dtype)
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
