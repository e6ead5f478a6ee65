"""Latent attention (MLA) of new tokens over a context whose pages are anywhere, part by part, merged exactly.

What `hicache.kernels.attend` is to keys and values of their own. On the query's device the kernel of `mla.py` reads
pages where they are; pages elsewhere, and on the CPU all, are copied together a piece at a time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from hicache.kernels import launch
from hicache.kernels.attend_scored import scored
from hicache.kernels.attend_torch import Running
from hicache.kernels.checks import FLOAT_DTYPES, check_page_ids, check_query, check_tensor, stored_dtypes
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from hicache.kernels.parts import no_keys, selectable, state_dtype
from hicache.kernels.scoring import PLAIN, Scoring, check_scoring
from hicache.kernels.state import AttentionState, with_sinks

PIECE_BYTES: Final = 8 << 20
"""Vectors that are copied together before they are attended to; at least one page."""


@dataclass(frozen=True)
class LatentPart:
    """Vectors of consecutive tokens in whole or partly filled pages, somewhere in one memory."""

    pages: torch.Tensor
    """[num_slots, page_size, DL + DR], latent and rope part of each token, on any device; the last dimension is
    contiguous, every other stride is free."""
    block_table: torch.Tensor
    """int32 [n], slots of the part's pages in order; each within `pages`."""
    num_tokens: int
    """Tokens that the part has, 0 to `n * page_size`: pages are full but for the last; slots beyond are not read."""
    page_scales: torch.Tensor | None = None
    """float32 [num_slots], beside the pages, any stride, at least 0: multiply what is stored."""


def attend_latent(
    query: torch.Tensor,
    parts: Iterable[LatentPart],
    *,
    vectors: torch.Tensor,
    latent_dim: int,
    scale: float,
    scoring: Scoring = PLAIN,
    path: Path | None = None,
) -> AttentionState:
    """Attend `T` new tokens of one sequence to everything in `parts`, and to the new tokens up to themselves.

    query [T, HQ, DL + DR], absorbed as for `mla_decode`, DL = `latent_dim`; vectors [T, DL + DR] those of the new
    tokens, or [0, DL + DR] if the queries are to see the parts only; float16, bfloat16 or float32 (on the torch path
    float64 too), the same in all parts; beside half precision, parts may be float8_e4m3fn or float8_e5m2. `scoring`
    without a window; its sinks count once. Parts may be empty and on any device, and are asked for one by one.

    Returns output [T, HQ, DL] in the query's dtype and natural-log LSE [T, HQ], float32 (float64 for float64), new
    tensors; 0 and -inf where there was no key at all. On CUDA the work is queued on the current stream, and parts that
    are elsewhere are waited for. The kernels take the dimensions that `mla_decode` does. Raises `BadArgument`, in the
    middle of the parts if one of them does not fit.
    """
    path = launch.choose_path("query", query.device, path)
    check_query(query, FLOAT_DTYPES if path is Path.TRITON else (*FLOAT_DTYPES, torch.float64))
    num_tokens, num_heads, head_dim = query.shape
    if not 1 <= latent_dim <= head_dim:
        raise BadArgument("latent_dim", f"is {latent_dim}, expected 1 to {head_dim}, the elements of a query")
    num_new = 0 if vectors.shape[:1] == (0,) else num_tokens
    check_tensor("vectors", vectors, (num_new, head_dim), dtype=query.dtype, device=query.device)
    check_scoring(scoring, num_heads, query.device)
    if scoring.window is not None:
        raise BadArgument("scoring.window", f"is {scoring.window}, expected None")
    if num_tokens == 0:
        return no_keys(query[..., :latent_dim], query.dtype)
    fitting = _checked(parts, query)
    with torch.no_grad():
        work = _attend_torch if path is Path.TORCH else _attend_triton
        return work(query, fitting, vectors, latent_dim, scale, scoring)


