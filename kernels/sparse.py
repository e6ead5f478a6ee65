"""Certified sparse decode: attend to the pages that matter, with a proof of how little the others could.

**What is kept of a page.** Its keys, cut down to bits: each element of each key lies in one of `2 ** b` equal steps
between the least and the greatest that some 64 pages have there, and the `b` bits of that step are kept, `b` being
greater where the steps would be longest. A bit of one element over the 16 tokens of a page is one 16-bit word, a
*plane*; a head of a page has as many planes as fit into an eighth of its keys (in half precision), about two an
element. From them `q·k` is known for every token within `Σ_d |q_d| step_d / 2`, and on average far better.

**Which pages are read.** Estimates of all tokens give each page's share of each query head's softmax. The pages with
the greatest shares are attended to exactly, the budget being shared by the heads of a layer: a head that looks at one
place leaves its part to one that looks everywhere. The first and the last page are always read.

**What is proved.** With `u_j` the upper bounds of the scores of the tokens that were left out, and `L` the exact LSE of
those that were not, the softmax mass left out is at most `m = Σ exp(u_j) / (Σ exp(u_j) + exp(L))`. The output then lies
within `m` times the distance between two values of the exact one. A head whose `m` is above what the caller allows is
attended to in full instead. Bounds include the rounding of their own computation.

Nothing here is used unless it is asked for. `README.md` has what it costs and misses on a real model's keys.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

from hicache.kernels.attend_torch import attend_torch
from hicache.kernels.checks import FLOAT_DTYPES, PageShape, check_group, check_page_ids, check_tensor
from hicache.kernels.errors import BadArgument
from hicache.kernels.parts import Asked, PagedPart

PAGE_SIZE: Final = 16
"""Tokens of a page: as many as a plane's word has bits. Larger pages leave little to leave out."""
GROUP_PAGES: Final = 64
"""Pages that share one table of steps, at least, if there are so many; the last table serves what remains too."""
_STEP_BYTES: Final = 4 + 4 + 1
"""Of a table, for each element: where steps begin, how long they are, and how many bits they have."""


@dataclass(frozen=True)
class KeyPlanes:
    """Bits of the keys of `n` pages, of which the last may be filled in part."""

    words: torch.Tensor
    """int16 [n, H, planes]; bit `t` of a word is that of token `t`."""
    low: torch.Tensor
    """float32 [tables, H, D], the middle of the lowest step."""
    step: torch.Tensor
    """float32 [tables, H, D], the length of a step; 0 where all keys agree."""
    depth: torch.Tensor
    """uint8 [tables, H, D], bits of a step's number; they add up to `planes` for each head of each table."""
    num_tokens: int
    """Tokens that the pages hold."""

    @property
    def num_pages(self) -> int:
        """Pages."""
        return self.words.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory that all of it takes."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.low, self.step, self.depth))


@dataclass(frozen=True)
class SparseState:
    """What attention over the pages that were read leaves, and what may be missing."""

    output: torch.Tensor
    """[1, HQ, D], the query's dtype."""
    lse: torch.Tensor
    """float32 [1, HQ], of the keys that were attended to."""
    missed: torch.Tensor
    """float32 [HQ]: the softmax mass of the other keys is at most this. 0 for a head attended to in full."""
    num_read: torch.Tensor
    """int64 [HQ], pages that were read."""


