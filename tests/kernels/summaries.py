"""Pages whose bounds are compared with what they bound, by either implementation, for the tests of both."""

from random import Random

import torch

from hicache.kernels.launch import Path
from hicache.kernels.score import ball_of, min_max_of, page_scores, page_scores_reference
from tests.kernels.contexts import Memory, empty_pages, tensor


def check_bounds(
    random: Random,
    dtype: torch.dtype,
    path: Path,
    device: str,
    *,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    spread: float = 1.0,
) -> None:
    """Both bounds of some pages: never below the greatest product in float64, and not far above it."""
    pages = empty_pages(Memory.PAGE_FIRST, num_pages + 2, page_size, num_kv_heads, head_dim, dtype)
    offsets = tensor(random, 1, 1, num_kv_heads, head_dim, dtype=torch.float32) * 3
    keys = tensor(random, num_pages, page_size, num_kv_heads, head_dim, dtype=torch.float32) * spread + offsets
    slots = random.sample(range(num_pages + 2), num_pages)
    pages[slots, 0] = keys.to(dtype)
    num_tokens = num_pages * page_size - (random.randrange(page_size) if num_pages else 0)
    query = tensor(random, num_kv_heads * group, head_dim, dtype=dtype)
    ids = torch.tensor(slots, dtype=torch.int32)
    stored = pages[ids.long(), 0].double()
    stored.view(-1, num_kv_heads, head_dim)[num_tokens:] = torch.nan
    held = [page[~page.isnan().flatten(1).any(dim=1)] for page in stored]
    exact = torch.empty(num_kv_heads * group, num_pages, dtype=torch.float64)
    # A box's diagonal is the greatest distance between two of its keys: no bound has a reason to be further off than
    # twice that. One that is always right because it is always huge would be of no use.
    diagonal = torch.empty(num_kv_heads, num_pages, dtype=torch.float64)
    for i, page in enumerate(held):
        exact[:, i] = page_scores_reference(query, page[None])[:, 0]
        diagonal[:, i] = (page.amax(dim=0) - page.amin(dim=0)).norm(dim=-1)
    length = query.double().norm(dim=-1)[:, None]
    size = torch.tensor([float(page.norm(dim=-1).amax()) for page in held])
    for summary in (min_max_of(pages.to(device), ids.to(device), num_tokens),
                    ball_of(pages.to(device), ids.to(device), num_tokens)):  # fmt: skip
        out = torch.full(exact.shape, torch.nan, device=device)
        page_scores(query.to(device), summary, out=out, path=path)
        over = out.cpu().double() - exact
        assert (over >= 0).all(), f"a bound is {-over.min():.2e} below a product"
        rounding = (2 * torch.finfo(dtype).eps + (head_dim + 8) * 2**-23) * length * size
        assert (over <= 2 * length * diagonal.repeat_interleave(group, dim=0) + rounding).all(), "a bound is of no use"
