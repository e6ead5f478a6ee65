"""What attention does beside softmax over scaled products: a cap on scores, a window, and two kinds of sinks."""

import math
from dataclasses import dataclass
from typing import Final

import torch

from hicache.kernels.checks import check_tensor
from hicache.kernels.errors import BadArgument


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores become weights; by default nothing but softmax."""

    soft_cap: float | None = None
    """A score `x` becomes `soft_cap * tanh(x / soft_cap)`; above 0. None: it stays `x`."""
    window: int | None = None
    """Tokens that a query sees: its own, and those right before it; at least 1. None: all before it."""
    keep_first: int = 0
    """Tokens at the start of the sequence that stay visible however far the window has moved on; 0 without a window."""
    sinks: torch.Tensor | None = None
    """float32 [HQ]: for each query head the score, neither scaled nor capped, of one more key, whose value is 0. The
    state includes it: of several parts that are merged, exactly one may be given it."""


PLAIN: Final = Scoring()


def check_scoring(
    scoring: Scoring, num_heads: int, device: torch.device, *, takes_window: bool = True
) -> None:
    """Refuse what is outside the bounds stated at the fields, sinks that are not one a head on `device`, and a window
    where none is taken."""
    cap, window, keep = scoring.soft_cap, scoring.window, scoring.keep_first
    if cap is not None and not 0 < cap < math.inf:
        raise BadArgument("scoring.soft_cap", f"is {cap}, expected a finite number above 0, or None")
    if window is not None and window < 1:
        raise BadArgument("scoring.window", f"is {window}, expected at least 1, or None")
    if window is not None and not takes_window:
        raise BadArgument("scoring.window", f"is {window}, expected None")
    if keep < 0 or (keep and window is None):
        raise BadArgument("scoring.keep_first", f"is {keep}, expected at least 0, and 0 without a window")
    if scoring.sinks is not None:
        check_tensor("scoring.sinks", scoring.sinks, (num_heads,), dtype=torch.float32, device=device)


def visible_reference(query_positions: torch.Tensor, key_positions: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Which key each query may see: bool [T, L], for positions int64 [T] and [L] in one sequence."""
    distance = query_positions[:, None] - key_positions[None, :]
    visible = distance >= 0
    if scoring.window is not None:
        visible &= (distance < scoring.window) | (key_positions < scoring.keep_first)[None, :]
    return visible