def planes_of(
    pages: torch.Tensor, page_ids: torch.Tensor, num_tokens: int, *, weights: torch.Tensor | None = None
) -> KeyPlanes:
    """The planes of pages [num_slots, 2, 16, H, D], float16, bfloat16 or float32, in order of `page_ids` int32 [n],
    n at least 1, full but for the last.

    weights float32 [H, D], above 0: how much an error of each element matters; the root mean square of queries seen so
    far serves best. New tensors on the pages' device. Keys are finite. Raises `BadArgument`.
    """
    check_tensor("pages", pages, (None, 2, PAGE_SIZE, None, None), dtype=FLOAT_DTYPES)
    check_tensor("page_ids", page_ids, (None,), dtype=torch.int32, device=pages.device)
    num_pages, num_kv_heads, head_dim = page_ids.shape[0], pages.shape[3], pages.shape[4]
    if not num_pages:
        raise BadArgument("page_ids", "is empty, expected at least one page")
    check_page_ids("page_ids", page_ids, pages.shape[0], negative=False)
    if not (num_pages - 1) * PAGE_SIZE < num_tokens <= num_pages * PAGE_SIZE:
        raise BadArgument("num_tokens", f"is {num_tokens}, expected the last of {num_pages} pages to hold some")
    if weights is not None:
        check_tensor("weights", weights, (num_kv_heads, head_dim), dtype=torch.float32, device=pages.device)
    num_tables = max(1, num_pages // GROUP_PAGES)
    num_planes = _num_planes(head_dim, num_pages // num_tables)
    keys = pages[page_ids.long(), 0].float()
    words, tables = [], []
    for table in range(num_tables):
        begin, end = _table_pages(table, num_tables, num_pages)
        some = keys[begin:end].reshape(-1, num_kv_heads, head_dim)
        here = some[: num_tokens - begin * PAGE_SIZE]
        low, high = here.amin(dim=0), here.amax(dim=0)
        depth = _depths(high - low if weights is None else (high - low) * weights, num_planes)
        step = (high - low) / torch.exp2(depth.float())
        number = ((some - low) / torch.where(step > 0.0, step, 1.0)).floor()
        number = number.clamp(min=0.0).minimum(torch.exp2(depth.float()) - 1.0).int()
        channel, level = _planes(depth, num_planes)
        bits = number.gather(2, channel.expand(len(some), -1, -1)) >> level & 1
        bits = bits.view(end - begin, PAGE_SIZE, num_kv_heads, num_planes)
        shifts = torch.arange(PAGE_SIZE, dtype=torch.int32, device=pages.device).view(1, -1, 1, 1)
        words.append((bits << shifts).sum(dim=1).to(torch.int32).to(torch.int16))
        tables.append((low + step / 2, step, depth))
    low, step, depth = (torch.stack([table[i] for table in tables]) for i in range(3))
    return KeyPlanes(torch.cat(words), low, step, depth, num_tokens)


def key_bounds(query: torch.Tensor, planes: KeyPlanes) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimates and upper bounds of `q·k`, float32 [HQ, n, 16] each, -inf where there is no token; unscaled.

    query [HQ, D], float16, bfloat16 or float32, on the planes' device. Raises `BadArgument`.
    """
    check_tensor("query", query, (None, None), dtype=FLOAT_DTYPES, device=planes.words.device)
    num_pages, num_kv_heads, num_planes = planes.words.shape
    check_tensor("query", query, (None, planes.low.shape[2]), dtype=FLOAT_DTYPES)
    check_group("query", num_kv_heads, query[None])
    by_head = query.float().view(num_kv_heads, -1, query.shape[1])
    num_tables = planes.low.shape[0]
    shifts = torch.arange(PAGE_SIZE, dtype=torch.int16, device=query.device)
    estimates, bounds = [], []
    for table in range(num_tables):
        begin, end = _table_pages(table, num_tables, num_pages)
        low, step, depth = planes.low[table], planes.step[table], planes.depth[table]
        channel, level = _planes(depth, num_planes)
        values = step.gather(1, channel) * torch.exp2(level.float())
        weights = by_head.gather(2, channel[:, None].expand(-1, by_head.shape[1], -1)) * values[:, None]
        bits = (planes.words[begin:end, :, :, None] >> shifts & 1).float()
        start = torch.einsum("hgd,hd->hg", by_head, low)
        estimate = torch.einsum("hgp,nhpt->hgnt", weights, bits) + start[:, :, None, None]
        # Half a step an element, and what float32 may lose, in adding up here and in finding the steps: a share of the
        # sum of the magnitudes.
        magnitude = torch.einsum("hgd,hd->hg", by_head.abs(), low.abs()) + weights.abs().sum(dim=2)
        slack = torch.einsum("hgd,hd->hg", by_head.abs(), step) / 2
        slack = slack + (magnitude + slack) * ((num_planes + query.shape[1] + 16) * 2.0**-23)
        estimates.append(estimate.flatten(0, 1))
        bounds.append((estimate + slack[:, :, None, None]).flatten(0, 1))
    token = torch.arange(num_pages * PAGE_SIZE, device=query.device).view(num_pages, PAGE_SIZE)
    absent = token >= planes.num_tokens
    return (
        torch.cat(estimates, dim=1).masked_fill(absent, -torch.inf),
        torch.cat(bounds, dim=1).masked_fill(absent, -torch.inf),
    )


def choose_pages(estimates: torch.Tensor, share: float) -> torch.Tensor:
    """Which pages each head reads, bool [HQ, n]: the first and the last, and as many of the others, over all heads, as
    `share` of all pages allows, by their estimated share of their head's softmax.

    estimates float32 [HQ, n, 16], scaled. Raises `BadArgument` for a share outside 0 to 1.
    """
    if not 0.0 <= share <= 1.0:
        raise BadArgument("share", f"is {share}, expected 0 to 1")
    num_heads, num_pages, _ = estimates.shape
    mass = torch.logsumexp(estimates, dim=2)
    mass = mass - torch.logsumexp(mass, dim=1, keepdim=True)
    mass[:, 0] = mass[:, -1] = torch.inf
    count = max(int(share * num_pages) * num_heads, min(2, num_pages) * num_heads)
    chosen = torch.zeros(num_heads * num_pages, dtype=torch.bool, device=mass.device)
    chosen[mass.flatten().topk(count).indices] = True
    return chosen.view(num_heads, num_pages)


def attend_sparse(
    query: torch.Tensor,
    part: PagedPart,
    planes: KeyPlanes,
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    share: float = 0.25,
    missed_max: float | None = None,
) -> SparseState:
    """Attend one new token to the pages of `part` that matter, and to itself.

    query [1, HQ, D]; key, value [1, H, D], those of the new token; all on the CPU, as the part's pages, float16,
    bfloat16 or float32. `planes` are those of the part's pages, in its order. share: of the pages, how many are read at
    first; missed_max: a head that may miss more of its softmax mass is attended to in full, None allows all.

    Returns new tensors. Raises `BadArgument`.
    """
    num_pages = part.block_table.shape[0]
    check_tensor("query", query, (1, None, None), dtype=FLOAT_DTYPES)
    if query.device.type != "cpu" or part.pages.device.type != "cpu":
        raise BadArgument("query", "is not on the CPU with all pages: choosing pages is done there only")
    check_tensor("key", key, (1, None, query.shape[2]), dtype=query.dtype)
    check_group("key", key.shape[1], query)
    check_tensor("value", value, tuple(key.shape), dtype=query.dtype)
    check_tensor("part.pages", part.pages, (None, 2, PAGE_SIZE, *key.shape[1:]), dtype=query.dtype)
    if (planes.num_pages, planes.num_tokens) != (num_pages, part.num_tokens):
        raise BadArgument("planes", f"are of {planes.num_tokens} tokens in {planes.num_pages} pages, not of the part's")
    if missed_max is not None and not 0.0 <= missed_max <= 1.0:
        raise BadArgument("missed_max", f"is {missed_max}, expected 0 to 1")
    estimates, bounds = (products * scale for products in key_bounds(query[0], planes))
    chosen = choose_pages(estimates, share)
    output, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    missed = torch.zeros(query.shape[1])
    for head in range(query.shape[1]):
        rest = torch.logsumexp(bounds[head, ~chosen[head]].flatten(), dim=0)
        output[:, head], lse[:, head] = _attend_head(query, part, chosen[head], head, key, value, scale)
        # 1 / (1 + exp(L - U)), a little more for the rounding of sums of exponentials.
        missed[head] = min(1.0, float(torch.sigmoid(rest - lse[0, head])) * (1.0 + 1e-4))
        if missed_max is not None and missed[head] > missed_max:
            chosen[head] = True
            output[:, head], lse[:, head] = _attend_head(query, part, chosen[head], head, key, value, scale)
            missed[head] = 0.0
    return SparseState(output, lse, missed, chosen.sum(dim=1))


def _attend_head(
    query: torch.Tensor,
    part: PagedPart,
    chosen: torch.Tensor,
    head: int,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [1, D] and LSE [1] of one query head over the chosen pages, bool [n], and the new token."""
    kv_head = head // (query.shape[1] // key.shape[1])
    one = slice(kv_head, kv_head + 1)
    # The last page, which alone may be filled in part, is always chosen, and stays last.
    missing = int((~chosen).sum()) * PAGE_SIZE
    pages = part.pages[:, :, :, one]
    some = PagedPart(pages, part.block_table[chosen], part.num_tokens - missing)
    shape = PageShape(pages.shape[0], PAGE_SIZE, 1, query.shape[2])
    state = attend_torch(query[:, head : head + 1], [(some, shape)], key[:, one], value[:, one], Asked(scale))
    return state.output[:, 0], state.lse[:, 0]


def _num_planes(head_dim: int, pages_per_table: int) -> int:
    """As many as fit, with their table, into an eighth of the keys in half precision; at least one."""
    page_bytes = 2 * PAGE_SIZE * head_dim / 8
    return max(1, math.floor((page_bytes - _STEP_BYTES * head_dim / pages_per_table) / 2))


def _table_pages(table: int, num_tables: int, num_pages: int) -> tuple[int, int]:
    """The pages that a table serves: where they begin and end."""
    begin = table * GROUP_PAGES
    return begin, num_pages if table == num_tables - 1 else begin + GROUP_PAGES


def _depths(ranges: torch.Tensor, num_planes: int) -> torch.Tensor:
    """Bits for each element, uint8 [H, D], of ranges [H, D]: each further bit goes to the longest step."""
    ranges = ranges.clone()
    depth = torch.zeros(ranges.shape, dtype=torch.uint8, device=ranges.device)
    for _ in range(num_planes):
        longest = ranges.argmax(dim=1, keepdim=True)
        depth.scatter_add_(1, longest, torch.ones_like(longest, dtype=torch.uint8))
        ranges.scatter_(1, longest, ranges.gather(1, longest) / 2)
    return depth


def _planes(depth: torch.Tensor, num_planes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Element and bit of every plane, int64 [H, planes] each, from the bits of elements [H, D]: all lowest bits first,
    in order of elements, then the next."""
    levels = torch.arange(int(depth.max()), device=depth.device).view(1, -1, 1)
    present = (levels < depth[:, None]).flatten(1)
    at = present.nonzero()[:, 1].view(depth.shape[0], num_planes)
    return at % depth.shape[1], at // depth.shape[1]
