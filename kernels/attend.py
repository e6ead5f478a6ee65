"""Attention of new tokens over a context whose pages are anywhere, part by part, merged exactly.

A context is a series of parts: pages in one memory each. `attend` goes over them once, in order, keeping the attention
state of what it has seen, and attends to the new tokens themselves last. On CUDA the kernels read device pages where
they are; on the CPU pages are gathered, a cache-sized piece at a time, and attended by torch.

Nothing is kept of a part when the next one is asked for, so a source may reuse one buffer for all of them. On CUDA that
holds in the order of the current stream: a source that refills a device buffer has to do so on that stream, or wait
for it.
"""

from collections.abc import Iterable, Iterator

import torch

from hicache.kernels import launch
from hicache.kernels.attend_torch import attend_torch
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
from hicache.kernels.parts import PagedPart, PartSource, no_keys
from hicache.kernels.remote import RemoteSpeeds
from hicache.kernels.state import AttentionState

__all__ = ["PagedPart", "PartSource", "attend"]

def attend(
    query: torch.Tensor,
    parts: Iterable[PagedPart],
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    path: Path | None = None,
    remote: RemoteSpeeds | None = None,
) -> AttentionState:
    """Attend `T` new tokens of one sequence to everything in `parts`, and to the new tokens up to themselves.

    query [T, HQ, D], on the device that does the work; key, value [T, H, D], those of the new tokens, there too, or
    [0, H, D] if the queries are to see the parts only; HQ a multiple of H, D contiguous. float16, bfloat16 or float32
    (on the torch path float64 too), the same in all parts. `scale` multiplies the scores. Parts may be empty and on any
    device. They are asked for one by one, and not at all with T = 0. On the CPU, pages are gathered into a buffer of
    bounded size. On CUDA, parts in host memory are streamed through two buffers on the device, the next piece being
    copied while one is attended to; if `remote` says how fast the two ways are, a single query (T = 1) has the CPU
    attend to as many of those pages where they are as makes both ways end together, for which the host waits.

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
        return no_keys(query, query.dtype)
    fitting = _checked(parts, query, key.shape[1])
    # A recorded graph would keep every buffer that is meant to be used again.
    with torch.no_grad():
        if path is Path.TORCH:
            return attend_torch(query, fitting, key, value, scale)
        from hicache.kernels.attend_triton import attend_triton  # the torch path works without Triton

        return attend_triton(query, fitting, key, value, scale, remote)


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
