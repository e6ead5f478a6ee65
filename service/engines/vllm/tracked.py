"""What the scheduler's side keeps of a request."""

from dataclasses import dataclass
from math import inf
from typing import Any

from hicache.namespace import Namespace
from hicache.service.client import Prompt


@dataclass(slots=True)
class Tracked:
    """A request that is not finished."""

    request: Any
    namespace: Namespace
    prompt: Prompt
    """As far as it was looked up."""
    found_tokens: int = 0
    runs: tuple[tuple[str, int], ...] = ()
    """Where those are: tiers of the sidecar, each with how many tokens, from the first on."""
    found_at: float = -inf
    wanted: tuple[int, int] = (0, 0)
    """Pages that the last answer to vLLM offered: from, to."""
    loads_left: int = 1
    """A load that failed is not tried again, but for what had come: the rest is computed. One more after each
    preemption."""
    load_by: float = inf
    """When it has waited for pages long enough, in all loads since it was begun or preempted."""
    num_full: int = 0
    """Pages that are cached, or that a save was planned for."""
    num_sent: int = 0
    """Tokens that the worker's side was told of for saves."""
    is_saving: bool = False
    """Whether a save was ever planned."""
    is_loading: bool = False
    is_to_start: bool = False
    """Pages were loaded for it that were computed with an adapter, and it has computed nothing since."""
    is_second: bool = False
    """A load has failed of which vLLM kept nothing, as it does where it has several groups of blocks. What did come is
    in the sidecar's memory by now, and nothing else is loaded any more."""
    is_retired: bool = False
    """It was begun with what `reset` has put out of use: it neither loads nor saves any more."""


def count_what_was_loaded(request: Any) -> None:
    """Take what a load did not bring out of vLLM's own figures, which have it as cached since the load began. A failed
    load has shortened the request's computed tokens by now."""
    stats = getattr(request, "prefill_stats", None)
    if stats is not None and stats.num_cached_tokens > request.num_computed_tokens:
        num_local = min(stats.num_local_cached_tokens, request.num_computed_tokens)
        stats.set(
            num_prompt_tokens=stats.num_prompt_tokens,
            num_local_cached_tokens=num_local,
            num_external_cached_tokens=request.num_computed_tokens - num_local,
        )
