"""Attention of new tokens over a context whose pages are anywhere, part by part, merged exactly.

A context is a series of parts: pages in one memory each. `attend` goes over them once, in order, keeping the attention
state of what it has seen, and attends to the new tokens themselves last. On CUDA the kernels read device pages where
they are; on the CPU compiled loops do so for a single token, once `decode_cpu.prepare` has them ready, and otherwise
pages are gathered, a cache-sized piece at a time, and attended to by torch.

Nothing is kept of a part when the next one is asked for, so a source may reuse one buffer for all of them. On CUDA that
holds in the order of the current stream: a source that refills a device buffer has to do so on that stream, or wait
for it.
"""

from collections.abc import Iterable, Iterator

import torch

from hicache.kernels import decode_cpu, launch
from hicache.kernels.attend_cpu import attend_cpu
from hicache.kernels.attend_torch import attend_torch
from hicache.kernels.checks import (
    FLOAT_DTYPES,
    PageShape,
    check_group,
    check_page_ids,
    check_page_scales,
    check_pages,
    check_query,
    check_tensor,
    stored_dtypes,
)
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from hicache.kernels.parts import Asked, PagedPart, PartSource, no_keys, seen_parts
from hicache.kernels.remote import RemoteSpeeds
from hicache.kernels.remote_speeds import known_speeds
from hicache.kernels.scoring import PLAIN, Scoring, check_scoring
from hicache.kernels.state import AttentionState, with_sinks

__all__ = ["PagedPart", "PartSource", "attend"]

def attend(
    query: torch.Tensor,
    parts: Iterable[PagedPart],
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    scoring: Scoring = PLAIN,
    first_position: int | None = None,
    path: Path | None = None,
    remote: RemoteSpeeds | None = None,
) -> AttentionState:
    """Attend `T` new tokens of one sequence to everything in `parts`, and to the new tokens up to themselves.

    query [T, HQ, D], on the device that does the work; key, value [T, H, D], those of the new tokens, there too, or
    [0, H, D] if the queries are to see the parts only; HQ a multiple of H, D contiguous. float16, bfloat16 or float32
    (on the torch path float64 too), the same in all parts; beside half precision, parts may be float8_e4m3fn or
    float8_e5m2. `scale` multiplies the scores. With a window in `scoring`, `first_position` is the index of the first
    new token in the sequence, and every part says where it is; `scoring.sinks` count once.

    Parts may be empty and on any device. They are asked for one by one, and not at all with T = 0. On the CPU, compiled
    loops read pages where they are, if T = 1, D is a multiple of 16, pages are not float8 and `decode_cpu.prepare` was
    called; otherwise pages are gathered into a buffer of bounded size. On CUDA, parts in host memory are streamed
    through two buffers on the device, the next piece being copied while one is attended to; if `remote` says how fast
    the two ways are (None: if `remote_speeds` knows of the device), a single query (T = 1) has the CPU attend to as
    many of those pages where they are as makes both ways end together, for which the host waits.

    Returns output [T, HQ, D] in the query's dtype and natural-log LSE [T, HQ], float32 (float64 for float64), new
    tensors that alias nothing and carry no gradient; 0 and -inf where there was no key at all. Partial results are kept
    and merged in float32. On CUDA the work is queued on the current stream. `path` is chosen by the query's device if
    None; `Path.TORCH` is torch alone. Callable from several threads. Raises `BadArgument`, in the middle of the parts
    if one of them does not fit.
    """
    by_torch = path is Path.TORCH
    path = launch.choose_path("query", query.device, path)
    check_query(query, FLOAT_DTYPES if path is Path.TRITON else (*FLOAT_DTYPES, torch.float64))
    num_tokens, num_heads, head_dim = query.shape
    num_new = 0 if key.shape[:1] == (0,) else num_tokens
    check_tensor("key", key, (num_new, None, head_dim), dtype=query.dtype, device=query.device)
    check_group("key", key.shape[1], query)
    check_tensor("value", value, tuple(key.shape), dtype=query.dtype, device=query.device)
    check_scoring(scoring, num_heads, query.device)
    asked = Asked(scale, scoring, check_position("first_position", first_position, scoring))
    if num_tokens == 0:
        return no_keys(query, query.dtype)
    by_loops = path is Path.TORCH and not by_torch and decode_cpu.takes(query, query.dtype)
    fitting = _checked(parts, query, key.shape[1], asked, check_ids=not by_loops)
    # A recorded graph would keep every buffer that is meant to be used again.
    with torch.no_grad():
        if path is Path.TORCH:
            state = (attend_cpu if by_loops else attend_torch)(query, fitting, key, value, asked)
            state = with_sinks(state, scoring.sinks)
            return AttentionState(state.output.to(query.dtype), state.lse)
        from hicache.kernels.attend_triton import attend_triton  # the torch path works without Triton

        return attend_triton(query, fitting, key, value, asked, remote or known_speeds(query.device))


def _checked(
    parts: Iterable[PagedPart], query: torch.Tensor, num_kv_heads: int, asked: Asked, *, check_ids: bool
) -> Iterator[tuple[PagedPart, PageShape]]:
    """What queries see of the parts, each checked when it comes; `check_ids`: whether its slots are there, too."""
    dtypes = (query.dtype,) if query.dtype == torch.float64 else stored_dtypes(query)
    for part in parts:
        shape = check_pages("part.pages", part.pages, query, dtypes)
        if shape.num_kv_heads != num_kv_heads:
            raise BadArgument("part.pages", f"has {shape.num_kv_heads} key/value heads, the new tokens {num_kv_heads}")
        check_page_scales("part.page_scales", part.page_scales, part.pages)
        check_tensor("part.block_table", part.block_table, (None,), dtype=torch.int32)
        most = part.block_table.shape[0] * shape.page_size
        if not 0 <= part.num_tokens <= most:
            raise BadArgument("part.num_tokens", f"is {part.num_tokens}, expected 0 to {most}, the tokens of its pages")
        if not part.num_tokens:
            continue
        position = check_position("part.first_position", part.first_position, asked.scoring)
        if asked.scoring.window is not None and position + part.num_tokens > asked.first_position:
            most = asked.first_position - part.num_tokens
            raise BadArgument("part.first_position", f"is {position}, expected at most {most}, before the new tokens")
        whole = part.cut(0, launch.ceil_div(part.num_tokens, shape.page_size))
        if check_ids:
            check_page_ids("part.block_table", whole.block_table, shape.num_slots, negative=False)
        for seen in [whole] if asked.scoring.window is None else seen_parts(whole, asked):
            yield seen, shape


def check_position(argument: str, position: int | None, scoring: Scoring) -> int:
    """The position, 0 if it is None. Refuses a negative one, and None where a window counts from it."""
    if position is None and scoring.window is None:
        return 0
    if position is None or position < 0:
        raise BadArgument(argument, f"is {position}, expected at least 0, and not None with a window")
    return position
