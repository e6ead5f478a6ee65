"""One step of a sequence: which pages it reads and writes, pinned where they are while it runs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.arriving import Arriving
from hicache.lease import Pin
from hicache.tier import PageIdentity, Slots, TierId

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class PrivatePage:
    """A device page that is not in the tree, and how many sequences, forks of each other, read it."""

    slot: int
    num_readers: int = 1


@dataclass(frozen=True, slots=True)
class PageRef:
    """One page in one tier, with all that is needed to read it and to notice that it is not the same any more."""

    slot: int
    generation: int
    identity: PageIdentity


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive context pages of a step that one tier holds."""

    tier_id: TierId
    slots: Slots
    refs: tuple[PageRef, ...]
    """One a page where reading verifies it (NVMe); empty where pages are read in place, under the step's pins."""
    arriving: Arriving | None = None
    """In a sequence opened `by_layer`: these pages of the host are on their way to the device."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Where everything is while one step runs: pinned, and unchanged until `commit` or `abort`."""

    tokens: Tokens
    """Ids of the new tokens."""
    runs: tuple[Run, ...]
    """Whole pages before the new tokens, root side first."""
    tail: PrivatePage | None
    """The page that the first new token is written to, if it is not the first of its page."""
    num_tail_tokens: int
    """Tokens already in `tail`, all before the new ones."""
    new_slots: Slots
    """Device slots of the fresh pages."""
    slot_mapping: npt.NDArray[np.int64]
    """`[num_new]`, flat device slot `slot * page_size + offset` of each new token."""
    pins: tuple[Pin, ...]