def _checked(parts: Iterable[LatentPart], query: torch.Tensor) -> Iterator[LatentPart]:
    """The parts that have tokens, each checked when it comes."""
    dtypes = (query.dtype,) if query.dtype == torch.float64 else stored_dtypes(query)
    for part in parts:
        check_tensor("part.pages", part.pages, (None, None, query.shape[2]), dtype=dtypes)
        num_slots, page_size, _ = part.pages.shape
        if page_size < 1:
            raise BadArgument("part.pages", "has pages of 0 tokens, expected at least 1")
        if part.page_scales is not None:
            check_tensor(
                "part.page_scales", part.page_scales, (num_slots,), dtype=torch.float32, device=part.pages.device,
                contiguous=False,
            )  # fmt: skip
        check_tensor("part.block_table", part.block_table, (None,), dtype=torch.int32)
        most = part.block_table.shape[0] * page_size
        if not 0 <= part.num_tokens <= most:
            raise BadArgument("part.num_tokens", f"is {part.num_tokens}, expected 0 to {most}, the tokens of its pages")
        if part.num_tokens:
            table = part.block_table[: launch.ceil_div(part.num_tokens, page_size)]
            check_page_ids("part.block_table", table, num_slots, negative=False)
            yield replace(part, block_table=table)


def _pieces(part: LatentPart, device: torch.device) -> Iterator[LatentPart]:
    """The part on `device`, a piece at a time, in pages of its own."""
    page_size = part.pages.shape[1]
    pages_max = max(1, PIECE_BYTES // (part.pages[:1].numel() * part.pages.element_size()))
    for begin in range(0, part.block_table.shape[0], pages_max):
        ids = part.block_table[begin : begin + pages_max].to(part.pages.device)
        pages = selectable(part.pages).index_select(0, ids).view(part.pages.dtype).to(device)
        scales = None if part.page_scales is None else part.page_scales[ids.long()].to(device)
        num_tokens = min(part.num_tokens - begin * page_size, len(ids) * page_size)
        yield LatentPart(pages, torch.arange(len(ids), dtype=torch.int32, device=device), num_tokens, scales)


def _attend_torch(
    query: torch.Tensor,
    parts: Iterator[LatentPart],
    vectors: torch.Tensor,
    latent_dim: int,
    scale: float,
    scoring: Scoring,
) -> AttentionState:
    dtype = state_dtype(query)
    # All heads are a group that shares one key.
    by_head = query.to(dtype).permute(1, 0, 2)[None]
    running = Running()

    def attend_to(keys: torch.Tensor, visible: torch.Tensor | None) -> None:
        keys = keys[:, None]
        running.add(
            *scored(by_head, keys, keys[..., :latent_dim], scale=scale, scoring=scoring, visible=visible)
        )

    for part in parts:
        for piece in _pieces(part, query.device):
            keys = piece.pages.to(dtype)
            if piece.page_scales is not None:
                keys *= piece.page_scales[:, None, None]
            attend_to(keys.flatten(0, 1)[: piece.num_tokens], None)
    if len(vectors):
        attend_to(vectors.to(dtype), torch.ones(len(vectors), len(vectors), dtype=torch.bool).tril())
    if running.state is None:
        state = no_keys(query[..., :latent_dim], dtype)
    else:
        state = AttentionState(running.state.output[0].transpose(0, 1), running.state.lse[0].transpose(0, 1))
    state = with_sinks(state, scoring.sinks)
    return AttentionState(state.output.to(query.dtype).contiguous(), state.lse.contiguous())


def _attend_triton(
    query: torch.Tensor,
    parts: Iterator[LatentPart],
    vectors: torch.Tensor,
    latent_dim: int,
    scale: float,
    scoring: Scoring,
) -> AttentionState:
    from hicache.kernels.attend_triton import Stack  # the torch path works without Triton
    from hicache.kernels.mla import mla_decode

    num_tokens, device = query.shape[0], query.device
    without_sinks = replace(scoring, sinks=None)
    stack = Stack(query[..., :latent_dim])

    def attend_to(part: LatentPart, lengths: torch.Tensor) -> None:
        """Every new token is a row with the part's table, of which it sees so many tokens."""
        output, lse = stack.push()
        mla_decode(
            query, part.pages, part.block_table.to(device).expand(num_tokens, -1), lengths, latent_dim=latent_dim,
            scale=scale, scoring=without_sinks, page_scales=part.page_scales, output=output, lse=lse,
        )  # fmt: skip

    for part in parts:
        for some in [part] if part.pages.device == device else _pieces(part, device):
            attend_to(some, torch.full((num_tokens,), some.num_tokens, dtype=torch.int32, device=device))
    if len(vectors):
        # Pages of one token each.
        counts = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        attend_to(LatentPart(vectors[:, None], counts[:-1], num_tokens), counts[1:])
    stack.push_sinks(scoring)
    return stack.result(query.dtype)
