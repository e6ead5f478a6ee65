"""How fast attention over what is on the device is: beside reading alone, and beside torch's own."""

from typing import Final

import torch

from hicache.kernels.cascade import cascade_decode
from hicache.kernels.decode import paged_decode
from hicache.kernels.extend import paged_extend
from hicache.kernels.merge import merge_states
from hicache.kernels.splits import workspace_elements
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.parts import Place, Report, elapsed_ms, measured
from hicache.tools.gpu_check.speed import read_gb_s

HEADS, GROUP, DIM, PAGE = 8, 4, 128, 16
"""A model of 8 billion parameters, and its pages."""
TOKEN_BYTES: Final = 2 * HEADS * DIM * 2
"""Keys and values of one token in one layer, bfloat16."""


def normal(place: Place, *shape: int) -> torch.Tensor:
    """Random bfloat16."""
    return torch.randn(shape, dtype=torch.bfloat16, device=place.device)


def int32(place: Place, *values: int) -> torch.Tensor:
    """The values, one-dimensional."""
    return torch.tensor(values, dtype=torch.int32, device=place.device)


class Pool:
    """Sequences over random pages of one layer, in bfloat16."""

    def __init__(self, place: Place, num_seqs: int, num_tokens: int, *, page_size: int = PAGE) -> None:
        self._place = place
        self.num_pages = num_tokens // page_size
        count = num_seqs * self.num_pages
        self.pages = normal(place, count, 2, page_size, HEADS, DIM)
        self.tables = torch.randperm(count, device=place.device).int().view(num_seqs, self.num_pages)
        self.lengths = int32(place, *[num_tokens] * num_seqs)
        self.num_bytes = num_seqs * num_tokens * TOKEN_BYTES

    def decode_ms(self) -> float:
        """How long one query token of each sequence takes to pass over its keys and values."""
        shape = (len(self.lengths), HEADS * GROUP)
        query = normal(self._place, *shape, DIM)
        output, lse = torch.empty_like(query), torch.empty(shape, device=query.device)
        workspace = torch.empty(workspace_elements(*shape, DIM), device=query.device)

        def decode() -> None:
            paged_decode(
                query, self.pages, self.tables, self.lengths, scale=DIM**-0.5, output=output, lse=lse,
                workspace=workspace,
            )  # fmt: skip

        return elapsed_ms(query.device, decode, 20)


@measured
def check_decode(place: Place, report: Report) -> None:
    """Bytes of keys and values a second, beside a kernel that only reads; and what merging 8 states adds."""
    read = Baseline("reading alone", read_gb_s(place))
    for num_seqs, num_tokens, page_size in ((16, 32_768, 16), (16, 32_768, 64), (4, 131_072, 16), (1, 131_072, 16)):
        pool = Pool(place, place.size(num_seqs, 1), place.size(num_tokens, 64), page_size=page_size)
        name = f"decode_{num_tokens >> 10}k_batch{num_seqs}_page{page_size}"
        gb_s = pool.num_bytes / pool.decode_ms() / 1e6
        report(Row(name, gb_s, "GB/s", read, goal=0.85, goal_is_ratio=True, higher_is_better=True))
    num_seqs = place.size(16, 2)
    outputs = torch.randn(8, num_seqs, HEADS * GROUP, DIM, device=place.device)
    lses = torch.randn(8, num_seqs, HEADS * GROUP, device=place.device)
    merging = elapsed_ms(place.device, lambda: merge_states(outputs, lses))
    whole = Baseline("decode of 32k, 16 requests", Pool(place, num_seqs, place.size(32_768, 64)).decode_ms())
    report(Row("merge_of_8", merging, "ms", whole, goal=0.02, goal_is_ratio=True))


@measured
def check_extend(place: Place, report: Report) -> None:
    """2,304 new tokens over a cached prefix, beside torch's attention over as many keys held contiguous."""
    for num_prefix in (8192, 32_768):
        _extend(place, report, f"extend_2304_over_{num_prefix >> 10}k", place.size(num_prefix, 64))


def _extend(place: Place, report: Report, name: str, num_prefix: int) -> None:
    num_new, prefix = place.size(2304, 20), Pool(place, 1, num_prefix)
    query = normal(place, num_new, HEADS * GROUP, DIM)
    key, value = normal(place, 2, num_new, HEADS, DIM)
    indptr = int32(place, 0, num_new)

    def extend() -> None:
        paged_extend(
            query, indptr, scale=DIM**-0.5, pages=prefix.pages, block_tables=prefix.tables,
            prefix_lens=prefix.lengths, key=key, value=value,
        )  # fmt: skip

    keys, values = normal(place, 2, 1, HEADS, num_prefix + num_new, DIM)
    rows = query.transpose(0, 1)[None]

    def sdpa() -> None:
        # Without a mask: the same keys, and of the new ones twice as many pairs.
        torch.nn.functional.scaled_dot_product_attention(rows, keys, values, scale=DIM**-0.5, enable_gqa=True)

    ours, theirs = elapsed_ms(place.device, extend, 5), elapsed_ms(place.device, sdpa, 5)
    report(Row(name, ours, "ms", Baseline("torch SDPA", theirs)))
    flops = 4 * num_new * (num_prefix + num_new / 2) * HEADS * GROUP * DIM
    report(Row(f"{name}_rate", flops / ours / 1e9, "TFLOP/s", higher_is_better=True))


@measured
def check_cascade(place: Place, report: Report) -> None:
    """32 requests over one document of 32k tokens and 256 of their own each, beside attending to each by itself."""
    num_seqs, num_shared, num_own = place.size((32, 32_768, 256), (3, 64, 16))
    shared_pages, own_pages = num_shared // PAGE, num_own // PAGE
    count = shared_pages + num_seqs * own_pages
    pages = normal(place, count, 2, PAGE, HEADS, DIM)
    order = torch.randperm(count, device=place.device).int()
    shared, own = order[:shared_pages][None], order[shared_pages:].view(num_seqs, own_pages)
    query = normal(place, num_seqs, HEADS * GROUP, DIM)
    whole = torch.cat([shared.expand(num_seqs, -1), own], dim=1).contiguous()
    lengths, own_lengths = (int32(place, *[n] * num_seqs) for n in (num_shared + num_own, num_own))
    indptr, shared_lengths = int32(place, 0, num_seqs), int32(place, num_shared)
    each = elapsed_ms(place.device, lambda: paged_decode(query, pages, whole, lengths, scale=DIM**-0.5))
    together = elapsed_ms(place.device, lambda: cascade_decode(
        query, pages, own, own_lengths, group_indptr=indptr, shared_tables=shared, shared_lens=shared_lengths,
        scale=DIM**-0.5,
    ))  # fmt: skip
    bound = num_seqs * (num_shared + num_own) / (num_shared + num_seqs * num_own)
    report(Row("cascade_gain", each / together, "x", bound=bound, goal=15.0, higher_is_better=True))
    report(Row("cascade", together, "ms", Baseline("each by itself", each)))
