"""Cascade decode: sequences that share a document attend to it once, and each to its own tokens; the states are merged.

The queries of a group become rows of one matrix, so that the document's keys and values are loaded once for all of
them, as they are for the query heads of one key/value head. Both levels write their splits into one array of states,
and one merge makes them the result.
"""

from itertools import pairwise

import torch

from hicache.kernels.checks import (
    HEAD_DIM_MAX,
    check_indptr,
    check_launchable_query,
    check_most,
    check_pages_beside,
    check_tables,
    check_tensor,
)
from hicache.kernels.decode import decode_variant, launch_decode, num_row_blocks, paged_decode_reference
from hicache.kernels.errors import BadArgument
from hicache.kernels.merge import merge_states_reference
from hicache.kernels.scoring import PLAIN, Scoring, check_scoring
from hicache.kernels.splits import GRID_MAX, allocate_reduction, resolve_num_splits
from hicache.kernels.state import AttentionState


def cascade_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    group_indptr: torch.Tensor,
    shared_tables: torch.Tensor,
    shared_lens: torch.Tensor,
    scale: float,
    scoring: Scoring = PLAIN,
    page_scales: torch.Tensor | None = None,
    max_group: int | None = None,
    num_shared_splits: int | None = None,
    num_splits: int | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> AttentionState:
    """Attend one query token of each of `B` sequences to what its group shares and to its own pages, by the kernels.

    query [B, HQ, D], pages, block_tables, seq_lens, page_scales, output and lse as for `paged_decode`, tables and
    lengths those of each sequence's own tokens, behind the shared ones. group_indptr int32 [C + 1], from 0 to B: group
    `c` has the sequences `group_indptr[c]` to `group_indptr[c + 1]`, and shares the first `shared_lens[c]` tokens in
    the pages of `shared_tables[c]`; int32 [C] and [C, max_shared_pages], negative ids passed over. A sequence that
    shares nothing is a group of one with length 0. All on one device.

    `max_group`: the most sequences that a group has, if the caller knows a smaller number than B: programs that find
    nothing to do are then not launched; what a group has beyond comes out wrong, and is refused on the CPU only.
    `num_shared_splits` and `num_splits`: parts into which the shared and the own tokens are cut, chosen as for
    `paged_decode` if None. `scoring` without a window: what sequences share would soon be outside of it. `workspace`:
    float32 [n], n at least what `splits.workspace_elements` says for the sum of both numbers of splits; for CUDA graphs
    as for `paged_decode`. Raises `BadArgument`.
    """
    check_launchable_query(query, HEAD_DIM_MAX)
    shape = check_pages_beside(query, pages, page_scales)
    num_seqs, num_heads, head_dim = query.shape
    device = query.device
    check_tensor("group_indptr", group_indptr, (None,), dtype=torch.int32, device=device)
    num_groups = group_indptr.shape[0] - 1
    if num_groups < 0 or max(num_groups, num_seqs) > GRID_MAX:
        raise BadArgument("group_indptr", f"has {num_groups + 1} entries, expected 1 to {GRID_MAX + 1}")
    check_indptr("group_indptr", group_indptr, num_seqs)
    max_tokens, max_shared = (
        check_tables(
            names, tables, lengths, count, num_slots=shape.num_slots, page_size=shape.page_size, device=device
        )
        for names, tables, lengths, count in (
            (("block_tables", "seq_lens"), block_tables, seq_lens, num_seqs),
            (("shared_tables", "shared_lens"), shared_tables, shared_lens, num_groups),
        )
    )
    check_scoring(scoring, num_heads, device, takes_window=False)
    most = check_most("max_group", max_group, group_indptr, num_seqs)

    group = num_heads // shape.num_kv_heads
    shared_variant = decode_variant(query.dtype, pages.dtype, head_dim, shape.page_size, group, max(1, most))
    own_variant = decode_variant(query.dtype, pages.dtype, head_dim, shape.page_size, group)
    num_shared_splits = resolve_num_splits(
        "num_shared_splits", num_shared_splits,
        num_groups * shape.num_kv_heads * num_row_blocks(shared_variant, most), max_shared, scoring, device,
    )  # fmt: skip
    num_splits = resolve_num_splits(
        "num_splits", num_splits, num_seqs * shape.num_kv_heads * num_row_blocks(own_variant, 1), max_tokens, scoring,
        device,
    )  # fmt: skip
    reduction = allocate_reduction(
        num_shared_splits + num_splits, query, head_dim, initial=None, output=output, lse=lse, workspace=workspace
    )
    if num_seqs == 0:
        return reduction.result
    parts = reduction.parts
    # What scoring adds for every query, it adds in the shared part: each query is in exactly one group.
    launch_decode(
        query, pages, shared_tables, shared_lens,
        AttentionState(parts.output[:num_shared_splits], parts.lse[:num_shared_splits]), shared_variant,
        scale=scale, scoring=scoring, page_scales=page_scales, indptr=group_indptr, max_queries=most,
    )  # fmt: skip
    launch_decode(
        query, pages, block_tables, seq_lens,
        AttentionState(parts.output[num_shared_splits:], parts.lse[num_shared_splits:]), own_variant,
        scale=scale, scoring=Scoring(soft_cap=scoring.soft_cap), page_scales=page_scales,
    )  # fmt: skip
    return reduction.finish()


def cascade_decode_reference(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    group_indptr: torch.Tensor,
    shared_tables: torch.Tensor,
    shared_lens: torch.Tensor,
    scale: float,
    scoring: Scoring = PLAIN,
    page_scales: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionState:
    """The definition of `cascade_decode`, computed and returned in `dtype`: by the law, each sequence's attention over
    what it shares, merged with that over its own. Arguments and shapes as there."""
    group_of = torch.zeros(query.shape[0], dtype=torch.int64)
    for i, (begin, end) in enumerate(pairwise(group_indptr.tolist())):
        group_of[begin:end] = i
    shared = paged_decode_reference(
        query, pages, shared_tables[group_of], shared_lens[group_of],
        scale=scale, scoring=scoring, page_scales=page_scales, dtype=dtype,
    )  # fmt: skip
    own = paged_decode_reference(
        query, pages, block_tables, seq_lens,
        scale=scale, scoring=Scoring(soft_cap=scoring.soft_cap), page_scales=page_scales, dtype=dtype,
    )  # fmt: skip
    return merge_states_reference(
        torch.stack([shared.output, own.output]), torch.stack([shared.lse, own.lse]), dtype=dtype
    )
