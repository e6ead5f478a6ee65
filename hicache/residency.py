"""In which state one tier's copy of a node is. This file owns the states and every legal change of them.

A node has one state a tier. States of different tiers are independent but for one rule, which the tree keeps: a node
in the tree is RESIDENT in at least one of them. Whether a copy may be *taken* (a pin, a move reading it, the last copy
below a lease) is not a state but a question about the node's holds; see `hicache.evictable`.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final


class Residency(IntEnum):
    """State of one (node, tier) pair."""

    ABSENT = 0
    """The tier has no copy and no slot for it."""
    ARRIVING = 1
    """Slots are taken and a move fills them; nothing may be read yet."""
    RESIDENT = 2
    """The copy is whole and may be served."""
    CONDEMNED = 3
    """Removed, but a pin or a move still uses the slots: never served, never reused, freed when the last user ends."""


class Event(IntEnum):
    """What happens to one (node, tier) pair."""

    STORED = 0
    """A finished copy was inserted."""
    MOVE_STARTED = 1
    """A move was given slots in this tier."""
    MOVE_DONE = 2
    """The move into this tier filled its slots."""
    MOVE_FAILED = 3
    """The move into this tier failed; its slots are given back."""
    EVICTED = 4
    """The copy leaves the tier to make room; nobody was using it."""
    REMOVED = 5
    """The copy must go (removal, flush, corruption), whoever uses it."""
    RELEASED = 6
    """Nobody uses the removed copy any more; its slots are given back."""


# (state, event) -> state. A pair that is missing is a bug in the caller.
TRANSITIONS: Final[Mapping[tuple[Residency, Event], Residency]] = {
    (Residency.ABSENT, Event.STORED): Residency.RESIDENT,
    (Residency.ABSENT, Event.MOVE_STARTED): Residency.ARRIVING,
    (Residency.ARRIVING, Event.MOVE_DONE): Residency.RESIDENT,
    (Residency.ARRIVING, Event.MOVE_FAILED): Residency.ABSENT,
    (Residency.ARRIVING, Event.REMOVED): Residency.CONDEMNED,
    (Residency.RESIDENT, Event.EVICTED): Residency.ABSENT,
    (Residency.RESIDENT, Event.REMOVED): Residency.CONDEMNED,
    (Residency.CONDEMNED, Event.RELEASED): Residency.ABSENT,
}


IN_TIER: Final = frozenset({Residency.ARRIVING, Residency.RESIDENT})
"""States in which a node counts as being in a tier: its parent is no leaf there."""


class IllegalTransition(AssertionError):
    """An event that the state does not allow: a bug in the caller. Nothing was changed."""

    def __init__(self, state: Residency, event: Event) -> None:
        super().__init__(f"{event.name} is not possible while {state.name}")
        self.state = state
        self.event = event


def after(state: Residency, event: Event) -> Residency:
    """The state that follows; raises `IllegalTransition` when the table has no such pair.

    >>> after(Residency.ABSENT, Event.STORED).name
    'RESIDENT'
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def diagram() -> str:
    """The table as a Mermaid state diagram, one line a transition: what the README shows."""
    lines = ["stateDiagram-v2", f"    [*] --> {Residency.ABSENT.name}"]
    lines += [f"    {state.name} --> {target.name}: {event.name}" for (state, event), target in TRANSITIONS.items()]
    return "\n".join(lines)
